"""Clients, agents and frameworks with a model of the family that most agents have: Qwen2.5-Coder of 0.5 billion.

Its markers of calls are tokens of a kind that SmolLM2 lacks. The other tests have most of the scripts; agents that edit
files or whose own prompts have thousands of tokens run here alone. So small a model may call nothing where it is free
to, or call again and again: only calls that are demanded are tried.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from tests.end_to_end.deployment import Deployment, deployed
from tests.real_models.others import CODER_SMALL
from tests.third_party import test_agents, test_clients, test_llm
from tests.third_party.conftest import NAME, Answer, Reports
from tests.third_party.environments import ONLY_IN_SOAK, Environment, NodeEnvironment
from tests.third_party.table import ON_QWEN, row, tries
from tests.third_party.test_agents import EVERYWHERE, Check, Client

pytestmark = ONLY_IN_SOAK

# What trials have in their names that demand calls or JSON.
DEMANDED = (
    *("a tool and the answer", "a streamed call", "as a tool", "TOOLS", "FUNCTIONS", "takes over", "ToolCalling"),
    *("a JSON schema", "JSON_SCHEMA", "an unknown model"),
)
NO_ANSWER = Answer("", {})  # these checks compare with none


@pytest.fixture(scope="module")
def deployment() -> Iterator[Deployment]:
    flags = "--served-model-name", NAME, "--max-model-len", "8192", "--pool-memory-mb", "512"  # Cline's prompt: 5,400
    with deployed(*flags, topology="1+1", model=CODER_SMALL.found()) as deployment:
        yield deployment


def _says(outcome: Mapping[str, Any], _: Answer) -> None:
    told = outcome["told"]
    assert told["answer"] if isinstance(told, dict) else told
    assert not isinstance(told, dict) or told["exit_code"] == 0


def _edits(outcome: Mapping[str, Any], _: Answer) -> None:
    assert outcome["told"]["exit_code"] == 0
    assert "a + b" in outcome["told"]["file"]


def _adds(outcome: Mapping[str, Any], _: Answer) -> None:
    assert "a + b" in outcome["told"]


def _calls(outcome: Mapping[str, Any], _: Answer) -> None:
    (call,) = outcome["told"]["calls"]
    assert call["name"] == "weather"


FORMED = {"chat": _says, "streaming": _says, "a JSON schema": EVERYWHERE["a JSON schema"]}
CALLED = {**FORMED, "a call": test_agents._calls, "a streamed call": test_agents._calls}
OF_DSPY = {"chat": _says, "a JSON schema": test_agents._is("odd", "even"), "a tool with native calls": _calls}
MIDDLES = ("the middle of a text", "the middle of a text (streamed)")
OF_MISTRAL = {"a demanded call": test_agents._calls, **dict.fromkeys(MIDDLES, _adds)}
AGENT = {"a question to the agent": _says}
CODING = "run_coding_agents.mjs"


def _with(package: str, version: str) -> Environment:
    return Environment(package.replace("-", "_"), (f"{package}=={version}",))


def _agent(package: str, version: str) -> NodeEnvironment:
    return NodeEnvironment(f"node_{package.rpartition('/')[2]}", (f"{package}@{version}",))


def _of_libraries() -> Iterator[Client]:
    for client in test_clients.CLIENTS[2:]:  # the newest openai, LiteLLM, LangChain
        yield Client(client.environment.pins[0].partition("==")[0], client.environment, client.script, CALLED)


def _of_frameworks() -> Iterator[Client]:
    for client in test_agents.CLIENTS:
        checks = {what: check for what, check in client.checks.items() if any(words in what for words in DEMANDED)}
        checks |= {"chat": _says} if "chat" in client.checks else {}
        yield Client(client.name, client.environment, client.script, checks, client.arguments)


UNKNOWN: dict[str, Check] = {"an unknown model": test_agents._is_raised("the model 'other' is not served here")}
CLIENTS = [
    *_of_libraries(),
    Client("llm", test_llm.LLM, "run_llm.py", FORMED, ("{url}/none",)),  # nothing there: its calls are not demanded
    Client("DSPy", _with("dspy", "3.4.1"), "run_dspy.py", {**OF_DSPY, **UNKNOWN}),
    Client("mistralai", _with("mistralai", "3.7.0"), "run_mistral.py", {**FORMED, **OF_MISTRAL, **UNKNOWN}),
    Client("aider", _with("aider-chat", "0.86.2"), "run_aider.py", {"an edit of a file": _edits}),
    Client("Continue (cn)", _agent("@continuedev/cli", "1.5.47"), CODING, AGENT, ("@continuedev/cli",)),
    Client("Cline (cline)", _agent("cline", "3.0.65"), CODING, AGENT, ("cline",)),
    Client(
        "Open WebUI",
        _with("open-webui", "0.12.4"),
        "run_open_webui.py",
        {"models": test_agents._is([NAME]), "chat": _says},
    ),
    *_of_frameworks(),
]


def _ran(report: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what came of a script's trials, whichever way it reports them."""
    if "ran" in report:
        return dict(report["ran"])
    word = "text" if "text" in report["whole"] else "said"
    told = {"chat": report["whole"][word], "streaming": report["streamed"][word], "a JSON schema": report["schema"]}
    if word == "said":  # by llm, a command
        told["a JSON schema"] = json.loads(report["schema"]["said"])
    else:
        told |= {"a call": report["call"], "a streamed call": report["streamed_call"]}
    return {what: {"told": it} for what, it in told.items()}


def _trials() -> Iterator[Any]:
    for client in CLIENTS:
        for what in client.checks:
            marks = [row(f"{client.name}{ON_QWEN}", client.version), tries(what)]
            yield pytest.param(client, what, id=f"{client.name}: {what}", marks=marks)


@pytest.mark.parametrize(("client", "what"), list(_trials()))
def test_a_client_gets_what_it_demands(client: Client, what: str, reports: Reports) -> None:
    outcome = _ran(reports(client))[what]
    print(outcome)
    client.checks[what](outcome, NO_ANSWER)
