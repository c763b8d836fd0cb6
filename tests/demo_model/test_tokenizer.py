"""Tests of the tokenizer of the committed folder: nothing is lost, digits stand alone, turns have their marks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jinja2
import pytest
import transformers
from hypothesis import given
from hypothesis import strategies as st

FOLDER = Path(__file__).resolve().parents[2] / "alignedserve" / "demo_model"


@pytest.fixture(scope="module")
def tokenizer() -> transformers.PreTrainedTokenizerFast:
    return transformers.AutoTokenizer.from_pretrained(FOLDER)


@given(text=st.text())
def test_any_text_survives(tokenizer: transformers.PreTrainedTokenizerFast, text: str) -> None:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids) == text


@given(number=st.integers(min_value=0))
def test_each_digit_is_a_token(tokenizer: transformers.PreTrainedTokenizerFast, number: int) -> None:
    assert tokenizer.tokenize(str(number)) == list(str(number))


def test_a_plain_prompt_begins_with_the_beginning(tokenizer: transformers.PreTrainedTokenizerFast) -> None:
    assert tokenizer("Hello")["input_ids"][0] == tokenizer.bos_token_id


def test_the_chat_template_marks_every_turn(tokenizer: transformers.PreTrainedTokenizerFast) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "  Count to 2\n"},
        {"role": "assistant", "content": "1, 2"},
        {"role": "user", "content": "Thanks"},
    ]
    assert tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == (
        "<|begin|><|system|>Be brief.<|end|><|user|>Count to 2<|end|>"
        "<|assistant|>1, 2<|end|><|user|>Thanks<|end|><|assistant|>"
    )


def test_the_chat_template_knows_tools(tokenizer: transformers.PreTrainedTokenizerFast) -> None:
    function = {"name": "weather", "arguments": {"city": "Rom"}}
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Rain?"},
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]},
        {"role": "tool", "content": "yes"},
    ]
    tool = {"type": "function", "function": {"name": "weather"}}
    assert tokenizer.apply_chat_template(messages, tools=[tool], tokenize=False, add_generation_prompt=True) == (
        '<|begin|><|system|>Be brief.\n\nTools:\n{"name": "weather"}\n'
        'To call one: <tool_call>\n{"name": NAME, "arguments": {...}}\n</tool_call><|end|><|user|>Rain?<|end|>'
        '<|assistant|>\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rom"}}\n</tool_call><|end|>'
        "<|user|><tool_response>\nyes\n</tool_response><|end|><|assistant|>"
    )


def test_every_mark_is_one_token(tokenizer: transformers.PreTrainedTokenizerFast) -> None:
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, return_dict=False
    )
    marks = ["<|begin|>", "<|user|>", "<|end|>", "<|assistant|>"]
    begin, user, end, assistant = tokenizer.convert_tokens_to_ids(marks)
    assert [ids[0], ids[1], *ids[-2:]] == [begin, user, end, assistant]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "Hi"


def test_an_unknown_role_is_refused_by_name(tokenizer: transformers.PreTrainedTokenizerFast) -> None:
    with pytest.raises(jinja2.TemplateError, match="unknown role odd: use system, user, assistant or tool"):
        tokenizer.apply_chat_template([{"role": "odd", "content": "x"}])
