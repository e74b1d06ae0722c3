"""The keeper: clients on a Unix socket, the agent on pipes, one sandbox between them."""

import asyncio
import json
import os
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from openk3.errors import InputError, OpenK3Error
from openk3.sandbox import events, frames
from openk3.sandbox.keeper.generations import Generations
from openk3.sandbox.keeper.link import AgentLink, ClientLink
from openk3.sandbox.keeper.machine import Machine, Plan
from openk3.sandbox.keeper.watch import Watch
from openk3.sandbox.store.home import Home, new_id, remove_tree
from openk3.sandbox.store.records import BoxRecord, ImageManifest

HELLO_TIMEOUT_S = 120.0
FLUSH_TIMEOUT_S = 2.0


def error_kind(error: OpenK3Error | OSError) -> str:
    """The word that stands for an error class on the wire; `client.py` turns it back."""
    names = {"ConflictError": "conflict", "StorageError": "no_space", "CheckpointError": "damaged"}
    return names.get(type(error).__name__, "input" if isinstance(error, InputError) else "failed")


class Keeper:
    """Runs one sandbox from start to pause or end."""

    def __init__(self, home: Home, record: BoxRecord, plan: Plan, mode: str, root: bool) -> None:
        self.home, self.record, self.mode, self.root = home, record, mode, root
        self.machine = Machine(home, record.id, plan, root)
        self.link = AgentLink()
        self.clients: set[ClientLink] = set()
        self.creator: ClientLink | None = None
        self.committed = mode == "resume"
        self.busy: str | None = None
        self.done = asyncio.Event()
        self.tasks: set[asyncio.Task[Any]] = set()
        self.deleted = False
        self._ending = asyncio.Lock()
        self.generations = Generations(self)
        self.watch = Watch(self)
        self.own_ops: dict[str, Callable[..., Any]] = {
            "commit": self._commit,
            "info": self._info_now,
            "set_timeout": self._set_timeout,
            "checkpoint": self.generations.checkpoint,
            "kill": self._kill,
        }

    # -- life -------------------------------------------------------------------------------

    async def run(self, creation: socket.socket) -> None:
        """From nothing to `done`. The creator hears on channel 0 how the start went."""
        started = time.perf_counter()
        reader, writer = await asyncio.open_unix_connection(sock=creation)
        self.creator = ClientLink(reader, writer)
        try:
            await self._start()
        except (OpenK3Error, OSError) as error:
            said = self._engine_said()
            try:
                await self.machine.destroy()
                self._discard_if_new()
            finally:
                self.creator.error(0, error_kind(error), f"{error}{said}")
                await _flush(self.creator)
            return
        server = await asyncio.start_unix_server(self._on_client, sock=self._listen())
        if self.mode == "resume":
            self._mark_running()
        seconds = time.perf_counter() - started
        ready = {"ready": True, "seconds": seconds, "disk": self.machine.disk.uses_image}
        self.creator.send(frames.pack_json(0, frames.EVENT, {**ready, **self._info()}))
        chores = (self.watch.machine(), self.watch.time(), self.generations.compact())
        for work in (self._serve(self.creator), *chores):
            self.spawn(work)
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, lambda: self.spawn(self.watch.deadline("pause")))
        await self.done.wait()
        server.close()
        await asyncio.gather(*(_flush(client) for client in [*self.clients, self.creator]))

    def _listen(self) -> socket.socket:
        """A socket in the box's folder, whose path may be longer than a socket address can be."""
        folder = os.open(self.home.box(self.record.id), os.O_RDONLY)
        try:
            path = Path(f"/proc/self/fd/{folder}/sock")
            path.unlink(missing_ok=True)
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(str(path))
            return listener
        finally:
            os.close(folder)

    async def _start(self) -> None:
        self.machine.prepare()
        layers, folder, check = [], None, None
        if self.record.image:
            manifest = ImageManifest.load(ImageManifest.path(self.home, self.record.image))
            self.machine.check(manifest)
            layers = manifest.layers
            if manifest.memory:
                folder = await asyncio.to_thread(self.machine.image_folder, manifest)
                check = asyncio.create_task(
                    asyncio.to_thread(self.machine.verify, manifest, folder)
                )
        try:
            await self.attach(self.machine.start(layers, folder))
            if check:
                await check
            await self.hello(detach_all=True)
        finally:
            if check and not check.done():
                await asyncio.wait({check})
        remove_tree(self.home.box(self.record.id) / "unpacked", self.home.path)

    async def attach(self, fds: tuple[int, int]) -> None:
        await self.link.attach(*fds)

    async def hello(self, detach_all: bool) -> None:
        """Every life of a machine gets an identity of its own."""
        self.record.generation = new_id("n")
        await self.link.call(
            "hello",
            HELLO_TIMEOUT_S,
            sandbox_id=self.record.id,
            generation=self.record.generation,
            hostname=f"sandbox-{self.record.id[:8]}",
            env=self.record.env,
            user=self.record.user,
            single_user=not self.root,
            limits={**self.record.limits, "inherit": "pids" not in self._grouped()},
            detach_all=detach_all,
        )

    def _grouped(self) -> set[str]:
        """Limits that the sandbox's cgroup enforces on its processes directly."""
        return set() if self.machine.plan.backend == "gvisor" else set(self.machine.group.folders)

    def _mark_running(self) -> None:
        self.record.state = "running"
        self.record.previous = None  # the new generation has answered
        self.record.reason = None
        if self.record.timeout:
            self.record.deadline = time.time() + self.record.timeout
        self.save()

    def save(self) -> None:
        self.record.save(BoxRecord.path(self.home, self.record.id))

    def _engine_said(self) -> str:
        log = self.machine.log
        said = log.read_text(errors="replace")[-600:].strip() if log.exists() else ""
        return f"\n{said}" if said else ""

    def spawn(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    # -- clients ----------------------------------------------------------------------------

    async def _on_client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        client = ClientLink(reader, writer)
        self.clients.add(client)
        await self._serve(client)
        self.clients.discard(client)

    async def _serve(self, client: ClientLink) -> None:
        while (incoming := await client.read()) is not None:
            self.watch.touch()
            for number, kind, payload in incoming:
                if kind == frames.CALL:
                    self._on_call(client, number, json.loads(payload))
                    continue
                channel = client.channels.get(number)
                if channel is not None:
                    self.link.send(frames.pack(channel, kind, payload))
            if not self.busy:
                await self.link.drain()
        for channel in list(client.channels.values()):
            self.link.send(frames.pack(channel, frames.CANCEL))
            self.link.forget(channel)
        if client is self.creator and not self.committed:
            await self.end("creation was abandoned")

    def _on_call(self, client: ClientLink, number: int, params: dict[str, Any]) -> None:
        op = params.get("op")
        if op in self.own_ops:
            params.pop("op")
            self.spawn(self._own_call(client, number, str(op), params))
            return
        if self.busy not in (None, "checkpoint"):
            client.error(number, "conflict", f"sandbox {self.record.id} is {self.busy}")
            return
        channel = self.link.open(client, number)
        self.link.send(frames.pack_json(channel, frames.CALL, params))

    async def _own_call(
        self, client: ClientLink, number: int, op: str, params: dict[str, Any]
    ) -> None:
        def announce(value: dict[str, Any]) -> None:
            client.send(frames.pack_json(number, frames.EVENT, value))

        if op == "checkpoint":
            params["announce"] = announce
        try:
            client.end(number, await self.own_ops[op](**params))
        except (OpenK3Error, OSError) as error:
            client.error(number, error_kind(error), str(error))
        except TypeError as error:
            client.error(number, "input", f"{op}: missing or unusable parameter: {error}")

    async def _commit(self, **fields: Any) -> dict[str, Any]:
        """The creator adopts the machine: from here it outlives the connection."""
        for name in ("metadata", "timeout", "on_timeout", "idle_pause", "created", "env"):
            if name in fields:
                setattr(self.record, name, fields[name])
        if fields.get("env"):
            await self.hello(detach_all=False)
        self._mark_running()
        self.committed = True
        events.emit(self.home, "created", self.record.id, template=self.record.template)
        return self._info()

    async def _info_now(self) -> dict[str, Any]:
        return self._info()

    def _info(self) -> dict[str, Any]:
        return {
            **vars(self.record),
            "busy": self.busy,
            "memory_bytes": self.machine.group.memory_bytes(),
            "disk_bytes": self.machine.disk.used_bytes() if not self.busy else 0,
        }

    async def _set_timeout(self, timeout: float | None) -> dict[str, Any]:
        self.record.timeout = timeout
        self.record.deadline = time.time() + timeout if timeout else None
        self.save()
        return {"deadline": self.record.deadline}

    async def _kill(self) -> dict[str, Any]:
        await self.end("killed")
        return {"killed": True}

    # -- ending -----------------------------------------------------------------------------

    async def end(self, reason: str) -> None:
        """Delete the sandbox, also one that is being saved, was just paused or has crashed."""
        async with self._ending:
            if self.deleted:
                return
            self.busy = "ending"
            await self.machine.children.kill_everything()
            await self.generations.settled()  # now nothing writes to the folder or the store
            await self.machine.destroy()
            remove_tree(self.home.box(self.record.id), self.home.path)
            self.deleted = True
            self.done.set()
            events.emit(self.home, "killed", self.record.id, reason=reason)

    async def crash(self, reason: str) -> None:
        """The machine is gone: back to the last generation, paused, or lost without one."""
        async with self._ending:
            if self.done.is_set():
                return
            events.emit(self.home, "crashed", self.record.id, reason=reason)
            await self.machine.destroy()
            if self.committed:
                self.record.state = "paused" if self.record.own_image else "lost"
                self.record.reason, self.record.deadline = reason, None
                self.save()
            self._discard_if_new()
            self.link.end_calls("ended", f"sandbox {self.record.id} ended: {reason}")
            self.done.set()

    def _discard_if_new(self) -> None:
        if not self.committed:
            remove_tree(self.home.box(self.record.id), self.home.path)


async def _flush(client: ClientLink) -> None:
    """Hang up once the client has everything; one that reads nothing is not waited for."""
    client.writer.close()
    with suppress(OSError, TimeoutError):
        await asyncio.wait_for(client.writer.wait_closed(), FLUSH_TIMEOUT_S)
