"""Tests of clients that ask, keep and meet limits: what they record of an undisturbed gateway is no anomaly."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from alignedserve.config.config import Config
from alignedserve.gateway.access.keys import Limits
from alignedserve.text.text_model import TextModel
from tests.chaos.load import Keeper, Load, run_batch
from tests.chaos.oracle import History, anomalies, read
from tests.chaos.recording import Client, Question, Recorder
from tests.end_to_end.client import Wanted
from tests.gateway.conftest import FakeOwner, folder, hello, text  # noqa: F401  (fixtures)
from tests.jobs.conftest import Service, config, service, sqlite_only  # noqa: F401  (fixtures)

pytestmark = sqlite_only
LIMITS = Limits(requests_per_minute=5)


def recorded(
    service: Service,  # noqa: F811
    path: Path,
    work: Callable[[Client], Awaitable[None]],
    key: str = "load",
) -> History:
    async def drive() -> None:
        async with service.client() as http, service.running():
            await work(Client(http, recorder, key))

    recorder = Recorder(path / "history.jsonl")
    service.run(drive)
    recorder.close()
    return read(recorder.path)


@pytest.fixture
def questions(hello: tuple[int, ...]) -> list[Question]:  # noqa: F811
    streams = [Question.of(Wanted((1, number), len(hello), stream=True)) for number in (5, 6)]
    return [*streams, Question.of_chat([{"role": "user", "content": "hi"}], len(hello))]


def test_an_undisturbed_gateway_shows_no_anomaly(
    service: Service,  # noqa: F811
    questions: list[Question],
    tmp_path: Path,
) -> None:
    async def work(client: Client) -> None:
        keeper, asking = Keeper(client, [Question.to_keep("hello", 40)], 3), Load(client, questions, 2, 1)
        running = asyncio.create_task(asking.run())
        for _ in range(60):
            await keeper.step()
        await run_batch(client, questions[:2])
        asking.stop()
        await running
        await keeper.read_all()

    history = recorded(service, tmp_path, work)
    assert anomalies(history) == []
    assert [batch.polls[-1].end["counts"] for batch in history.batches] == [[2, 2, 0]]
    routes = Counter(call.route for call in history.calls)
    kept = {f"{method} {kind} ID" for method in ("GET", "DELETE") for kind in ("files", "responses")} - {"GET files ID"}
    assert routes.keys() >= {"POST files", "GET files", "GET files ID content", "POST responses", *kept}
    assert {call.status for call in history.calls} == {200, 404}


def test_the_oracle_counts_as_the_gateway_does(
    text: TextModel,  # noqa: F811
    hello: tuple[int, ...],  # noqa: F811
    config: Config,  # noqa: F811
    questions: list[Question],
    tmp_path: Path,
) -> None:
    limited = Service(text, FakeOwner(*((token,) for token in hello)), config, LIMITS)

    async def work(client: Client) -> None:
        for _ in range(8):
            await client.ask(questions[0])

    history = recorded(limited, tmp_path, work, key="limited")
    assert Counter(call.outcome for call in history.calls) == {"answered": 5, "refused": 3}
    ((limit, _),) = history.marks["limit"]
    limit["requests_per_minute"] = 5
    assert anomalies(history) == []
    limit["requests_per_minute"] = 4
    assert [anomaly.kind for anomaly in anomalies(history)] == ["over the limit"]
