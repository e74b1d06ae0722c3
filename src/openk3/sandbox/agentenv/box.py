"""A sandbox of a remote service."""

import json
from collections.abc import Mapping
from typing import Any

from openk3.errors import BackendError, ConflictError, InputError, NotFoundError
from openk3.sandbox.agentenv.files import RemoteFiles, unix_time
from openk3.sandbox.agentenv.link import RemoteConnection
from openk3.sandbox.agentenv.process import RemoteProcess
from openk3.sandbox.agentenv.service import Service, raise_for
from openk3.sandbox.process import MAX_OUTPUT, Process
from openk3.sandbox.sandbox import Command, Sandbox
from openk3.sandbox.types import Capabilities, Info, Limits, Network, SnapshotInfo, State

ABLE = Capabilities(True, True, True, True, True, True)


class RemoteSandbox(Sandbox):
    """A sandbox of the remote service."""

    def __init__(self, service: Service, answer: dict[str, Any], user: str, info: Info) -> None:
        self.service, self.id, self._info = service, answer["sandboxID"], info
        token = answer.get("envdAccessToken") or ""
        self.link = RemoteConnection(service, self.id, token, user)
        self.files = RemoteFiles(self.link)

    @classmethod
    async def begin(
        cls,
        *,
        template: str,
        timeout: float | None,
        on_timeout: str,
        idle_pause: float | None,
        env: dict[str, str],
        metadata: dict[str, str],
        limits: Limits,
        network: Network,
        user: str,
        allow_files_only: bool,
        service: Service | None = None,
    ) -> "RemoteSandbox":
        """See `Sandbox.create`."""
        if idle_pause is not None:
            raise BackendError("the protocol knows no idle_pause; use timeout and on_timeout")
        if limits != Limits():
            raise BackendError("limits belong to the template there; leave `limits` out")
        service = service or Service()
        rules = {"allowOut": list(network.allow_out), "denyOut": list(network.deny_out)}
        body = {
            "templateID": template,
            "timeout": int(timeout or 86400),
            "autoPause": on_timeout == "pause",
            "metadata": metadata,
            "envVars": env,
            "secure": True,
            "allow_internet_access": network.internet,
            **({"network": rules} if any(rules.values()) else {}),
        }
        answer = await service.ask_either("/sandboxes", body)
        return await cls._wrap(service, answer, user)

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
    async def _wrap(cls, service: Service, answer: dict[str, Any], user: str) -> "RemoteSandbox":
        detail = await service.ask("GET", f"/sandboxes/{answer['sandboxID']}")
        return cls(service, answer, user, _info(detail))

    async def start(
        self,
        cmd: Command,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        timeout: float | None = None,
        stdin: bool = False,
        tty: tuple[int, int] | None = None,
        detach: bool = False,
        tag: str | None = None,
        output_limit: int | None = None,
        max_output: int = MAX_OUTPUT,
    ) -> Process:
        if output_limit is not None:
            raise BackendError("the protocol knows no output_limit")
        words = ["/bin/bash", "-l", "-c", cmd] if isinstance(cmd, str) else cmd
        if not words:
            raise InputError("an empty command")
        process: dict[str, Any] = {"cmd": words[0], "args": words[1:], "envs": dict(env or {})}
        body: dict[str, Any] = {"process": {**process, **({"cwd": cwd} if cwd else {})}}
        body["stdin"] = stdin
        if tag:
            body["tag"] = tag
        if tty:
            body["pty"] = {"size": {"rows": tty[0], "cols": tty[1]}}
        source = self.link.stream("process.Process/Start", body, user, timeout)
        job = await RemoteProcess(self.link, source, max_output).opened()
        job.detached = detach
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

    async def fork(self, count: int = 1, *, timeout: float | None = 300.0) -> list[Sandbox]:
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

    async def snapshot(self, name: str | None = None) -> SnapshotInfo:
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
        await self.service.http.aclose()


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
