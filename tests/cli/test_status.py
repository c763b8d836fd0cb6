"""The lines of `alignedserve status` add up, though gateways and the router count at different moments."""

from __future__ import annotations

import httpx
import pytest

from alignedserve import http_client
from alignedserve.cli import main as cli
from alignedserve.cli.remote.status import DeploymentServer

TOLD = {"state": "ready", "models": ["demo"], "parts": [], "late": [], "scale": {}, "fallbacks": [], "weights": {}}


@pytest.mark.parametrize(
    ("gateway", "router", "said"),
    [
        (17, {"unplaced": 2, "decode": 17}, "be: 19 open (2 without a worker, 17 with decode workers), 0 served"),
        (5, {"decode": 4}, "be: 5 open (4 with decode workers, 1 with a gateway), 0 served"),
        (3, {}, "be: 3 open, 0 served"),
    ],
    ids=["some have just ended", "one has just come", "the router is away"],
)
def test_open_requests_are_the_sum_of_their_places(
    gateway: int, router: dict[str, int], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def answer(asked: httpx.Request) -> httpx.Response:
        if asked.url.path != "/metrics":
            return httpx.Response(200, json=TOLD)
        lines = [f'alignedserve:num_requests_open{{class="be"}} {gateway}']
        lines += [f'alignedserve:num_requests_at{{class="be",stage="{at}"}} {count}' for at, count in router.items()]
        return httpx.Response(200, text="\n".join(lines) + "\n")

    monkeypatch.setattr(http_client, "options", lambda *_, **__: {"transport": httpx.MockTransport(answer)})
    assert cli.main(["status"]) == 0
    assert capsys.readouterr().out.splitlines()[1] == said


@pytest.mark.parametrize("url", ["http://host:8000", "http://host:8000/", "http://host:8000/v1/"])
def test_the_address_of_the_api_names_its_server(url: str) -> None:
    assert DeploymentServer(url, None).url == "http://host:8000"


@pytest.mark.parametrize("told", [TOLD, {"state": "ready", "models": ["demo"]}])
def test_without_the_scope_of_metrics_it_says_what_the_rest_is(
    told: dict[str, object], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def answer(asked: httpx.Request) -> httpx.Response:
        if asked.url.path != "/metrics":
            return httpx.Response(200, json=told)
        return httpx.Response(403, json={"error": {"message": "it lacks the scope metrics"}})

    monkeypatch.setattr(http_client, "options", lambda *_, **__: {"transport": httpx.MockTransport(answer)})
    assert cli.main(["status"]) == 0
    head, lacks = capsys.readouterr().out.splitlines()
    assert head == "ready: demo"
    no_parts = "" if "parts" in told else "; no parts: for keys with the scope dashboard"
    assert lacks == f"no figures: it lacks the scope metrics{no_parts}"
