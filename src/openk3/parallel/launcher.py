"""How a process finds the others: what its launcher tells it, and the store they meet at."""

import os
from datetime import timedelta

import torch.distributed as dist

from openk3.errors import ConfigError, LostProcessError

LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
"""What a launcher tells each process by its environment."""
START_S = 120.0
"""Time that starting is granted at least, without any progress."""


def told_by_launcher() -> tuple[int, int, int]:
    """RANK, WORLD_SIZE and LOCAL_RANK; without a launcher one process alone. Raises ConfigError."""
    told = {name: os.environ.get(name) for name in LAUNCHER}
    shown = ", ".join(f"{name}={value}" for name, value in told.items() if value is not None)
    try:
        size = int(told["WORLD_SIZE"] or 1)
        if size == 1:
            return 0, 1, int(told["LOCAL_RANK"] or 0)
        rank, local_rank, port = (int(told[n] or "") for n in ("RANK", "LOCAL_RANK", "MASTER_PORT"))
        whole = 0 <= rank < size and local_rank >= 0 and 0 < port < 1 << 16
    except ValueError:
        whole, size, rank, local_rank = False, 0, 0, 0
    if not whole or not told["MASTER_ADDR"]:
        raise ConfigError(
            f"{shown} in the environment tell of no launcher that can be used: it must set all of "
            f"{', '.join(LAUNCHER)}, as torchrun does; unset WORLD_SIZE to start one process alone"
        )
    return rank, size, local_rank


def open_store(rank: int, size: int, seconds: float) -> dist.Store:
    """The store of this attempt, at the launcher's address. Raises LostProcessError."""
    try:
        store, _, _ = next(
            dist.rendezvous("env://", rank, size, timeout=timedelta(seconds=seconds))
        )
    except RuntimeError as error:
        place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise LostProcessError(
            f"rank {rank} has found no store at {place} (MASTER_ADDR, MASTER_PORT) within "
            f"{seconds:.0f} s: {str(error).splitlines()[0]}"
        ) from error
    # torchrun keeps its store over restarts, and with it the addresses of processes that are gone
    return dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)


def meet(store: dist.Store, rank: int, size: int, seconds: float) -> None:
    """Return when all processes are here. Raises LostProcessError naming who is not."""
    keys = [f"here/{r}" for r in range(size)]
    store.set(keys[rank], "")
    try:
        store.wait(keys, timedelta(seconds=seconds))
    except RuntimeError as error:
        absent = [r for r, key in enumerate(keys) if not store.check([key])]
        named = ", ".join(map(str, absent[:4])) + (", ..." if len(absent) > 4 else "")
        raise LostProcessError(
            f"{len(absent)} of {size} processes have not come within {seconds:.0f} s: rank {named}"
        ) from error
