"""The wire format between client, keeper and agent: one framing over pipes and Unix sockets.

A frame is a 9-byte header (payload length, channel, kind; big endian) and a payload. A client opens
a channel with CALL and a JSON object `{"op": ...}`; the other side answers on the same channel with
any number of EVENT (JSON) and DATA frames and closes it with one END (JSON) or ERROR (JSON
`{"kind", "message"}`). DATA from the agent starts with one byte, the stream (1 stdout, 2 stderr,
3 terminal, 0 file). CREDIT (4-byte count) allows that many more bytes of DATA from the agent, so a
slow reader slows its own command down and nobody else. CANCEL says the caller is gone.

This module and `openk3.sandbox.agent` also run inside the sandbox: standard library only.
"""

import json
import struct
from typing import Any

CALL, DATA, EVENT, END, ERROR, CREDIT, CANCEL, EOF = range(8)
STREAM_FILE, STREAM_OUT, STREAM_ERR, STREAM_TTY = range(4)

HEADER = struct.Struct("!IIB")
MAX_PAYLOAD = 1 << 20
PIECE = 64 << 10  # largest DATA payload this project sends
WINDOW = 512 << 10  # bytes of DATA a channel may have in flight before it needs CREDIT


class FrameError(ValueError):
    """The peer sent bytes that are no frame."""


def pack(channel: int, kind: int, payload: bytes = b"") -> bytes:
    """One frame as bytes."""
    return HEADER.pack(len(payload), channel, kind) + payload


def pack_json(channel: int, kind: int, value: Any) -> bytes:
    """One frame whose payload is JSON (ASCII, so that undecodable file names survive)."""
    return pack(channel, kind, json.dumps(value).encode())


def pack_credit(channel: int, num_bytes: int) -> bytes:
    """A CREDIT frame."""
    return pack(channel, CREDIT, struct.pack("!I", num_bytes))


def credit_of(payload: bytes) -> int:
    """The count in a CREDIT payload."""
    return struct.unpack("!I", payload)[0]


class Decoder:
    """Turns a byte stream into frames; feed it pieces of any size."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, piece: bytes) -> list[tuple[int, int, bytes]]:
        """Complete frames `(channel, kind, payload)` in order. Raises FrameError on nonsense."""
        self._buffer += piece
        frames, at, have = [], 0, len(self._buffer)
        while have - at >= HEADER.size:
            length, channel, kind = HEADER.unpack_from(self._buffer, at)
            if length > MAX_PAYLOAD or kind > EOF:
                raise FrameError(f"frame of {length} bytes, kind {kind}: not the sandbox protocol")
            if have - at < HEADER.size + length:
                break
            start = at + HEADER.size
            frames.append((channel, kind, bytes(self._buffer[start : start + length])))
            at = start + length
        del self._buffer[:at]
        return frames
