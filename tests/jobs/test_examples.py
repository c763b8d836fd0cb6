"""Tests that the bodies in `examples/` are what the API takes, and that the batch asks about each document."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema

from alignedserve.gateway.openai.strict import parse_body
from alignedserve.gateway.openai.types import ChatRequest
from alignedserve.jobs.lines import LineRules, check_file
from alignedserve.store.job import Endpoint

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
MODEL = "smollm2"


def lines_of(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (EXAMPLES / name).read_text(encoding="utf-8").splitlines()]


def test_the_batch_is_a_valid_file_for_the_model() -> None:
    rules = LineRules(Endpoint.CHAT, lambda model: model == MODEL, most_lines=100, most_bytes=10_000)
    with (EXAMPLES / "extraction_batch.jsonl").open("rb") as file:
        assert check_file(file, rules) == (len(lines_of("documents.jsonl")), MODEL, ())


def test_every_body_is_taken_as_it_is() -> None:
    bodies = [*lines_of("chats.jsonl"), *(line["body"] for line in lines_of("extraction_batch.jsonl"))]
    assert {parse_body(ChatRequest, json.dumps(body).encode()).model for body in bodies} == {MODEL}


def test_the_batch_asks_for_the_facts_of_each_document() -> None:
    for document, line in zip(lines_of("documents.jsonl"), lines_of("extraction_batch.jsonl"), strict=True):
        assert (line["custom_id"], line["body"]["messages"][-1]["content"]) == (document["id"], document["text"])
        jsonschema.validate(document["facts"], line["body"]["response_format"]["json_schema"]["schema"])
        assert all(str(fact) in document["text"] for fact in document["facts"].values())
