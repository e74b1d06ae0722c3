"""Isolating programs: where they are, which version, and how to fetch one.

`fetch` asks the Debian mirror this machine is configured with, through apt and its signatures, in a
private folder: nothing of the system's own package state changes.
"""

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from openk3.errors import BackendError
from openk3.sandbox.store.home import remove_tree

OLDEST_RUNSC = 20240729  # older ones hang or lose data in checkpoint
RUNSC_SUITE = "trixie"
FETCH_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Engine:
    """One usable isolating program."""

    backend: str
    program: str
    version: str


def cache_dir() -> Path:
    """Where fetched programs live: `$OPENK3_SANDBOX_CACHE` or the user's cache."""
    if given := os.environ.get("OPENK3_SANDBOX_CACHE"):
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "openk3" / "sandbox"


def find(backend: str) -> Engine:
    """The program of `gvisor` or `bwrap`. Raises BackendError that says how to get one."""
    name = {"gvisor": "runsc", "bwrap": "bwrap"}[backend]
    said = []
    override = os.environ.get(f"OPENK3_{name.upper()}")
    for place in [override] if override else [str(cache_dir() / "bin" / name), shutil.which(name)]:
        if not place or not os.access(place, os.X_OK):
            continue
        try:
            return Engine(backend, place, check_version(backend, place))
        except BackendError as error:
            said.append(str(error))
    why = "; ".join(said) or f"no {name} on PATH or in {cache_dir() / 'bin'}"
    raise BackendError(f"backend {backend}: {why}. `k3 sandbox setup` can fetch one")


def check_version(backend: str, program: str) -> str:
    """The version of a program, if it is one this project works with. Raises BackendError."""
    info = os.stat(program)
    return _version(backend, program, info.st_mtime_ns, info.st_size)


@lru_cache(maxsize=16)
def _version(backend: str, program: str, mtime_ns: int, size: int) -> str:
    del mtime_ns, size  # they are there to forget the answer for a file that was replaced
    done = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
    words = done.stdout.split("\n")[0].split()
    if done.returncode or not words:
        raise BackendError(f"{program} does not run: {done.stderr.strip()[-200:]}")
    version = words[-1]
    if backend == "gvisor":
        date = re.search(r"20\d{6}", version)
        if not date or int(date.group()) < OLDEST_RUNSC:
            raise BackendError(
                f"{program} is version {version}; its checkpoint works from {OLDEST_RUNSC} on"
            )
    return version


def fetch(backend: str) -> Engine:
    """Fetch the program's Debian package and unpack it into the cache. Raises BackendError."""
    if not shutil.which("apt-get") or not shutil.which("dpkg-deb"):
        raise BackendError(
            "no apt-get and dpkg-deb here; put runsc (release 20240729 or newer) on PATH instead"
        )
    package, suite = {"gvisor": ("runsc", RUNSC_SUITE), "bwrap": ("bubblewrap", None)}[backend]
    name = {"gvisor": "runsc", "bwrap": "bwrap"}[backend]
    target = cache_dir() / "bin" / name
    cache_dir().mkdir(parents=True, exist_ok=True)
    with open(cache_dir() / "fetch.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:  # another process was here while we waited
            return Engine(backend, str(target), check_version(backend, str(target)))
        except (FileNotFoundError, BackendError):
            return Engine(backend, str(target), _fetch(backend, package, suite, target))


def _fetch(backend: str, package: str, suite: str | None, target: Path) -> str:
    """Put the program of a package at `target`; its version. The caller holds the lock."""
    work = cache_dir() / "fetch"
    remove_tree(work, cache_dir())  # of one that was killed
    try:
        work.mkdir(parents=True)
        archive = _download(package, suite, work)
        _run(["dpkg-deb", "-x", str(archive), str(work / "root")], "unpack the package")
        program = work / "root" / "usr" / "bin" / target.name
        version = check_version(backend, str(program))
        target.parent.mkdir(parents=True, exist_ok=True)
        os.replace(program, target)
    finally:
        remove_tree(work, cache_dir())
    return version


def mirror_lines(suite: str | None) -> list[str]:
    """apt source lines: this machine's own Debian mirrors, for another suite if given."""
    lines = []
    for file in sorted(Path("/etc/apt/sources.list.d").glob("*.sources")):
        for stanza in file.read_text().split("\n\n"):
            lines += _from_stanza(stanza, suite)
    single = [Path("/etc/apt/sources.list"), *Path("/etc/apt/sources.list.d").glob("*.list")]
    for file in single:
        if file.exists():
            lines += _from_list(file.read_text(), suite)
    return list(dict.fromkeys(lines))


def _from_stanza(stanza: str, suite: str | None) -> list[str]:
    fields = dict(re.findall(r"^([A-Za-z-]+):[ \t]*(.*)$", stanza, re.MULTILINE))
    keyring = fields.get("Signed-By", "").strip()
    if "deb" not in fields.get("Types", "").split() or "debian-archive" not in keyring:
        return []
    return [
        line
        for uri in fields.get("URIs", "").split()
        for line in _lines(f"[signed-by={keyring}] ", uri, fields.get("Suites", ""), suite)
    ]


def _from_list(text: str, suite: str | None) -> list[str]:
    found = []
    for line in text.splitlines():
        match = re.match(r"deb\s+(\[[^\]]*\]\s+)?(\S*debian\S*)\s+(\S+)", line.strip())
        if match:
            found += _lines(match.group(1) or "", match.group(2), match.group(3), suite)
    return found


def _lines(options: str, uri: str, suites: str, suite: str | None) -> list[str]:
    if "security" in uri:
        return []
    plain = [word for word in suites.split() if "-" not in word]
    return [f"deb {options}{uri} {suite or word} main" for word in plain]


def _download(package: str, suite: str | None, work: Path) -> Path:
    lines = mirror_lines(suite)
    if not lines:
        raise BackendError(
            "this machine has no Debian mirror configured; put runsc on PATH or name it in "
            "OPENK3_RUNSC"
        )
    for name in ("lists/partial", "cache/archives/partial"):
        (work / name).mkdir(parents=True)
    (work / "sources.list").write_text("\n".join(lines) + "\n")
    (work / "status").write_text("")
    options = {
        "Dir::Etc::SourceList": work / "sources.list",
        "Dir::Etc::SourceParts": "/dev/null",
        "Dir::State::Lists": work / "lists",
        "Dir::State::Status": work / "status",
        "Dir::Cache": work / "cache",
        "APT::Sandbox::User": "",
        "Acquire::Languages": "none",
        "Acquire::Retries": "2",
        "Acquire::http::Timeout": "30",
        "Acquire::https::Timeout": "30",
    }
    apt = ["apt-get", "-q", *(f"-o{key}={value}" for key, value in options.items())]
    _run([*apt, "update"], f"read the {suite or 'configured'} index of the Debian mirror")
    _run([*apt, "download", package], f"fetch {package} from the Debian mirror", work)
    return next(work.glob(f"{package}_*.deb"))


def _run(argv: list[str], what: str, cwd: Path | None = None) -> None:
    try:
        done = subprocess.run(
            argv,
            cwd=cwd,
            capture_output=True,
            text=True,
            check=False,
            stdin=subprocess.DEVNULL,
            timeout=FETCH_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        raise BackendError(f"could not {what} in {FETCH_TIMEOUT_S:g} s") from None
    if done.returncode:
        raise BackendError(f"could not {what}: {(done.stderr or done.stdout).strip()[-400:]}")


@lru_cache(maxsize=1)
def cpu_fingerprint() -> str:
    """Processor model and features: a memory image restores only where these are the same."""
    wanted = ("vendor_id", "flags", "Features", "CPU implementer")
    lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    kept = [line for line in lines if line.split("\t")[0].strip(" :") in wanted]
    return hashlib.sha256("\n".join(kept).encode()).hexdigest()[:16]
