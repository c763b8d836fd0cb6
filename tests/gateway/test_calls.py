"""Tests that tool calls are found in a model's text, however the text is cut into pieces; other text stays text."""

from __future__ import annotations

import json
from collections.abc import Iterable
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alignedserve.config.choices import CALL_FORMATS
from alignedserve.text.calls.formats import (
    FORMATS,
    HERMES,
    LLAMA3_JSON,
    CallFormat,
    deepseek_marker,
    find_call_format,
    named_call_format,
)
from alignedserve.text.calls.scanning import CallReader, CallText, join_parts
from tests.gateway.test_calls_as_before import PIECES

PARAMETERS = {
    "type": "object",
    "properties": {
        "s": {"type": "string"},
        "n": {"type": ["integer", "null"]},
        "o": {"$ref": "#/$defs/deep"},
        "l": {"anyOf": [{"type": "array"}, {"type": "boolean"}]},
    },
    "$defs": {"deep": {"type": "object"}},
}
TOOLS: dict[str, Any] = dict.fromkeys(("f", "get_weather", "a-b.c"), PARAMETERS)
OURS = pytest.mark.parametrize("form", FORMATS, ids=lambda form: f"{form.name}-{type(form.layout).__name__}")


def read(form: CallFormat, text: str, sizes: Random | int | None = None, most: int | None = None) -> CallText:
    """Return all that is found in a text, which comes in pieces of one size, or of the sizes that are drawn."""
    reader, pieces = CallReader(form, TOOLS, most), list[str]()
    while text:
        size = sizes.randint(1, 7) if isinstance(sizes, Random) else sizes or len(text)
        pieces.append(text[:size])
        text = text[size:]
    return fed(reader, pieces)


def fed(reader: CallReader, pieces: Iterable[str]) -> CallText:
    found = [*map(reader.feed, pieces), reader.flush()]
    return CallText("".join(each.text for each in found), join_parts(part for each in found for part in each.parts))


def called(found: CallText) -> list[tuple[str | None, Any]]:
    return [(part.name, json.loads(part.arguments)) for part in found.parts]


# --- Whatever is called is found, in every format

_CHARACTERS = st.characters(codec="utf-8")
_TEXTS = st.text(_CHARACTERS | st.sampled_from("{}[]\"'\\<>|(),=:\n")).filter(lambda text: "</" not in text)
_JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | _TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXTS, inner, max_size=3),
    max_leaves=5,
)
_ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "s": _TEXTS,
        "n": st.none() | st.integers(),
        "o": st.dictionaries(_TEXTS, _JSON, max_size=3),
        "l": st.booleans() | st.lists(_JSON, max_size=3),
    },
)
_CALLS = st.lists(st.tuples(st.sampled_from(sorted(TOOLS)), _ARGUMENTS), min_size=1, max_size=3)


@OURS
@settings(max_examples=8)
@given(calls=_CALLS, sizes=st.randoms(use_true_random=False))
def test_written_calls_are_found(form: CallFormat, calls: list[tuple[str, Any]], sizes: Random) -> None:
    found = read(form, form.write(calls), sizes)
    assert called(found) == called(read(form, form.write(calls), 1)) == calls
    assert found.text == ""
    assert [part.index for part in found.parts] == [*range(len(calls))]
    assert len({part.id for part in found.parts}) == len(calls)
    (only,) = called(read(form, form.write(calls), sizes, most=1))
    assert only == calls[0]


_PIECES = st.sampled_from([*PIECES, "", '{"name": "f", "arguments": {}}', "</invoke>", '">'])


@OURS
@settings(max_examples=8)
@given(pieces=st.lists(_PIECES, max_size=14), sizes=st.randoms(use_true_random=False), most=st.none() | st.just(1))
def test_pieces_change_nothing(form: CallFormat, pieces: list[str], sizes: Random, most: int | None) -> None:
    whole, *cut = (read(form, "".join(pieces), size, most) for size in (None, 1, sizes))
    for found in cut:
        assert found.text == whole.text
        assert [(part.name, part.arguments) for part in found.parts] == [
            (part.name, part.arguments) for part in whole.parts
        ]


@OURS
@settings(max_examples=8)
@given(text=st.text(_CHARACTERS), sizes=st.randoms(use_true_random=False))
def test_other_text_stays_text(form: CallFormat, text: str, sizes: Random) -> None:
    for said in (text, *(f"{marker} so, {text}!" for marker in form.openings), f'{{"answer": {json.dumps(text)}}} !'):
        found = read(form, said, sizes)
        assert (found.text, found.parts) == (said, ())


@OURS
def test_text_may_stand_before_calls(form: CallFormat) -> None:
    text = f"Let me see. {form.write([('f', {'s': 'Rom'})])}"
    found = read(form, text)
    if form.openings and form.frame[0].startswith(form.openings):
        assert (found.text, called(found)) == ("Let me see. ", [("f", {"s": "Rom"})])
    else:
        assert (found.text, found.parts) == (text, ()), "a call of this format has no mark of its own"


# --- What models write besides

QUOTES = r'{"a": "x}\"{", "b": [1, {"c": 2}]}'
NO_ARGUMENTS = "\n".join(map(deepseek_marker, ("tool calls begin", "tool call begin")))
NO_ARGUMENTS += f"f{deepseek_marker('tool sep')}{deepseek_marker('tool call end')}"
BY_NAME = {form.name: form for form in reversed(FORMATS)}
MORE = [
    ("hermes", f'See.\n<tool_call>\n{{"name": "f", "arguments": {QUOTES}}}\n</tool_call>\n', "See.\n", [("f", QUOTES)]),
    ("hermes", '<tool_call>{"arguments": {"a":1}, "name": "g"}</tool_call> after', " after", [("g", '{"a":1}')]),
    ("hermes", r'<tool_call>{"name": "f", "arguments": "{\"a\": 1}"}</tool_call>', "", [("f", '{"a": 1}')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [("f", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": ""}</tool_call>', "", [("f", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": a=1}</tool_call>.', ".", [("f", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}, "arguments": {}}</tool_call>', "", [("f", '{"a": 1}')]),
    ("hermes", '<tool_call>{"arguments": null, "name": "f", "parameters": {"a": 1}}', "", [("f", '{"a": 1}')]),
    ("hermes", '<tool_call>{"name": ""} x', '<tool_call>{"name": ""} x', []),
    ("hermes", '<tool_call>{"name": "f"}}</tool_call>', "}", [("f", "{}")]),
    ("hermes", '<tool_call>{"x": {"name": "f"}}</tool_call> x', '<tool_call>{"x": {"name": "f"}}</tool_call> x', []),
    ("hermes", "<tool_call>no JSON</tool_call> x", "<tool_call>no JSON</tool_call> x", []),
    ("hermes", 'a <tool_call>{"name": "f", "arguments": {"a": [', "a ", [("f", '{"a": [')]),
    ("hermes", 'a <tool_call>{"name": "f', 'a <tool_call>{"name": "f', []),
    ("llama3_json", '\n {"name": "f", "parameters": null}; {"name": "f"}', "", [("f", "{}"), ("f", "{}")]),
    ("llama3_json", '{"type": "function", "name": "f", "parameters": {"a": 1}}', "", [("f", '{"a": 1}')]),
    ("llama3_json", '{"name": "Ann", "parameters": {}}', '{"name": "Ann", "parameters": {}}', []),
    ("llama3_json", '<|python_tag|>{"name": "f", "parameters": {"a": 1}}', "", [("f", '{"a": 1}')]),
    ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}, "id": "x"}]', "", [("f", '{"a": 1}')]),
    ("mistral", '[TOOL_CALLS]f[CALL_ID]a1B[ARGS]{"a": 1}[TOOL_CALLS]g{}', "", [("f", '{"a": 1}'), ("g", "{}")]),
    ("deepseek_v31", NO_ARGUMENTS, "", [("f", "{}")]),
    ("glm45", "<tool_call>f</tool_call>", "", [("f", "{}")]),
    ("glm45", "<tool_call>f<arg_key>n</arg_key><arg_value>5</arg_value></tool_call>", "", [("f", '{"n": 5}')]),
    ("qwen3_coder", "<function=f><parameter=s>5</parameter></function>", "", [("f", '{"s": "5"}')]),
    ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=n>\nNone\n</parameter>\n", "", [("f", '{"n": null}')]),
    ("qwen3_coder", "<function=f><parameter=l>True</parameter><parameter=z>x</parameter>", "",
     [("f", '{"l": true, "z": "x"}')]),
    ("qwen3_coder", "<function=f><parameter=s>\nRo", "", [("f", '{"s": "Ro')]),
    ("granite", '<tool_call>[{"name": "f", "arguments": {}}]', "", [("f", "{}")]),
    ("phi4_mini_json", 'functools[{"name": "f", "arguments": {}}]', "", [("f", "{}")]),
    ("cohere_command3", '<|START_ACTION|>[\n{"tool_call_id": "0", "tool_name": "f"}]<|END_ACTION|>', "", [("f", "{}")]),
    ("openai", "<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{}<|call|>", "", [("f", "{}")]),
    ("openai", '<|channel|>commentary to=functions.f<|message|>{"a"', "", [("f", '{"a"')]),
    ("pythonic", "[f(n='5', s=\"a\" 'b'), f()]", "", [("f", '{"n": 5, "s": "ab"}'), ("f", "{}")]),
    ("pythonic", "[f(s='a', 5)] x", ")] x", [("f", '{"s": "a"}')]),
    ("pythonic", "[f](http://x)", "[f](http://x)", []),
    ("pythonic", "[Ann(s='a')]", "[Ann(s='a')]", []),
    ("llama4_pythonic", '<|python_start|>{"name": "f", "parameters": {}}<|python_end|>', "", [("f", "{}")]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "plain", "calls"), MORE)
def test_they_are_found(name: str, text: str, plain: str, calls: list[tuple[str, str]]) -> None:
    for sizes in (None, 1, *map(Random, range(10))):
        found = read(BY_NAME[name], text, sizes)
        assert ([(part.name, part.arguments) for part in found.parts], found.text) == (calls, plain)


WITHOUT_MARKER = [
    ('```json\n{\n  "name": "f",\n  "arguments": {"a": 1}\n}\n```', "", [("f", '{"a": 1}')]),
    ('{"name": "f", "arguments": {"a": 1}}', "", [("f", '{"a": 1}')]),
    ('```\n[{"name": "f"}, {"name": "f"}]\n```', "", [("f", "{}"), ("f", "{}")]),
    ('```json\n{"name": "Ann", "age": 5}\n```', '```json\n{"name": "Ann", "age": 5}\n```', []),
    ('{"answer": 5}', '{"answer": 5}', []),
    ("```python\nf()\n```", "```python\nf()\n```", []),
    ('See:\n```json\n{"name": "f"}\n```', 'See:\n```json\n{"name": "f"}\n```', []),
    ('{"name": "f"}\n<tool_call>{"name": "g"}</tool_call>', "", [("f", "{}"), ("g", "{}")]),
]


@pytest.mark.parametrize(("text", "plain", "calls"), WITHOUT_MARKER)
def test_an_answer_that_is_a_call_of_a_tool_needs_no_marker(
    text: str, plain: str, calls: list[tuple[str, str]]
) -> None:
    """As Qwen2.5-Coder writes most of its calls."""
    for sizes in (None, 1, *map(Random, range(10))):
        found = read(HERMES.without_marker, text, sizes)
        assert ([(part.name, part.arguments) for part in found.parts], found.text) == (calls, plain)


def test_arguments_come_as_they_are_written() -> None:
    reader = CallReader(HERMES, TOOLS)
    written = ['<tool_call>{"name": "f", "arg', 'uments": {"city": "Par', 'is"', "}}</tool", "_call>"]
    parts = [reader.feed(text).parts for text in written]
    assert [[part.arguments for part in of] for of in parts] == [[""], ['{"city": "Par'], ['is"'], ["}"], []]
    (first,), (second,) = parts[0], parts[1]
    assert (first.name, second.name, second.id, second.index) == ("f", None, None, 0)


def test_a_text_between_tags_comes_as_it_is_written() -> None:
    reader = CallReader(BY_NAME["qwen3_coder"], TOOLS)
    written = ["<tool_call><function=f><parameter=s>", "\nRo", 'm"', "\n", "</parameter>", "</function>"]
    parts = ["".join(part.arguments for part in reader.feed(text).parts) for text in written]
    assert parts == ['{"s": ', '"Ro', 'm\\"', "", '"', "}"]


def test_nothing_follows_the_calls_that_are_wanted() -> None:
    reader = CallReader(HERMES, TOOLS, most=1)
    found = reader.feed(f"{HERMES.write([('f', {})])} and more")
    assert ([part.name for part in found.parts], found.text, reader.is_over) == (["f"], "", True)


def test_special_tokens_are_no_text() -> None:
    reader = CallReader(BY_NAME["mistral"], TOOLS, hidden=("[TOOL_CALLS]", "[ARGS]"))
    assert fed(reader, ("a [TOOL", "_CALLS] b [ARGS] c", " [ARGS]")).text == "a  b  c "


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("<tool_call>\n{{ tool_call | tojson }}\n</tool_call>", HERMES),
        ('{% if message.tool_calls %}\'{"name": "\' + f.name + \'", "parameters": \'', LLAMA3_JSON),
        ("<tool_call>\n<function=", BY_NAME["qwen3_coder"]),
        ("[TOOL_CALLS]{{ name }}[ARGS]", BY_NAME["mistral"]),
        ("'[TOOL_CALLS] ['", named_call_format("mistral", "[TOOL_CALLS]")),
        (f"{deepseek_marker('tool sep')}' + '```json'", BY_NAME["deepseek_v3"]),
        ("{{ tools }}", None),
    ],
)
def test_a_template_says_how_its_model_calls(template: str, expected: CallFormat | None) -> None:
    assert find_call_format(template) is expected


@OURS
def test_a_template_that_has_the_signs_of_a_format_shows_it(form: CallFormat) -> None:
    assert {find_call_format(" ".join(signs)) for signs in form.signs} == {form}


def test_settings_can_name_every_format() -> None:
    assert {form.name for form in FORMATS} == {*CALL_FORMATS.values()}
