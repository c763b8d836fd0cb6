"""Tests that the examples are what the generator makes, and that their APIs accept them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from make_examples import DOCUMENTS, FILES, as_jsonl

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.mark.parametrize("name", FILES)
def test_examples_are_up_to_date(name: str) -> None:
    assert (EXAMPLES / name).read_text(encoding="utf-8") == as_jsonl(FILES[name]()), "run `make examples`"


def test_the_batch_asks_about_each_document_once() -> None:
    documents = [json.loads(line) for line in (EXAMPLES / "documents.jsonl").read_text().splitlines()]
    lines = [json.loads(line) for line in (EXAMPLES / "extraction_batch.jsonl").read_text().splitlines()]
    assert len(documents) == DOCUMENTS
    assert [line["custom_id"] for line in lines] == [document["id"] for document in documents]
    for document, line in zip(documents, lines, strict=True):
        assert set(line) == {"custom_id", "method", "url", "body"}
        assert (line["method"], line["url"]) == ("POST", "/v1/chat/completions")
        assert document["text"] in line["body"]["messages"][-1]["content"]
