"""`k3 doctor` on this machine, on one without torch, and on one with a broken base."""

import json
import sys

import pytest
import torch

from openk3.cli import doctor, main


def test_report(capsys):
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "OpenK3 can run here." in out
    assert torch.__version__ in out
    assert "kda: reference" in out
    assert "(chosen)" in out


def test_json(capsys):
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"]
    by_name = {f["name"]: f for f in report["findings"]}
    assert by_name["torch"]["status"] == "ok"
    assert {"python", "memory", "disk here", "cpu threads", "matplotlib"} <= by_name.keys()
    assert all(f["text"] for f in report["findings"])


def test_every_table_is_asked_and_a_reference_always_runs():
    names = {table.op for table in doctor.tables()}
    at_top, below = {"kda", "attn_res", "norm", "conv"}, {"kda_decode", "mla_paged", "experts"}
    assert at_top | below <= names
    found = {f.name: f for f in doctor.examine()}
    for op in names:
        assert found[f"{op}: reference"].status == "ok"


def test_missing_base_package_fails(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "BASE", ("torch", "no-such-package"))
    assert main(["doctor"]) == 1
    assert "Mend first: no-such-package." in capsys.readouterr().out


def test_torch_that_cannot_be_imported(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    (finding,) = doctor._torch()
    assert finding.status == "bad"


@pytest.mark.parametrize("free", [1 << 20, 1 << 40])
def test_little_disk_is_said(monkeypatch, free):
    usage = type("Usage", (), {"free": free})
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: usage)
    disks = [f for f in doctor._machine() if f.name.startswith("disk")]
    assert [f.status for f in disks] == (["no"] * 2 if free < 1 << 30 else ["ok"] * 2)
