"""What an ordinary user gets, as JSON lines; `test_ordinary_user.py` runs it as another user."""

import asyncio
import json
import os
import sys

from openk3.sandbox import Limits, Pool, Sandbox, recovery
from openk3.sandbox.probe import probe


async def main(home: str) -> None:
    pool = Pool(home)
    found = await probe(pool, "gvisor")
    row = {"uid": os.geteuid(), "ok": found.ok, "reason": found.reason, **found.capabilities}
    print(json.dumps(row), flush=True)
    if not found.ok:
        return
    box = await Sandbox.create(pool=pool, limits=Limits(disk_mb=32))
    # written aside: a reader must not meet a file that was just emptied
    counting = (
        "n=0; while true; do n=$((n+1)); echo $n > /tmp/m; mv /tmp/m /tmp/n; sleep 0.02; done"
    )
    (await box.start(counting, detach=True)).let_go()
    await box.run("echo kept > f; rm -f /etc/hosts; mkdir d; until [ -e /tmp/n ]; do :; done")
    full = await box.run("head -c 60000000 /dev/zero > big; rm big")
    for _ in range(2):
        await box.pause()
        await box.resume()
    (copy,) = await box.fork(1)
    await copy.run("echo other > f")
    script = f"id -u; cat f; ls /etc/hosts {home}; kill -0 $(pgrep -of 'echo .n') && cat /tmp/n"
    done = await box.run(script)
    await box.snapshot()
    await copy.kill()
    await box.kill()
    for saved in pool.snapshots():
        pool.delete_snapshot(saved.id)
    await pool.close()
    recovery.sweep(pool.home)
    left = {name: os.listdir(f"{home}/{name}") for name in ("boxes", "images", "layers", "tmp")}
    print(json.dumps({"stdout": done.stdout, "stderr": done.stderr, "full": full.stderr, **left}))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
