"""One deployment for all clients, and the answers that it gives to plain HTTP."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import httpx
import pytest

from alignedserve.architectures.model_source import resolve
from tests.end_to_end.deployment import Deployment, deployed
from tests.smollm2 import smollm2
from tests.third_party import table
from tests.third_party.environments import INSTALL_S, SCRIPT_S

NAME = "smollm2"
QUESTION = "List the numbers from 1 to 8."  # the model is sure of each token of its answer, and ends it
MOST_TOKENS = 6144


@dataclass(frozen=True)
class Answer:
    text: str
    usage: dict[str, int]


def pytest_itemcollected(item: pytest.Item) -> None:
    table.name_in(item)
    # the first test of a client makes its environment
    item.add_marker(pytest.mark.timeout(INSTALL_S + SCRIPT_S))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    by_outcome = terminalreporter.stats
    reports = [report for outcome in ("passed", "failed", "error") for report in by_outcome.get(outcome, ())]
    if ran := table.keep(reports):
        terminalreporter.section("what ran of other people's clients")
        terminalreporter.write(ran)


@pytest.fixture(scope="package")
def deployment() -> Iterator[Deployment]:
    """Yield a deployment of SmolLM2 in fp32: in bf16 greedy words may depend on what runs beside a request."""
    # agents' own prompts have thousands of tokens
    flags = "--served-model-name", NAME, "--max-model-len", str(MOST_TOKENS), "--pool-memory-mb", "512"
    with deployed(*flags, topology="1+1", model=smollm2()) as deployment:
        yield deployment


Reports: TypeAlias = Callable[[Any], Any]  # what a client's script reports


@pytest.fixture(scope="module")
def reports(deployment: Deployment, tmp_path_factory: pytest.TempPathFactory) -> Reports:
    """Return what makes a client's script report; each runs once."""
    said: dict[str, Any] = {}

    def report(client: Any) -> Any:
        if client.name not in said:
            said[client.name] = None
            url = f"{deployment.url}/v1"
            arguments = url, NAME, QUESTION, *(argument.format(url=url) for argument in client.arguments)
            said[client.name] = client.environment.run(client.script, *arguments, home=tmp_path_factory.mktemp("home"))
        assert said[client.name] is not None, "its script failed, as the first test of this client shows"
        return said[client.name]

    return report


@pytest.fixture(scope="package")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder that a server makes of the GGUF file: clients that count tokens find the tokenizer there."""
    return resolve(str(smollm2()), str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(scope="package")
def plain(deployment: Deployment) -> Answer:
    """Return the greedy answer, which every client must show unchanged."""
    asked = {"model": NAME, "messages": [{"role": "user", "content": QUESTION}], "temperature": 0}
    with httpx.Client(base_url=deployment.url, timeout=60, trust_env=False) as http:
        body = http.post("/v1/chat/completions", json=asked).raise_for_status().json()
        streamed = http.post("/v1/chat/completions", json={**asked, "stream": True}).raise_for_status().text
    text = body["choices"][0]["message"]["content"]
    # counts only, without the details
    usage = {name: count for name, count in body["usage"].items() if isinstance(count, int)}
    assert text == "1, 2, 3, 4, 5, 6, 7, 8"
    assert "".join(_pieces(streamed)) == text
    return Answer(text, usage)


def _pieces(events: str) -> Iterator[str]:
    for line in events.splitlines():
        if line.startswith("data: ") and line != "data: [DONE]":
            chunk: Any = json.loads(line.removeprefix("data: "))
            yield chunk["choices"][0]["delta"].get("content", "")
