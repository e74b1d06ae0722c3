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

from openk3.errors import ConflictError, InputError, OpenK3Error, StorageError
from openk3.sandbox import events, frames
from openk3.sandbox.keeper.link import AgentLink, ClientLink
from openk3.sandbox.keeper.machine import Machine, Plan
from openk3.sandbox.store.home import Home, new_id, remove_tree
from openk3.sandbox.store.records import BoxRecord, ImageManifest

HELLO_TIMEOUT_S = 120.0
QUIESCE_TIMEOUT_S = 60.0
PING_EVERY_S, PING_TIMEOUT_S = 20.0, 60.0
RETRY_PAUSE_S = 30.0
KEEPER_OPS = ("commit", "info", "set_timeout", "checkpoint", "kill")


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
        self.gate = asyncio.Event()
        self.done = asyncio.Event()
        self.tasks: set[asyncio.Task[Any]] = set()
        self.last_activity = time.monotonic()
        self.num_oom_kills = 0

    # -- life -------------------------------------------------------------------------------

    async def run(self, creation: socket.socket) -> None:
        """From nothing to `done`. The creator hears on channel 0 how the start went."""
        started = time.perf_counter()
        reader, writer = await asyncio.open_unix_connection(sock=creation)
        self.creator = ClientLink(reader, writer)
        try:
            await self._start()
        except (OpenK3Error, OSError, TimeoutError) as error:
            await self.machine.destroy()
            self._discard_if_new()
            self.creator.error(0, error_kind(error), f"{error}{self._engine_said()}")
            await _drain(self.creator)
            return
        server = await asyncio.start_unix_server(self._on_client, sock=self._listen())
        if self.mode == "resume":
            self._mark_running()
        seconds = time.perf_counter() - started
        ready = {"ready": True, "seconds": seconds, "disk": self.machine.disk.uses_image}
        self.creator.send(frames.pack_json(0, frames.EVENT, {**ready, **self._info()}))
        chores = (self._watch_machine(), self._tick(), self._compact())
        for work in (self._serve(self.creator), *chores):
            self._spawn(work)
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, lambda: self._spawn(self._on_deadline("pause")))
        await self.done.wait()
        server.close()
        for client in [*self.clients, self.creator]:
            await _drain(client)

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
            await self._attach(self.machine.start(layers, folder))
            if check:
                await check
            await self._hello(detach_all=True)
        finally:
            if check and not check.done():
                await asyncio.wait({check})
        remove_tree(self.home.box(self.record.id) / "unpacked", self.home.path)
        self.gate.set()

    async def _attach(self, fds: tuple[int, int]) -> None:
        await self.link.attach(*fds)

    async def _hello(self, detach_all: bool) -> None:
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
        self._save()

    def _save(self) -> None:
        self.record.save(BoxRecord.path(self.home, self.record.id))

    def _discard_if_new(self) -> None:
        if not self.committed:
            remove_tree(self.home.box(self.record.id), self.home.path)

    def _engine_said(self) -> str:
        log = self.machine.log
        said = log.read_text(errors="replace")[-600:].strip() if log.exists() else ""
        return f"\n{said}" if said else ""

    def _spawn(self, work: Any) -> None:
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
            self.last_activity = time.monotonic()
            for number, kind, payload in incoming:
                if kind == frames.CALL:
                    await self._on_call(client, number, json.loads(payload))
                    continue
                if self.busy == "checkpoint":
                    await self.gate.wait()
                channel = client.channels.get(number)
                if channel is not None:
                    self.link.send(frames.pack(channel, kind, payload))
            if self.link.writer and not self.busy:
                with suppress(OSError):  # the machine is gone: _watch_machine deals with it
                    await self.link.writer.drain()
        for channel in list(client.channels.values()):
            self.link.send(frames.pack(channel, frames.CANCEL))
            self.link.forget(channel)
        if client is self.creator and not self.committed:
            await self._end("creation was abandoned")

    async def _on_call(self, client: ClientLink, number: int, params: dict[str, Any]) -> None:
        op = params.get("op")
        if op in KEEPER_OPS:
            params.pop("op")
            self._spawn(self._own_call(client, number, str(op), params))
            return
        if self.busy == "checkpoint":
            await self.gate.wait()
        if self.busy:
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
            client.end(number, await getattr(self, f"_op_{op}")(**params))
        except (OpenK3Error, OSError) as error:
            client.error(number, error_kind(error), str(error))

    async def _op_commit(self, **fields: Any) -> dict[str, Any]:
        """The creator adopts the machine: from here it outlives the connection."""
        for name in ("metadata", "timeout", "on_timeout", "idle_pause", "created", "env"):
            if name in fields:
                setattr(self.record, name, fields[name])
        if fields.get("env"):
            await self._hello(detach_all=False)
        self._mark_running()
        self.committed = True
        events.emit(self.home, "created", self.record.id, template=self.record.template)
        return self._info()

    async def _op_info(self) -> dict[str, Any]:
        return self._info()

    def _info(self) -> dict[str, Any]:
        return {
            **vars(self.record),
            "busy": self.busy,
            "memory_bytes": self.machine.group.memory_bytes(),
            "disk_bytes": self.machine.disk.used_bytes() if not self.busy else 0,
        }

    async def _op_set_timeout(self, timeout: float | None) -> dict[str, Any]:
        self.record.timeout = timeout
        self.record.deadline = time.time() + timeout if timeout else None
        self._save()
        return {"deadline": self.record.deadline}

    async def _op_kill(self) -> dict[str, Any]:
        await self._end("killed")
        return {"killed": True}

    # -- checkpoints ------------------------------------------------------------------------

    async def _op_checkpoint(
        self, stay: bool, memory: bool = True, announce: Callable[[Any], None] = lambda value: None
    ) -> dict[str, Any]:
        """A new generation; then run on (`stay`) or end this keeper, paused.

        `announce` hears of the image as soon as others may start from it.
        """
        if self.busy:
            raise ConflictError(f"sandbox {self.record.id} is {self.busy}")
        if not self.committed:
            raise ConflictError("the sandbox is not created yet")
        if memory and self.machine.plan.backend != "gvisor":
            raise InputError(
                f"backend {self.machine.plan.backend} cannot save processes and memory; "
                "memory=False saves the files and ends the processes"
            )
        self.busy = "checkpoint" if stay else "pausing"
        self.gate.clear()
        started = time.perf_counter()
        try:
            with self.home.using():
                manifest = await self._new_generation(stay, memory, announce)
        finally:
            if stay or not self.done.is_set():
                self.busy = None
                self.gate.set()
        seconds = time.perf_counter() - started
        event = "checkpointed" if stay else "paused"
        events.emit(self.home, event, self.record.id, image=manifest.id, seconds=seconds)
        size = sum(item[0] for item in manifest.files.values())
        return {"image": manifest.id, "seconds": seconds, "bytes": size, "memory": memory}

    async def _new_generation(
        self, stay: bool, memory: bool, announce: Callable[[Any], None]
    ) -> ImageManifest:
        aside = None
        if memory:
            await self._quiesce()
            try:
                aside = await self.machine.checkpoint()
            except (ConflictError, StorageError):
                await self._thaw()
                raise
        else:
            await self.link.call("sync", QUIESCE_TIMEOUT_S)
        self.link.detach()
        await self.machine.stop()
        folder = aside or self.machine.empty_image()
        try:
            manifest = await self.machine.commit(folder, memory)
        except OSError as error:
            await self._run_on(aside)
            raise StorageError(f"could not save sandbox {self.record.id}: {error}") from error
        self.record.previous, self.record.image = self.record.image, manifest.id
        self.record.own_image = True
        if not stay:
            self.record.state, self.record.deadline = "paused", None
        self._save()  # the switch: from here the new generation is the sandbox
        announce({"image": manifest.id})
        if stay:
            await self._restart(manifest)
        else:
            for client in [*self.clients, self.creator]:
                for number in list(client.channels) if client else []:
                    client.error(number, "conflict", f"sandbox {self.record.id} was paused")
            await self.machine.destroy()
            self.done.set()
        return manifest

    async def _restart(self, manifest: ImageManifest) -> None:
        """The parent goes on from its own new image; failing that it is paused there."""
        try:
            await self._attach(self.machine.restart(manifest))
            await self._hello(detach_all=not manifest.memory)
        except (OpenK3Error, OSError) as error:
            await self._crash(f"it could not be restored after a checkpoint: {error}")
            raise
        self.record.previous = None
        self._save()
        self._spawn(self._compact())

    async def _compact(self) -> None:
        """Keep the chain of layers short, beside the running machine."""
        if not (self.record.image and self.record.own_image):
            return
        with self.home.using():
            manifest = ImageManifest.load(ImageManifest.path(self.home, self.record.image))
            try:
                merged = await asyncio.to_thread(self.machine.compact, manifest)
            except OSError as error:
                events.emit(self.home, "compaction_failed", self.record.id, reason=str(error))
                return
            if merged and self.record.image == manifest.id and not self.busy and self.committed:
                self.machine.disk.replace_layers(merged.layers)
                self.record.image = merged.id
                self._save()

    async def _quiesce(self) -> None:
        try:
            await self.link.call("quiesce", QUIESCE_TIMEOUT_S)
        except TimeoutError as error:
            raise ConflictError(f"the sandbox is too busy to be saved: {error}") from error

    async def _thaw(self) -> None:
        """After a refused checkpoint: any call makes the agent speak again."""
        if not self.link.closed.is_set():
            await self.link.call("ping", PING_TIMEOUT_S)

    async def _run_on(self, aside: Path | None) -> None:
        """The image could not be made durable: go on from memory as if nothing had happened."""
        await self._attach(self.machine.relaunch(aside))
        await self._hello(detach_all=aside is None)
        if aside:
            remove_tree(aside, self.home.path)

    # -- watching ---------------------------------------------------------------------------

    async def _watch_machine(self) -> None:
        """The machine ending by itself ends the sandbox, or drops it to its last generation."""
        while not self.done.is_set():
            closed = self.link.closed
            await closed.wait()
            if self.busy:
                await self.gate.wait()
            if self.busy == "ending" or self.done.is_set():
                return
            if closed is self.link.closed:
                await asyncio.sleep(0.02)  # the program's exit and the kernel's OOM count follow
                await self._crash(self.machine.death_reason())

    async def _crash(self, reason: str) -> None:
        events.emit(self.home, "crashed", self.record.id, reason=reason)
        await self.machine.destroy()
        if not self.committed:
            self._discard_if_new()
        else:
            self.record.state = "paused" if self.record.own_image else "lost"
            self.record.reason, self.record.deadline = reason, None
            self._save()
        for client in [*self.clients, self.creator]:
            for number in list(client.channels) if client else []:
                client.error(number, "ended", f"sandbox {self.record.id} ended: {reason}")
        self.done.set()

    async def _end(self, reason: str) -> None:
        if self.done.is_set():
            return
        self.busy = "ending"
        await self.machine.destroy()
        self.committed = False
        self._discard_if_new()
        events.emit(self.home, "killed", self.record.id, reason=reason)
        self.done.set()

    async def _tick(self) -> None:
        """Deadlines, idle pause and a sign of life, once a second."""
        last_ping = time.monotonic()
        while not self.done.is_set():
            await asyncio.sleep(1.0)
            if self.busy or not self.committed:
                continue
            if self.machine.group.oom_kills() > self.num_oom_kills:
                self.num_oom_kills = self.machine.group.oom_kills()
                events.emit(self.home, "oom_kill", self.record.id, count=self.num_oom_kills)
            if self.link.routes:
                self.last_activity = time.monotonic()
            idle = self.record.idle_pause
            if self.record.deadline and time.time() >= self.record.deadline:
                await self._on_deadline(self.record.on_timeout)
            elif idle and time.monotonic() - self.last_activity > idle:
                await self._on_deadline("pause")
            elif time.monotonic() - last_ping > PING_EVERY_S:
                last_ping = time.monotonic()
                await self._ping()

    async def _on_deadline(self, action: str) -> None:
        if action == "kill":
            await self._end("its time was up")
            return
        memory = self.machine.plan.backend == "gvisor"
        if not memory and not self.record.allow_files_only:
            await self._end("its time was up and this backend cannot pause processes")
            return
        try:
            await self._op_checkpoint(stay=False, memory=memory)
        except (OpenK3Error, OSError) as error:
            events.emit(self.home, "pause_failed", self.record.id, reason=str(error))
            self.record.deadline = time.time() + RETRY_PAUSE_S
            self.last_activity = time.monotonic()

    async def _ping(self) -> None:
        try:
            await self.link.call("ping", PING_TIMEOUT_S)
        except TimeoutError:
            if not self.busy:
                await self._crash("unresponsive")
        except ConnectionError:
            return  # _watch_machine deals with it


async def _drain(client: ClientLink) -> None:
    try:
        await asyncio.wait_for(client.writer.drain(), 2.0)
        client.writer.close()
    except (OSError, TimeoutError):
        return
