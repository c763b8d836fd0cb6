"""Scrapes of /metrics: whoever asks in a loop leaves the event loop to streams, and nobody gets an old text."""

from __future__ import annotations

import asyncio

from alignedserve.gateway.http.scraping import Scrapes
from alignedserve.metrics.parts import PartMetrics
from alignedserve.metrics.requests import RequestMetrics
from tests.exposition import value


class Owners:
    """The owners of requests: this one's series, which take a while."""

    def __init__(self) -> None:
        self.metrics, self.num_asked = RequestMetrics(), 0

    async def ask_all(self) -> list[bytes]:
        self.num_asked += 1
        return [await self.metrics.text()]


def rejected(text: bytes) -> float:
    return value(text.decode(), 'alignedserve:admission_rejections_total{class="rt"}')


def test_scrapes_that_come_together_share_a_text() -> None:
    async def asked() -> int:
        owners = Owners()
        scrapes = Scrapes(PartMetrics(), owners.ask_all)
        texts = await asyncio.gather(*(scrapes.text() for _ in range(50)))
        assert len(set(texts)) == 1
        return owners.num_asked

    assert asyncio.run(asked()) == 1


def test_a_scrape_shows_all_that_was_counted_before_it_asked() -> None:
    async def asked() -> list[float]:
        owners, shown = Owners(), list[float]()
        scrapes = Scrapes(PartMetrics(), owners.ask_all)
        for _ in range(3):
            owners.metrics.rejected.of("queue_full", "rt").inc()
            shown.append(rejected(await scrapes.text()))
        early = asyncio.create_task(scrapes.text())
        while owners.num_asked < 4:
            await asyncio.sleep(0)  # until its text is being written
        owners.metrics.rejected.of("queue_full", "rt").inc()
        late = await scrapes.text()
        await early
        return [*shown, rejected(late)]

    assert asyncio.run(asked()) == [1, 2, 3, 4]


def test_a_scraper_in_a_loop_leaves_most_of_the_time_to_others() -> None:
    async def asked() -> float:
        owners, loop = Owners(), asyncio.get_running_loop()
        scrapes, spent = Scrapes(PartMetrics(), owners.ask_all), 0.0

        async def timed() -> list[bytes]:
            nonlocal spent
            began_at = loop.time()
            told = await Owners.ask_all(owners)
            spent += loop.time() - began_at
            return told

        scrapes.owners = timed
        began_at = loop.time()
        for _ in range(5):
            await scrapes.text()
        return spent / (loop.time() - began_at)

    assert asyncio.run(asked()) < 0.25


def test_the_loop_goes_on_while_a_text_is_written() -> None:
    async def asked() -> int:
        turns, scraping = 0, asyncio.create_task(Scrapes(PartMetrics(), Owners().ask_all).text())
        while not scraping.done():
            await asyncio.sleep(0)
            turns += 1
        return turns

    assert asyncio.run(asked()) > 30, "one for each family at least"


def test_a_scraper_that_leaves_keeps_no_other_waiting() -> None:
    async def asked() -> bytes:
        scrapes = Scrapes(PartMetrics(), Owners().ask_all)
        leaving, staying = (asyncio.create_task(scrapes.text()) for _ in range(2))
        await asyncio.sleep(0)
        leaving.cancel()
        return await staying

    assert b"# HELP" in asyncio.run(asked())
