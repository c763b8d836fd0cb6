"""Tests of the table of families: a row says what works, and the page has a row for each family that is served."""

from __future__ import annotations

import re

import transformers

from tests.engine.family_table import FEATURES, OWN, PAGE, refused, rows, table
from tests.engine.transformers_families import SERVED


def test_a_row_says_what_works_and_why_the_rest_is_refused() -> None:
    (qwen3, gpt2) = rows(["qwen3", "gpt2"])
    assert qwen3.cells[:2] == ("qwen3", "our module")
    assert gpt2.cells[:2] == ("gpt2", "transformers")
    why = dict(zip(FEATURES, gpt2.refusals, strict=True))
    assert why["KV in int8"] is None
    assert "tensor_parallel_size" in str(why["two ranks"])
    assert f"| gpt2 | transformers | {' | '.join('yes' if reason is None else 'no' for reason in gpt2.refusals)} |" in (
        table([qwen3, gpt2])
    )


def test_the_page_names_what_is_refused() -> None:
    assert refused() in PAGE.read_text(encoding="utf-8")


def test_the_page_has_a_row_for_each_family() -> None:
    page = PAGE.read_text(encoding="utf-8")
    served = set(re.findall(r"^\| ([\w-]+) \|", page, re.MULTILINE))
    assert {*OWN, *(family for family in SERVED if family in transformers.CONFIG_MAPPING)} <= served
    assert all(feature in page for feature in FEATURES)
