"""Offline generation over a scripted engine."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from openk3.engine.llm import LLM
from openk3.engine.types import SamplingParams
from openk3.errors import BackendError, InputError
from scripted_engine import ScriptedEngine, ids_of, tokenizer

ANSWER = "hm⟨C⟩think⟨S⟩⟨O⟩response⟨S⟩fine, thanks⟨C⟩response⟨S⟩⟨C⟩message⟨S⟩⟨E⟩"


def llm(script, **options) -> LLM:
    return LLM.over(ScriptedEngine(lambda request: script, **options), tokenizer())


def test_generate_gives_n_answers_a_prompt_in_order():
    def script(request):
        text = ids_of(f"{request.params.seed}{len(request.prompt_ids)}")
        return (*text, tokenizer().eos_id)

    model = LLM.over(ScriptedEngine(script), tokenizer())
    answers = model.generate(["x", list(np.arange(3))], SamplingParams(seed=5, logprobs=1), n=2)
    assert [answer.text for answer in answers] == ["51", "61", "53", "63"]
    assert all(answer.finish_reason == "stop" for answer in answers)
    assert [answer.prompt_tokens for answer in answers] == [1, 1, 3, 3]
    assert all(len(answer.logprobs) == len(answer.ids) for answer in answers)
    assert model.engine.aborts == []


def test_chat_reads_the_channels_and_streams_them():
    seen = []
    model = llm(ids_of(ANSWER))
    user = [{"role": "user", "content": "hi"}]
    [answer] = model.chat(user, on_delta=lambda i, delta: seen.append((i, delta.kind)))
    assert answer.text == "fine, thanks"
    assert answer.message == {"role": "assistant", "content": "fine, thanks",
                              "reasoning_content": "hm"}  # fmt: skip
    assert {(0, "reasoning"), (0, "content")} == set(seen)
    again = model.chat([user, [*user, answer.message, *user]])
    assert [one.text for one in again] == ["fine, thanks"] * 2
    assert again[0].cached_tokens > 0


def test_stop_strings_and_limits_end_answers():
    model = llm(ids_of("alpha beta gamma" + "x" * 99))
    [answer] = model.generate("x", SamplingParams(max_tokens=90), stop=["beta"])
    assert (answer.text, answer.finish_reason) == ("alpha ", "stop")
    assert model.engine.running == {}
    [answer] = model.generate("x", SamplingParams(max_tokens=2))
    assert answer.finish_reason == "length"
    assert len(answer.ids) == 2


def test_more_prompts_than_the_queue_holds_wait_their_turn():
    answers = llm(ids_of("ok⟨E⟩"), max_queued=3).generate(["a"] * 10)
    assert [answer.text for answer in answers] == ["ok"] * 10


def test_bad_input_starts_nothing():
    model = llm(ids_of("ok"), max_context=10)
    with pytest.raises(InputError, match="fit"):
        model.generate(["x", [1] * 20])
    assert model.engine.running == {}
    for n in (0, 1.5):
        with pytest.raises(InputError, match="n must be"):
            model.generate("x", n=n)
    for prompts in ([1, 2], b"ab", [["a"]], [[1.5]], [None]):
        with pytest.raises(InputError, match="a text or a list of ids"):
            model.generate(prompts)
    assert model.engine.running == {}


@pytest.mark.parametrize(
    "wrong",
    [
        *({"max_tokens": x} for x in (1.5, "3", True, None)),
        *({"temperature": x} for x in ("1", None, True)),
        {"top_k": 2.0}, {"logprobs": True}, {"seed": 1.5}, {"top_p": "0.5"}, {"min_p": None},
    ],
)  # fmt: skip
def test_parameters_of_a_wrong_type_are_refused(wrong):
    with pytest.raises(InputError, match=f"{next(iter(wrong))} must be a"):
        SamplingParams(**wrong)


def test_one_stop_string_is_not_its_letters():
    [answer] = llm(ids_of("alpha beta gamma")).generate("x", stop="beta")
    assert (answer.text, answer.finish_reason) == ("alpha ", "stop")


def test_threads_take_turns_and_a_callback_asks_for_nothing():
    def script(request):
        return (*ids_of(f"{request.params.seed}" * 20), tokenizer().eos_id)

    model = LLM.over(ScriptedEngine(script), tokenizer())

    def ask(seed):
        found = [model.generate("x", SamplingParams(seed=seed))[0].text for _ in range(20)]
        return set(found)

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(ask, (3, 4))) == [{"3" * 20}, {"4" * 20}]
    with pytest.raises(InputError, match="on_delta"):
        model.generate("x", on_delta=lambda *_: model.generate("y"))
    assert model.engine.running == {}
    assert ask(5) == {"5" * 20}


def test_a_failed_answer_is_an_error():
    class Failing(ScriptedEngine):
        def _advance(self, request, left):
            from dataclasses import replace

            output = super()._advance(request, left)
            return replace(output, finish_reason="error", error="its logits are not finite")

    with pytest.raises(BackendError, match="not finite"):
        LLM.over(Failing(lambda _: [1, 2]), tokenizer()).generate("x")
