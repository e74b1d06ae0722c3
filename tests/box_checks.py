"""What a tidy sandbox home must not have."""

import time
from pathlib import Path

from openk3.sandbox import recovery
from openk3.sandbox.keeper import cgroups
from openk3.sandbox.store.home import Home, mounts_below

TIDY = {"processes": [], "groups": [], "mounts": [], "boxes": []}


def leftovers(home: Home) -> dict[str, list[str]]:
    """What a tidy home must not have: processes, cgroups, mounts, boxes."""
    keepers, inside = [], str(home.path)  # a keeper and all of its processes have mounts there
    for place in Path("/proc").iterdir():
        try:
            if place.name.isdigit() and inside in (place / "mountinfo").read_text():
                keepers.append(place.name)
        except OSError:
            continue
    prefix = recovery.group_name(home, "")
    return {
        "processes": keepers,
        "groups": [name for name in cgroups.all_names() if name.startswith(prefix)],
        "mounts": mounts_below(home.path),
        "boxes": [place.name for place in home.boxes.iterdir()],
    }


def settled(home: Home, wait_s: float = 60.0) -> dict[str, list[str]]:
    """`leftovers`, once those that are about to end had time to, and sweeps had theirs."""
    end = time.monotonic() + wait_s
    while (found := leftovers(home)) != TIDY and time.monotonic() < end:
        time.sleep(0.1)
        recovery.sweep(home)
    return found
