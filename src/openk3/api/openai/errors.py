"""Errors as OpenAI's clients read them: {"error": {"message", "type", "param", "code"}}."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fastapi.responses import JSONResponse
from pydantic import ValidationError

from openk3.errors import (
    BackendError,
    ConfigError,
    ConflictError,
    DataError,
    DeniedError,
    InputError,
    LimitError,
    NotFoundError,
    OpenK3Error,
)

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    499: "client_closed_request",
    500: "server_error",
    503: "overloaded_error",
}
STATUS: Mapping[type[OpenK3Error], int] = {
    InputError: 400,
    ConfigError: 400,
    DataError: 400,
    DeniedError: 403,
    NotFoundError: 404,
    ConflictError: 503,
    LimitError: 429,
    BackendError: 503,
}


@dataclass
class ApiError(Exception):
    """An answer that is no success."""

    status: int
    message: str
    code: str | None = None
    param: str | None = None
    retry_after_s: float | None = None
    headers: dict[str, str] = field(default_factory=dict)

    def body(self) -> dict[str, Any]:
        """The JSON body."""
        kind = TYPES.get(self.status, "server_error")
        inner = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": inner}

    def response(self, body: dict[str, Any] | None = None) -> JSONResponse:
        """The whole answer, in OpenAI's shape unless another is given."""
        headers = dict(self.headers)
        if self.retry_after_s is not None:
            headers["retry-after"] = str(math.ceil(self.retry_after_s))
        return JSONResponse(body or self.body(), self.status, headers)


def bad(message: str, param: str) -> ApiError:
    """A 400 that names the field."""
    return ApiError(400, f"{param}: {message}", "invalid_value", param)


def as_api_error(error: OpenK3Error | ValidationError) -> ApiError:
    """What a caller is told of an error of ours, or of a body that does not fit its model."""
    if isinstance(error, ValidationError):
        return _invalid(error)
    status = next((code for kind, code in STATUS.items() if isinstance(error, kind)), 500)
    code = {429: "rate_limit_exceeded", 503: "service_unavailable"}.get(status)
    return ApiError(status, str(error), code, retry_after_s=1.0 if code else None)


def _invalid(error: ValidationError) -> ApiError:
    """Names the field and what is wrong with it; the value, which may be a prompt, stays out."""
    first = error.errors(include_input=False, include_url=False, include_context=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    message = first["msg"].removeprefix("Value error, ")
    return ApiError(400, f"{where or 'body'}: {message}", "invalid_value", where or None)
