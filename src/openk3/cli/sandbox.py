"""`k3 sandbox`: isolated machines that pause, resume, fork and snapshot, from the command line."""

import argparse
import asyncio
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

from openk3.cli import common
from openk3.cli.sandbox_host import serve, setup
from openk3.errors import InputError
from openk3.sandbox import Limits, Pool, Sandbox

Action = Callable[[argparse.Namespace, Pool], Awaitable[int]]


def main(argv: list[str]) -> int:
    """Run `k3 sandbox ...`. Returns the exit code; `run` returns the command's own."""
    options = _parser().parse_args(argv)
    if options.action is serve:
        return serve(options)

    async def go() -> int:
        pool = Pool(options.home)
        try:
            return await options.action(options, pool)
        finally:
            await pool.close()

    return asyncio.run(go())


def _parser() -> argparse.ArgumentParser:
    parser = common.parser("sandbox", "Isolated machines: files, processes and memory survive.")
    verbs = parser.add_subparsers(required=True, metavar="VERB")

    def verb(name: str, action: Any, what: str) -> argparse.ArgumentParser:
        sub = verbs.add_parser(name, help=what, description=what)
        sub.add_argument("--home", help="folder that holds everything (OPENK3_SANDBOX_HOME)")
        sub.set_defaults(action=action)
        return sub

    sub = verb("setup", setup, "fetch runsc if needed, test it, make and warm the template")
    sub.add_argument("--backend", default="gvisor", choices=["gvisor", "bwrap"])
    sub.add_argument("--template", help="name of a template to make from --from")
    sub.add_argument("--from", dest="source", help="a folder, an OCI archive, or debootstrap:SUITE")
    sub = verb("new", new, "create a sandbox and print its id")
    sub.add_argument(
        "template", nargs="?", default="python", help="a template, or a snapshot's id or name"
    )
    sub.add_argument("--backend", default="auto", help="auto, gvisor, bwrap")
    sub.add_argument("--timeout", type=float, default=3600.0, help="seconds; 0 for never")
    sub.add_argument("--on-timeout", choices=["kill", "pause"], default="pause")
    sub.add_argument("--idle-pause", type=float, help="pause after so many seconds without a call")
    sub.add_argument("--cpus", type=float, default=1.0)
    sub.add_argument("--memory-mb", type=int, default=1024)
    sub.add_argument("--disk-mb", type=int, default=2048)
    sub.add_argument("--env", action="append", default=[], metavar="NAME=VALUE")
    sub.add_argument("--files-only", action="store_true", help="accept a backend without memory")
    sub = verb("run", run, "run a command: k3 sandbox run ID -- python3 -c 'print(1)'")
    sub.add_argument("id")
    sub.add_argument("--timeout", type=float, help="seconds")
    sub.add_argument("--user")
    sub.add_argument("command", nargs=argparse.REMAINDER)
    sub = verb("shell", shell, "a terminal inside")
    sub.add_argument("id")
    sub = verb("ls", ls, "all sandboxes and snapshots")
    common.add_json(sub)
    for name, action, what in (
        ("pause", pause, "save everything and stop"),
        ("resume", resume, "go on where pause stopped"),
        ("kill", kill, "end and delete"),
    ):
        sub = verb(name, action, what)
        sub.add_argument("id", nargs="+")
        if action is pause:
            sub.add_argument("--files-only", action="store_true", help="end the processes")
    sub = verb("fork", fork, "copies that go on from this moment")
    sub.add_argument("id")
    sub.add_argument("-n", "--count", type=int, default=1)
    sub.add_argument("--files-only", action="store_true", help="end the processes")
    sub = verb("snapshot", snapshot, "an immutable copy to create from")
    sub.add_argument("id")
    sub.add_argument("--name")
    sub.add_argument("--files-only", action="store_true", help="end the processes")
    sub = verb("serve", serve, "an E2B-compatible server over these sandboxes")
    sub.add_argument("--host", default="127.0.0.1")
    sub.add_argument("--port", type=int, default=3000)
    sub.add_argument("--key-file", help="file with one API key a line; default: one is made")
    sub.add_argument("--no-key", action="store_true", help="open to this machine's users")
    sub.add_argument("--backend", default="auto", help="auto, gvisor, bwrap")
    sub.add_argument("--files-only", action="store_true", help="accept a backend without memory")
    sub.add_argument("--prewarm", type=int, default=0, help="machines to keep started")
    sub.add_argument("--max-running", type=int, default=64)
    return parser


async def new(options: argparse.Namespace, pool: Pool) -> int:
    pairs = [word.partition("=") for word in options.env]
    if any(not equals for _, equals, _ in pairs):
        raise InputError("--env takes NAME=VALUE")
    box = await Sandbox.create(
        options.template,
        backend=options.backend,
        timeout=options.timeout or None,
        on_timeout=options.on_timeout,
        idle_pause=options.idle_pause,
        env={name: value for name, _, value in pairs},
        limits=Limits(cpus=options.cpus, memory_mb=options.memory_mb, disk_mb=options.disk_mb),
        allow_files_only=options.files_only,
        pool=pool,
    )
    print(box.id)
    await box.close()
    return 0


async def run(options: argparse.Namespace, pool: Pool) -> int:
    words = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not words:
        raise InputError("no command: k3 sandbox run ID -- COMMAND ...")
    box = await Sandbox.connect(options.id, pool=pool)
    cmd = words[0] if len(words) == 1 else words
    piped = None if sys.stdin.isatty() else sys.stdin.buffer.read()
    result = await box.run(
        cmd,
        timeout=options.timeout,
        user=options.user,
        input=piped,
        on_stdout=_to(sys.stdout),
        on_stderr=_to(sys.stderr),
        max_output=2,
    )
    await box.close()
    return 124 if result.timed_out else result.exit_code


def _to(stream: Any) -> Callable[[bytes], None]:
    def write(piece: bytes) -> None:
        stream.buffer.write(piece)
        stream.flush()

    return write


async def shell(options: argparse.Namespace, pool: Pool) -> int:
    """Needs a terminal, and gives it to a shell inside."""
    from openk3.cli.terminal import Terminal

    if not sys.stdin.isatty():
        raise InputError("k3 sandbox shell needs a terminal; use k3 sandbox run")
    box = await Sandbox.connect(options.id, pool=pool)
    try:
        return await Terminal().shell(box)
    finally:
        await box.close()


async def ls(options: argparse.Namespace, pool: Pool) -> int:
    rows = await Sandbox.list(pool=pool, backend="gvisor")
    saved = pool.snapshots()
    if options.json:
        from openk3.sandbox.types import to_dict

        facts = {"sandboxes": [to_dict(row) for row in rows], "snapshots": list(map(vars, saved))}
        print(common.json_text(facts), end="")
        return 0
    for row in rows:
        age = _ago(time.time() - row.created)
        note = f"  {row.reason}" if row.reason else ""
        print(f"{row.id}  {row.state:<8} {row.backend:<7} {row.template:<22} {age:>5}{note}")
    for item in saved:
        print(f"{item.id}  snapshot of {item.sandbox_id}  {item.name or ''}")
    return 0


def _ago(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f}{unit}"
    return f"{seconds:.0f}s"


async def pause(options: argparse.Namespace, pool: Pool) -> int:
    for box_id in options.id:
        await pool.pause(box_id, memory=not options.files_only)
    return 0


async def resume(options: argparse.Namespace, pool: Pool) -> int:
    for box_id in options.id:
        await (await pool.connect(box_id)).close()
    return 0


async def kill(options: argparse.Namespace, pool: Pool) -> int:
    """Exit code 1 when one of them did not exist. Snapshots are deleted by id too."""
    missing = 0
    for box_id in options.id:
        if box_id.startswith("snap"):
            pool.delete_snapshot(box_id)
        elif not await pool.kill(box_id):
            print(f"no sandbox {box_id}", file=sys.stderr)
            missing = 1
    return missing


async def fork(options: argparse.Namespace, pool: Pool) -> int:
    box = await Sandbox.connect(options.id, pool=pool)
    for copy in await box.fork(options.count, timeout=3600.0, memory=not options.files_only):
        print(copy.id)
        await copy.close()
    await box.close()
    return 0


async def snapshot(options: argparse.Namespace, pool: Pool) -> int:
    saved = await pool.snapshot(options.id, options.name, memory=not options.files_only)
    print(saved.id)
    return 0
