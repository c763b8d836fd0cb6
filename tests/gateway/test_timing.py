"""How long an answer took, for its client: in a header, and in a stream's last usage where it is asked for."""

from __future__ import annotations

import re
from typing import Any

import httpx
import pytest

from alignedserve.core import Opening
from alignedserve.owner.client import Delivered
from alignedserve.text.text_model import TextModel
from tests.gateway.conftest import FakeOwner, Gateway, data_lines


class TimedOwner(FakeOwner):
    """An owner whose clock goes on by a second with each token."""

    at = 100.0

    def now(self) -> float:
        return self.at

    async def _play(self, request: Any) -> Any:
        async for delivered in super()._play(request):
            self.at += 1.0
            yield delivered


@pytest.fixture
def gateway(text: TextModel) -> Gateway:
    first = Delivered((5,), None, (), Opening(waited_s=0.25))
    return Gateway(text, TimedOwner(first, (6,), (2,)))


def times(answer: httpx.Response) -> dict[str, float]:
    found = re.findall(r"(\w+);dur=([\d.]+)", answer.headers["server-timing"])
    return {name: float(value) for name, value in found}


def test_a_whole_answer_says_it_in_a_header(gateway: Gateway) -> None:
    shown = {"queue": 250.0, "prefill": 750.0, "first_token": 1000.0, "decode": 2000.0, "total": 3000.0}
    assert times(gateway.chat()) == times(gateway.complete()) == shown


def test_a_stream_s_header_says_what_is_known_at_its_first_token(gateway: Gateway) -> None:
    assert times(gateway.chat(stream=True)) == {"queue": 250.0, "prefill": 750.0, "first_token": 1000.0}


def test_a_stream_says_the_rest_in_its_last_usage_where_it_is_asked_for(gateway: Gateway) -> None:
    asked = {"include_usage": True, "include_timing": True}
    *_, last, done = data_lines(gateway.chat(stream=True, stream_options=asked))
    timing = {"queue_time": 0.25, "prompt_time": 0.75, "completion_time": 2.0, "total_time": 3.0}
    assert done == "[DONE]"
    assert {name: last["usage"][name] for name in timing} == timing
    *_, plain, _ = data_lines(gateway.chat(stream=True, stream_options={"include_usage": True}))
    assert "total_time" not in plain["usage"]


def test_it_needs_a_usage(gateway: Gateway) -> None:
    refused = gateway.chat(stream=True, stream_options={"include_timing": True})
    assert refused.status_code == 400
    assert "include_usage" in refused.json()["error"]["message"]
