"""A bounded set of expert buffers, least recently used out first, filled by a few threads.

Nothing here knows what an expert is: a key, a function that fills a buffer with its bytes, and a
fixed number of buffers. What is predicted or cached decides how long a read is waited for, never
what is read.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from openk3.errors import CheckpointError, InputError, OpenK3Error

Fill = Callable[[Hashable, Tensor], None]


@dataclass
class CacheStats:
    """Counts since the cache was made. Every use is exactly one of hit, predicted and missed."""

    hits: int = 0
    """Uses of an expert that an earlier use had left in the cache."""
    predicted: int = 0
    """Uses of an expert that a prediction had asked for."""
    missed: int = 0
    """Uses that began their own read."""
    predictions: int = 0
    """Reads begun by predictions, useful or not."""
    evictions: int = 0
    bytes_read: int = 0

    @property
    def hit_rate(self) -> float:
        """Share of uses that found their expert in the cache or on its way."""
        uses = self.hits + self.predicted + self.missed
        return (self.hits + self.predicted) / uses if uses else 0.0

    def __str__(self) -> str:
        uses = self.hits + self.predicted + self.missed
        return (
            f"{uses} expert uses, {self.hit_rate:.1%} hits ({self.predicted} of "
            f"{self.predictions} predictions used), {self.bytes_read / 1e6:.1f} MB read"
        )


@dataclass
class _Slot:
    key: Hashable
    buffer: Tensor
    pins: int = 1
    """Users and the thread that fills it; a pinned slot is not evicted."""
    origin: str = "missed"
    """What its next use counts as."""
    error: OpenK3Error | None = None
    ready: threading.Event = field(default_factory=threading.Event)


class ExpertCache:
    """`num_slots` buffers of `slot_bytes` uint8 each, allocated as they are first needed."""

    def __init__(self, fill: Fill, slot_bytes: int, num_slots: int, *, workers: int = 4) -> None:
        if num_slots < 2:
            raise InputError(
                f"the expert cache must hold at least 2 experts of {slot_bytes / 1e9:.6f} GB each"
            )
        self.stats = CacheStats()
        self.num_slots, self.slot_bytes, self.workers = num_slots, slot_bytes, workers
        self._fill_buffer = fill
        self._slots: OrderedDict[Hashable, _Slot] = OrderedDict()
        self._changed = threading.Condition()
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="experts")

    def close(self) -> None:
        """Wait for the reads that were asked for and end the threads."""
        self._pool.shutdown()

    def ahead(
        self, keys: Sequence[Hashable], *, keep: Sequence[Hashable] = (), predicted: bool = False
    ) -> None:
        """Begin to read `keys` as far as unpinned slots allow, sparing those of `keep`."""
        with self._changed:
            spare = {*keys, *keep}
            for key in keys:
                if key in self._slots:
                    continue
                slot = self._take(key, spare)
                if slot is None:
                    return
                slot.origin = "predicted" if predicted else "missed"
                self.stats.predictions += predicted
                self._pool.submit(self._fill_ahead, slot)

    @contextmanager
    def use(self, key: Hashable) -> Iterator[Tensor]:
        """The buffer of `key`, filled, kept until the block ends. Raises what its read raised."""
        slot, fill_here = self._pin(key)
        try:
            if fill_here:
                self._fill(slot)
            slot.ready.wait()
            if slot.error is not None:
                raise slot.error
            yield slot.buffer
        finally:
            self._unpin(slot)

    def _pin(self, key: Hashable) -> tuple[_Slot, bool]:
        with self._changed:
            slot = self._slots.get(key)
            while slot is None:
                slot = self._take(key, ())
                if slot is not None:
                    self.stats.missed += 1
                    slot.origin = "hits"
                    return slot, True
                self._changed.wait()
                slot = self._slots.get(key)
            self._slots.move_to_end(key)
            slot.pins += 1
            setattr(self.stats, slot.origin, getattr(self.stats, slot.origin) + 1)
            slot.origin = "hits"
            return slot, False

    def _take(self, key: Hashable, spare: "set[Hashable] | tuple[()]") -> _Slot | None:
        """A slot for `key` with one pin, or None if none is free. The lock is held."""
        if len(self._slots) < self.num_slots:
            buffer = torch.empty(self.slot_bytes, dtype=torch.uint8)
        else:
            old = next((s for k, s in self._slots.items() if s.pins == 0 and k not in spare), None)
            if old is None:
                return None
            del self._slots[old.key]
            self.stats.evictions += 1
            buffer = old.buffer
        self._slots[key] = _Slot(key, buffer)
        return self._slots[key]

    def _fill_ahead(self, slot: _Slot) -> None:
        try:
            self._fill(slot)
        finally:
            self._unpin(slot)

    def _fill(self, slot: _Slot) -> None:
        slot.error = CheckpointError(f"reading expert {slot.key} was interrupted")
        try:
            self._fill_buffer(slot.key, slot.buffer)
            slot.error = None
        except OpenK3Error as error:
            slot.error = error
        finally:  # whatever happened, nobody may wait for ever
            with self._changed:
                self.stats.bytes_read += self.slot_bytes
            slot.ready.set()

    def _unpin(self, slot: _Slot) -> None:
        with self._changed:
            slot.pins -= 1
            if slot.error is not None and slot.pins == 0:
                self._slots.pop(slot.key, None)
            self._changed.notify_all()
