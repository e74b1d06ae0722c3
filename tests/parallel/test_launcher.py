"""How processes find each other, and what is said when they do not."""

import pytest
import torch

from openk3.errors import ConfigError, LostProcessError
from openk3.parallel import launcher

PLACE = {"LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def test_who_has_not_come_is_named():
    store = torch.distributed.HashStore()
    for rank in (1, 4):
        store.set(f"here/{rank}", "")
    with pytest.raises(LostProcessError) as caught:
        launcher.meet(store, 0, 8, 0.01)
    assert str(caught.value) == ("5 of 8 processes have not come within 0 s: rank 2, 3, 5, 6, ...")
    for rank in range(1, 8):
        store.set(f"here/{rank}", "")
    launcher.meet(store, 0, 8, 0.01)


@pytest.mark.parametrize(
    "told",
    [
        {"WORLD_SIZE": "2"},
        {"WORLD_SIZE": "two"},
        {"WORLD_SIZE": "0"},
        {"WORLD_SIZE": "2", "RANK": "2"} | PLACE,
        {"WORLD_SIZE": "2", "RANK": "0"} | PLACE | {"MASTER_PORT": "none"},
        {"WORLD_SIZE": "2", "RANK": "0"} | PLACE | {"MASTER_ADDR": ""},
    ],
)
def test_half_a_launcher_is_refused(monkeypatch, told):
    for name in launcher.LAUNCHER:
        monkeypatch.delenv(name, raising=False)
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    first = next(f"{n}={told[n]}" for n in launcher.LAUNCHER if n in told)
    with pytest.raises(ConfigError, match=f"^{first}.*in the environment tell of no launcher"):
        launcher.told_by_launcher()


def test_a_rank_alone_is_one_process(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setenv("RANK", "3")
    assert launcher.told_by_launcher() == (0, 1, 0)
    for name, value in ({"WORLD_SIZE": "4"} | PLACE).items():
        monkeypatch.setenv(name, value)
    assert launcher.told_by_launcher() == (3, 4, 0)


def test_a_store_that_is_not_there_is_named(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    with pytest.raises(LostProcessError, match=r"rank 1 has found no store at 127\.0\.0\.1:1 "):
        launcher.open_store(1, 2, 0.5)
