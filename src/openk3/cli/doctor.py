"""`k3 doctor` says what this machine has, what runs on it, and why the rest does not."""

import dataclasses
import importlib
import pkgutil
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from openk3._version import __version__
from openk3.cli import common
from openk3.obs import env

Status = Literal["ok", "no", "bad"]
BASE = ("torch", "numpy", "safetensors", "tokenizers")
EXTRAS: dict[str, tuple[str, tuple[str, ...]]] = {
    "serve": (
        "the HTTP server",
        ("fastapi", "uvicorn", "pydantic", "prometheus-client", "xgrammar"),
    ),
    "vision": ("pictures", ("pillow",)),
    "data": ("Parquet files", ("pyarrow",)),
    "rl": ("rollouts on many machines", ("ray",)),
    "sandbox": ("sandboxes on a cluster", ("e2b",)),
    "track": ("other trackers than metrics.jsonl", ("wandb", "tensorboard", "trackio")),
    "plot": ("PNG plots", ("matplotlib",)),
    "tiktoken": ("K3's published tokenizer", ("tiktoken", "regex")),
    "kernels": ("GPU kernels", ("triton",)),
}
LEAST_FREE_GIB = 2.0
K3_FACTS: dict[str, Any] = {
    "dim": 7168,
    "width": 128,
    "value_width": 128,
    "needs_grad": False,
    "with_states": False,
    "taps": 4,
    "num_experts": 896,
    "widths": (3584, 3072),
}
"""What the backends are asked about, besides device and dtype: a plain call at K3's own sizes."""


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    section: str
    name: str
    status: Status
    """ok; no: absent, and only some features need it; bad: OpenK3 does not work without it."""
    text: str


def main(argv: list[str]) -> int:
    """Run `k3 doctor`. Returns 0, or 1 when something OpenK3 cannot do without is missing."""
    parser = common.parser(
        "doctor", "What this machine has, what runs on it, and why not the rest."
    )
    common.add_json(parser)
    options = parser.parse_args(argv)
    findings = list(examine())
    broken = any(finding.status == "bad" for finding in findings)
    if options.json:
        plain = [dataclasses.asdict(finding) for finding in findings]
        sys.stdout.write(common.json_text({"ok": not broken, "findings": plain}))
    else:
        sys.stdout.write(render(findings))
    return int(broken)


def examine() -> Iterator[Finding]:
    """Every finding, in the order of the report."""
    yield from _python()
    yield from _packages("base packages", BASE, "bad", "pip install openk3")
    yield from _machine()
    yield from _torch()
    for extra, (purpose, names) in EXTRAS.items():
        fix = f"for {purpose}: pip install 'openk3[{extra}]'"
        yield from _packages("optional packages", names, "no", fix)


def render(findings: list[Finding]) -> str:
    """The report for people."""
    marks = {"ok": "ok", "no": "--", "bad": "!!"}
    wide = max(len(finding.name) for finding in findings)
    lines, section = [], ""
    for finding in findings:
        if finding.section != section:
            section = finding.section
            lines += ["", section]
        lines.append(f"  {marks[finding.status]}  {finding.name.ljust(wide)}  {finding.text}")
    broken = [finding.name for finding in findings if finding.status == "bad"]
    verdict = f"Mend first: {', '.join(broken)}." if broken else "OpenK3 can run here."
    return "\n".join([*lines[1:], "", verdict]) + "\n"


def _python() -> Iterator[Finding]:
    good = sys.version_info >= (3, 11)
    version = platform.python_version()
    text = f"{version} at {sys.executable}" if good else f"{version}; OpenK3 needs 3.11 or newer"
    yield Finding("software", "python", "ok" if good else "bad", text)
    commit = env.commit()
    where = f"commit {commit[:12]}" if commit else "an installed package"
    yield Finding("software", "openk3", "ok", f"{__version__}, {where}")


def _packages(section: str, names: tuple[str, ...], absent: Status, fix: str) -> Iterator[Finding]:
    for name in names:
        version = env.version(name)
        yield Finding(
            section, name, "ok" if version else absent, version or f"not installed; {fix}"
        )


def _machine() -> Iterator[Finding]:
    yield Finding("machine", "system", "ok", platform.platform())
    yield Finding("machine", "processor", "ok", f"{env.cpu_name()}, {env.usable_cpus()} usable")
    memory = env.total_memory()
    yield Finding("machine", "memory", "ok", common.binary(memory) if memory else "unknown")
    for name, folder in (("disk here", Path.cwd()), ("disk for scratch", tempfile.gettempdir())):
        free = shutil.disk_usage(folder).free
        enough = free >= LEAST_FREE_GIB * 2**30
        text = f"{common.binary(free)} free at {folder}"
        hint = "" if enough else f"; a small run wants {LEAST_FREE_GIB:.0f} GiB"
        yield Finding("machine", name, "ok" if enough else "no", text + hint)
    for tool, purpose in (("git", "keeps a run's code state"), ("gcc", "Triton compiles with it")):
        path = shutil.which(tool)
        yield Finding("machine", tool, "ok" if path else "no", path or f"not found; {purpose}")


def _torch() -> Iterator[Finding]:
    try:
        import torch
    except (ImportError, OSError) as error:
        yield Finding("torch", "import torch", "bad", f"{type(error).__name__}: {error}")
        return
    yield Finding("torch", "version", "ok", torch.__version__)
    yield Finding("torch", "cpu threads", "ok", str(torch.get_num_threads()))
    yield from _devices(torch)
    yield from _backends(torch)


def _devices(torch: Any) -> Iterator[Finding]:
    if not torch.cuda.is_available():
        built = torch.version.cuda or torch.version.hip
        reason = "torch sees none" if built else "this torch is built for CPU only"
        yield Finding("torch", "gpu", "no", reason)
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        text = f"{facts.name}, sm_{facts.major}{facts.minor}, {facts.multi_processor_count} SMs"
        memory = f"{common.binary(free)} of {common.binary(total)} free"
        yield Finding("torch", f"cuda:{index}", "ok", f"{text}, {memory}")


def _backends(torch: Any) -> Iterator[Finding]:
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    dtype = torch.bfloat16 if on_gpu else torch.float32
    section = f"backends, asked for {device.type} {str(dtype).removeprefix('torch.')} at K3's sizes"
    for table in tables():
        chosen = False
        for backend in table.backends:
            usable, reason = backend.usable(device=device, dtype=dtype, **K3_FACTS)
            mark = " (chosen)" if usable and not chosen else ""
            chosen = chosen or usable
            status = "ok" if usable else "no"
            yield Finding(section, f"{table.op}: {backend.name}", status, reason + mark)


def tables() -> list[Any]:
    """The backend table of every op, found in the modules of `openk3.ops`."""
    from openk3 import ops
    from openk3.ops.backends import BackendTable

    found = []
    for module in pkgutil.walk_packages(ops.__path__, "openk3.ops."):
        try:
            table = getattr(importlib.import_module(module.name), "BACKENDS", None)
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] != "triton":
                raise
            continue  # a file of kernels, which is no table
        if isinstance(table, BackendTable):
            found.append(table)
    return found
