"""Saving a running machine as a new generation, and going on from it or ending there."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from openk3.errors import ConflictError, InputError, OpenK3Error, StorageError
from openk3.sandbox import events
from openk3.sandbox.store.home import remove_tree
from openk3.sandbox.store.records import ImageManifest

if TYPE_CHECKING:
    from openk3.sandbox.keeper.keeper import Keeper

QUIESCE_TIMEOUT_S = 60.0
THAW_TIMEOUT_S = 60.0


class Generations:
    """Checkpoints of one keeper's machine. While one is under way the keeper is `busy`."""

    def __init__(self, keeper: "Keeper") -> None:
        self.keeper = keeper
        self._idle = asyncio.Event()
        self._idle.set()

    async def settled(self) -> None:
        """Until no checkpoint is under way."""
        await self._idle.wait()

    async def checkpoint(
        self, stay: bool, memory: bool = True, announce: Callable[[Any], None] = lambda value: None
    ) -> dict[str, Any]:
        """A new generation; then run on (`stay`) or end the keeper, paused.

        `announce` hears of the image as soon as others may start from it.
        """
        keeper = self.keeper
        self._require_possible(memory)
        keeper.busy = "checkpoint" if stay else "pausing"
        keeper.link.hold()
        self._idle.clear()
        started = time.perf_counter()
        try:
            with keeper.home.using():
                manifest = await self._make(stay, memory, announce)
        finally:
            if keeper.busy != "ending" and not keeper.done.is_set():
                keeper.busy = None
                keeper.link.release()
            self._idle.set()
        seconds = time.perf_counter() - started
        event = "checkpointed" if stay else "paused"
        events.emit(keeper.home, event, keeper.record.id, image=manifest.id, seconds=seconds)
        size = sum(item[0] for item in manifest.files.values())
        return {"image": manifest.id, "seconds": seconds, "bytes": size, "memory": memory}

    def _require_possible(self, memory: bool) -> None:
        keeper = self.keeper
        if keeper.busy or keeper.done.is_set():
            raise ConflictError(f"sandbox {keeper.record.id} is {keeper.busy or 'ending'}")
        if not keeper.committed:
            raise ConflictError("the sandbox is not created yet")
        if memory and keeper.machine.plan.backend != "gvisor":
            raise InputError(
                f"backend {keeper.machine.plan.backend} cannot save processes and memory; "
                "memory=False saves the files and ends the processes"
            )

    async def _make(
        self, stay: bool, memory: bool, announce: Callable[[Any], None]
    ) -> ImageManifest:
        keeper, record = self.keeper, self.keeper.record
        aside = await self._freeze() if memory else None
        if not memory:
            await keeper.link.call("sync", QUIESCE_TIMEOUT_S)
        keeper.link.detach()
        await keeper.machine.stop()
        if not memory:
            keeper.link.end_calls("ended", f"sandbox {record.id} was saved without its processes")
        try:
            folder = aside or keeper.machine.empty_image()
            manifest = await keeper.machine.commit(folder, memory)
        except OSError as error:
            await self._run_on(aside)
            raise StorageError(f"could not save sandbox {record.id}: {error}") from error
        self._require_wanted()
        record.previous, record.image = record.image, manifest.id
        record.own_image = True
        if not stay:
            record.state, record.deadline = "paused", None
        keeper.save()  # the switch: from here the new generation is the sandbox
        announce({"image": manifest.id})
        if stay:
            await self._restart(manifest)
        else:
            keeper.link.end_calls("conflict", f"sandbox {record.id} was paused")
            await keeper.machine.destroy()
            keeper.done.set()
        return manifest

    def _require_wanted(self) -> None:
        if self.keeper.busy == "ending":
            raise ConflictError(f"sandbox {self.keeper.record.id} was killed")

    async def _freeze(self) -> Path:
        """The memory image, of an agent that has fallen silent."""
        try:
            await self.keeper.link.call("quiesce", QUIESCE_TIMEOUT_S)
        except TimeoutError as error:
            raise ConflictError(f"the sandbox is too busy to be saved: {error}") from error
        try:
            return await self.keeper.machine.checkpoint()
        except (ConflictError, StorageError):
            if not self.keeper.link.closed.is_set():  # any call makes the agent speak again
                await self.keeper.link.call("ping", THAW_TIMEOUT_S)
            raise

    async def _run_on(self, aside: Path | None) -> None:
        """The image could not be made durable: go on from memory as if nothing had happened."""
        self._require_wanted()
        await self.keeper.attach(self.keeper.machine.relaunch(aside))
        await self.keeper.hello(detach_all=aside is None)
        if aside:
            remove_tree(aside, self.keeper.home.path)

    async def _restart(self, manifest: ImageManifest) -> None:
        """The parent goes on from its own new image; failing that it is paused there."""
        keeper = self.keeper
        try:
            self._require_wanted()
            await keeper.attach(keeper.machine.restart(manifest))
            await keeper.hello(detach_all=not manifest.memory)
        except (OpenK3Error, OSError) as error:
            if keeper.busy != "ending":
                await keeper.crash(f"it could not be restored after a checkpoint: {error}")
            raise
        keeper.record.previous = None
        keeper.save()
        keeper.spawn(self.compact())

    async def compact(self) -> None:
        """Keep the chain of layers short, beside the running machine."""
        keeper, record = self.keeper, self.keeper.record
        if not (record.image and record.own_image):
            return
        with keeper.home.using():
            manifest = ImageManifest.load(ImageManifest.path(keeper.home, record.image))
            try:
                merged = await asyncio.to_thread(keeper.machine.compact, manifest)
            except OSError as error:
                events.emit(keeper.home, "compaction_failed", record.id, reason=str(error))
                return
            if merged and record.image == manifest.id and not keeper.busy and keeper.committed:
                keeper.machine.disk.replace_layers(merged.layers)
                record.image = merged.id
                keeper.save()
