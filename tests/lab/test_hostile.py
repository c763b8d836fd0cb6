"""How much of a flood's work is still done while another client chats."""

from __future__ import annotations

import pytest

from alignedserve.lab.benchmarks.hostile import ServedWork, conserved, told


def test_work_is_conserved_where_each_has_its_part_of_the_time() -> None:
    """A stream of 1 ms tokens, and chats of 4 ms tokens, which take 0.12 s of each second."""
    flood = ServedWork(seconds=10.0, tokens=10_000, device_s={"flood": 10.0})
    assert conserved(flood, ServedWork(2.0, 2 * (880 + 30), {}), 60, 0.004) == pytest.approx(1.0)
    assert conserved(flood, ServedWork(2.0, 2 * (800 + 30), {}), 60, 0.004) == pytest.approx(0.92)


def test_the_metrics_say_what_each_key_got() -> None:
    page = """# TYPE alignedserve:generation_tokens_total counter
alignedserve:generation_tokens_total{class="rt",part="gateway-0"} 120
alignedserve:generation_tokens_total{class="be",part="gateway-0"} 5
alignedserve:request_device_seconds_total{class="rt",key="flood",part="gateway-0"} 1.5
alignedserve:request_device_seconds_total{class="be",key="flood",part="gateway-0"} 0.25
alignedserve:request_device_seconds_total{class="rt",key="chats",part="gateway-0"} 0.5
"""
    before, now = told("", 1.0), told(page, 3.0)
    gained = now.since(before)
    assert gained == ServedWork(2.0, 125.0, {"flood": 1.75, "chats": 0.5})
    assert now.since(now).token_s("flood") == 0.0
