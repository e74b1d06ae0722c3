"""Conversations as prompts, and answers as channels, without a server."""

import json

import pytest

from openk3.engine.chat import ChatReader, Template, chat_prompt
from openk3.errors import InputError
from openk3.text.image import ImageProcessor
from scripted_engine import ids_of, tokenizer

ANSWER = (
    "plan⟨C⟩think⟨S⟩⟨O⟩response⟨S⟩Sure.⟨C⟩response⟨S⟩⟨O⟩tools⟨S⟩"
    '⟨O⟩call tool="get_weather" index="1"⟨S⟩⟨O⟩argument key="city" type="string"⟨S⟩Paris'
    "⟨C⟩argument⟨S⟩⟨C⟩call⟨S⟩⟨C⟩tools⟨S⟩⟨C⟩message⟨S⟩⟨E⟩"
)


def read(pieces, **options):
    reader = ChatReader(tokenizer(), thinking=True, **options)
    deltas = [delta for piece in pieces for delta in reader.feed(piece)] + reader.finish()
    texts: dict[tuple[str, int], str] = {}
    for delta in deltas:
        key = (delta.kind, delta.index)
        texts[key] = texts.get(key, "") + delta.text
    return texts, reader


def test_a20_however_an_answer_is_cut_it_reads_the_same():
    ids = ids_of(ANSWER)
    whole, _ = read([ids])
    assert whole[("content", 0)] == "Sure."
    assert json.loads(whole[("arguments", 0)]) == {"city": "Paris"}
    assert read([[i] for i in ids])[0] == whole
    for cut in range(len(ids)):
        assert read([ids[:cut], ids[cut:]])[0] == whole


def test_thoughts_are_counted_by_token():
    _, reader = read([ids_of(ANSWER)])
    assert reader.num_reasoning == len(ids_of("plan⟨C⟩think⟨S⟩"))


def test_a_stop_string_does_not_reach_over_a_call():
    texts, reader = read([ids_of(ANSWER)], stops=["Sure.x"])
    assert texts[("content", 0)] == "Sure."
    assert reader.stop is None
    texts, reader = read([ids_of(ANSWER)], stops=["re."])
    assert texts[("content", 0)] == "Su"
    assert reader.stop == "re."
    assert ("call", 0) not in texts


def test_an_answer_without_thoughts_is_the_answer():
    texts, _ = read([ids_of("It is fine.⟨C⟩response⟨S⟩⟨C⟩message⟨S⟩⟨E⟩")], stops=["fine"])
    assert texts[("answer", 0)] == "It is "


def test_pictures_take_their_full_length_and_have_digests():
    Image = pytest.importorskip("PIL.Image", reason="the vision extra is not installed")
    processor = ImageProcessor(patch_size=4)
    images = [Image.new("RGB", (16, 8)), Image.new("RGB", (8, 8), "red")]
    content = [{"type": "image_url"}, {"type": "text", "text": "and"}, {"type": "image_url"}]
    messages = [{"role": "user", "content": content}]
    prompt = chat_prompt(messages, tokenizer(), Template(), processor=processor, images=images)
    assert prompt.media is not None
    assert prompt.media.grid_thws.tolist() == [[1, 2, 4], [1, 2, 2]]
    assert len(set(prompt.media.digests)) == 2
    assert prompt.num_tokens == len(prompt.ids) + (2 - 1) + (1 - 1)
    with pytest.raises(InputError, match="sees no pictures"):
        chat_prompt(messages, tokenizer(), Template(), images=images)


def test_a_partial_thought_goes_on_as_thought():
    last = {"role": "assistant", "reasoning_content": "so", "content": "", "partial": True}
    prompt = chat_prompt([{"role": "user", "content": "hi"}, last], tokenizer(), Template())
    wanted = ids_of("⟨O⟩think⟨S⟩so")
    assert prompt.ids[-len(wanted) :] == wanted
    assert prompt.thinking
    assert prompt.num_pending == 0
    with pytest.raises(InputError, match="partial"):
        chat_prompt([{"role": "user", "content": "x", "partial": True}], tokenizer(), Template())
