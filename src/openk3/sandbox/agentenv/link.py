"""The in-sandbox half of the protocol: Connect with JSON."""

import base64
import json
import struct
from collections.abc import AsyncGenerator
from typing import Any

from openk3.errors import BackendError, NotFoundError
from openk3.sandbox.agentenv.service import RPC_ERRORS, Service, raise_for
from openk3.sandbox.files import Content

ENVD_PORT = "49983"


class RemoteConnection:
    """The in-sandbox half: Connect JSON calls and streams."""

    def __init__(self, service: Service, sandbox_id: str, token: str, user: str) -> None:
        self.service, self.user = service, user
        self.headers = {
            "E2b-Sandbox-Id": sandbox_id,
            "E2b-Sandbox-Port": ENVD_PORT,
            "X-Access-Token": token,
        }

    def _headers(self, user: str | None) -> dict[str, str]:
        word = base64.b64encode(f"{user or self.user}:".encode()).decode()
        return {**self.headers, "Authorization": f"Basic {word}"}

    async def unary(self, method: str, body: Any, user: str | None = None) -> Any:
        url = f"{self.service.inside}/{method}"
        answer = await self.service.http.post(url, json=body, headers=self._headers(user))
        raise_for(answer.status_code, answer.text, inside=True)
        return answer.json()

    async def stream(
        self, method: str, body: Any, user: str | None = None, timeout: float | None = None
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Messages of a server stream. Raises the error in its last frame."""
        raw = json.dumps(body).encode()
        headers = {
            **self._headers(user),
            "Content-Type": "application/connect+json",
            "Connect-Protocol-Version": "1",
            "Keepalive-Ping-Interval": "50",
        }
        if timeout:
            headers["Connect-Timeout-Ms"] = str(int(timeout * 1000))
        url = f"{self.service.inside}/{method}"
        request = self.service.http.stream(
            "POST", url, content=struct.pack(">BI", 0, len(raw)) + raw, headers=headers
        )
        async with request as answer:
            if answer.status_code >= 400:
                await answer.aread()
                raise_for(answer.status_code, answer.text, inside=True)
            buffer = bytearray()
            async for piece in answer.aiter_bytes():
                buffer += piece
                while len(buffer) >= 5:
                    flags, length = struct.unpack_from(">BI", buffer)
                    if len(buffer) < 5 + length:
                        break
                    message = json.loads(bytes(buffer[5 : 5 + length]))
                    del buffer[: 5 + length]
                    if flags & 2:
                        _raise_end(message)
                        return
                    yield message

    async def read(self, path: str, user: str | None) -> AsyncGenerator[bytes, None]:
        request = self.service.http.stream(
            "GET",
            f"{self.service.inside}/files",
            params={"path": path, "username": user or self.user},
            headers=self._headers(user),
        )
        async with request as answer:
            if answer.status_code >= 400:
                await answer.aread()
                if answer.status_code == 404 and "sandboxId" not in answer.text:
                    raise NotFoundError(answer.text[:400])
                raise_for(answer.status_code, answer.text, inside=True)
            async for piece in answer.aiter_bytes():
                yield piece

    async def write(self, path: str, data: Content, user: str | None) -> Any:
        content = data.encode() if isinstance(data, str) else data
        answer = await self.service.http.post(
            f"{self.service.inside}/files",
            params={"path": path, "username": user or self.user},
            content=content,
            headers={**self._headers(user), "Content-Type": "application/octet-stream"},
        )
        raise_for(answer.status_code, answer.text, inside=True)
        return answer.json()


def _raise_end(message: dict[str, Any]) -> None:
    if error := message.get("error"):
        if error.get("code") in ("deadline_exceeded", "canceled"):
            raise TimeoutError(error.get("message", "the time limit was reached"))
        raise RPC_ERRORS.get(error.get("code"), BackendError)(error.get("message", "no reason"))
