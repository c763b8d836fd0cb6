"""The tokens that a key may use in a day and in a month."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from contextlib import closing
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from alignedserve.gateway.access import budgets as module
from alignedserve.gateway.access.budgets import FILE, Budgets
from alignedserve.gateway.access.keys import Caller, KeyEntry, KeyRing, Limits, hash_key
from alignedserve.gateway.access.ledger import JOB_RUNNER, Ledger
from alignedserve.gateway.http.limits import CONVERTED_TOKENS, TRIAL_S, CallerQuota
from alignedserve.gateway.openai.errors import ApiError
from alignedserve.text.text_model import TextModel
from tests.gateway.conftest import FakeOwner, Gateway
from tests.samples import request

KEYS = {name: f"key-of-{name}" for name in ("ann", "bob")}
BOTH = Limits(tokens_per_day=100, tokens_per_month=150)
HOUR_S, DAY_S = 3600.0, 86_400.0
NOON = datetime(2026, 11, 29, 12, tzinfo=timezone.utc).timestamp()  # November ends on the next day


class Clock:
    def __init__(self) -> None:
        self.now = NOON

    def __call__(self) -> float:
        return self.now


def test_a_day_ends_at_midnight_and_a_month_with_its_last_day() -> None:
    clock = Clock()
    budgets = Budgets(now=clock)
    budgets.use("ann", 99)
    assert budgets.over("ann", BOTH) is None
    budgets.use("ann", 1)
    assert budgets.over("ann", BOTH) == ("100 tokens in a day", 12 * HOUR_S)
    assert budgets.over("bob", BOTH) is None
    assert budgets.over("ann", Limits()) is None
    clock.now += DAY_S
    assert budgets.over("ann", BOTH) is None
    budgets.use("ann", 60)
    assert budgets.over("ann", BOTH) == ("150 tokens in a month", 12 * HOUR_S)
    clock.now += DAY_S
    assert budgets.over("ann", BOTH) is None
    assert budgets.used("ann") == (0, 0)


def test_what_was_used_outlives_the_process_and_is_known_to_others(tmp_path: Path) -> None:
    clock = Clock()
    one, other = (Budgets(tmp_path / "jobs" / FILE, clock) for _ in range(2))
    for _ in range(2):
        one.use("ann", 30)
        one.exchange()
    other.use("ann", 5)
    other.use("bob", 7)
    other.exchange()
    assert other.used("ann") == (65, 65)
    one.exchange()
    assert (one.used("ann"), one.used("bob")) == ((65, 65), (7, 7))
    later = Budgets(tmp_path / "jobs" / FILE, clock)
    later.exchange()
    clock.now += DAY_S
    later.exchange()
    assert later.used("ann") == (0, 65)
    assert (tmp_path / "jobs" / FILE).stat().st_mode & 0o777 == 0o600


def test_where_the_file_cannot_be_written_all_is_counted_and_written_later(tmp_path: Path) -> None:
    folder = tmp_path / "jobs"
    folder.write_text("no folder")
    budgets = Budgets(folder / FILE, Clock())
    budgets.use("ann", 30)
    budgets.exchange()
    budgets.use("ann", 4)
    assert budgets.used("ann") == (34, 34)
    folder.unlink()
    budgets.exchange()
    assert budgets.used("ann") == (34, 34)
    again = Budgets(folder / FILE, Clock())
    again.exchange()
    assert again.used("ann") == (34, 34)


def test_it_is_written_at_the_end(tmp_path: Path) -> None:
    async def use() -> None:
        budgets = Budgets(tmp_path / FILE, Clock())
        async with budgets.kept():
            budgets.use("ann", 3)

    asyncio.run(use())
    again = Budgets(tmp_path / FILE, Clock())
    again.exchange()
    assert again.used("ann") == (3, 3)


def test_what_is_being_written_at_the_end_is_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process has the file when the gateway ends: the thread that waits for it has the same tokens."""
    first = Budgets(tmp_path / FILE, Clock())
    first.use("ann", 1)
    first.exchange()
    connect: Any = sqlite3.connect
    waits, loop_thread = threading.Event(), threading.get_ident()

    def noted(*given: Any, **named: Any) -> Any:
        if threading.get_ident() != loop_thread:
            waits.set()
        return connect(*given, **named)

    async def use() -> None:
        budgets = Budgets(tmp_path / FILE, Clock())
        async with budgets.kept():
            other.execute("BEGIN IMMEDIATE")
            budgets.use("ann", 3)
            monkeypatch.setattr(sqlite3, "connect", noted)
            await asyncio.to_thread(waits.wait)
            threading.Timer(0.1, other.rollback).start()

    monkeypatch.setattr(module, "WRITE_S", 0.0)
    with closing(sqlite3.connect(tmp_path / FILE, check_same_thread=False, isolation_level=None)) as other:
        asyncio.run(use())
    first.exchange()
    assert first.used("ann") == (4, 4)


def test_other_work_counts_without_a_limit_of_the_minute() -> None:
    ledger = Ledger(budgets=Budgets(now=Clock()))
    tab = CallerQuota(ledger, Caller("ann", limits=Limits(tokens_per_day=10)))
    tab.convert(4 * CONVERTED_TOKENS)
    tab.try_grammars([6 * TRIAL_S])
    tab.close(is_refused=True)
    assert ledger.budgets.used("ann") == (6, 6), "a refusal gives back all but trials"
    other = CallerQuota(ledger, tab.caller)
    other.convert(4 * CONVERTED_TOKENS)
    other.close()
    assert ledger.budgets.over("ann", tab.caller.limits) is not None


def tab_of(ledger: Ledger, tokens_per_day: int = 1000) -> CallerQuota:
    return CallerQuota(ledger, Caller("ann", limits=Limits(tokens_per_day=tokens_per_day)))


def paid(tab: CallerQuota, most: int, choices: int = 1, prompt: int = 10, has_limit: bool = True) -> int:
    """Let a body pay, and return how many tokens its outputs may have together; -1 where it is refused."""
    try:
        tab.admit()
        asked = [request(prompt=prompt, max_tokens=most)] * choices
        return sum(each.max_tokens for each in tab.pay(asked, prompt, has_limit))
    except ApiError as error:
        return -1 if error.status == 429 else -2


def test_bodies_together_cost_no_more_than_a_budget_has() -> None:
    """Sixteen bodies of 16 choices with 100 tokens each would cost 25,760 of a day of 1,000."""
    ledger = Ledger(budgets=Budgets(now=Clock()))
    tabs = [tab_of(ledger) for _ in range(16)]
    outputs = [paid(tab, most=100, choices=16) for tab in tabs]
    assert outputs == [16 * ((1000 - 10) // 16), *[-1] * 15]
    with pytest.raises(ApiError, match="its open requests hold the rest: try again in 1 s"):
        tab_of(ledger).pay([request(prompt=14, max_tokens=5)], 14, has_limit=True)
    assert tabs[0].use(30)
    for tab in tabs:
        tab.close(is_refused=tab is not tabs[0])
    assert ledger.budgets.used("ann") == (40, 40), "what was not used is given back"
    assert paid(tab_of(ledger), most=900) == 900


def test_outputs_without_a_limit_hold_more_as_they_grow_and_end_with_the_budget() -> None:
    ledger = Ledger(budgets=Budgets(now=Clock()))
    long, other = tab_of(ledger, 3000), tab_of(ledger, 3000)
    assert paid(long, most=8000, has_limit=False) == 2990
    assert paid(other, most=1500) == 1500
    num = 0
    while long.use(1):
        num += 1
    assert num in (3000 - 10 - 1510, 3000 - 10 - 1510 - 1)
    other.close()
    assert long.use(1), "the other one has used nothing"
    runner = Ledger(place=JOB_RUNNER)
    line = CallerQuota(runner, long.caller)
    assert paid(line, most=8000, has_limit=False) == 2990
    assert paid(CallerQuota(runner, long.caller), most=1) == -1, "a line holds all that it may use"


def test_what_one_gateway_holds_the_others_know_and_its_next_life_forgets(tmp_path: Path) -> None:
    def gateway(number: int) -> Ledger:
        return Ledger(tmp_path / "rows", number, Budgets(now=Clock()))

    first, second = gateway(0), gateway(1)
    assert paid(tab_of(first), most=980) == 980
    assert paid(tab_of(second), most=980) == -1
    assert paid(tab_of(gateway(0)), most=980) == 980


@pytest.fixture
def gateway(text: TextModel) -> Gateway:
    ring = KeyRing([KeyEntry(name, hash_key(key), limits=Limits(tokens_per_day=10)) for name, key in KEYS.items()])
    return Gateway(text, FakeOwner((5,), (6,), (2,)), keys=ring, ledger=Ledger(budgets=Budgets(now=Clock())))


def test_a_key_that_has_used_its_day_is_refused_until_the_next(gateway: Gateway) -> None:
    def ask(name: str, prompt: list[int], path: str = "/v1/completions") -> tuple[int, dict[str, str], str]:
        body = {"model": "demo", "prompt": prompt, "max_tokens": 3}
        answer = gateway.ask("POST", path, json=body, headers={"Authorization": f"Bearer {KEYS[name]}"})
        return answer.status_code, dict(answer.headers), answer.text

    assert ask("ann", [5] * 5)[0] == 200  # five, and three of output
    status, headers, text = ask("ann", [5] * 5)
    assert "has fewer than 6 tokens left of its 10 tokens in a day" in text
    assert (status, headers["x-should-retry"]) == (429, "false")
    status, headers, text = ask("ann", [5])
    assert (status, headers["x-max-tokens"]) == (200, "1"), "as many as are left"
    status, headers, text = ask("ann", [5])
    assert (status, headers["retry-after"], headers["x-should-retry"]) == (429, str(int(12 * HOUR_S)), "false")
    assert "insufficient_quota" in text
    assert "10 tokens in a day" in text
    assert ask("bob", [5] * 5)[0] == 200


def test_what_was_refused_uses_nothing(gateway: Gateway) -> None:
    headers = {"Authorization": f"Bearer {KEYS['ann']}"}
    for _ in range(5):
        wrong = {"model": "demo", "prompt": [5] * 5, "max_tokens": -1}
        assert gateway.ask("POST", "/v1/completions", json=wrong, headers=headers).status_code == 400
    right = {"model": "demo", "prompt": [5] * 5, "max_tokens": 3}
    assert gateway.ask("POST", "/v1/completions", json=right, headers=headers).status_code == 200
