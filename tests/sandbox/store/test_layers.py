"""Merged layers mean what overlayfs says they mean."""

import os
import shutil
import stat
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from openk3.sandbox.store.layers import is_opaque, is_whiteout, merge

NAMES = ("a", "b", "c")
actions = st.lists(
    st.tuples(
        st.sampled_from(("write", "mkdir", "remove", "symlink", "replace")),
        st.sampled_from(NAMES),
        st.sampled_from(("", *NAMES)),
        st.integers(0, 9),
    ),
    max_size=6,
)

# Runs in a mount namespace of its own: applies actions through an overlay, prints the view.
APPLY = """
import os, shutil, sys, json
root, steps = sys.argv[1], json.loads(sys.argv[2])
def gone(p):
    if os.path.isdir(p) and not os.path.islink(p): shutil.rmtree(p)
    elif os.path.lexists(p): os.unlink(p)
for kind, first, second, number in steps:
    place = os.path.join(root, first, second) if second else os.path.join(root, first)
    parent = os.path.dirname(place)
    if not os.path.isdir(parent) or os.path.islink(parent): continue
    if kind == "remove": gone(place)
    elif kind == "replace": gone(place); os.mkdir(place)
    elif os.path.lexists(place): continue
    elif kind == "write": open(place, "w").write(str(number))
    elif kind == "mkdir": os.mkdir(place)
    elif kind == "symlink": os.symlink(str(number), place)
"""


def _in_namespace(script: str) -> None:
    command = ["unshare", "-m", "--propagation", "private", "sh", "-ec", script]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def _tree(path) -> dict[str, str]:
    found = {}
    for folder, names, files in os.walk(path):
        for name in names + files:
            place = os.path.join(folder, name)
            mode = os.lstat(place).st_mode
            inner = os.path.relpath(place, path)
            if stat.S_ISLNK(mode):
                found[inner] = "-> " + os.readlink(place)
            else:
                found[inner] = "dir" if stat.S_ISDIR(mode) else open(place).read()  # noqa: SIM115
    return found


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting overlays needs root")
@settings(max_examples=8, deadline=None)
@given(first=actions, second=actions, third=actions)
def test_merge_of_layers_looks_like_the_overlay_of_them(tmp_path_factory, first, second, third):
    import json

    work = tmp_path_factory.mktemp("layers")
    (work / "t").mkdir()
    (work / "t" / "a").mkdir()
    (work / "t" / "a" / "b").write_text("base")
    (work / "t" / "c").write_text("base")
    # overlay may not lie on an overlay: uppers on a tmpfs, copied out with their marks
    for name in ("apply.py",):
        (work / name).write_text(APPLY)
    lowers = ["t"]
    script = f"cd {work}; mkdir s root view; mount -t tmpfs tmpfs s; cp -a t s/t; cd s\n"
    for number, steps in enumerate((first, second, third)):
        script += (
            f"mkdir u{number} w{number} r{number}\n"
            f"mount -t overlay o -o lowerdir={':'.join(lowers)},upperdir=u{number},"
            f"workdir=w{number} r{number}\n"
            f"{sys.executable} ../apply.py r{number} '{json.dumps(steps)}'\n"
        )
        lowers.insert(0, f"u{number}")
    merged = (
        "import sys; sys.path[:0] = " + repr(sys.path) + "\n"
        "from pathlib import Path; from openk3.sandbox.store.layers import merge\n"
        "merge([Path('u0'), Path('u1'), Path('u2')], Path('m'), True, [Path('t')])"
    )
    (work / "merge.py").write_text(merged)
    script += (
        f"{sys.executable} ../merge.py\n"
        "mkdir v; mount -t overlay o -o lowerdir=m:t v\n"
        "cp -a v/. ../view; cp -a r2/. ../root\n"
    )
    _in_namespace(script)
    assert _tree(work / "view") == _tree(work / "root")
    shutil.rmtree(work)


@pytest.mark.skipif(os.geteuid() != 0, reason="whiteouts are device nodes: root makes them")
def test_metadata_links_and_marks_are_kept(tmp_path):
    low, high = tmp_path / "low", tmp_path / "high"
    for layer in (low, high):
        layer.mkdir()
    (low / "file").write_text("x")
    os.chown(low / "file", 1000, 1001)  # clears the set-user-id bit
    os.chmod(low / "file", 0o4751)
    os.utime(low / "file", ns=(5, 7_000_000_003))
    os.link(low / "file", low / "other")
    os.setxattr(low / "file", "user.note", b"kept")
    os.mknod(high / "gone", stat.S_IFCHR, 0)
    (high / "new").mkdir()
    os.setxattr(high / "new", "trusted.overlay.opaque", b"y")
    merge([low, high], tmp_path / "out", True)
    info = os.lstat(tmp_path / "out" / "file")
    assert (stat.S_IMODE(info.st_mode), info.st_uid, info.st_gid) == (0o4751, 1000, 1001)
    assert info.st_mtime_ns == 7_000_000_003
    assert info.st_ino == os.lstat(tmp_path / "out" / "other").st_ino
    assert os.getxattr(tmp_path / "out" / "file", "user.note") == b"kept"
    assert is_whiteout(os.lstat(tmp_path / "out" / "gone"))
    assert is_opaque(tmp_path / "out" / "new")
