"""The server over the real engine; a scripted runner checks every page that is read."""

import asyncio
import contextlib
import json
import random
from functools import cache

import pytest

pytest.importorskip("fastapi", reason="the serve extra is not installed")
httpx = pytest.importorskip("httpx", reason="the serve extra is not installed")

from openai_server import serving  # noqa: E402
from openk3.engine.engine import Engine  # noqa: E402
from openk3.engine.scripted import ScriptedRunner  # noqa: E402
from openk3.engine.types import EngineConfig  # noqa: E402
from openk3.text.image import ImageProcessor  # noqa: E402
from scripted_engine import ids_of, tokenizer  # noqa: E402
from small_models import lively_model  # noqa: E402

H, P = 16, 64
OFF = {"thinking": {"type": "disabled"}}
ANSWER = ids_of("fine⟨C⟩response⟨S⟩⟨C⟩message⟨S⟩⟨E⟩")


def engine(answer=ANSWER, *, num_pages=400, max_queued=4096) -> Engine:
    def script(request, ids):
        at = len(ids) - sum(4 if i == MEDIA else 1 for i in request.prompt_ids)
        return answer[at] if at < len(answer) else answer[-1]

    runner = ScriptedRunner(
        script,
        page_tokens=P,
        num_pages=num_pages,
        vocab_size=tokenizer().vocab_size,
        end_id=tokenizer().end_of_msg_id,
    )
    runner.media_id, runner.picture_size = MEDIA, 4
    config = EngineConfig(hash_block=H, page_tokens=P, max_queued=max_queued, debug=True)
    return Engine(runner, config)


MEDIA = tokenizer().special_id("<|media_pad|>")


def ask(server, stream: bool, path: str, body: dict) -> dict:
    """The usage of one request."""
    if not stream:
        return server.post(path, body).json()["usage"]
    events = server.stream(path, body)[:-1]
    return next(event["usage"] for event in events if "usage" in event)


def test_a26_the_cached_tokens_of_the_engine_are_told_everywhere():
    text = "the weather in Paris " * 60
    messages = [{"role": "user", "content": text}]
    for path, body in (
        ("/v1/chat/completions", {"messages": messages, **OFF}),
        ("/v1/completions", {"prompt": text, "max_tokens": 3}),
    ):
        found = []
        for stream in (False, True):
            with serving(engine=engine()) as server:
                usages = [ask(server, stream, path, body) for _ in range(2)]
            cached = [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages]
            size = usages[0]["prompt_tokens"]
            assert cached[0] == 0
            assert size - 2 * H < cached[1] <= size
            assert cached[1] % H == 0
            found.append(cached)
        assert found[0] == found[1]


def picture(colour: str) -> dict:
    import base64
    import io

    from PIL import Image

    out = io.BytesIO()
    Image.new("RGB", (16, 16), colour).save(out, "PNG")
    url = "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": url}}


def test_a27_another_picture_shares_no_prefix_past_its_place():
    pytest.importorskip("PIL", reason="the vision extra is not installed")
    with serving(engine=engine(), processor=ImageProcessor(patch_size=4)) as server:

        def cached(*parts: dict) -> tuple[int, int]:
            content = [{"type": "text", "text": "x " * 40}, *parts,
                       {"type": "text", "text": "y " * 40}]  # fmt: skip
            body = {"messages": [{"role": "user", "content": content}], **OFF}
            usage = server.post("/v1/chat/completions", body).json()["usage"]
            return usage["prompt_tokens_details"]["cached_tokens"], usage["prompt_tokens"]

        lead = len(ids_of('⟨O⟩message role="user"⟨S⟩' + "x " * 40))
        red, blue = picture("red"), picture("blue")
        assert cached(red)[0] == 0
        assert cached(blue)[0] <= lead + 20
        hit, size = cached(red)
        assert size - 2 * H < hit
        pair, _ = cached(red, blue)
        swapped, size = cached(blue, red)
        assert pair < size - 2 * H
        assert swapped < size - 2 * H
        assert cached(red, blue)[0] > size - 2 * H


@pytest.mark.parametrize("stream", [True, False])
def test_a16_a17_after_a_hang_up_all_memory_is_free(stream):
    long = (*ids_of("⟨C⟩think⟨S⟩⟨O⟩response⟨S⟩"), *tokenizer().encode("x") * 100_000)
    with serving(engine=engine(long, num_pages=4000)) as server:
        free = server.engine.stats().free_pages

        async def leave() -> None:
            async with httpx.AsyncClient(base_url=server.url, timeout=30) as client:
                body = {"messages": [{"role": "user", "content": "hi"}], "stream": stream}
                if stream:
                    async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
                        await anext(answer.aiter_lines())
                else:
                    with pytest.raises(TimeoutError):
                        await asyncio.wait_for(client.post("/v1/chat/completions", json=body), 0.3)

        asyncio.run(leave())
        while server.engine.stats().aborted == 0:
            server.settle()
        stats = server.engine.stats()
        assert (stats.running, stats.waiting, stats.free_pages) == (0, 0, free)


def test_an_echoed_prompt_has_its_log_probabilities():
    """As evaluation harnesses ask for them: also with nothing behind the prompt."""
    text = "fine and so on"
    body = {"prompt": text, "echo": True, "logprobs": 2, "max_tokens": 3, "ignore_eos": True}
    with serving(engine=engine()) as server:
        whole = server.post("/v1/completions", body).json()
        parts = server.stream("/v1/completions", body)[:-1]
        alone = server.post("/v1/completions", {**body, "max_tokens": 0}).json()
        bare = server.stream("/v1/completions", {**body, "max_tokens": 0})[:-1]
    prompt = tokenizer().encode(text)
    told = whole["choices"][0]["logprobs"]
    assert "".join(told["tokens"]) == whole["choices"][0]["text"]
    assert told["token_logprobs"][0] is told["top_logprobs"][0] is None
    scores = [-0.01 * token for token in prompt[1:]]
    assert told["token_logprobs"][1:] == pytest.approx([*scores, -0.5, -0.5, -0.5])
    ends = [len("".join(told["tokens"][:i])) for i in range(len(told["tokens"]))]
    assert told["text_offset"] == ends
    streamed = {key: [x for part in parts for x in part["choices"][0]["logprobs"][key]]
                for key in told}  # fmt: skip
    assert streamed == told
    assert "".join(part["choices"][0]["text"] for part in parts) == whole["choices"][0]["text"]
    for choice in (alone["choices"][0], bare[0]["choices"][0]):
        assert (choice["text"], choice["finish_reason"]) == (text, "length")
        assert choice["logprobs"]["token_logprobs"][1:] == pytest.approx(scores)
    assert len(bare) == 1
    assert alone["usage"] == bare[0]["usage"]
    assert alone["usage"]["completion_tokens"] == 0


REPEATING = "the weather in Paris is fine " * 4
DRAWN = [
    {"temperature": 0},
    {"temperature": 0.9, "seed": 5, "top_p": 0.9, "n": 2},
    {"temperature": 0.7, "seed": 6, "frequency_penalty": 0.5, "repetition_penalty": 1.1},
    {"temperature": 0, "logit_bias": {"80": 100}, "stop": ["p" * 9]},
]


@cache
def drafted(**options) -> tuple[list, dict[str, float]]:
    """What a small model says to DRAWN, and what the metrics say of drafts."""
    config = EngineConfig(hash_block=16, num_pages=60, **options)
    made = Engine(lively_model(seed=3, mtp=True), config)
    with serving(engine=made, vocab_size=made.runner.vocab_size) as server:
        said = []
        for fields in DRAWN:
            body = {"prompt": REPEATING, "max_tokens": 20, "ignore_eos": True, **fields}
            answer = server.post("/v1/completions", body).json()
            parts = server.stream("/v1/completions", body)[:-1]
            for choice in answer["choices"]:
                assert choice["text"] == "".join(
                    one["text"] for part in parts for one in part["choices"]
                    if one["index"] == choice["index"]
                )  # fmt: skip
            usage = {**answer["usage"], "prompt_tokens_details": None}
            said.append(([(c["text"], c["finish_reason"]) for c in answer["choices"]], usage))
        lines = server.client.get("/metrics").text.splitlines()
    found = [line.split() for line in lines if line.startswith("vllm:spec_decode_num")]
    return said, {
        name.split("{")[0].removeprefix("vllm:spec_decode_num_"): float(value)
        for name, value in found
    }


@pytest.mark.parametrize("draft", ["ngram", "mtp"])
def test_drafts_change_no_answer_and_are_counted(draft):
    plain, nothing = drafted()
    assert set(nothing.values()) == {0}
    said, counts = drafted(num_drafts=3, draft=draft)
    assert said == plain
    drafts, tokens = counts["drafts_total"], counts["draft_tokens_total"]
    accepted = counts["accepted_tokens_total"]
    assert 0 < drafts <= tokens <= 3 * drafts
    assert 0 < accepted <= tokens


def test_n_choices_take_their_prompt_from_the_cache():
    with serving(engine=engine()) as server:
        text = "the weather in Paris " * 40
        server.chat(text, **OFF)
        before = server.engine.stats()
        answer = server.chat(text, n=4, **OFF).json()
        assert [c["message"]["content"] for c in answer["choices"]] == ["fine"] * 4
        after = server.engine.stats()
        asked = after.prompt_tokens - before.prompt_tokens
        assert after.cached_tokens - before.cached_tokens > asked - 4 * 2 * H


def test_a_thousand_requests_at_random_leave_nothing_behind():
    """Whole and streamed, malformed, left at random moments, read slowly, in too little memory."""
    rng = random.Random(0)
    kinds = ["whole", "stream", "bad", "leave", "slow", "text"]
    texts = ["the weather in Paris " * n for n in (1, 3, 10, 20)]

    async def one(client) -> str:
        kind = rng.choice(kinds)
        body = {"messages": [{"role": "user", "content": rng.choice(texts)}], **OFF,
                "max_tokens": rng.randrange(1, 20), "n": rng.choice([1, 1, 2])}  # fmt: skip
        try:
            if kind == "bad":
                answer = await client.post("/v1/chat/completions", json={**body, "n": "x"})
                assert answer.status_code == 400
            elif kind in ("stream", "slow"):
                async with client.stream(
                    "POST", "/v1/chat/completions", json={**body, "stream": True}
                ) as answer:
                    last = ""
                    async for line in answer.aiter_lines():
                        last = line or last
                        await asyncio.sleep(0.001 if kind == "slow" else 0)
                    assert last == "data: [DONE]"
            elif kind == "leave":
                work = client.post("/v1/chat/completions", json=body)
                await asyncio.wait_for(work, rng.random() * 0.03)
            else:
                path = "/v1/completions" if kind == "text" else "/v1/chat/completions"
                answer = await client.post(path, json={**body, "prompt": rng.choice(texts)})
                assert answer.status_code == 200, answer.text
        except TimeoutError:
            return "left"
        return kind

    async def all_of_them(url: str) -> list[str]:
        limits = httpx.Limits(max_connections=32)
        async with httpx.AsyncClient(base_url=url, timeout=60, limits=limits) as client:
            done: list[str] = []
            for _ in range(20):
                done += await asyncio.gather(*(one(client) for _ in range(50)))
            return done

    with serving(engine=engine(num_pages=60)) as server:
        idle = server.engine.stats()
        done = asyncio.run(all_of_them(server.url))
        server.settle()
        assert len(done) == 1000
        assert {"left", *kinds} - {"leave"} <= set(done)
        stats = server.engine.stats()
        assert (stats.running, stats.waiting) == (0, 0)
        assert stats.free_pages == idle.free_pages
        assert stats.finished > 500
        assert server.state.service._streams == {}
        assert server.client.get("/health").status_code == 200


def test_callers_that_leave_change_no_other_callers_tokens():
    """64 at once in too little memory: every probability is what it is alone, to the last bit."""
    config = EngineConfig(hash_block=16, num_pages=24, batch_invariant=True, max_running=16)
    made = Engine(lively_model(seed=3), config)
    rng = random.Random(1)
    bodies = [
        {"prompt": "the weather in Paris is fine and so on " * n + str(i), "max_tokens": 6 + 2 * i,
         "ignore_eos": True, "seed": i, "temperature": i % 2, "logprobs": 0}
        for i, n in enumerate([1, 1, 2, 2, 3, 4])
    ]  # fmt: skip

    def odds(*answers) -> list[float]:
        return [x for a in answers for x in a["choices"][0]["logprobs"]["token_logprobs"]]

    async def whole(client, body) -> list[float]:
        return odds((await client.post("/v1/completions", json=body)).json())

    async def stream(client, body) -> list[float]:
        answer = await client.post("/v1/completions", json={**body, "stream": True})
        lines = [line for line in answer.text.splitlines() if line.startswith("data: {")]
        return odds(*(json.loads(line[6:]) for line in lines))

    async def leave(client, body) -> None:
        with contextlib.suppress(TimeoutError):
            wanted = {**body, "max_tokens": 200, "stream": rng.random() < 0.5}
            work = client.post("/v1/completions", json=wanted)
            await asyncio.wait_for(work, rng.random() * 0.3)

    async def half(client, body) -> None:
        data = json.dumps(body).encode()
        _, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
        head = f"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: {len(data)}"
        writer.write(f"{head}\r\n\r\n".encode() + data[: rng.randrange(len(data))])
        await writer.drain()
        writer.transport.abort()

    async def all_at_once(url: str, alone: list[list[float]]) -> None:
        async with httpx.AsyncClient(base_url=url, timeout=120) as client:
            kinds = [whole, stream, leave, half] * 16
            numbers = [rng.randrange(len(bodies)) for _ in kinds]
            said = await asyncio.gather(
                *(kind(client, bodies[i]) for kind, i in zip(kinds, numbers, strict=True))
            )
        for found, i in zip(said, numbers, strict=True):
            assert found in (None, alone[i])

    with serving(engine=made, vocab_size=made.runner.vocab_size) as server:
        idle = made.stats().free_pages
        alone = [odds(server.post("/v1/completions", body).json()) for body in bodies]
        assert [len(found) for found in alone] == [body["max_tokens"] for body in bodies]
        asyncio.run(all_at_once(server.url, alone))
        server.settle()
        stats = made.stats()
        assert (stats.running, stats.waiting, stats.free_pages) == (0, 0, idle)
        assert stats.aborted > 0
        assert server.state.service._streams == {}
