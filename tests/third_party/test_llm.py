"""Tests that `llm`, a command for terminals, finds in our API what it looks for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.end_to_end.deployment import Deployment, deployed
from tests.third_party import calling_model
from tests.third_party.conftest import NAME, QUESTION, Answer
from tests.third_party.environments import ONLY_IN_SOAK, Environment
from tests.third_party.table import row, tries

LLM = Environment("llm", ("llm==0.36",))

pytestmark = [ONLY_IN_SOAK, row("llm", "0.36")]


@pytest.fixture(scope="module")
def caller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """Yield a deployment whose model calls tools by itself, since `llm` cannot demand a call."""
    model = calling_model.made(tmp_path_factory.mktemp("caller"))
    with deployed("--served-model-name", NAME, model=model) as deployment:
        yield deployment


@pytest.fixture(scope="module")
def report(deployment: Deployment, caller: Deployment, tmp_path_factory: pytest.TempPathFactory) -> Any:
    home = tmp_path_factory.mktemp("llm")
    return LLM.run("run_llm.py", f"{deployment.url}/v1", NAME, QUESTION, f"{caller.url}/v1", home=home)


def test_it_has_the_version_that_was_asked_for(report: Any) -> None:
    assert report["version"] == "0.36"


@tries("chat")
def test_it_chats(report: Any, plain: Answer) -> None:
    check_answer(report["whole"], plain)
    assert report["again"]["exit_code"] == 0
    assert report["again"]["said"]


@tries("streaming")
def test_it_streams(report: Any, plain: Answer) -> None:
    check_answer(report["streamed"], plain)


def check_answer(told: Any, plain: Answer) -> None:
    usage = f"Token usage: {plain.usage['prompt_tokens']} input, {plain.usage['completion_tokens']} output"
    assert (told["said"], told["exit_code"]) == (plain.text, 0)
    assert told["logged"].startswith(usage)  # it may go on with how many were cached


@tries("a JSON schema")
def test_it_gets_what_its_schema_says(report: Any) -> None:
    schema = json.loads(report["schema"]["said"])
    assert 1 <= schema["number"] <= 99
    assert schema["word"] in ("odd", "even")


@tries("tools")
@pytest.mark.parametrize("name", ["called", "called_whole"])
def test_it_runs_tools(report: Any, name: str) -> None:
    called = report[name]
    assert (called["said"], called["exit_code"]) == ("It rains there.", 0)
    assert "Tool call: weather({'city': 'Rome'})" in called["logged"]


@tries("an unknown model")
@pytest.mark.parametrize("name", ["no_such_model", "no_such_model_whole"])
def test_it_says_what_is_wrong(report: Any, name: str) -> None:
    assert report[name]["exit_code"] != 0
    assert "the model 'other' is not served here" in report[name]["logged"]
