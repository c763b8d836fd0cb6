"""Tests that tool calls are found in a model's text, however the text is cut into pieces; other text stays text."""

from __future__ import annotations

from random import Random

import pytest

from alignedserve.text.calls.formats import HERMES as HERMES_FORMAT
from alignedserve.text.calls.formats import LLAMA3_JSON, CallFormat, find_call_format
from alignedserve.text.calls.parts import CallText
from alignedserve.text.calls.reading import CallReader, HermesCalls, Llama3Calls

QUOTES = r'{"a": "x}\"{", "b": [1, {"c": 2}]}'
HERMES = [
    (f'See.\n<tool_call>\n{{"name": "f", "arguments": {QUOTES}}}\n</tool_call>\n', "See.\n", [("f", QUOTES)]),
    (
        '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\n<tool_call>\n{"arguments": {"a":1}, "name": "g"}'
        "\n</tool_call>",
        "",
        [("f", "{}"), ("g", '{"a":1}')],
    ),
    ("nothing < here <tool", "nothing < here <tool", []),
    (r'<tool_call>{"name": "f", "arguments": "{\"a\": 1}"}</tool_call> after', " after", [("f", '{"a": 1}')]),
    ('<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [("f", "{}")]),
    ('<tool_call>{"name": "f"}</tool_call>', "", [("f", "")]),
    ('<tool_call>{"x": {"name": "f"}}</tool_call>', '{"x": {"name": "f"}}', []),
    ("<tool_call>no JSON</tool_call> x", "no JSON x", []),
    ('a <tool_call>{"name": "f", "arguments": {"a": [', "a ", [("f", '{"a": [')]),
    ('a <tool_call>{"name": "f', 'a {"name": "f', []),
]
LLAMA3 = [
    ('{"name": "f", "parameters": {"a": 1}}', "", [("f", '{"a": 1}')]),
    (
        '\n {"name": "f", "parameters": null}; {"name": "g", "parameters": {"z":"}"}}',
        "",
        [("f", "{}"), ("g", '{"z":"}"}')],
    ),
    ('{"type": "function", "name": "f", "parameters": {"a": 1}}', "", [("f", '{"a": 1}')]),
    ('{"answer": 1} and more', '{"answer": 1} and more', []),
    ('plain {"name": "f", "parameters": {}}', 'plain {"name": "f", "parameters": {}}', []),
]
CASES = [*((HermesCalls, *case) for case in HERMES), *((Llama3Calls, *case) for case in LLAMA3)]


def read(reader: CallReader, text: str, draw: Random | None) -> CallText:
    found = CallText()
    while text:
        size = draw.randint(1, 7) if draw else len(text)
        found, text = found + reader.feed(text[:size]), text[size:]
    return found + reader.flush()


@pytest.mark.parametrize(("kind", "text", "plain", "calls"), CASES)
def test_they_are_found(kind: type[CallReader], text: str, plain: str, calls: list[tuple[str, str]]) -> None:
    for draw in (None, *map(Random, range(40))):
        found = read(kind(), text, draw)
        assert found.text == plain
        assert [(part.name, part.arguments) for part in found.parts] == calls
        assert [part.index for part in found.parts] == [*range(len(calls))]
        assert len({part.id for part in found.parts}) == len(calls)


def test_arguments_come_as_they_are_written() -> None:
    reader = HermesCalls()
    written = ['<tool_call>{"name": "f", "arg', 'uments": {"city": "Par', 'is"', "}}</tool", "_call>"]
    parts = [reader.feed(text).parts for text in written]
    assert [[part.arguments for part in of] for of in parts] == [[""], ['{"city": "Par'], ['is"'], ["}"], []]
    (first,), (second,) = parts[0], parts[1]
    assert (first.name, second.name, second.id, second.index) == ("f", None, None, 0)


def test_of_more_than_are_wanted_the_others_are_left_out() -> None:
    text = "".join(f'<tool_call>{{"name": "{name}", "arguments": {{}}}}</tool_call>' for name in "fgh")
    assert [part.name for part in read(HermesCalls(1), text, None).parts] == ["f"]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("<tool_call>\n{{ tool_call | tojson }}\n</tool_call>", HERMES_FORMAT),
        ('{% if message.tool_calls %}\'{"name": "\' + f.name + \'", "parameters": \'', LLAMA3_JSON),
        ("<tool_call>\n<function=", None),
        ("[TOOL_CALLS]{{ message.tool_calls }}", None),
    ],
)
def test_a_template_says_how_its_model_calls(template: str, expected: CallFormat | None) -> None:
    assert find_call_format(template) is expected
