"""Models, tokens, health, version, metrics, and the chat page."""

import asyncio
import time
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse

from openk3._version import __version__
from openk3.api.openai import conversation, prepare
from openk3.api.openai.errors import bad
from openk3.api.openai.images import Pictures
from openk3.api.openai.requests import DetokenizeBody, TokenizeBody
from openk3.api.openai.routing import read_body, state_of
from openk3.api.openai.state import Serving

router = APIRouter()
STARTED = int(time.time())
PAGE = Path(__file__).with_name("page.html")
PAGE_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; form-action 'none'; base-uri 'none'; "
    "frame-ancestors 'none'"
)


@router.get("/")
async def page() -> Response:
    """The chat page."""
    headers = {"content-security-policy": PAGE_POLICY, "referrer-policy": "no-referrer"}
    return HTMLResponse(await asyncio.to_thread(PAGE.read_text, "utf-8"), headers=headers)


@router.get("/health")
async def health(request: Request) -> Response:
    """200 while the engine runs, 503 once it has failed."""
    return Response(status_code=200 if state_of(request).service.is_healthy else 503)


@router.get("/ready")
async def ready(request: Request) -> Response:
    """200 while requests are taken; 503 when the engine failed or the server shuts down."""
    service = state_of(request).service
    return Response(status_code=200 if service.is_healthy and not service.draining else 503)


@router.get("/version")
async def version() -> dict[str, str]:
    """Of OpenK3."""
    return {"version": __version__}


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Prometheus text."""
    state = state_of(request)
    text = state.metrics.render(state.service.stats())
    return Response(text, media_type="text/plain; version=0.0.4")


@router.get("/v1/models")
async def models(request: Request) -> dict[str, Any]:
    """The model that is served, with its longest context."""
    return {"object": "list", "data": [_model(state_of(request))]}


@router.get("/v1/models/{name:path}")
async def model(request: Request, name: str) -> dict[str, Any]:
    """One model."""
    state_of(request).require_model(name)
    return _model(state_of(request))


def _model(state: Serving) -> dict[str, Any]:
    special = state.tokenizer.special_tokens.values()
    return {
        "id": state.model,
        "object": "model",
        "created": STARTED,
        "owned_by": "openk3",
        "root": state.model,
        "max_model_len": state.max_context,
        "supports_chat": state.tokenizer.can_chat,
        "supports_images": state.processor is not None,
        "num_ordinary_tokens": min(special, default=state.tokenizer.vocab_size),
    }


@router.post("/tokenize")
async def tokenize(request: Request) -> Response:
    """Ids of a text, or of a conversation as the template renders it."""
    state = state_of(request)
    body = await read_body(request, TokenizeBody)
    return await asyncio.to_thread(_tokenized, state, body)


def _tokenized(state: Serving, body: TokenizeBody) -> Response:
    """The answer; a long text takes a while, also as JSON."""
    ids = _ids(state, body)
    answer = {"count": len(ids), "max_model_len": state.max_context, "tokens": ids}
    if body.return_token_strs:
        answer["token_strs"] = [state.tokenizer.decode([i]) for i in ids]
    return JSONResponse(answer)


def _ids(state: Serving, body: TokenizeBody) -> list[int]:
    if (body.prompt is None) == (body.messages is None):
        raise bad("give either prompt or messages", "prompt")
    if body.prompt is not None:
        return state.tokenizer.encode(body.prompt)
    read = conversation.read(
        body.messages or [],
        Pictures(state.options.max_images),
        tools=body.tools,
        thinking=body.thinking,
        reasoning_effort=body.reasoning_effort,
    )
    return list(prepare.prompt_of(state, read).ids)


@router.post("/detokenize")
async def detokenize(request: Request) -> Response:
    """The text of ids."""
    state = state_of(request)
    body = await read_body(request, DetokenizeBody)
    return await asyncio.to_thread(_detokenized, state, body)


def _detokenized(state: Serving, body: DetokenizeBody) -> Response:
    for token_id in body.tokens:
        if not 0 <= token_id < state.tokenizer.vocab_size:
            raise bad(f"{token_id} is no token id", "tokens")
    return JSONResponse({"prompt": state.tokenizer.decode(body.tokens)})
