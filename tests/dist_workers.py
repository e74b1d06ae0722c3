"""A crew of processes in one process group, started once and given many checks.

Gloo on CPUs; NCCL for a crew of `best_device`, where there are as many GPUs as processes. A check
is a module-level function `work(world, *args)`; every process runs it at the same time.
"""

import atexit
import faulthandler
import functools
import multiprocessing
import os
import sys
import time
import traceback
from multiprocessing.connection import wait
from pathlib import Path

ROOT = str(Path(__file__).parents[1])
if ROOT not in sys.path:  # processes unpickle functions of the module tests.dist.NAME
    sys.path.append(ROOT)

PATIENCE_S = 120.0
"""Of one check."""
GRACE_S = 5.0
"""What the others get once one has failed."""


class Crew:
    """`size` processes that live until `close`, or until a check fails."""

    def __init__(self, size, device="cpu"):
        self.size, self.device, self._store = size, device, None
        self._processes, self._pipes = [], []

    def run(self, work, *args):
        """Run `work(world, *args)` everywhere; the results by rank. Fails with every traceback."""
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((work, args))
        answers, deadline = {}, time.monotonic() + PATIENCE_S
        while len(answers) < self.size and time.monotonic() < deadline:
            waiting = [p for p in self._pipes if self._pipes.index(p) not in answers]
            for pipe in wait(waiting, deadline - time.monotonic()):
                rank = self._pipes.index(pipe)
                try:
                    answers[rank] = pipe.recv()
                except EOFError:
                    answers[rank] = (False, "died")
                if not answers[rank][0]:
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        failed = {r: text for r, (ok, text) in answers.items() if not ok}
        silent = [r for r in range(self.size) if r not in answers]
        if failed or silent:
            self.close(patience=0)
            told = "\n".join(f"--- rank {r}:\n{text}" for r, text in sorted(failed.items()))
            raise AssertionError(f"ranks {silent} gave no answer\n{told}" if silent else told)
        return [answers[r][1] for r in range(self.size)]

    def _start(self):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["openk3.train.setup"])
        self._store = open_store()
        for rank in range(self.size):
            here, there = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, self.size, self._store.port, self.device, there)
            )
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)

    def close(self, patience=GRACE_S):
        """End the processes, by force those that do not end in time."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(patience)
            if process.is_alive():
                process.kill()
                process.join()
        self._store, self._processes, self._pipes = None, [], []


@functools.cache
def crew(size, device="cpu"):
    """The crew of `size` processes that all tests of this session share."""
    shared = Crew(size, device)
    atexit.register(shared.close)
    return shared


def open_store():
    """The store of processes that `enter`, in this one as torchrun has it: its port is taken the
    moment it is chosen."""
    from torch.distributed import TCPStore

    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def enter(rank, size, port):
    """Become rank `rank` of a torchrun-like world."""
    import torch

    torch.set_num_threads(1)
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_PORT": port}
    os.environ |= {k: str(v) for k, v in names.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_USE_AGENT_STORE": "True"}


def best_device(size):
    """cuda where every process can have a GPU."""
    import torch

    return "cuda" if torch.cuda.device_count() >= size else "cpu"


def _serve(rank, size, port, device, pipe):
    from openk3.parallel.world import join

    faulthandler.enable()
    enter(rank, size, port)
    with join(device) as world:
        while True:
            try:
                work, args = pipe.recv()
            except (EOFError, OSError):
                return
            try:
                pipe.send((True, work(world, *args)))
            except BaseException:  # noqa: BLE001  (shown by the test that asked)
                pipe.send((False, traceback.format_exc()))
