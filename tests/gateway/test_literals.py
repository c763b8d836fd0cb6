"""Values that models write as Python does are read as Python reads them, and written in JSON."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator

import pytest

from alignedserve.text.calls import values
from alignedserve.text.calls.values import NoValue, coerced, read_literal, to_json


@pytest.mark.parametrize(
    "written",
    [
        r"'\x41\u00e9\U0001F600 \n\t\r\b\f\v\a\0 \012 \' \" \\'",
        r'"\U0010FFFF" "beside" ' + "'it'",
        "'over \\\nlines'",
        "{'a': [1, -2.5, 1e3, True, None], 'b': {'c': ('x', 1), 'd': []}}",
        "[(1, 2), {'a': 'b',},]",
    ],
)
def test_literals_are_read_as_python_reads_them(written: str) -> None:
    assert json.dumps(read_literal(written)) == json.dumps(ast.literal_eval(written))


def test_a_code_that_no_character_has_stays_as_it_is() -> None:
    assert read_literal(r"'\U00110000 \x4'") == r"\U00110000 \x4"


@pytest.mark.parametrize(
    ("written", "types", "value"),
    [
        ("08", "integer", 8),
        ("-007", "number", -7),
        ("[08, 9]", "array", [8, 9]),
        ("00.5", "number", 0.5),
        ("08", "string", "08"),
    ],
)
def test_zeros_before_a_number_change_nothing_but_in_a_text(written: str, types: str, value: object) -> None:
    """Models write months and hours so, which Python refuses."""
    assert coerced(written, frozenset({types})) == value


def test_a_literal_of_very_many_tokens_is_none() -> None:
    """One of 400,000 took 190 MB of a gateway, and all its streams stood still for a second."""
    assert len(read_literal(f"[{'1,' * 9_000}]")) == 9_000
    with pytest.raises(NoValue):
        read_literal(f"[{'1,' * 10_000}]")


def test_json_s_words_count_too_and_nothing_is_computed() -> None:
    assert read_literal("[true, false, null, None]") == [True, False, None, None]
    for written in ("1 + 1", "f()", "'a' 1", "[1 2]", "{1: 2, [3]: 4}", "{'a' 1}", "[" * 65 + "]" * 65):
        with pytest.raises(NoValue):
            read_literal(written)


def test_no_token_is_looked_for_behind_what_is_no_literal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind an open quote each look would take time for all of the text: 16,000 of them took six seconds."""
    looks = list[str]()

    class Counted:
        def finditer(self, text: str) -> Iterator[re.Match[str]]:
            for found in token.finditer(text):
                looks.append(found[0])
                yield found

    token = values._TOKEN
    monkeypatch.setattr(values, "_TOKEN", Counted())
    with pytest.raises(NoValue):
        read_literal("\\'" * 1000)
    assert len(looks) < 10


@pytest.mark.parametrize(("code", "is_half"), [(0xD7FF, False), (0xD800, True), (0xDFFF, True), (0xE000, False)])
def test_half_a_character_is_written_as_an_escape(code: int, is_half: bool) -> None:
    assert to_json([chr(code)]) == json.dumps([chr(code)], ensure_ascii=is_half)
