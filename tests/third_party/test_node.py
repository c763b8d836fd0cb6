"""Tests that clients for Node find in our APIs what they look for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from tests.end_to_end.deployment import Deployment
from tests.third_party.conftest import NAME, QUESTION, Answer
from tests.third_party.environments import ONLY_IN_SOAK, NodeEnvironment
from tests.third_party.table import row, tries

pytestmark = ONLY_IN_SOAK

SDK = "ai@7.0.173", "zod@4.6.7"
ERRORS = "NotFoundError", "BadRequestError"


@dataclass(frozen=True)
class Client:
    environment: NodeEnvironment
    script: str
    no_such_model: str  # the class of the error that the client raises
    too_long: str
    base: str = "/v1"  # where the client's base URL ends
    stop: str = "stop"  # the client's word for an answer that ended by itself

    @property
    def package(self) -> str:
        return self.environment.pins[0].rpartition("@")[0]

    @property
    def version(self) -> str:
        return self.environment.pins[0].rpartition("@")[2]


CLIENTS = [
    Client(NodeEnvironment("node_openai", ("openai@7.57.0", "zod@4.6.7")), "ask_openai.mjs", *ERRORS),
    Client(
        NodeEnvironment("node_ai_sdk", ("@ai-sdk/openai-compatible@3.0.92", *SDK)),
        "ask_ai_sdk.mjs",
        *["APICallError"] * 2,
    ),
    Client(
        NodeEnvironment("node_ai_sdk_openai", ("@ai-sdk/openai@4.0.118", *SDK)), "ask_ai_sdk.mjs", *["APICallError"] * 2
    ),
    Client(
        NodeEnvironment("node_anthropic", ("@anthropic-ai/sdk@1.12.0",)),
        "message_with_anthropic.mjs",
        *ERRORS,
        base="",
        stop="end_turn",
    ),
]


def _row(client: Client) -> object:
    """Return the client as a parameter of tests, with its row of the table."""
    beside = [pin.replace("@", " ") for pin in client.environment.pins if pin.startswith("ai@")]
    name = f"{', '.join([client.package, *beside])} (Node)"
    return pytest.param(client, id=client.environment.name, marks=row(name, client.version))


@pytest.fixture(scope="module", params=[_row(client) for client in CLIENTS])
def client(request: pytest.FixtureRequest) -> Client:
    chosen: Client = request.param
    return chosen


@pytest.fixture(scope="module")
def report(client: Client, deployment: Deployment, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the client's report, in the shape that scripts/node/report.mjs gives it."""
    home = tmp_path_factory.mktemp(client.environment.name)
    arguments = f"{deployment.url}{client.base}", NAME, QUESTION, client.package
    return client.environment.run(client.script, *arguments, home=home)


def test_the_client_has_the_version_that_was_asked_for(client: Client, report: Any) -> None:
    assert report["version"] == client.version


@tries("chat")
@pytest.mark.parametrize("name", ["whole", "streamed"])
def test_it_chats(client: Client, report: Any, plain: Answer, name: str) -> None:
    usage = [plain.usage["prompt_tokens"], plain.usage["completion_tokens"]]
    assert report[name] == {"text": plain.text, "finish": client.stop, "usage": usage}


@tries("streaming")
def test_it_streams_the_same_in_pieces(report: Any, plain: Answer) -> None:
    assert report["joined"] == plain.text
    assert report["pieces"] > 1


@tries("tools")
@pytest.mark.parametrize("name", ["call", "streamed_call"])
def test_it_reads_calls_of_tools(report: Any, name: str) -> None:
    assert report[name]["name"] == "weather"
    assert report[name]["arguments"] in ({"city": "Rome"}, {"city": "Oslo"})


@tries("tools")
def test_the_model_goes_on_after_the_tool(report: Any) -> None:
    assert report["after"]


@tries("a JSON schema")
def test_it_gets_what_its_schema_says(report: Any) -> None:
    for shape in report["shapes"]:
        assert set(shape) == {"number", "word"}
        assert 1 <= shape["number"] <= 99
        assert shape["word"] in ("odd", "even")


@tries("an unknown model")
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_it_raises_its_own_404(client: Client, report: Any, stream: bool) -> None:
    raised = report["no_such_model_streamed" if stream else "no_such_model"]
    assert (raised["kind"], raised["status"]) == (client.no_such_model, 404)
    assert "the model 'other' is not served here" in raised["message"]


@tries("a prompt that is too long")
def test_it_knows_what_is_too_long(client: Client, report: Any) -> None:
    raised = report["too_long"]
    assert (raised["kind"], raised["status"]) == (client.too_long, 400)
    assert "maximum context length" in raised["message"]


@tries("tools that it runs itself")
@pytest.mark.parametrize("client", [_row(client) for client in CLIENTS[1:3]], indirect=True)
def test_vercels_sdk_runs_tools_itself(report: Any) -> None:
    assert report["steps"] == 2
    assert report["runs"][0] == report["call"]["arguments"]["city"]  # the model may call for the other city too
    assert report["again"]


@tries("tools that it runs itself")
@pytest.mark.parametrize("client", [_row(client) for client in CLIENTS[:1]], indirect=True)
def test_openais_own_runs_tools_itself(report: Any) -> None:
    assert report["runs"] == [report["call"]["arguments"]["city"]]
    assert report["models"] == [NAME]


@tries("Responses")
@pytest.mark.parametrize("client", [_row(client) for client in CLIENTS[:1]], indirect=True)
def test_openais_own_has_responses(report: Any, plain: Answer) -> None:
    responses = report["responses"]
    assert [responses[name] for name in ("text", "streamed", "joined")] == [plain.text] * 3
    assert responses["call"]["name"] == "weather"
    assert responses["again"]
    assert (responses["no_such_model"]["kind"], responses["no_such_model"]["status"]) == ("NotFoundError", 404)


@tries("counts of tokens")
@pytest.mark.parametrize("client", [_row(client) for client in CLIENTS[3:]], indirect=True)
def test_anthropics_counts_tokens(report: Any, plain: Answer) -> None:
    assert report["counted"] == plain.usage["prompt_tokens"]
    assert report["models"] == [NAME]
