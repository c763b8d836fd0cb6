"""Tests of what a gateway tells its operator."""

from __future__ import annotations

import pytest

from alignedserve.text.text_model import TextModel
from tests.gateway.conftest import MODEL, FakeOwner, Gateway


@pytest.fixture
def gateway(text: TextModel) -> Gateway:
    return Gateway(text, FakeOwner())


def test_the_parts_of_the_deployment_and_where_they_are(gateway: Gateway) -> None:
    told = gateway.get("/status").json()
    part = {"name": "decode-0", "role": "decode", "node": "node-1", "address": "tcp://10.0.0.2:1"}
    assert told == {"state": "ready", "models": [MODEL], "parts": [part], "scale": {}}


def test_whether_it_takes_requests(gateway: Gateway) -> None:
    gateway.owner.ready = False
    assert gateway.get("/status").json()["state"] == "not ready"
    gateway.app.state.draining = True
    assert gateway.get("/status").json()["state"] == "draining"
