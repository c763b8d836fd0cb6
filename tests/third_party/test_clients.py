"""Tests that libraries for OpenAI's API find in ours what they look for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.deployment import Deployment
from tests.third_party.conftest import MOST_TOKENS, NAME, QUESTION, Answer
from tests.third_party.environments import ONLY_IN_SOAK, Environment
from tests.third_party.table import row, tries

pytestmark = ONLY_IN_SOAK


@dataclass(frozen=True)
class Client:
    environment: Environment
    script: str
    no_such_model: str  # the error that the client raises, with its module
    too_long: str


def _openai(version: str) -> Client:
    """Make a client for one major version: the current one, the one before, and an older one that many users still
    have."""
    name = f"openai_{version.partition('.')[0]}"
    errors = "openai.NotFoundError", "openai.BadRequestError"
    return Client(Environment(name, (f"openai=={version}",)), "ask_openai.py", *errors)


CLIENTS = [
    _openai("1.109.1"),
    _openai("2.54.0"),
    _openai("3.54.0"),
    Client(
        Environment("litellm", ("litellm==1.106.2", "mcp")),  # litellm imports mcp without requiring it
        "ask_litellm.py",
        "litellm.exceptions.NotFoundError",
        "litellm.exceptions.ContextWindowExceededError",
    ),
    Client(
        Environment("langchain_openai", ("langchain-openai==1.7.3",)),
        "ask_langchain.py",
        "langchain_openai.chat_models.base.OpenAIModelNotFoundError",
        "langchain_openai.chat_models.base.OpenAIContextOverflowError",
    ),
]


def _row(client: Client) -> object:
    """Return the client as a parameter of tests, with its row of the table."""
    package, _, version = client.environment.pins[0].partition("==")
    return pytest.param(client, id=client.environment.name, marks=row(package, version))


@pytest.fixture(scope="module", params=[_row(client) for client in CLIENTS])
def client(request: pytest.FixtureRequest) -> Client:
    chosen: Client = request.param
    return chosen


@pytest.fixture(scope="module")
def report(client: Client, deployment: Deployment, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the client's report, in the shape that scripts/report.py gives it."""
    home = tmp_path_factory.mktemp(client.environment.name)
    return client.environment.run(client.script, f"{deployment.url}/v1", NAME, QUESTION, home=home)


def test_the_client_has_the_version_that_was_asked_for(client: Client, report: Any) -> None:
    assert client.environment.pins[0].endswith(f"=={report['version']}")


@tries("chat")
def test_it_chats(report: Any, plain: Answer) -> None:
    assert report["whole"] == {"text": plain.text, "finish": "stop", "usage": plain.usage}


@tries("streaming")
def test_it_streams_the_same(report: Any, plain: Answer) -> None:
    assert report["streamed"] == {"text": plain.text, "finish": "stop", "usage": plain.usage}
    assert report["pieces"] > 1


@tries("a JSON schema")
def test_it_gets_what_its_schema_says(report: Any) -> None:
    assert set(report["schema"]) == {"number", "word"}
    assert 1 <= report["schema"]["number"] <= 99
    assert report["schema"]["word"] in ("odd", "even")


@tries("tools")
@pytest.mark.parametrize("name", ["call", "streamed_call"])
def test_it_reads_calls_of_tools(report: Any, name: str) -> None:
    assert report[name]["name"] == "weather"
    assert report[name]["arguments"] in ({"city": "Rome"}, {"city": "Oslo"})


@tries("other options")
def test_openais_own_asks_for_several(client: Client, report: Any) -> None:
    if not client.environment.name.startswith("openai_"):
        pytest.skip("the others ask through it")
    several = report["several"]
    assert several["chat"] == [0, 1, 2]
    assert all(1 <= count <= 4 for count in several["entries"])
    assert several["text"] == [0, 1, 2, 3]
    assert several["first"] == [None] * 4
    assert several["parsed"] in ("odd", "even")
    assert (several["forced"], several["ids"]) == (6, [3, 3])
    assert several["usage_so_far"] == sorted(several["usage_so_far"])
    assert 1 <= several["usage_so_far"][-1] <= 4
    assert (several["tier"], several["biased"], several["max_model_len"]) == ("default", True, MOST_TOKENS)


@tries("an unknown model")
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_it_raises_its_own_404(client: Client, report: Any, stream: bool) -> None:
    raised = report["no_such_model_streamed" if stream else "no_such_model"]
    assert (raised["kind"], raised["status"]) == (client.no_such_model, 404)
    assert "other" in raised["message"]


@tries("a prompt that is too long")
def test_it_knows_what_is_too_long(client: Client, report: Any) -> None:
    raised = report["too_long"]
    assert (raised["kind"], raised["status"]) == (client.too_long, 400)
    assert "maximum context length" in raised["message"]


@tries("a batch")
@pytest.mark.parametrize("client", [_row(client) for client in CLIENTS[:3]], indirect=True)
def test_openais_drives_a_batch(client: Client, deployment: Deployment, plain: Answer, tmp_path: Path) -> None:
    told = client.environment.run("batch_with_openai.py", f"{deployment.url}/v1", NAME, QUESTION, home=tmp_path)
    assert client.environment.pins[0].endswith(f"=={told.pop('version')}")
    counts = {"completed": 1, "failed": 0, "total": 1}
    assert told == {
        "status": "completed",
        "counts": counts,
        "listed": True,
        "text": plain.text,
        "deleted": True,
        "cancelled": True,
    }
