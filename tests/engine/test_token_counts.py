"""Lengths of rendered prompts in Kimi's own ranks: counts that others measured."""

import json
import shutil

import pytest

from conftest import GOLDEN_LOCAL, GOLDEN_SHARED
from openk3.engine.chat import Template, chat_prompt
from openk3.text import tokenizer
from openk3.text.xtml import render

RANKS = GOLDEN_SHARED / "data" / "kimi_tiktoken.model"
pytestmark = pytest.mark.skipif(not RANKS.exists(), reason=f"needs {RANKS}")
CASES = json.loads((GOLDEN_LOCAL / "chat_template.json").read_text("utf-8"))["cases"]
COUNTS = {
    "user_only": 25,
    "system_user_effort_max": 103,
    "effort_low": 90,
    "no_thinking": 22,
    "no_generation_prompt": 38,
    "multi_turn_thinking_kept": 131,
    "assistant_no_reasoning": 58,
    "assistant_nothink_mode": 52,
    "tools_declared": 175,
    "tool_roundtrip": 425,
    "bad_json_arguments": 98,
    "named_participants_and_escapes": 66,
    "dynamic_tools": 106,
    "tool_choice_required_json_object": 186,
    "tool_choice_none": 141,
    "json_schema": 102,
    "image": 43,
    "image_placeholder_text": 33,
    "empty_content": 56,
}


@pytest.fixture(scope="module")
def kimi(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kimi")
    shutil.copy(RANKS, folder / "tiktoken.model")
    return tokenizer.load(folder)


@pytest.mark.parametrize("name", COUNTS)
def test_the_published_template(kimi, name):
    case = CASES[name]
    ids = kimi.encode_segments(render(case["messages"], **case["kwargs"]))
    assert len(ids) == COUNTS[name]


def counted(kimi, messages, **template):
    """What `usage.prompt_tokens` says."""
    prompt = chat_prompt(messages, kimi, Template(**template))
    assert prompt.num_pending == 3
    return prompt.num_tokens - prompt.num_pending


def test_every_case_has_its_count():
    assert COUNTS.keys() == CASES.keys()


def test_what_the_vendors_verifier_counts(kimi):
    """Kimi-Vendor-Verifier's `assistant_hello`, effort high: 99; its preambles of 67 and 68."""
    assert counted(kimi, [{"role": "assistant", "content": "hello"}], thinking_effort="high") == 99
    hi = [{"role": "user", "content": "hi"}]
    plain = counted(kimi, hi, thinking_effort=None)
    added = {e: counted(kimi, hi, thinking_effort=e) - plain for e in ("low", "high", "max")}
    assert added == {"low": 68, "high": 68, "max": 67}
    assert counted(kimi, hi, thinking=False) == plain
    # an assistant's message has a think channel also when that is empty: 6 tokens
    talk = [*hi, {"role": "assistant", "content": "hello"}, *hi]
    kept = counted(kimi, talk, thinking_effort=None) - counted(kimi, talk, thinking=False)
    assert kept == 6
