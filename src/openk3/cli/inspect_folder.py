"""`k3 inspect PATH`: what a model folder holds and whether it is complete; no tensor is read."""

import sys
from collections import Counter
from math import prod
from pathlib import Path
from typing import Any

from openk3.checkpoint.hf.folder import Survey, survey
from openk3.cli import common

SHOWN = 20


def run(path: Path, *, as_json: bool, tensors: bool) -> int:
    """Print the report. Exit code 1 when something is missing, unknown or wrong."""
    found = survey(path)
    facts = describe(found)
    if tensors:
        facts["all_tensors"] = [
            {"name": e.name, "dtype": e.dtype, "shape": list(e.shape), "file": e.path.name}
            for e in found.entries.values()
        ]
    sys.stdout.write(common.json_text(facts) if as_json else render(facts))
    return 0 if found.complete else 1


def describe(found: Survey) -> dict[str, Any]:
    """The report as plain data."""
    dtypes = Counter(entry.dtype for entry in found.entries.values())
    config = found.config
    return {
        "path": str(found.path),
        "complete": found.complete,
        "layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "experts": config.num_experts,
        "vision": config.vision is not None,
        "experts_stored_as": sorted(
            {stack.stored_dtype for stack in found.stacks.values() if stack.parameter.is_expert}
        ),
        "parameters": sum(prod(stack.parameter.shape) for stack in found.stacks.values()),
        "tensors": len(found.entries),
        "tensors_by_dtype": dict(dtypes.most_common()),
        "bytes": sum(entry.num_bytes for entry in found.entries.values()),
        "shards": {shard.name: shard.stat().st_size for shard in found.shards},
        "companions": sorted(
            file.name
            for file in found.path.iterdir()
            if file.is_file() and file.suffix != ".safetensors"
        ),
        "missing": found.missing,
        "unknown": found.unknown,
        "wrong": found.wrong,
    }


def render(facts: dict[str, Any]) -> str:
    """The report for people."""
    kinds = ", ".join(f"{count:,} {dtype}" for dtype, count in facts["tensors_by_dtype"].items())
    stored = " and ".join(facts["experts_stored_as"]) or "none"
    lines = [
        f"{facts['path']}: {'complete' if facts['complete'] else 'NOT complete'}",
        f"  {facts['layers']} layers, width {facts['hidden_size']}, {facts['experts']} experts "
        f"stored as {stored}, {'with' if facts['vision'] else 'without'} vision",
        f"  {facts['parameters']:,} parameters in {facts['tensors']:,} tensors ({kinds})",
        f"  {facts['bytes']:,} bytes in {len(facts['shards'])} shards",
        f"  beside them: {', '.join(facts['companions'])}",
    ]
    for kind in ("wrong", "missing", "unknown"):
        problems = facts[kind]
        lines += [f"  {kind}: {problem}" for problem in problems[:SHOWN]]
        if len(problems) > SHOWN:
            lines.append(f"  ... and {len(problems) - SHOWN:,} more {kind} (--json lists them)")
    rows = [
        (t["name"], t["dtype"], " x ".join(map(str, t["shape"])), t["file"])
        for t in facts.get("all_tensors", ())
    ]
    if rows:
        lines += ["", common.table(rows, left=(0, 1, 2, 3))]
    return "\n".join(lines) + "\n"
