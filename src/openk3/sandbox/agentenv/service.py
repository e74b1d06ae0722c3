"""The REST half of a remote service, and its errors as ours."""

import json
import os
from typing import Any

from openk3.errors import (
    BackendError,
    ConfigError,
    ConflictError,
    DeniedError,
    InputError,
    LimitError,
    NotFoundError,
    OpenK3Error,
    StorageError,
)

HTTP_ERRORS: dict[int, type[OpenK3Error]] = {
    400: InputError,
    401: DeniedError,
    403: DeniedError,
    404: NotFoundError,
    405: BackendError,
    409: ConflictError,
    410: ConflictError,  # AgentENV: paused
    413: LimitError,
    429: LimitError,
    501: BackendError,
    507: StorageError,
}
RPC_ERRORS: dict[str, type[OpenK3Error]] = {
    "invalid_argument": InputError,
    "unauthenticated": DeniedError,
    "permission_denied": DeniedError,
    "not_found": NotFoundError,
    "already_exists": ConflictError,
    "resource_exhausted": LimitError,
    "unavailable": ConflictError,
    "unimplemented": BackendError,
}


def raise_for(status: int, text: str, *, inside: bool = False) -> None:
    if status < 400:
        return
    try:
        body = json.loads(text)
        message, code = str(body.get("message", text)), body.get("code")
    except (ValueError, AttributeError):
        message, code = text, None
    if isinstance(code, str) and code in RPC_ERRORS:
        raise RPC_ERRORS[code](message)
    if inside and status in (404, 410, 502) and code in (status, None):
        # the proxy before the sandbox: gone or paused, said in three ways by three services
        raise ConflictError(f"the sandbox is not running: {message}")
    raise HTTP_ERRORS.get(status, BackendError)(f"HTTP {status}: {message[:400]}")


class Service:
    """One HTTP client, and what was learnt about the other side."""

    def __init__(self, transport: Any = None) -> None:
        import httpx

        self.url = os.environ.get("E2B_API_URL", "").rstrip("/")
        if not self.url:
            raise ConfigError("backend agentenv needs E2B_API_URL")
        self.inside = os.environ.get("E2B_SANDBOX_URL", self.url).rstrip("/")
        headers = {"X-API-Key": os.environ.get("E2B_API_KEY", "")}
        self.http = httpx.AsyncClient(headers=headers, timeout=120.0, transport=transport)
        self.generation: int | None = None
        self.num_users = 0

    async def let_go(self) -> None:
        """Forks share the client of their original: the last of them closes it."""
        self.num_users -= 1
        if self.num_users <= 0:
            await self.http.aclose()

    async def ask(self, method: str, path: str, body: Any = None, **options: Any) -> Any:
        """One REST call; its JSON, or None without a body."""
        answer = await self._send(method, path, body, **options)
        raise_for(answer.status_code, answer.text)
        return answer.json() if answer.content else None

    async def _send(self, method: str, path: str, body: Any, **options: Any) -> Any:
        import httpx

        try:
            return await self.http.request(method, self.url + path, json=body, **options)
        except httpx.TransportError as error:
            raise BackendError(f"cannot reach {self.url}: {error!r}") from error

    async def ask_either(self, path: str, body: Any) -> Any:
        """POST to `/v2` + path, or to the older path where the service has no other."""
        if self.generation in (None, 2):
            answer = await self._send("POST", "/v2" + path, body)
            missing = answer.status_code == 405 or (
                answer.status_code == 404 and "sandbox" not in answer.text.lower()
            )
            if self.generation == 2 or not missing:
                raise_for(answer.status_code, answer.text)
                self.generation = 2
                return answer.json()
            self.generation = 1
        return await self.ask("POST", path, body)
