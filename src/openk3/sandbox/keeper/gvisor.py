"""gVisor: how `runsc` is called. Files of the OCI bundle, and the argument lists."""

import json
from pathlib import Path
from typing import Any

CONTAINER = "sandbox-of-openk3"  # one container in each private state folder: one fixed name
IMAGE_FILES = ("checkpoint.img", "pages_meta.img", "pages.img")

# What the agent needs inside the sandbox's own kernel; none of it exists on the host.
_CAPABILITIES = """
CAP_AUDIT_WRITE CAP_CHOWN CAP_DAC_OVERRIDE CAP_DAC_READ_SEARCH CAP_FOWNER CAP_FSETID CAP_KILL
CAP_MKNOD CAP_NET_BIND_SERVICE CAP_SETFCAP CAP_SETGID CAP_SETPCAP CAP_SETUID CAP_SYS_ADMIN
CAP_SYS_CHROOT CAP_SYS_PTRACE CAP_SYS_RESOURCE CAP_SYS_NICE
"""


def bundle_config(argv: list[str], rootfs: str) -> dict[str, Any]:
    """The OCI config.json. Constant for a template: a restore must see the same."""
    private = ["nosuid", "nodev"]
    return {
        "ociVersion": "1.0.2",
        "process": {
            "terminal": False,
            "user": {"uid": 0, "gid": 0},
            "args": argv,
            "env": ["PATH=/usr/local/bin:/usr/bin:/bin"],
            "cwd": "/",
            "capabilities": dict.fromkeys(
                ("bounding", "effective", "permitted", "inheritable"), _CAPABILITIES.split()
            ),
            "noNewPrivileges": False,
        },
        "root": {"path": rootfs, "readonly": False},
        "hostname": "sandbox",
        "mounts": [
            {"destination": "/proc", "type": "proc", "source": "proc"},
            {"destination": "/sys", "type": "sysfs", "source": "sysfs", "options": ["ro"]},
            {"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": private},
            {"destination": "/dev/shm", "type": "tmpfs", "source": "tmpfs", "options": private},
            {"destination": "/run", "type": "tmpfs", "source": "tmpfs", "options": private},
            {
                "destination": "/tmp",
                "type": "tmpfs",
                "source": "tmpfs",
                "options": [*private, "mode=1777"],
            },
        ],
        "linux": {
            "namespaces": [{"type": kind} for kind in ("pid", "mount", "ipc", "uts", "network")]
        },
    }


class Runsc:
    """Argument lists for one private state folder."""

    def __init__(self, program: str, state: str, log: str) -> None:
        self.base = [
            program,
            f"--root={state}",
            "--platform=systrap",
            "--network=none",
            "--overlay2=none",  # the host's overlay holds the layers
            "--ignore-cgroups",  # the keeper's own group limits everything it starts
            "--host-uds=none",
            "--log-format=text",
            f"--log={log}",
            f"--panic-log={log}.panic",
        ]

    def write_bundle(self, folder: Path, argv: list[str], rootfs: str) -> None:
        (folder / "config.json").write_text(json.dumps(bundle_config(argv, rootfs)))

    def run(self, bundle: str) -> list[str]:
        return [*self.base, "run", f"--bundle={bundle}", CONTAINER]

    def checkpoint(self, image: str) -> list[str]:
        """Of a paused container, which stays paused: without --leave-running a checkpoint that is
        refused would end it."""
        options = ["--compression=none", "--exclude-committed-zero-pages", "--leave-running"]
        return [*self.base, "checkpoint", *options, f"--image-path={image}", CONTAINER]

    def freeze(self) -> list[str]:
        return [*self.base, "pause", CONTAINER]

    def unfreeze(self) -> list[str]:
        return [*self.base, "resume", CONTAINER]

    def restore(self, bundle: str, image: str) -> list[str]:
        return [*self.base, "restore", f"--bundle={bundle}", f"--image-path={image}", CONTAINER]
