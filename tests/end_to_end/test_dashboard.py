"""The live page in a real browser, on a deployment whose parts die."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from alignedserve.lab.reports.trial import SimulationTrial
from alignedserve.lab.trials.running import run_filmed
from tests.browser import Browser, Page, chromium
from tests.chromium import program
from tests.end_to_end.client import Wanted, all_tokens, mixed
from tests.end_to_end.deployment import ANSWER_S, BACK_S, Deployment, deployed, wait_until
from tests.end_to_end.test_explain import chat
from tests.rare import rare

SHOWN_S = 5.0  # a dead worker shows within this time


@pytest.fixture(scope="module")
def watched() -> Iterator[Deployment]:
    program()  # skips before anything starts
    with deployed(topology="1+1") as deployment:
        yield deployment


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    program()  # skips before anything starts
    with chromium(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture(scope="module")
def page(watched: Deployment, browser: Browser) -> Iterator[Page]:
    """Yield the page, which stays open through all tests of this file."""
    with browser.page(f"{watched.url}/dashboard") as opened:
        opened.until("document.querySelector('#state').textContent === 'ready'")
        yield opened


def row(part: str) -> str:
    """Return an expression for the text of this part's row."""
    rows = "[...document.querySelectorAll('#part-rows tr')]"
    return f"({rows}.find(row => row.innerText.startsWith('{part}'))?.innerText ?? '')"


@contextmanager
def load(url: str) -> Iterator[None]:
    """Send ten requests, again and again, while the block runs."""
    is_over = threading.Event()

    def send() -> None:
        while not is_over.is_set():
            asyncio.run(all_tokens(url, mixed(10, seed=3, outputs=(40, 80))))

    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def test_it_shows_the_parts_and_streams_move_it(watched: Deployment, page: Page) -> None:
    for part in ("router", "gateway-0", "prefill-0", "decode-0", "pool-0"):
        page.until(f"{row(part)}.includes('up')")
    at = page.value("shown.at")
    page.until(f"shown.at > {at}")
    assert page.text("#idle pre").startswith(f"curl {watched.url}/v1/chat/completions "), "nothing runs yet"
    with load(watched.url):
        page.until("shown.workers.some(worker => worker.lengths.band !== null)")
        assert page.value("byId('idle').hidden")
    page.until("shown.requests.slots.some(slot => slot.rt.tokens > 0)")
    page.until("document.querySelectorAll('#slow-rows tr').length >= 8")
    page.until("shown.requests.keys.some(used => used.key === 'anonymous' && used.output_tokens > 0)")
    page.until("slotsOf(shown).some(slot => slot.rt.joules === 0) && sum(slotsOf(shown), 'rt', 'joules') > 0")
    assert "NaN" not in page.text("main"), "also where nothing happened in some slots"
    page.until("shown.queues !== null && countOpen(shown, 'rt') === 0")


def test_it_shows_how_busy_machines_and_gpus_are(page: Page) -> None:
    page.until("/ of \\d+ cores/.test(document.querySelector('#machine-rows').innerText)")
    page.until("shown.machines[0].use.busy_cores > 0")
    known = {"busy": 0.25, "used_bytes": 6e9, "total_bytes": 8e10}
    gpus = [known, dict.fromkeys(known)]
    use = {"busy_cores": 1.5, "cores": 4, "used_bytes": 2e9, "total_bytes": 8e9, "gpus": gpus}
    rows = "showMachines({machines: [{node: 'far', use: " + json.dumps(use) + "}]}), "
    rows += "[...document.querySelectorAll('#machine-rows tr')].map(row => row.innerText.replaceAll('\\t', ' '))"
    assert page.value(rows) == [
        "far 1.5 of 4 cores 2.0 GB 8.0 GB",
        "GPU 0 25 % 6.0 GB 80.0 GB",
        "GPU 1 unknown unknown unknown",
    ]


def test_prices_are_shown_where_there_are_any(page: Page) -> None:
    assert "price" not in page.text("#rt-tiles") + page.text("#be-tiles")
    assert page.value("byId('key-prices').hidden"), "this deployment has none"
    used = {"key": "ann", **dict.fromkeys(("ended", "missed", "refused", "prompt_tokens", "output_tokens"), 1)}
    used |= {"device_s": 2.0, "joules": 30.0}
    keys = [used | {"price": 0.00123}, used | {"price": 1234.5}]
    rows = "showKeys({requests: {keys: " + json.dumps(keys) + "}}), "
    rows += "[...document.querySelectorAll('#key-rows tr')].map(row => row.lastChild.innerText)"
    assert page.value(rows) == ["0.0012", "1,234.50"]
    assert not page.value("byId('key-prices').hidden")


def test_a_request_in_a_table_tells_its_story(page: Page) -> None:
    page.value("document.querySelector('#slow-rows [data-story]').click()")
    page.until("document.querySelector('#story pre').innerText.includes('tokens')")
    page.value("document.querySelector('#story').close()")


@rare  # the test above tells such a story
def test_each_reason_names_requests_that_tell_their_story(watched: Deployment, page: Page) -> None:
    chat(watched, slo={"ttft_ms": 0.001, "tbt_ms": 60_000})
    page.until("document.querySelector('#reason-rows').innerText.includes('first token after')")
    page.value("document.querySelector('#reason-rows [data-story]').click()")
    page.until("document.querySelector('#story pre').innerText.includes('Where the time went')")
    page.value("document.querySelector('#story').close()")


def test_a_longer_time_range_comes_in_longer_slots(watched: Deployment, page: Page) -> None:
    asked = Wanted((5, 6, 7), 4, stream=False).body
    httpx.post(f"{watched.url}/v1/completions", json=asked, timeout=ANSWER_S).raise_for_status()
    for slot_s, words in ((960, "last 24 hours"), (10, "last 15 minutes")):
        page.value(f"byId('range').value = {90 * slot_s}; byId('range').dispatchEvent(new Event('change'))")
        page.until(f"shown.slot_s === {slot_s}")
        page.until("sum(slotsOf(shown), 'rt', 'tokens') > 0")
        assert words in page.text("#slow h2")
        assert page.value("slotsOf(shown).length") == 90


def test_the_charts_tell_values_to_a_mouse(page: Page) -> None:
    page.value("scrollTo(0, document.querySelector('.chart').getBoundingClientRect().top)")
    page.value(
        "{ const chart = document.querySelector('.chart'), box = chart.getBoundingClientRect(); chart.dispatchEvent("
        "new PointerEvent('pointermove', {bubbles: true, clientX: box.right - 8, clientY: box.top + 40})) }"
    )
    assert "promise" in page.text("#tip")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_small_screen_in_light_and_dark(page: Page, scheme: str) -> None:
    page.prefer(scheme)
    page.resize(400, 800)
    page.until("shown !== null && innerWidth === 400")
    assert page.value("document.documentElement.scrollWidth") <= 400
    background = page.value("getComputedStyle(document.body).backgroundColor")
    assert background == {"light": "rgb(246, 247, 249)", "dark": "rgb(17, 20, 24)"}[scheme]
    page.resize(1280, 900)


def test_keys_do_what_buttons_do(page: Page) -> None:
    page.prefer("light")
    page.press("t")
    assert page.value("document.documentElement.dataset.theme") == "dark"
    page.press("t")
    assert page.value("document.documentElement.dataset.theme") == "light"
    page.press("p")
    assert page.value("document.querySelector('#pause').getAttribute('aria-pressed')") == "true"
    at = page.value("shown.at")
    page.until(f"newest.at > {at} + 1.5")
    assert page.value("shown.at") == at
    page.press("p")
    page.until(f"shown.at > {at}")
    page.press("8")
    assert page.value("document.activeElement.id") == "jobs"


def test_a_dead_worker_shows_within_five_seconds(watched: Deployment, page: Page) -> None:
    os.kill(watched.pid("decode-0"), signal.SIGKILL)
    page.until(
        f"{row('decode-0')}.includes('down') || shown.parts.some(part => part.name === 'decode-0' && part.life === 2)",
        SHOWN_S,
    )
    page.until(f"{row('decode-0')}.includes('up') && shown.parts.find(part => part.name === 'decode-0').life === 2")
    assert "decode-0 was started again" in page.text("#alerts")
    wait_until(lambda: watched.is_ready, BACK_S)


def test_it_outlives_the_router_and_says_so(watched: Deployment, page: Page) -> None:
    at = page.value("shown.at")
    os.kill(watched.pid("router"), signal.SIGSTOP)
    stopped = watched.pid("router")
    try:
        page.until("document.querySelector('#alerts').innerText.includes('The router has said nothing for')")
        assert page.value("shown.at") > at, "pictures still come"
    finally:
        os.kill(stopped, signal.SIGKILL)
    page.until("shown.parts.some(part => part.name === 'router' && part.life === 2)")
    page.until("!document.querySelector('#alerts').innerText.includes('The router has said nothing')")
    wait_until(lambda: watched.is_ready, BACK_S)


def test_it_asked_only_its_own_server_and_had_no_error(watched: Deployment, page: Page) -> None:
    foreign = [url for url in page.requests if not url.startswith((f"{watched.url}/dashboard", "data:"))]
    assert foreign == []
    assert page.errors == []


def test_a_recorded_run_is_moved_by_its_slider_and_by_keys(browser: Browser, tmp_path: Path) -> None:
    recorded, trial = tmp_path / "run.html", SimulationTrial("aligned", "chat,num_requests=20,rate=10", "1+1")
    run_filmed(trial, lambda *_: None, recorded)
    with browser.page(recorded.as_uri()) as page:
        last = page.value("pictures.length - 1")
        assert page.value("document.querySelector('#slider').max") == str(last)
        page.value("choose(pictures.length - 1)")
        assert page.value("document.querySelectorAll('#slow-rows tr').length") == 9, "and their heading"
        page.press("ArrowLeft")
        assert page.value("shown === pictures[pictures.length - 2]")
        page.press(" ")
        page.until("shown === pictures[pictures.length - 1]")
        assert page.errors == []
        assert [url for url in page.requests if not url.startswith(("file:", "data:"))] == []


def test_the_pages_of_the_front_need_nothing_else(watched: Deployment, browser: Browser) -> None:
    with browser.page(f"{watched.url}/") as page:
        assert "demo" in page.text("body")
        page.value("document.querySelector('a[href=docs]').click()")
        page.until("document.title === 'API' && document.readyState === 'complete'")
        assert "/v1/chat/completions" in page.text("body")
        page.value("find.value = 'embeddings'; find.dispatchEvent(new Event('input'))")
        assert [line for line in page.text("body").splitlines() if "/v1/" in line] == [
            "POST /v1/embeddings A vector of each text."
        ]
        assert "Batch jobs" not in page.text("body")
        assert page.errors == []
        assert [url for url in page.requests if not url.startswith((watched.url, "data:"))] == []


def test_the_pages_of_the_front_ask_and_fit_a_small_screen(watched: Deployment, browser: Browser) -> None:
    with browser.page(f"{watched.url}/", 400, 800) as page:
        page.until("document.getElementById('model').value === 'demo'")
        page.value("document.getElementById('words').value = 'Hi'; document.getElementById('ask').requestSubmit()")
        page.until("document.getElementById('times').textContent.includes('first token after')")
        assert page.value("document.querySelectorAll('#chat .user, #chat .assistant').length") == 2
        assert page.value("document.documentElement.scrollWidth") <= 400
    with browser.page(f"{watched.url}/docs", 400, 800) as page:
        form = "document.querySelector('form[data-call=\"GET /v1/models\"]')"
        page.value(f"{form}.requestSubmit()")
        page.until(f"{form}.querySelector('pre').textContent.includes('demo')")
        assert page.value("document.documentElement.scrollWidth") <= 400
