"""bubblewrap: how it is called. Namespaces on the host's kernel; files survive, processes not."""

import os


def argv(program: str, rootfs: str, agent: list[str], single_user: bool) -> list[str]:
    """The agent as process 1 of new pid, ipc, uts and empty network namespaces."""
    identity = ["--unshare-user", "--uid", "0", "--gid", "0"] if single_user else []
    masks: list[str] = []
    for name in ("/proc/sys", "/proc/sysrq-trigger", "/proc/irq", "/proc/bus"):
        if os.path.exists(name):
            masks += ["--ro-bind", name, name]
    caps = ["--cap-drop", "ALL"]
    for name in (
        "CHOWN",
        "DAC_OVERRIDE",
        "FOWNER",
        "FSETID",
        "KILL",
        "SETGID",
        "SETUID",
        "SYS_PTRACE",
    ):
        caps += ["--cap-add", f"CAP_{name}"]
    return [
        program,
        *("--bind", rootfs, "/"),
        *("--proc", "/proc"),
        *("--dev", "/dev"),
        *("--tmpfs", "/run"),
        *("--perms", "1777", "--tmpfs", "/tmp"),
        *masks,
        *identity,
        *("--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-net"),
        *caps,
        *("--as-pid-1", "--die-with-parent", "--new-session", "--clearenv"),
        *("--setenv", "PATH", "/usr/local/bin:/usr/bin:/bin"),
        *("--chdir", "/"),
        "--",
        *agent,
    ]
