"""Shared fixtures. Tests are sorted by what they need: unit, dist, gpu, golden, e2e."""

import os
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tests run in parallel processes
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

GOLDEN_SHARED = Path(__file__).resolve().parents[2] / "shared"
GOLDEN_LOCAL = Path(__file__).parent / "golden"


def pytest_configure(config: pytest.Config) -> None:
    import torch

    torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    import torch

    if torch.cuda.is_available():
        return
    no_gpu = pytest.mark.skip(reason="needs a CUDA device; torch sees none")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(no_gpu)
