"""Tests that each gateway reports on all gateways."""

from __future__ import annotations

import asyncio
import gc
from functools import partial
from uuid import uuid4

import uvloop
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from alignedserve.gateway.http.siblings import Siblings
from tests.gateway.conftest import PATIENT_S

NAMES = ("gateway-0", "gateway-1", "gateway-2")


def series(number: int) -> bytes:
    registry = CollectorRegistry()
    Counter("asked", "How often.", ["path"], registry=registry).labels("/a{b} c").inc(number + 1)
    Counter("plain", "Without labels.", registry=registry).inc(7)
    Histogram("took", "How long.", buckets=(1.0, 2.0), registry=registry).observe(number)
    return generate_latest(registry)


def test_all_are_told_once_by_each_that_lives() -> None:
    deployment = f"test-{uuid4().hex}"

    async def told() -> list[bytes]:
        gateways = [
            Siblings(deployment, name, [sibling for sibling in NAMES if sibling != name], partial(bytes, series(at)))
            for at, name in enumerate(NAMES)
        ]
        for gateway in gateways[:2]:  # the third gateway has not started yet
            await gateway.listen()
        gc.collect()
        return [await gateway.series() for gateway in gateways[:2]]

    first, second = uvloop.run(asyncio.wait_for(told(), PATIENT_S))
    assert first == second
    families = {family.name: family.samples for family in text_string_to_metric_families(first.decode())}
    asked = [sample for sample in families["asked"] if sample.name == "asked_total"]
    assert [(sample.labels, sample.value) for sample in asked] == [
        ({"gateway": "gateway-0", "path": "/a{b} c"}, 1),
        ({"gateway": "gateway-1", "path": "/a{b} c"}, 2),
    ]
    assert [sample.value for sample in families["plain"] if sample.name == "plain_total"] == [7, 7]
    assert [sample.value for sample in families["took"] if sample.name == "took_count"] == [1, 1]
    assert first.decode().count("# TYPE took histogram") == 1


def test_one_alone_adds_nothing() -> None:
    told_once = series(0)

    async def told() -> bytes:
        gateway = Siblings("test", "gateway-0", [], partial(bytes, told_once))
        await gateway.listen()
        return await gateway.series()

    assert uvloop.run(told()) == told_once
