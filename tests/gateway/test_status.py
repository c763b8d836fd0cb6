"""Tests of what a gateway tells its operator."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from alignedserve.config.sections import SloConfig
from alignedserve.core import Fallback, Slo
from alignedserve.fallbacks import fell_back
from alignedserve.protocol.figures import ProcessFigures
from alignedserve.protocol.messages import Figures
from alignedserve.text.text_model import TextModel
from tests.gateway.conftest import MODEL, FakeOwner, Gateway


@pytest.fixture
def gateway(text: TextModel) -> Gateway:
    return Gateway(text, FakeOwner())


def test_the_parts_of_the_deployment_and_where_they_are(gateway: Gateway) -> None:
    told = gateway.get("/status").json()
    part = {"name": "decode-0", "role": "decode", "node": "node-1", "address": "tcp://10.0.0.2:1"}
    nothing: dict[str, object] = {"late": [], "scale": {}, "fallbacks": [], "weights": {}}
    promise = {"ttft_ms": 1000.0, "tbt_ms": 187.5, "by": "machine"}
    assert told == {"state": "ready", "models": [MODEL], "promise": promise, "parts": [part], **nothing}


@pytest.mark.parametrize(
    ("named", "promise"),
    [
        ({}, {"ttft_ms": 6000.0, "tbt_ms": 250.0, "by": "machine"}),
        ({"ttft_ms": 500.0}, {"ttft_ms": 500.0, "tbt_ms": 250.0, "by": "operator"}),
    ],
)
def test_what_chats_are_promised_that_ask_for_nothing(
    text: TextModel, named: dict[str, float], promise: dict[str, object]
) -> None:
    gateway = Gateway(text, FakeOwner(), slo=SloConfig(**named), machine=Slo(6.0, 0.25, is_asked=False))
    (card,) = gateway.get("/v1/models").json()["data"]
    told = [gateway.get(path).json()["promise"] for path in ("/status", "/ready", f"/v1/models/{MODEL}")]
    assert [*told, card["promise"]] == [promise] * 4


@pytest.mark.parametrize(
    ("named", "is_known"), [({}, False), ({"ttft_ms": 5.0}, False), ({"ttft_ms": 5.0, "tbt_ms": 5.0}, True)]
)
def test_it_says_no_promise_with_ready_before_a_worker_has_told_it(
    text: TextModel, named: dict[str, float], is_known: bool
) -> None:
    told = Gateway(text, FakeOwner(), slo=SloConfig(**named)).get("/ready").json()
    assert (told["status"], told["promise"] is not None) == ("ready", is_known)


def test_which_worker_is_late_with_a_step(gateway: Gateway) -> None:
    gateway.owner.late = {"decode-0": 6.5}
    assert gateway.get("/status").json()["late"] == [{"part": "decode-0", "step_s": 6.5}]


def test_whether_it_takes_requests(gateway: Gateway) -> None:
    gateway.owner.ready = False
    assert gateway.get("/status").json()["state"] == "not ready"
    gateway.app.state.draining = True
    assert gateway.get("/status").json()["state"] == "draining"


def test_what_falls_back_in_any_part(gateway: Gateway) -> None:
    """A worker's kernel has failed while it served, and this gateway lacks a library; only /status says why."""
    assert gateway.get("/health").json() == {"status": "serving", "fallbacks": []}
    fell_back("uvloop", "it cannot be imported", "asyncio's own event loop runs")
    kernel = Fallback("kernel attend", "ptxas fatal: /opt/x", "torch reference takes its place")
    process = ProcessFigures(1.0, 1, 1, 1.0, fell_back=(kernel,))
    gateway.app.state.parts.update(Figures(process=process, member="decode-0"))
    told = gateway.get("/status").json()["fallbacks"]
    assert told[1] == {"part": "decode-0", **asdict(kernel)}
    assert [(fallback["part"], fallback["what"]) for fallback in told] == [
        (gateway.owner.name, "uvloop"),
        ("decode-0", "kernel attend"),
    ]
    public = gateway.get("/health").json()
    assert public["fallbacks"] == [{name: of[name] for name in ("part", "what", "instead")} for of in told]
    exposed = gateway.get("/metrics").text
    assert exposed.count("# HELP alignedserve:fallbacks ") == 1
    assert 'what="uvloop"} 1.0' in exposed
    assert 'what="kernel attend",part="decode-0"} 1.0' in exposed
