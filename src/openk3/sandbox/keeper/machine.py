"""One isolated machine: start, checkpoint, restore, stop. Knows nothing of clients or records."""

import asyncio
import os
import shutil
import time
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from openk3._io import fsync_dir
from openk3.errors import CheckpointError, ConflictError, StorageError
from openk3.sandbox.keeper import bwrap
from openk3.sandbox.keeper.cgroups import Group
from openk3.sandbox.keeper.children import Children
from openk3.sandbox.keeper.disk import Disk
from openk3.sandbox.keeper.gvisor import IMAGE_FILES, Runsc
from openk3.sandbox.store import pages
from openk3.sandbox.store.home import Home, new_id, remove_tree
from openk3.sandbox.store.records import ImageManifest

CHECKPOINT_TIMEOUT_S = 300.0


@dataclass
class Plan:
    """What to run, decided by the client before the keeper starts."""

    backend: str
    program: str
    engine: str
    cpu: str
    template: str
    template_root: str
    runtime: str
    runtime_root: str
    agent: list[str]
    group: str
    max_layers: int
    limits: dict[str, Any]


class Machine:
    """The isolating program, its mounts and its cgroup."""

    def __init__(self, home: Home, box_id: str, plan: Plan, root: bool) -> None:
        self.home, self.box_id, self.plan, self.root = home, box_id, plan, root
        self.children = Children()
        self.group = Group(plan.group)
        self.disk = Disk(home, box_id, plan.limits["disk_mb"], root)
        self.log = home.box(box_id) / "engine.log"
        self.runsc = Runsc(plan.program, str(home.mnt / "state"), str(self.log))
        self.exit: asyncio.Future[int] | None = None
        self.oom_before = 0

    def prepare(self) -> None:
        """Namespace-private mounts and the cgroup."""
        if self.root:
            limits = self.plan.limits
            # on the host's own kernel a user's process limit would count all sandboxes together
            own = {} if self.plan.backend == "gvisor" else {"tasks": limits["processes"] + 16}
            self.group.create(limits["cpus"], limits["memory_mb"], **own)
        self.disk.prepare(self.plan.template_root, self.plan.runtime_root)
        self.runsc.write_bundle(self.home.mnt / "bundle", self.plan.agent, self.disk.rootfs)

    # -- starting ---------------------------------------------------------------------------

    def start(self, layers: list[str], image: Path | None) -> tuple[int, int]:
        """Boot, or restore the memory image in folder `image`; (read fd, write fd) of the agent."""
        self.disk.mount(layers)
        return self._launch(image)

    def _launch(self, image: Path | None) -> tuple[int, int]:
        bundle = str(self.home.mnt / "bundle")
        shutil.rmtree(self.home.mnt / "state")  # what the last container left
        (self.home.mnt / "state").mkdir()
        if self.plan.backend == "bwrap":
            argv = bwrap.argv(self.plan.program, self.disk.rootfs, self.plan.agent, not self.root)
        elif image is None:
            argv = self.runsc.run(bundle)
        else:
            argv = self.runsc.restore(bundle, str(image))
        from_us, to_agent = os.pipe2(os.O_CLOEXEC)
        from_agent, to_us = os.pipe2(os.O_CLOEXEC)
        log = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            _, self.exit = self.children.spawn(
                argv,
                stdin=from_us,
                stdout=to_us,
                stderr=log,
                groups=self.group.procs_files(),
            )
        finally:
            for handle in (from_us, to_us, log):
                os.close(handle)
        return from_agent, to_agent

    # -- images -----------------------------------------------------------------------------

    def check(self, manifest: ImageManifest) -> None:
        """Raises CheckpointError when a memory image belongs to another engine or processor."""
        here = {"engine": self.plan.engine, "cpu": self.plan.cpu, "runtime": self.plan.runtime}
        for name, value in here.items():
            made_with = getattr(manifest, name)
            if manifest.memory and made_with != value:
                raise CheckpointError(
                    f"image {manifest.id} was made with {name} {made_with!r}, here is {value!r}; "
                    "a memory image restores only where both are the same"
                )

    def image_folder(self, manifest: ImageManifest) -> Path:
        """Where the memory image lies as plain files; unpacked first when it is in pages."""
        if not manifest.packed:
            return self.home.images / manifest.id
        aside = self.home.box(self.box_id) / "unpacked"
        remove_tree(aside, self.home.path)
        aside.mkdir()
        pages.unpack(self.home.pages, manifest.id, aside)
        return aside

    def verify(self, manifest: ImageManifest, folder: Path) -> None:
        """Raises CheckpointError unless every file has the size and sum it was written with."""
        for name, (size, crc) in manifest.files.items():
            found = _size_and_crc(folder / name)
            if found != (size, crc):
                raise CheckpointError(
                    f"image {manifest.id} is damaged: {name} has size {found[0]} and sum "
                    f"{found[1]:08x}, not {size} and {crc:08x}"
                )

    async def checkpoint(self) -> Path:
        """Freeze and write a memory image aside. The caller has quiesced the agent and stops the
        frozen machine next; what it would still do after the image must never happen.

        Raises ConflictError when refused; the machine then runs on.
        """
        aside = self.home.tmp / new_id("i")
        try:
            aside.mkdir()
        except OSError as error:
            raise StorageError(f"cannot write a memory image: {error}") from error
        code, said = await self.children.run(self.runsc.freeze(), CHECKPOINT_TIMEOUT_S)
        if not code:
            save = self.runsc.checkpoint(str(aside))
            code, said = await self.children.run(save, CHECKPOINT_TIMEOUT_S)
        missing = [name for name in IMAGE_FILES if not (aside / name).exists()]
        if code or missing:
            await self.children.run(self.runsc.unfreeze(), CHECKPOINT_TIMEOUT_S)
            remove_tree(aside, self.home.path)
            raise ConflictError(_why_refused(said, self.log))
        return aside

    def empty_image(self) -> Path:
        """The image of a machine whose memory is not kept."""
        aside = self.home.tmp / new_id("i")
        aside.mkdir()
        return aside

    async def stop(self) -> None:
        """End every process, take the root apart; the upper stays mounted."""
        await self.children.kill_everything()
        self.disk.unmount()

    async def commit(self, aside: Path, memory: bool) -> ImageManifest:
        """Make the stopped machine's state a durable image: sum, sync, rename, seal the upper."""
        layer = self.disk.pending()
        layers = [*self.disk.layers, *([layer] if layer else [])]
        manifest = ImageManifest(
            id=new_id("g"),
            backend=self.plan.backend,
            engine=self.plan.engine,
            cpu=self.plan.cpu,
            template=self.plan.template,
            runtime=self.plan.runtime,
            layers=layers,
            memory=memory,
            created=time.time(),
        )
        manifest.files = await asyncio.to_thread(_seal_files, aside)
        manifest.save(aside / "manifest.json")
        os.rename(aside, self.home.images / manifest.id)
        fsync_dir(self.home.images)
        await asyncio.to_thread(self.disk.seal)
        return manifest

    def relaunch(self, image: Path | None) -> tuple[int, int]:
        """Run on over the same upper, from an image just written or anew: the commit failed."""
        self.disk.reopen()
        return self._launch(image)

    def restart(self, manifest: ImageManifest) -> tuple[int, int]:
        """Run on after a commit, as the image's first user."""
        self.disk.mount(manifest.layers)
        return self._launch(self.image_folder(manifest) if manifest.memory else None)

    def compact(self, manifest: ImageManifest) -> ImageManifest | None:
        """The same image over one merged layer, or None while there are few. Takes its time.

        Sealed layers never change, so the machine may run and even be saved meanwhile.
        """
        if len(manifest.layers) <= self.plan.max_layers or manifest.layers != self.disk.layers:
            return None
        old = self.home.images / manifest.id
        merged = replace(manifest, id=new_id("g"), layers=[self.disk.merge_layers()])
        aside = self.home.tmp / new_id("i")
        aside.mkdir()
        if manifest.packed:
            name = f"{manifest.id}.recipe"
            os.link(self.home.pages / name, self.home.pages / f"{merged.id}.recipe")
        else:
            for name in manifest.files:
                os.link(old / name, aside / name)
        merged.save(aside / "manifest.json")
        os.rename(aside, self.home.images / merged.id)
        fsync_dir(self.home.images)
        return merged

    # -- ending -----------------------------------------------------------------------------

    def death_reason(self) -> str:
        """Why the machine ended although nobody asked."""
        if self.group.oom_kills():
            return "oom"
        code = self.exit.result() if self.exit and self.exit.done() else None
        return f"the isolating program ended (exit code {code})"

    async def destroy(self) -> None:
        """Leave nothing of the live machine: no process, mount, upper or cgroup."""
        await self.children.kill_everything()
        self.disk.unmount()
        self.disk.drop()
        self.group.remove()


def _seal_files(folder: Path) -> dict[str, list[int]]:
    found = {}
    for file in sorted(folder.iterdir()):
        found[file.name] = list(_size_and_crc(file))
        handle = os.open(file, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    fsync_dir(folder)
    return found


def _size_and_crc(file: Path) -> tuple[int, int]:
    crc = size = 0
    try:
        with open(file, "rb") as handle:
            while piece := handle.read(1 << 20):
                crc, size = zlib.crc32(piece, crc), size + len(piece)
    except FileNotFoundError:
        return 0, 0
    return size, crc


def _why_refused(said: str, log: Path) -> str:
    text = said.strip()
    if not text and log.exists():
        text = log.read_text(errors="replace")[-600:].strip()
    hint = ""
    if "unlinked" in text or "deleted" in text or "no such file" in text.lower():
        hint = " (a file that is open but deleted cannot be saved; close it, or keep it in /tmp)"
    return f"the checkpoint was refused and the sandbox runs on{hint}: {text[:300]}"
