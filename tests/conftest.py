"""Shared fixtures. Tests are sorted by what they need: unit, dist, gpu, golden, e2e."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tests run in parallel processes
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

GOLDEN_SHARED = Path(__file__).resolve().parents[2] / "shared"
GOLDEN_LOCAL = Path(__file__).parent / "golden"


def pytest_configure(config: pytest.Config) -> None:
    import torch

    import triton_interpreter  # noqa: F401  (before any test module imports triton)

    torch.set_num_threads(1)
    # how long one example takes is the machine's business, which may have much else to do
    slow = [hypothesis.HealthCheck.too_slow]
    hypothesis.settings.register_profile("patient", deadline=None, suppress_health_check=slow)
    hypothesis.settings.load_profile("patient")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    import torch

    for item in items:
        if "home" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.sandbox)

    if torch.cuda.is_available():
        return
    no_gpu = pytest.mark.skip(reason="needs a CUDA device; torch sees none")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(no_gpu)


@pytest.fixture(autouse=True)
def fails_rather_than_hangs(request: pytest.FixtureRequest) -> Iterator[None]:
    """Real machines are waited for in many ways; a fault in one must not stop all tests."""
    if "sandbox" not in request.keywords or "slow" in request.keywords:
        yield
        return

    def end(*_: object) -> None:
        raise TimeoutError(f"{request.node.name} hangs")

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, 240.0, 5.0)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0.0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="session")
def golden():
    """golden(name) -> (description, tensors) of a golden file; skips where it is not to be had."""
    from safetensors.torch import load_file

    def find(name: str):
        for folder in (GOLDEN_LOCAL, GOLDEN_SHARED / "golden"):
            if (folder / f"{name}.json").exists():
                description = json.loads((folder / f"{name}.json").read_text())
                tensors = folder / f"{name}.safetensors"
                return description, load_file(tensors) if tensors.exists() else {}
        pytest.skip(f"golden file {name} needs a folder shared/golden beside the checkout")

    return find
