"""Agents and frameworks, and the interfaces that they are built on: each shows what plain HTTP shows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.third_party.conftest import NAME, Answer, Reports
from tests.third_party.environments import ONLY_IN_SOAK, Environment, NodeEnvironment
from tests.third_party.table import row, tries

pytestmark = ONLY_IN_SOAK

Check = Callable[[Mapping[str, Any], Answer], None]  # of what came of a trial


def _shows(outcome: Mapping[str, Any], plain: Answer) -> None:
    assert outcome["told"] == plain.text


def _streams(outcome: Mapping[str, Any], plain: Answer) -> None:
    assert "".join(outcome["told"]) == plain.text
    assert len(outcome["told"]) > 1


def _calls_and_answers(outcome: Mapping[str, Any], _: Answer) -> None:
    assert outcome["told"]["asked"] in (["Rome"], ["Oslo"])
    assert outcome["told"]["answer"]


def _counts_the_prompt(outcome: Mapping[str, Any], plain: Answer) -> None:
    assert outcome["told"] == plain.usage["prompt_tokens"]


def _calls(outcome: Mapping[str, Any], _: Answer) -> None:
    assert outcome["told"] in [{"name": "weather", "arguments": {"city": city}} for city in ("Rome", "Oslo")]


def _is_a_number(outcome: Mapping[str, Any], _: Answer) -> None:
    assert set(outcome["told"]) == {"number", "word"}
    assert 1 <= outcome["told"]["number"] <= 99
    assert outcome["told"]["word"] in ("odd", "even")


def _has_two(outcome: Mapping[str, Any], _: Answer) -> None:
    assert len(outcome["told"]) == 2


def _is_raised(*words: str) -> Check:
    def check(outcome: Mapping[str, Any], _: Answer) -> None:
        assert [word for word in words if word not in outcome["raised"]] == []

    return check


def _is(*told: object) -> Check:
    """Check that one of these was told."""

    def check(outcome: Mapping[str, Any], _: Answer) -> None:
        assert outcome["told"] in told

    return check


def _has(**parts: object) -> Check:
    """Check that something was answered, and these parts of what was told."""

    def check(outcome: Mapping[str, Any], _: Answer) -> None:
        assert outcome["told"]["answer"]
        assert {name: outcome["told"][name] for name in parts} == parts

    return check


EVERYWHERE: Mapping[str, Check] = {
    "chat": _shows,
    "streaming": _streams,
    "a tool and the answer to it": _calls_and_answers,
    "a tool with auto": _has(),
    "a JSON schema": _is_a_number,
    "an unknown model": _is_raised("404", "the model 'other' is not served here"),
}
OF_AGENTS = {
    **EVERYWHERE,
    "a second agent that takes over": _has(last="second"),
    "a conversation": _has(roles=["user", "assistant"] * 2),
}
OF_PYDANTIC = {
    **EVERYWHERE,
    "a JSON schema as a tool": _is_a_number,
    "a conversation": _has(roles=["request", "response"] * 2),
}
STRICT_MODES = ("TOOLS", "TOOLS_STRICT", "FUNCTIONS", "JSON_SCHEMA", "MD_JSON", "RESPONSES_TOOLS")
LOOSE_MODES = ("JSON", "JSON_O1")  # the prompt alone says what an object has
WAYS = ("", " (streamed)")
NEITHER = ("a tool with auto",)  # of clients that are no frameworks


def _but(checks: Mapping[str, Check], *names: str) -> dict[str, Check]:
    return {name: check for name, check in checks.items() if name not in names}


@dataclass(frozen=True)
class Client:
    name: str  # in the table
    environment: Environment | NodeEnvironment
    script: str
    checks: Mapping[str, Check] = field(repr=False)  # by what the script tries
    arguments: tuple[str, ...] = ()  # of the script, besides three; {url} is where the server is

    @property
    def version(self) -> str:
        return self.environment.pins[0].replace("==", "@").rpartition("@")[2]


AGENTS = Environment("openai_agents", ("openai-agents==0.24.0",))
PYDANTIC = Environment("pydantic_ai", ("pydantic-ai-slim[openai]==2.68.0",))
LLAMA_INDEX = "llama-index-llms-openai-like==0.8.1", "llama-index-llms-openai==0.8.3"
CLIENTS = [
    Client(
        "openai (Responses)",
        Environment("openai_3", ("openai==3.54.0",)),
        "respond_with_openai.py",
        {
            **_but(EVERYWHERE, *NEITHER),
            "a streamed call of a tool": _calls,
            "a conversation that the server keeps": _has(listed=["And again?"]),
            "a response in the background": _has(status="completed"),
        },
    ),
    Client(
        "anthropic",
        Environment("anthropic", ("anthropic==2.12.0",)),
        "message_with_anthropic.py",
        {
            **_but(EVERYWHERE, *NEITHER, "a JSON schema"),
            "a streamed call of a tool": _calls,
            "a JSON schema": _is({"word": "odd"}, {"word": "even"}),
            "a system text": _has(),
            "stop sequences": _is("4"),
            "counts of tokens": _counts_the_prompt,
            "models": _is([NAME]),
            "a prompt that is too long": _is_raised("BadRequestError", "maximum context length"),
        },
    ),
    Client(
        "openai-agents (Responses)",
        AGENTS,
        "run_openai_agents.py",
        {**OF_AGENTS, "a conversation that the server keeps": _has()},
        ("responses",),
    ),
    Client("openai-agents (chat completions)", AGENTS, "run_openai_agents.py", OF_AGENTS, ("chat",)),
    Client(
        "AutoGen",
        Environment("autogen", ("autogen-agentchat==0.7.5", "autogen-ext[openai]==0.7.5")),
        "run_autogen.py",
        {
            **EVERYWHERE,
            "an assistant": _has(messages=["user", "plain"]),
            "an assistant (streamed)": _has(same=True),
            "OpenAIAgent (Responses)": _has(),
            "a team": _is({"messages": ["user", "first", "second"]}),
        },
    ),
    Client(
        "pydantic-ai (chat completions)",
        PYDANTIC,
        "run_pydantic_ai.py",
        {**OF_PYDANTIC, "a JSON object": _is({"number": None})},
        ("chat",),
    ),
    Client("pydantic-ai (Responses)", PYDANTIC, "run_pydantic_ai.py", OF_PYDANTIC, ("responses",)),
    Client(
        "instructor",
        Environment("instructor", ("instructor==1.17.0",)),
        "run_instructor.py",
        {
            **{f"mode {mode}{way}": _is_a_number for mode in STRICT_MODES for way in WAYS},
            **{f"mode {mode}{way}": _is({"number": None}, {"number": 1}) for mode in LOOSE_MODES for way in WAYS},
            **{f"mode RESPONSES_TOOLS_WITH_INBUILT_TOOLS{way}": _is_a_number for way in WAYS},
            "mode PARALLEL_TOOLS": _is_a_number,
            "an answer that is asked for again": _has_two,
            "an unknown model": EVERYWHERE["an unknown model"],
        },
    ),
    Client(
        "LangGraph",
        Environment("langgraph", ("langgraph==1.2.22", "langchain-openai==1.7.3", "langchain==1.4.7")),
        "run_langgraph.py",
        {
            **EVERYWHERE,
            "a JSON schema beside a tool": _is_a_number,
            "a JSON schema as a tool": _is_a_number,
            "a conversation": _has(roles=["human", "ai"] * 2),
            "a broken call that comes back": _has(),
            "chat by the Responses API": _shows,
        },
    ),
    Client(
        "LlamaIndex",
        Environment("llama_index", LLAMA_INDEX),
        "run_llama_index.py",
        {
            **EVERYWHERE,
            "a JSON schema as a tool": _is_a_number,
            "completion": _has(),
            "chat by the Responses API": _shows,
        },
    ),
    Client(
        "Haystack",
        Environment("haystack", ("haystack-ai==3.4.0",)),
        "run_haystack.py",
        {
            **EVERYWHERE,
            "a name in a message": _shows,
            "chat by the Responses API": _shows,
            "a tool by the Responses API": _calls_and_answers,
        },
    ),
    Client(
        "smolagents",
        Environment("smolagents", ("smolagents[openai]==1.26.0",)),
        "run_smolagents.py",
        {
            **_but(EVERYWHERE, "a tool and the answer to it", "a tool with auto", "a JSON schema"),
            **{f"{agent}{way}": _calls_and_answers for agent in ("CodeAgent", "ToolCallingAgent") for way in WAYS},
            "CodeAgent by a JSON schema": _is({"wrote": ["code", "thought"]}),
        },
    ),
]


def _trials() -> Iterator[Any]:
    for client in CLIENTS:
        for what in client.checks:
            yield pytest.param(
                client, what, id=f"{client.name}: {what}", marks=[row(client.name, client.version), tries(what)]
            )


@pytest.mark.parametrize(("client", "what"), list(_trials()))
def test_a_client_shows_what_plain_http_shows(client: Client, what: str, reports: Reports, plain: Answer) -> None:
    outcome = reports(client)["ran"][what]
    print(outcome)
    client.checks[what](outcome, plain)


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)
def test_every_trial_of_its_script_has_a_check(client: Client, reports: Reports) -> None:
    report = reports(client)
    assert report["version"] == client.version
    assert set(report["ran"]) == set(client.checks)
