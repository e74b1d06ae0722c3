"""A model's words stay the tokens that it chose, in the next turn's prompt."""

from openk3.engine.llm import LLM
from openk3.engine.own_words import OwnWords
from scripted_engine import ScriptedEngine, ids_of, tokenizer

TEXT = "the weather in Paris is fine"


def by_characters(text):
    return tuple(i for c in text for i in tokenizer().encode(c))


def test_a_beginning_of_the_same_text_gets_the_tokens_that_were_chosen():
    chosen, written = by_characters(TEXT), tuple(tokenizer().encode(TEXT))
    assert chosen != written
    end = tokenizer().end_of_msg_id
    words = OwnWords([(*by_characters("other"), end), (*chosen, end)], tokenizer())
    assert words.restore((*written, end, 5, 6)) == (*chosen, end, 5, 6)
    assert words.restore((*written, end)) == (*chosen, end)


def test_other_texts_stay_as_they_are():
    chosen, written = by_characters(TEXT), tuple(tokenizer().encode(TEXT))
    end = tokenizer().end_of_msg_id
    pieces = [tokenizer().decode([i]) for i in written]
    long = next(i for i, piece in enumerate(pieces) if len(piece) > 1)
    within_a_token = by_characters("".join(pieces[:long]) + pieces[long][0])
    words = OwnWords([(*chosen, end), within_a_token], tokenizer())
    spelled = tuple(tokenizer().encode("<|end_of_msg|>"))
    for ids in (written, (*written, *spelled), (), written[:3], (5000, *written, end)):
        assert words.restore(ids) == ids
    assert OwnWords([], tokenizer()).restore(written) == written


def test_the_next_turn_begins_with_the_last_one_as_it_was():
    close = ids_of("⟨C⟩think⟨S⟩⟨O⟩response⟨S⟩"), ids_of("⟨C⟩response⟨S⟩⟨C⟩message⟨S⟩⟨E⟩")
    answer = (*by_characters("so it is"), *close[0], *by_characters(TEXT), *close[1])
    llm = LLM.over(ScriptedEngine(lambda request: answer), tokenizer())
    talk = [{"role": "user", "content": "How is it?"}]
    for _ in range(3):
        [said] = llm.chat(talk)
        talk += [said.message, {"role": "user", "content": "And then?"}]
    first, second, third = (request.prompt_ids for request in llm.engine.seen.values())
    assert second[: len(first) + len(answer)] == (*first, *answer)
    assert third[: len(second) + len(answer)] == (*second, *answer)
    [again] = llm.chat(talk[:1])
    assert again.prompt_tokens == len(first)
    talk[1]["content"] = "something else"
    [other] = llm.chat(talk[:3])
    assert other.prompt_tokens < len(second)
