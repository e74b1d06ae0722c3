"""The default template: this machine's own Python and basic tools, copied without any network."""

import compileall
import os
import shutil
import sys
import zipfile
from pathlib import Path

from openk3.sandbox.templates import pyzip
from openk3.sandbox.templates.elf import Root
from openk3.sandbox.templates.runtime import base_python

TOOLS = """
bash sh ls cat cp mv rm ln mkdir rmdir touch chmod chown stat readlink realpath dirname basename
pwd echo printf true false test sleep date env id whoami hostname uname tee head tail wc sort uniq
cut tr seq yes od base64 sha256sum md5sum cksum dd df du sync mktemp mkfifo timeout nice nohup split
comm join paste expr factor nproc getconf grep sed awk find xargs diff cmp tar gzip xz file which
ps kill pkill pgrep free top setsid script stty tty git make patch less
"""
SKIP = frozenset(
    "test tests idlelib turtledemo ensurepip lib2to3 site-packages dist-packages lib-dynload "
    "tkinter pydoc_data".split()
)

# Signal 23 (SIGURG, ignored by default) says: you are a copy now, or a later life of yourself.
RESEED = '''"""Reseeds `random` when this process wakes up in a fork or a resumed sandbox."""
import signal
import sys


def _reseed(*_):
    for name in ("random", "numpy.random"):
        module = sys.modules.get(name)
        if module is not None:
            module.seed()


try:
    signal.signal(signal.SIGURG, _reseed)
except ValueError:
    pass
'''


def fill(root: Path) -> None:
    """Build the template in the empty folder `root`."""
    build = Root(root)
    build.put_programs(TOOLS.split())
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    build.put(base_python(), f"/usr/local/bin/{version}")
    for name in ("python3", "python"):
        (root / "usr/local/bin" / name).symlink_to(version)
    library = root / "usr/local/lib" / version
    (library / "lib-dynload").mkdir(parents=True)
    home = Path(os.__file__).parent
    archive = root / "usr/local/lib" / f"python{sys.version_info.major}{sys.version_info.minor}.zip"
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_STORED) as out:
        pyzip.add_tree(out, home, SKIP)
    shutil.copy2(home / "os.py", library / "os.py")  # getpath recognises its home by this file
    for shared in (home / "lib-dynload").glob("*.so"):
        if "test" not in shared.name:
            shutil.copy2(shared, library / "lib-dynload")
    build.put_libraries(base_python(), *(library / "lib-dynload").glob("*.so"))
    site = library / "site-packages"
    site.mkdir()
    (site / "sitecustomize.py").write_text(RESEED)
    compileall.compile_dir(str(site), quiet=1, maxlevels=0)
    _settings(root)


def _settings(root: Path) -> None:
    etc = root / "etc"
    etc.mkdir(exist_ok=True)
    (etc / "profile").write_text("umask 022\n")
    (etc / "hosts").write_text("127.0.0.1 localhost\n::1 localhost\n")
    (etc / "nsswitch.conf").write_text("passwd: files\ngroup: files\nhosts: files\n")
    (etc / "os-release").write_text('ID=openk3\nNAME="OpenK3 sandbox"\n')
    target = root / "usr/share/terminfo"
    for kind in ("x/xterm-256color", "x/xterm", "d/dumb", "l/linux", "v/vt100"):
        for source in ("/usr/share/terminfo", "/lib/terminfo"):
            if (place := Path(source) / kind).exists() and not (target / kind).exists():
                (target / kind).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(place, target / kind)
