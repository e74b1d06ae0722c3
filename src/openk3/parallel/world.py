"""The processes of a data-parallel run: who I am, and the few collectives the loop needs.

One process needs no process group: then every collective is the identity. Under torchrun (RANK and
WORLD_SIZE in the environment) they run over gloo on CPUs and NCCL on GPUs. Tensors are reduced in
the order they are given, in buckets of fixed size, so equal runs add in equal order.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from openk3.errors import BackendError, ConfigError, LostProcessError, OpenK3Error
from openk3.parallel.launcher import START_S, meet, open_store, told_by_launcher

T = TypeVar("T")
CPU = torch.device("cpu")
BUCKET_BYTES = 32 << 20
"""Gradients travel in flat buffers of about this size."""

RAISED_EVERYWHERE = "rank 0 raised this for all processes"


class Pulse:
    """Where a process is, for whoever watches it."""

    def __init__(self) -> None:
        self.step, self.phase, self.count = 0, "start", 0
        self.listener: Callable[[], None] | None = None
        """Called after every change."""

    def at(self, phase: str, step: int | None = None) -> None:
        """Note progress: another phase, or another piece of the same one."""
        self.step, self.phase = self.step if step is None else step, phase
        self.count += 1
        if self.listener is not None:
            self.listener()

    def __str__(self) -> str:
        return f"step {self.step}, phase {self.phase}"


@dataclass(frozen=True)
class World:
    """This process among `size` equal ones."""

    rank: int = 0
    size: int = 1
    device: torch.device = CPU
    patience: timedelta = timedelta(minutes=30)
    """Time that a collective waits for the others, where no watchdog ends it before."""
    pulse: Pulse = field(default_factory=Pulse, compare=False)

    @property
    def is_main(self) -> bool:
        """Whether this process writes the files."""
        return self.rank == 0

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum over processes, in place."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def max(self, tensor: Tensor) -> Tensor:
        """Elementwise maximum over processes, in place."""
        if self.size > 1:
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return tensor

    def sum_all(self, tensors: Sequence[Tensor]) -> None:
        """Sum each tensor over processes, in place, through flat buckets."""
        if self.size > 1:
            sum_all(tensors)

    def copy_from_main(self, tensors: Iterable[Tensor]) -> None:
        """Overwrite the tensors with those of rank 0."""
        if self.size > 1:
            for tensor in tensors:
                here = tensor.to(self.device)  # NCCL moves GPU memory only; counters live on CPUs
                dist.broadcast(here, src=0)
                if here is not tensor:
                    tensor.copy_(here)

    def share(self, value: Any) -> Any:
        """Rank 0's `value`, a small picklable object, on every process."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, device=self.device)
        return box[0]

    def on_main(self, work: Callable[[], T]) -> T:
        """What `work` returns on rank 0, a small picklable object, on every process.

        Raises everywhere the error that it raises there, if it is one of this project.
        """
        if self.size == 1:
            return work()
        outcome: tuple[Any, OpenK3Error | None] = (None, None)
        if self.is_main:
            try:
                outcome = (work(), None)
            except OpenK3Error as error:
                outcome = (None, error)
        value, refusal = self.share(outcome)
        if refusal is not None:
            refusal.add_note(RAISED_EVERYWHERE)
            raise refusal
        return value

    def barrier(self) -> None:
        """Wait until every process is here."""
        if self.size > 1:
            dist.barrier()


def sum_all(tensors: Sequence[Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Sum each tensor over the processes of `group`, in place, through flat buckets."""
    for bucket in _buckets(tensors):
        flat = torch.cat([t.reshape(-1) for t in bucket])
        dist.all_reduce(flat, group=group)
        for t, piece in zip(bucket, flat.split([t.numel() for t in bucket]), strict=True):
            t.copy_(piece.view_as(t))


@contextmanager
def join(device: str = "auto", seconds: float = START_S) -> Iterator[World]:
    """The world of this process, from torchrun's environment or alone.

    device: cpu, cuda, cuda:N or auto (a GPU when torch sees one). seconds: to wait for the other
    processes, START_S at least. Raises BackendError when a GPU is asked for and there is none,
    ConfigError for a name torch does not know, LostProcessError naming who has not come.
    """
    rank, size, local_rank = told_by_launcher()
    chosen = pick_device(device, local_rank)
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    if size == 1:
        yield World(device=chosen)
        return
    backend = "nccl" if chosen.type == "cuda" else "gloo"
    seconds = max(seconds, START_S)
    attempt = open_store(rank, size, seconds)
    meet(attempt, rank, size, seconds)
    patience = timedelta(seconds=seconds + 60)  # the watchdog is to speak first: it knows why
    try:
        dist.init_process_group(
            backend, timeout=patience, store=attempt, rank=rank, world_size=size
        )
    except RuntimeError as error:
        raise LostProcessError(f"the {size} processes could not be connected: {error}") from error
    try:
        yield World(rank, size, chosen, patience)
    finally:
        dist.destroy_process_group()


def pick_device(name: str, local_rank: int = 0) -> torch.device:
    """`auto`, `cpu`, `cuda` or `cuda:N` as a device; `cuda` is the GPU of `local_rank`.

    Raises ConfigError for any other name, BackendError for a GPU that is not there.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if not re.fullmatch(r"cpu|cuda(:\d{1,3})?", name):
        raise ConfigError(f"device is {name!r}; allowed: auto, cpu, cuda, cuda:N")
    device = torch.device(name)
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        index = local_rank if device.index is None else device.index
        if index >= count:
            raise BackendError(
                f"device {name!r} needs GPU {index}, but torch sees {count}; use cpu or install a "
                "CUDA build of torch"
            )
        return torch.device("cuda", index)
    return device


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype of products: `float32`, `bfloat16`, or `auto`, which is bfloat16 on a GPU.

    Raises ConfigError for any other name.
    """
    if name == "auto":
        name = "bfloat16" if device.type == "cuda" else "float32"
    kinds = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    if name not in kinds:
        raise ConfigError(f"dtype is {name!r}; allowed: auto, float32, bfloat16")
    return kinds[name]


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    bucket: list[Tensor] = []
    size = 0
    for tensor in tensors:
        if bucket and (size >= BUCKET_BYTES or tensor.dtype != bucket[0].dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.numel() * tensor.element_size()
    if bucket:
        yield bucket
