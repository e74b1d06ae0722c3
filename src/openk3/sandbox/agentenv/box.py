"""A sandbox of a remote service."""

import json
from typing import Any

from openk3.errors import BackendError, ConflictError, NotFoundError
from openk3.sandbox.agentenv.files import RemoteFiles, unix_time
from openk3.sandbox.agentenv.link import RemoteConnection
from openk3.sandbox.agentenv.process import RemoteProcess
from openk3.sandbox.agentenv.service import Service, raise_for
from openk3.sandbox.process import Process
from openk3.sandbox.requests import MAX_OUTPUT, ProcessRequest, SandboxRequest
from openk3.sandbox.sandbox import Sandbox
from openk3.sandbox.types import Capabilities, Info, Limits, SnapshotInfo, State

ABLE = Capabilities(True, True, True, True, True, True)


class RemoteSandbox(Sandbox):
    """A sandbox of the remote service."""

    def __init__(self, service: Service, answer: dict[str, Any], user: str, info: Info) -> None:
        self.service, self.id, self._info = service, answer["sandboxID"], info
        token = answer.get("envdAccessToken") or ""
        self.link = RemoteConnection(service, self.id, token, user)
        self.files = RemoteFiles(self.link)
        self._open = True
        service.num_users += 1

    @classmethod
    async def begin(
        cls, request: SandboxRequest, service: Service | None = None
    ) -> "RemoteSandbox":
        """See `Sandbox.create`."""
        if request.idle_pause is not None:
            raise BackendError("the protocol knows no idle_pause; use timeout and on_timeout")
        if request.limits != Limits():
            raise BackendError("limits belong to the template there; leave `limits` out")
        network = request.network
        service = service or Service()
        rules = {"allowOut": list(network.allow_out), "denyOut": list(network.deny_out)}
        body = {
            "templateID": request.template,
            "timeout": int(request.timeout or 86400),
            "autoPause": request.on_timeout == "pause",
            "metadata": dict(request.metadata),
            "envVars": dict(request.env),
            "secure": True,
            "allow_internet_access": network.internet,
            **({"network": rules} if any(rules.values()) else {}),
        }
        answer = await service.ask_either("/sandboxes", body)
        return await cls._wrap(service, answer, request.user)

    @classmethod
    async def find(
        cls, sandbox_id: str, timeout: float | None, service: Service | None = None
    ) -> "RemoteSandbox":
        """See `Sandbox.connect`."""
        service = service or Service()
        body = {"timeout": int(timeout or 300)}
        answer = await service.ask_either(f"/sandboxes/{sandbox_id}/connect", body)
        return await cls._wrap(service, answer, "user")

    @classmethod
    async def find_all(cls, service: Service | None = None) -> list[Info]:
        """See `Sandbox.list`."""
        service = service or Service()
        return [_info(row) for row in await service.ask("GET", "/v2/sandboxes")]

    @classmethod
    async def forget_snapshot(cls, snapshot_id: str, service: Service | None = None) -> None:
        """See `Sandbox.delete_snapshot`; the protocol counts snapshots as templates."""
        await (service or Service()).ask("DELETE", f"/templates/{snapshot_id}")

    @classmethod
    async def _wrap(cls, service: Service, answer: dict[str, Any], user: str) -> "RemoteSandbox":
        detail = await service.ask("GET", f"/sandboxes/{answer['sandboxID']}")
        return cls(service, answer, user, _info(detail))

    async def _start(self, request: ProcessRequest) -> Process:
        if request.output_limit is not None:
            raise BackendError("the protocol knows no output_limit")
        cmd = request.cmd
        words = ["/bin/bash", "-l", "-c", cmd] if isinstance(cmd, str) else cmd
        process = {"cmd": words[0], "args": words[1:], "envs": dict(request.env)}
        body: dict[str, Any] = {"process": process, "stdin": request.stdin}
        if request.cwd:
            process["cwd"] = request.cwd
        if request.tag:
            body["tag"] = request.tag
        if request.tty:
            body["pty"] = {"size": dict(zip(("rows", "cols"), request.tty, strict=True))}
        source = self.link.stream("process.Process/Start", body, request.user, request.timeout)
        job = await RemoteProcess(self.link, source, request.max_output).opened()
        job.detached = request.detach
        return job

    async def attach(self, *, pid: int | None = None, tag: str | None = None) -> Process:
        selector = {"pid": pid} if pid else {"tag": tag}
        source = self.link.stream("process.Process/Connect", {"process": selector})
        job = await RemoteProcess(self.link, source, MAX_OUTPUT).opened()
        job.detached = True
        return job

    async def processes(self) -> list[dict[str, Any]]:
        answer = await self.link.unary("process.Process/List", {})
        return [
            {"pid": row["pid"], "tag": row.get("tag"), "running": True, **row.get("config", {})}
            for row in answer.get("processes", [])
        ]

    @property
    def info(self) -> Info:
        return self._info

    async def refresh(self) -> Info:
        self._info = _info(await self.service.ask("GET", f"/sandboxes/{self.id}"))
        return self._info

    async def pause(self, *, memory: bool = True) -> None:
        await self.service.ask("POST", f"/sandboxes/{self.id}/pause", {"memory": memory})
        await self.refresh()

    async def resume(self, timeout: float | None = None) -> None:
        if (await self.refresh()).state == State.RUNNING:
            raise ConflictError(f"sandbox {self.id} runs already")
        other = await type(self).find(self.id, timeout, self.service)
        self.link = other.link
        self.files = RemoteFiles(self.link)
        self._info = other.info
        await other.close()

    async def fork(
        self, count: int = 1, *, timeout: float | None = 300.0, memory: bool = True
    ) -> list[Sandbox]:
        _require_memory(memory)
        body = {"count": count, "timeout": int(timeout or 86400)}
        rows = await self.service.ask("POST", f"/sandboxes/{self.id}/fork", body)
        made: list[Sandbox] = [
            await self._wrap(self.service, row["sandbox"], self.link.user)
            for row in rows
            if row.get("sandbox")
        ]
        errors = [row["error"] for row in rows if row.get("error")]
        if errors:
            for box in made:
                await box.kill()
            raise_for(int(errors[0]["code"]), json.dumps(errors[0]))
        return made

    async def snapshot(self, name: str | None = None, *, memory: bool = True) -> SnapshotInfo:
        _require_memory(memory)
        body = {"name": name} if name else {}
        answer = await self.service.ask("POST", f"/sandboxes/{self.id}/snapshots", body)
        return SnapshotInfo(answer["snapshotID"], name, self.id, 0.0, True, 0)

    async def set_timeout(self, seconds: float | None) -> None:
        body = {"timeout": int(seconds or 86400)}
        await self.service.ask("POST", f"/sandboxes/{self.id}/timeout", body)

    async def kill(self) -> bool:
        try:
            await self.service.ask("DELETE", f"/sandboxes/{self.id}")
        except NotFoundError:
            return False
        return True

    async def close(self) -> None:
        if self._open:
            self._open = False
            await self.service.let_go()


def _require_memory(memory: bool) -> None:
    if not memory:
        raise BackendError("the protocol forks and snapshots with memory; memory=False is unknown")


def _info(row: dict[str, Any]) -> Info:
    return Info(
        id=row["sandboxID"],
        state=State.PAUSED if row.get("state") == "paused" else State.RUNNING,
        backend="agentenv",
        isolation="microvm",
        capabilities=ABLE,
        template=row.get("templateID", ""),
        limits=Limits(
            cpus=row.get("cpuCount") or 1,
            memory_mb=row.get("memoryMB") or 1024,
            disk_mb=row.get("diskSizeMB") or 2048,
        ),
        metadata=row.get("metadata") or {},
        created=unix_time(row.get("startedAt")) or 0.0,
        deadline=unix_time(row.get("endAt")),
    )
