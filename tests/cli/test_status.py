"""The lines of `alignedserve status` add up, though gateways and the router count at different moments."""

from __future__ import annotations

import io
import json
import sys

import httpx
import pytest

from alignedserve import http_client
from alignedserve.cli import main as cli
from alignedserve.cli.remote.options import StatusOptions
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


FIGURES = """
alignedserve:num_requests_open{class="rt",part="gateway-0"} 0
alignedserve:request_success_total{class="rt",finished_reason="stop",part="gateway-0"} 11
alignedserve:request_success_total{class="rt",finished_reason="error",part="gateway-1"} 1
alignedserve:admission_rejections_total{class="rt",reason="queue_full",part="gateway-1"} 3
alignedserve:time_to_first_token_seconds_bucket{class="rt",le="1.0",part="gateway-0"} 2
alignedserve:time_to_first_token_seconds_bucket{class="rt",le="2.5",part="gateway-0"} 6
alignedserve:time_to_first_token_seconds_bucket{class="rt",le="20.0",part="gateway-0"} 11
alignedserve:time_to_first_token_seconds_bucket{class="rt",le="+Inf",part="gateway-0"} 11
"""
PROMISED = """
alignedserve:slo_attained_total{class="rt",part="gateway-0"} 1
alignedserve:slo_missed_total{class="rt",why="ttft",part="gateway-0"} 1
"""
TOLD_OF_CHATS = "rt: 0 open, 12 served (1 failed), 3 refused; first token within 2.5 s for half, 20 s for 95 %"


@pytest.mark.parametrize(
    ("figures", "said"),
    [(FIGURES, ""), (FIGURES + PROMISED, "; 50.0 % as promised of 2, 50.0 % late first token")],
    ids=["nobody asked for a promise", "two did"],
)
def test_a_share_says_of_how_many_and_what_asked_for_nothing_is_told_by_its_times(
    figures: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def answer(asked: httpx.Request) -> httpx.Response:
        return httpx.Response(200, text=figures) if asked.url.path == "/metrics" else httpx.Response(200, json=TOLD)

    monkeypatch.setattr(http_client, "options", lambda *_, **__: {"transport": httpx.MockTransport(answer)})
    assert cli.main(["status"]) == 0
    assert capsys.readouterr().out.splitlines()[1] == f"{TOLD_OF_CHATS}{said}"
    assert cli.main(["status", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ttft_s"] == {"rt": {"half": 2.5, "95 %": 20.0}}


@pytest.mark.parametrize("command", [["status"], ["explain", "req-1"], ["batch", "list"], ["chat"]])
def test_a_port_names_a_server_of_this_machine(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = list[str]()

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(
            f"{request.url.scheme}://{request.url.host}:{request.url.port}{request.url.path.partition('/')[0]}"
        )
        return httpx.Response(404, json={"error": {"message": "nothing"}})

    monkeypatch.setattr(http_client, "options", lambda *_, **__: {"transport": httpx.MockTransport(answer)})
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hi\n"))
    cli.main([*command, "--url", "http://other", "--port", "9517"])
    assert set(asked) == {"http://127.0.0.1:9517"}
    assert cli.main([*command, "--port", "x"]) == 2
    assert "argument --port: must be a whole number" in capsys.readouterr().err


@pytest.mark.parametrize("url", ["http://host:8000", "http://host:8000/", "http://host:8000/v1/"])
def test_the_address_of_the_api_names_its_server(url: str) -> None:
    assert DeploymentServer(StatusOptions(url)).url == "http://host:8000"


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
