"""The unmodified `openai` and `anthropic` SDKs against a real server, streaming and not."""

import json

import pytest

pytest.importorskip("fastapi", reason="the serve extra is not installed")
openai = pytest.importorskip("openai", reason="the dev extra is not installed")
anthropic = pytest.importorskip("anthropic", reason="the dev extra is not installed")
pytest.importorskip("xgrammar", reason="the serve extra is not installed")

from openai_server import MODEL, serving  # noqa: E402
from scripted_engine import ids_of, tokenizer  # noqa: E402

KEY = "sk-test-1"
ARGUMENTS = (
    '⟨O⟩argument key="city" type="string"⟨S⟩Paris⟨C⟩argument⟨S⟩'
    '⟨O⟩argument key="days" type="number"⟨S⟩3⟨C⟩argument⟨S⟩'
)
CALLS = "".join(f'⟨O⟩call tool="weather" index="{i}"⟨S⟩{ARGUMENTS}⟨C⟩call⟨S⟩' for i in (1, 2))
END = "⟨C⟩message⟨S⟩⟨E⟩"
THOUGHT = "let me see⟨C⟩think⟨S⟩⟨O⟩response⟨S⟩"
PLAIN = f"{THOUGHT}It is fine.⟨C⟩response⟨S⟩{END}"
CALLING = f"{THOUGHT}Sure.⟨C⟩response⟨S⟩⟨O⟩tools⟨S⟩{CALLS}⟨C⟩tools⟨S⟩{END}"
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city", "days"],
}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
USER = [{"role": "user", "content": "What is the weather in Paris?"}]
WANTED = {"city": "Paris", "days": 3}


def script(request):
    """Thinks if the prompt ends in the think channel; calls if tools were declared."""
    prompt = tokenizer().decode(request.prompt_ids)
    text = CALLING if "# Tools" in prompt else PLAIN
    is_thinking = prompt.endswith("<|open|>think<|sep|>")
    return ids_of(text if is_thinking else text.removeprefix(THOUGHT))


@pytest.fixture(scope="module")
def server():
    with serving(script, keys=[KEY]) as running:
        yield running


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=server.url + "/v1", api_key=KEY, max_retries=0)


@pytest.fixture(scope="module")
def claude(server):
    return anthropic.Anthropic(base_url=server.url, api_key=KEY, max_retries=0)


# OpenAI


def test_models(client):
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_chat(client):
    answer = client.chat.completions.create(model=MODEL, messages=USER)
    message = answer.choices[0].message
    assert (message.content, answer.choices[0].finish_reason) == ("It is fine.", "stop")
    assert message.reasoning_content == "let me see"
    assert answer.usage.prompt_tokens_details.cached_tokens >= 0
    assert answer.usage.completion_tokens_details.reasoning_tokens > 0
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_chat_stream(client):
    stream = client.chat.completions.create(
        model=MODEL, messages=USER, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert chunks[-1].usage.completion_tokens == len(ids_of(PLAIN))
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert "".join(delta.content or "" for delta in deltas) == "It is fine."
    thoughts = [(delta.model_extra or {}).get("reasoning_content", "") for delta in deltas]
    assert "".join(thoughts) == "let me see"


def test_chat_stream_helper_puts_calls_together(client):
    with client.chat.completions.stream(model=MODEL, messages=USER, tools=[TOOL]) as stream:
        for _ in stream:
            pass
        answer = stream.get_final_completion()
    assert answer.choices[0].finish_reason == "tool_calls"
    calls = answer.choices[0].message.tool_calls
    assert [json.loads(call.function.arguments) for call in calls] == [WANTED, WANTED]
    assert len({call.id for call in calls}) == 2


def test_a_whole_turn_with_parallel_calls(client):
    first = client.chat.completions.create(model=MODEL, messages=USER, tools=[TOOL])
    message = first.choices[0].message
    assert message.content == "Sure."
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
        for call in reversed(message.tool_calls)
    ]
    second = client.chat.completions.create(
        model=MODEL, messages=[*USER, message.model_dump(exclude_none=True), *results]
    )
    assert second.choices[0].message.content == "It is fine."


def test_structured_output_helper(server, client):
    pydantic = pytest.importorskip("pydantic")

    class Weather(pydantic.BaseModel):
        city: str
        days: int

    text = '{"city":"Paris","days":3}'

    def answering(_):
        return ids_of(f"hm⟨C⟩think⟨S⟩⟨O⟩response⟨S⟩{text}⟨C⟩response⟨S⟩{END}")

    server.engine.script, before = answering, server.engine.script
    try:
        answer = client.chat.completions.parse(model=MODEL, messages=USER, response_format=Weather)
    finally:
        server.engine.script = before
    assert answer.choices[0].message.parsed == Weather(city="Paris", days=3)
    *_, request = server.engine.seen.values()
    for token_id in answering(None):  # what was said is what the grammar allows
        assert request.constraint.allowed()[token_id]
        request.constraint.accept(token_id)


def test_completions(client):
    fields = {"model": MODEL, "max_tokens": 100}
    answer = client.completions.create(prompt=["a", "b"], n=2, echo=True, **fields)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.text[0] for choice in answer.choices] == ["a", "a", "b", "b"]
    stream = client.completions.create(prompt=[1, 2, 3], stream=True, logprobs=2, **fields)
    choices = [chunk.choices[0] for chunk in stream]
    assert choices[-1].finish_reason == "stop"
    assert "It is fine." in "".join(choice.text for choice in choices)
    tokens = [token for choice in choices for token in choice.logprobs.tokens]
    assert len(tokens) == len(script_of_text())


def script_of_text() -> tuple[int, ...]:
    return ids_of(PLAIN.removeprefix(THOUGHT))


def test_errors_are_the_classes_that_callers_catch(client, server):
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(model=MODEL, messages=USER, temperature=9)
    with pytest.raises(openai.NotFoundError, match="other"):
        client.chat.completions.create(model="other", messages=USER)
    wrong = openai.OpenAI(base_url=server.url + "/v1", api_key="sk-wrong", max_retries=0)
    with pytest.raises(openai.AuthenticationError):
        wrong.models.list()


def test_responses(client):
    answer = client.responses.create(model=MODEL, input="hi", reasoning={"effort": "low"})
    assert (answer.status, answer.output_text) == ("completed", "It is fine.")
    assert [item.type for item in answer.output] == ["reasoning", "message"]
    assert answer.usage.input_tokens_details.cached_tokens >= 0
    tool = {"type": "function", "name": "weather", "parameters": SCHEMA}
    called = client.responses.create(model=MODEL, input="hi", tools=[tool])
    calls = [item for item in called.output if item.type == "function_call"]
    assert [json.loads(call.arguments) for call in calls] == [WANTED, WANTED]
    outputs = [
        {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
        for call in calls
    ]
    history = [{"role": "user", "content": "hi"}, *called.output, *outputs]
    again = client.responses.create(model=MODEL, input=history)
    assert again.output_text == "It is fine."
    with pytest.raises(openai.BadRequestError, match="stores no responses"):
        client.responses.create(model=MODEL, input="hi", previous_response_id=answer.id)


def test_responses_stream(client):
    with client.responses.stream(model=MODEL, input="hi", max_output_tokens=500) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert final.output_text == "It is fine."
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"
    assert "response.reasoning_text.delta" in kinds
    assert "response.output_text.delta" in kinds
    cut = list(client.responses.create(model=MODEL, input="hi", max_output_tokens=3, stream=True))
    assert cut[-1].type == "response.incomplete"
    assert cut[-1].response.incomplete_details.reason == "max_output_tokens"


# Anthropic


def test_messages(claude):
    answer = claude.messages.create(model=MODEL, max_tokens=500, messages=USER, system="Be brief.")
    assert [block.type for block in answer.content] == ["text"]
    assert (answer.content[0].text, answer.stop_reason) == ("It is fine.", "end_turn")
    assert answer.usage.input_tokens > 0
    thinking = {"type": "enabled", "budget_tokens": 1024}
    answer = claude.messages.create(model=MODEL, max_tokens=2000, messages=USER, thinking=thinking)
    assert [block.type for block in answer.content] == ["thinking", "text"]
    assert answer.content[0].thinking == "let me see"


CLAUDE_TOOL = {"name": "weather", "description": "d", "input_schema": SCHEMA}


def test_messages_stream_and_tools(claude):
    fields = {"model": MODEL, "max_tokens": 2000, "tools": [CLAUDE_TOOL],
              "thinking": {"type": "enabled", "budget_tokens": 1024}}  # fmt: skip
    with claude.messages.stream(messages=USER, **fields) as stream:
        for _ in stream:
            pass
        answer = stream.get_final_message()
    whole = claude.messages.create(messages=USER, **fields)
    assert answer.stop_reason == whole.stop_reason == "tool_use"
    for one in (answer, whole):
        kinds = [block.type for block in one.content]
        assert kinds == ["thinking", "text", "tool_use", "tool_use"]
        assert [block.input for block in one.content[2:]] == [WANTED, WANTED]
        assert len({block.id for block in one.content[2:]}) == 2
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": "sunny"}
        for block in answer.content[2:]
    ]
    history = [*USER, {"role": "assistant", "content": answer.content},
               {"role": "user", "content": results}]  # fmt: skip
    again = claude.messages.create(model=MODEL, max_tokens=500, messages=history)
    assert again.content[0].text == "It is fine."


def test_messages_endings_and_errors(claude):
    cut = claude.messages.create(model=MODEL, max_tokens=2, messages=USER)
    assert cut.stop_reason == "max_tokens"
    stopped = claude.messages.create(
        model=MODEL, max_tokens=500, messages=USER, stop_sequences=["is"]
    )
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "is")
    assert stopped.content[0].text == "It "
    count = claude.messages.count_tokens(model=MODEL, messages=USER)
    assert count.input_tokens == stopped.usage.input_tokens + stopped.usage.cache_read_input_tokens
    with pytest.raises(anthropic.BadRequestError) as caught:
        claude.messages.create(model=MODEL, max_tokens=-5, messages=USER)
    assert caught.value.body["type"] == "error"
    with pytest.raises(anthropic.NotFoundError):
        claude.messages.create(model="other", max_tokens=5, messages=USER)
