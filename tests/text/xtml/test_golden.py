"""Every segment of the 19 conversations that the authors' own encoder rendered."""

import json

import pytest

from conftest import GOLDEN_LOCAL
from openk3.text import xtml

CASES = json.loads((GOLDEN_LOCAL / "chat_template.json").read_text("utf-8"))["cases"]
NUM_TOKENS = {
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


@pytest.mark.parametrize("name", CASES)
def test_segments(name):
    case = CASES[name]
    segments = xtml.render(case["messages"], **case["kwargs"])
    assert segments == [tuple(segment) for segment in case["special_segments"]]
    assert "".join(text for text, _ in segments) == case["rendered"]


@pytest.mark.parametrize("name", CASES)
def test_token_counts_with_the_published_ranks(name, real):
    case = CASES[name]
    segments = xtml.render(case["messages"], **case["kwargs"])
    ids = real.encode_segments(segments)
    assert len(ids) == NUM_TOKENS[name]
    assert real.decode(ids) == case["rendered"]
