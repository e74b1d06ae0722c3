"""Four processes over gloo, started once for all tests of this folder that ask for `ranks`."""

import multiprocessing
import tempfile
import traceback
from multiprocessing.connection import wait
from pathlib import Path

import pytest
import triton_interpreter  # noqa: F401  (the processes inherit its environment)

NUM_RANKS = 4
PATIENCE = 120.0
"""Seconds after which a task that has not answered counts as hung."""


def serve(rank, store, pipe):
    """Join the group, then run (work, args) pairs; `work` gets a group of as many as asked for."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=NUM_RANKS)
    groups = {size: dist.new_group(list(range(size))) for size in (1, 2, NUM_RANKS)}
    while (task := pipe.recv()) is not None:
        size, work, args = task
        try:
            pipe.send((True, work(groups[size], *args)))
        except Exception:  # noqa: BLE001  (handed to the test that asked)
            pipe.send((False, traceback.format_exc()))
    dist.destroy_process_group()


class Ranks:
    """`ranks(size, work, *args)` -> [work(group, *args) of each rank], or the first failure."""

    def __init__(self):
        self.processes = []

    def __call__(self, size, work, *args):
        self._start()
        for pipe in self.pipes[:size]:
            pipe.send((size, work, args))
        answers, waiting = [None] * size, dict(zip(self.pipes[:size], range(size), strict=True))
        while waiting:
            ready = wait(list(waiting), PATIENCE)
            if not ready:
                self.stop()
                pytest.fail(f"ranks {list(waiting.values())} of {size} hang for {PATIENCE} s")
            for pipe in ready:
                rank = waiting.pop(pipe)
                good, answers[rank] = pipe.recv()
                if not good:
                    self.stop()  # the others may wait inside a collective
                    pytest.fail(f"rank {rank} of {size}:\n{answers[rank]}")
        return answers

    def _start(self):
        if self.processes:
            return
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch.distributed", "openk3.train.setup"])
        store = Path(tempfile.mkdtemp()) / "store"
        ends = [context.Pipe() for _ in range(NUM_RANKS)]
        self.pipes = [ours for ours, _ in ends]
        for rank, (_, theirs) in enumerate(ends):
            process = context.Process(target=serve, args=(rank, store, theirs), daemon=True)
            process.start()
            self.processes.append(process)

    def stop(self):
        for process in self.processes:
            process.kill()
        self.processes = []

    def finish(self):
        for pipe in self.pipes if self.processes else ():
            pipe.send(None)
        for process in self.processes:
            process.join(20)
        self.stop()


@pytest.fixture(scope="session")
def ranks():
    pool = Ranks()
    yield pool
    pool.finish()
