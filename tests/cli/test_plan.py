"""k3 plan --experts prints the planner's own figures."""

import json

import pytest

from openk3.cli import main

SMALL = ["plan", "--experts", "nano", "--ranks", "2,4", "--skew", "1", "--tokens", "64"]


def test_json_holds_every_size_and_skew(capsys):
    assert main([*SMALL, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(f["ranks"], f["slots_bound"]) for f in found["layers"]] == [(2, 8), (4, 4)]
    assert all(f["plan_ms"] > 0 and f["buffer_bytes"] > 0 for f in found["layers"])


def test_the_table_explains_itself(capsys):
    assert main(SMALL) == 0
    text = capsys.readouterr().out
    head = text.splitlines()[2].split()
    for name in head:
        assert name in ("ranks", "memory") or f"\n{name.strip('()')}" in text or "plain:" in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["--ranks", "3"], "do not divide"), (["--skew", "99"], "impossible")],
)
def test_what_cannot_be_says_so(capsys, arguments, words):
    assert main([*SMALL, *arguments]) == 1
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [[], ["--experts", "--tokens", "0"], ["--experts", "--bandwidth", "0"]]
)
def test_wrong_usage(capsys, arguments):
    with pytest.raises(SystemExit, match="2"):
        main(["plan", *arguments])
    capsys.readouterr()
