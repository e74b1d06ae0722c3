"""Rows turn into plain JSON and back into what readers expect."""

import json

import pytest

from openk3.obs import rows

AXES = {"step": 3, "tokens": 96, "flops": 1e9, "seconds": 2.5}


def test_step_row_leaves_out_unknowns_and_flattens_extra():
    row = rows.StepRow(
        **AXES,
        loss=2.0,
        lr=1e-3,
        grad_norm=float("inf"),
        step_seconds=0.1,
        tokens_per_s=320.0,
        extra={"mtp_loss": 2.5},
    )
    written = json.loads(json.dumps(row.to_dict(), allow_nan=False))
    assert next(iter(written)) == "kind"
    assert written["kind"] == "step"
    assert written["grad_norm"] is None
    assert written["mtp_loss"] == 2.5
    assert "mfu" not in written
    assert "extra" not in written


def test_nested_values_become_lists_and_nulls():
    row = rows.AttnResRow(
        **AXES, weights={"layers.0.ffn": (0.25, 0.75), "output": (float("nan"), 1.0)}
    )
    assert row.to_dict()["weights"] == {"layers.0.ffn": [0.25, 0.75], "output": [None, 1.0]}


@pytest.mark.parametrize(("load", "worst"), [([4, 4, 4, 4], 0.0), ([4, 3, 1, 0], 1.0), ([0], 0.0)])
def test_max_violation(load, worst):
    assert rows.max_violation(load) == worst


def test_kinds_are_unique():
    assert len(rows.KINDS) == 8
    assert all(name == kind.kind for name, kind in rows.KINDS.items())
