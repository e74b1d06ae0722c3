"""torchrun starts a run again after a death, and the run goes on by itself."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_run import write_tiny_data

from openk3.obs.metrics import read_rows
from openk3.obs.run import read_env

pytestmark = pytest.mark.dist

TESTS = Path(__file__).parents[1]


def test_a_killed_process_costs_the_steps_since_the_last_checkpoint(tmp_path):
    data, folder = write_tiny_data(tmp_path / "tiny"), tmp_path / "run"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", "--max-restarts", "1"]
    done = subprocess.run(
        [*command, TESTS / "elastic_run.py", data, folder],
        env=os.environ | {"PYTHONPATH": f"{TESTS.parent / 'src'}{os.pathsep}{TESTS}"},
        capture_output=True,
        text=True,
        check=False,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr
    assert "rank 1 died or is frozen" in done.stderr
    assert "was last in step 3, phase update" in done.stderr
    assert len(read_env(folder)) == 2
    rows = list(read_rows(folder / "metrics.jsonl", superseded=True))
    assert [r["step"] for r in rows if r["kind"] == "resume"] == [2]
    steps = [r["step"] for r in read_rows(folder / "metrics.jsonl") if r["kind"] == "step"]
    assert steps == [1, 2, 3, 4]
