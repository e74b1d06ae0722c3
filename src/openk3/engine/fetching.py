"""Requests that wait for pages of an external store (`openk3.engine.external`)."""

from collections.abc import Iterable
from concurrent.futures import wait

from openk3.engine.cache import Memory
from openk3.engine.external import External
from openk3.engine.plan import Runner
from openk3.engine.sequence import Sequence
from openk3.engine.stores import KeyValueStore, open_store
from openk3.engine.types import EngineConfig

WAIT_S = 0.02
"""How long a step waits for a fetch when it has nothing else to do."""


def connect(store: KeyValueStore | None, config: EngineConfig, runner: Runner) -> External | None:
    """The engine's side of a store, or of the one that the config names; None without any."""
    if store is None and config.external is not None:
        store = open_store(config.external)
    return None if store is None else External(store, runner.fingerprint(), runner.read_host)


def start(seq: Sequence, memory: Memory) -> None:
    """Ask for what the store knows of a prompt and the tiers do not."""
    if memory.external is not None and (wanted := memory.wanted(seq)):
        seq.fetch = wanted, memory.external.fetch(wanted)


def land(waiting: Iterable[Sequence], memory: Memory, runner: Runner, wait_s: float = 0.0) -> bool:
    """What has come is findable in the host tier, and who waited for it goes on. Whether any."""
    if memory.external is None:
        return False
    under_way = {seq.fetch[1]: seq for seq in waiting if seq.fetch}
    landed = wait(under_way, wait_s).done
    for future in landed:
        seq = under_way[future]
        assert seq.fetch is not None, "it is under way"
        brought = memory.bring(seq.fetch[0], future.result(), runner.write_host)
        memory.external.fetched += brought
        seq.fetch = None
    return bool(landed)
