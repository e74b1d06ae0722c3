"""POST /v1/responses: the part of OpenAI's Responses API that needs no stored state."""

import time
from collections.abc import AsyncGenerator
from typing import Any

from fastapi import APIRouter, Request, Response

from openk3.api.openai import routing
from openk3.api.openai.blocks import Block, Blocks
from openk3.api.openai.connection import event
from openk3.api.openai.errors import ApiError
from openk3.api.openai.generation import Generation
from openk3.api.openai.responses_request import ResponsesBody, units
from openk3.text.xtml import Delta

router = APIRouter()


@router.post("/v1/responses")
async def create(request: Request) -> Response:
    """One response."""
    return await routing.answer(request, ResponsesBody, units, Items, "resp_")


class Items:
    """Writes a generation as one response, or as the events that build it."""

    def __init__(self, generation: Generation, body: ResponsesBody) -> None:
        self._generation, self._body = generation, body
        self._created = int(time.time())
        self._blocks = Blocks(generation.state.new_id)
        self._number = -1

    async def whole(self) -> dict[str, Any]:
        """The response object. Raises ApiError if generation failed."""
        await self._blocks.take_all(self._generation)
        return self._ended()

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Server-sent events."""
        response = self._response("in_progress", [])
        yield self._event("response.created", response=response)
        yield self._event("response.in_progress", response=response)
        async for part in self._generation.parts():
            for delta in part.deltas:
                if self._blocks.take(delta):
                    for piece in (*self._endings(len(self._blocks) - 2), *self._beginnings()):
                        yield piece
                if delta.kind != "call":
                    yield self._delta(delta)
        for piece in self._endings(len(self._blocks) - 1):
            yield piece
        response = self._ended()
        yield self._event(f"response.{response['status']}", response=response)

    def failed(self, error: ApiError) -> bytes:
        failure = {"code": "server_error", "message": error.message}
        response = {**self._response("failed", []), "error": failure}
        return self._event("response.failed", response=response)

    def _beginnings(self) -> list[bytes]:
        index, item = len(self._blocks) - 1, _begun(self._blocks[-1])
        pieces = [self._event("response.output_item.added", output_index=index, item=item)]
        if item["type"] == "message":
            pieces.append(self._event(
                "response.content_part.added", item_id=item["id"], output_index=index,
                content_index=0, part=_output(""),
            ))  # fmt: skip
        return pieces

    def _endings(self, index: int) -> list[bytes]:
        """Events that close a block; none for one that is not there."""
        if index < 0:
            return []
        item, text = _whole(self._blocks[index]), self._blocks[index].text
        place = {"item_id": item["id"], "output_index": index}
        pieces = []
        if item["type"] == "function_call":
            pieces.append(self._event(
                "response.function_call_arguments.done", **place, name=item["name"],
                arguments=text,
            ))  # fmt: skip
        elif item["type"] == "reasoning":
            pieces.append(self._event(
                "response.reasoning_text.done", **place, content_index=0, text=text
            ))  # fmt: skip
        else:
            pieces.append(self._event(
                "response.output_text.done", **place, content_index=0, text=text, logprobs=[]
            ))  # fmt: skip
            pieces.append(self._event(
                "response.content_part.done", **place, content_index=0, part=_output(text)
            ))  # fmt: skip
        done = self._event("response.output_item.done", output_index=index, item=item)
        return [*pieces, done]

    def _delta(self, delta: Delta) -> bytes:
        place = {"item_id": _begun(self._blocks[-1])["id"], "output_index": len(self._blocks) - 1}
        if delta.kind == "arguments":
            return self._event("response.function_call_arguments.delta", **place, delta=delta.text)
        if delta.kind == "reasoning":
            return self._event(
                "response.reasoning_text.delta", **place, content_index=0, delta=delta.text
            )
        return self._event(
            "response.output_text.delta", **place, content_index=0, delta=delta.text, logprobs=[]
        )

    def _event(self, name: str, /, **data: Any) -> bytes:
        self._number += 1
        return event({"type": name, "sequence_number": self._number, **data}, name)

    def _ended(self) -> dict[str, Any]:
        [choice] = self._generation.choices
        return self._response(choice.finish_reason, [_whole(block) for block in self._blocks])

    def _response(self, reason: str | None, items: list[dict[str, Any]]) -> dict[str, Any]:
        status = {"stop": "completed", "in_progress": "in_progress", "failed": "failed"}
        usage = self._generation.usage()
        short = {"length": "max_output_tokens"}.get(reason or "")
        return {
            "id": self._generation.id,
            "object": "response",
            "created_at": self._created,
            "model": self._generation.state.model,
            "status": status.get(reason or "", "incomplete"),
            "incomplete_details": {"reason": short} if short else None,
            "error": None,
            "instructions": self._body.instructions,
            "output": items,
            "parallel_tool_calls": self._body.parallel_tool_calls is not False,
            "tool_choice": self._body.tool_choice or "auto",
            "tools": self._body.tools or [],
            "metadata": {},
            "temperature": self._body.temperature,
            "top_p": self._body.top_p,
            "usage": None if reason == "in_progress" else {
                "input_tokens": usage.prompt_tokens,
                "input_tokens_details": {"cached_tokens": usage.cached_tokens},
                "output_tokens": usage.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
                "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            },
        }  # fmt: skip


def _begun(block: Block) -> dict[str, Any]:
    """An item of which nothing is said yet."""
    if block.kind == "thought":
        return {"type": "reasoning", "id": f"rs_{block.id}", "summary": []}
    if block.kind == "call":
        return {"type": "function_call", "id": f"fc_{block.id}", "call_id": f"call_{block.id}",
                "name": block.tool, "arguments": "", "status": "in_progress"}  # fmt: skip
    return {"type": "message", "id": f"msg_{block.id}", "role": "assistant", "content": [],
            "status": "in_progress"}  # fmt: skip


def _whole(block: Block) -> dict[str, Any]:
    item = _begun(block)
    if block.kind == "thought":
        return {**item, "content": [{"type": "reasoning_text", "text": block.text}]}
    said = {"arguments": block.text} if block.kind == "call" else {"content": [_output(block.text)]}
    return {**item, **said, "status": "completed"}


def _output(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
