"""A process with everything a keeper needs already imported; each order forks one keeper from it.

It serves one Pool over a Unix socket and ends with it. The keepers do not: they leave its session
and its pid namespace.
"""

import asyncio
import json
import os
import signal
import socket
import sys

from openk3.sandbox.keeper import keeper, main

MAX_ORDER = 1 << 16

_IMPORTED_FOR_ITS_CHILDREN = (asyncio, keeper)


def serve() -> None:
    """Read orders from standard input until it closes."""
    orders = socket.socket(fileno=0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for the Pool
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits: a keeper may wait for its lock
    while True:
        text, handles, _, _ = socket.recv_fds(orders, MAX_ORDER, 1)
        if not text:
            return
        if os.fork() == 0:
            _deliver(text, socket.socket(fileno=handles[0]))
        for handle in handles:
            os.close(handle)


def _deliver(text: bytes, creation: socket.socket) -> None:
    code = 1
    try:
        os.setsid()
        null = os.open("/dev/null", os.O_RDWR)
        os.dup2(null, 0)  # in place of the orders, and never a free number for a lock to get
        os.close(null)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        main.become(json.loads(text), creation)
        code = 0
    finally:
        sys.stderr.flush()
        os._exit(code)
