"""Tests that a caller with long texts or slow grammars waits for itself, and others do not wait for it."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import Any

import httpx
import pytest

from alignedserve.gateway.access.keys import KeyEntry, KeyRing, hash_key
from alignedserve.gateway.actor import HttpServer, http_settings
from alignedserve.gateway.http.bodies import LONG_BYTES
from alignedserve.gateway.openai.reading import AnswerReader
from alignedserve.shell import bounded_threads
from alignedserve.text.syntax_trial import SyntaxTrial
from alignedserve.text.text_model import TextModel
from tests.gateway.conftest import PATIENT_S, FakeOwner, Gateway

KEYS = KeyRing([KeyEntry(name, hash_key(name)) for name in ("ann", "bob", "cat")])
LONG = "a" * (LONG_BYTES + 1)
MANY = 40  # bodies of a caller at once, more than may be parsed at once

Ask = Callable[..., Coroutine[Any, Any, httpx.Response]]


class Held:
    """Work in threads that goes on when it is told to; what is in it is noted."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.inside, self.most = 0, 0
        self.go_on, self._changing = threading.Event(), threading.Lock()

    def hold(self, what: str) -> None:
        with self._changing:
            self.begun.append(what)
            self.inside += 1
            self.most = max(self.most, self.inside)
        assert self.go_on.wait(PATIENT_S)
        with self._changing:
            self.inside -= 1

    async def begins(self) -> None:
        while not self.begun:
            await asyncio.sleep(0.001)


def ask_each(text: TextModel, work: Callable[[Ask], Awaitable[None]], keys: KeyRing = KEYS) -> None:
    """Run the work with what asks the same gateway as a caller: ask(caller, path, **fields)."""
    gateway = Gateway(text, FakeOwner((5,), (2,)), keys=keys)

    async def asked() -> None:
        async with gateway.client() as client:

            async def ask(caller: str, path: str, **fields: Any) -> httpx.Response:
                headers = {"Authorization": f"Bearer {caller}"}
                return await client.post(path, json={"model": "demo", **fields}, headers=headers)

            await work(ask)

    asyncio.run(asyncio.wait_for(asked(), PATIENT_S))


@pytest.mark.parametrize(
    ("path", "field"),
    [("/tokenize", "prompt"), ("/v1/completions", "prompt"), ("/v1/messages/count_tokens", "messages")],
)
def test_short_chats_do_not_stand_behind_long_texts(
    text: TextModel, monkeypatch: pytest.MonkeyPatch, path: str, field: str
) -> None:
    """Of a caller with many long texts one is tokenised at a time, and then it is the other caller's turn."""
    held, exceeds = Held(), TextModel.surely_exceeds

    def held_back(self: TextModel, texts: Any, most: int) -> bool:
        (first,) = (given for given in texts if LONG in given)
        held.hold(first.removeprefix(LONG))
        return exceeds(self, texts, most)

    monkeypatch.setattr(TextModel, "surely_exceeds", held_back)

    def long(name: str) -> dict[str, Any]:
        return {field: LONG + name if field == "prompt" else [{"role": "user", "content": LONG + name}]}

    async def work(ask: Ask) -> None:
        flood = [asyncio.create_task(ask("ann", path, **long("ann"))) for _ in range(MANY)]
        await held.begins()
        for caller in ("bob", "ann"):
            assert (await ask(caller, "/v1/completions", prompt="Hi")).status_code == 200
            assert (await ask(caller, "/tokenize", prompt="Hi")).status_code == 200
        other = asyncio.create_task(ask("bob", path, **long("bob")))
        await ask("bob", "/tokenize", prompt="Hi")  # and so the one before it waits in its thread
        held.go_on.set()
        assert {(await answer).status_code for answer in [other, *flood]} <= {200, 400}

    ask_each(text, work)
    assert held.most == 1
    assert held.begun[:2] == ["ann", "bob"]
    assert len(held.begun) == MANY + 1


def test_a_callers_slow_grammars_are_tried_one_at_a_time(text: TextModel, monkeypatch: pytest.MonkeyPatch) -> None:
    held, bob_waits, find = Held(), threading.Event(), SyntaxTrial.find_fault

    def held_back(_: SyntaxTrial, syntax: str) -> tuple[None, float]:
        if "known" not in syntax:
            held.hold("bob" if "bob" in syntax else "ann")
        return None, 0.0

    def noted(self: SyntaxTrial, syntax: str, tried: Any) -> str | None:
        if "bob" in syntax:
            bob_waits.set()
        return find(self, syntax, tried)

    monkeypatch.setattr(SyntaxTrial, "_try", held_back)
    monkeypatch.setattr(SyntaxTrial, "find_fault", noted)

    async def work(ask: Ask) -> None:
        assert (await ask("bob", "/v1/completions", prompt="Hi", guided_regex="known")).status_code == 200
        slow = [
            asyncio.create_task(ask("ann", "/v1/completions", prompt="Hi", guided_regex=f"ann{number}"))
            for number in range(MANY)
        ]
        await held.begins()
        assert (await ask("bob", "/v1/completions", prompt="Hi")).status_code == 200
        assert (await ask("bob", "/v1/completions", prompt="Hi", guided_regex="known")).status_code == 200
        other = asyncio.create_task(ask("bob", "/v1/completions", prompt="Hi", guided_regex="bob"))
        while not bob_waits.is_set():
            await asyncio.sleep(0.001)
        held.go_on.set()
        assert {(await answer).status_code for answer in [other, *slow]} == {200}

    ask_each(text, work)
    assert held.most == 1
    assert "bob" in held.begun[:4]  # soon, and not behind all of ann's: a lock need not go to who has waited longest
    assert len(held.begun) == MANY + 1


@pytest.mark.parametrize("keys", [KEYS, KeyRing([])], ids=["keys", "no keys"])
def test_what_waits_for_a_trial_holds_no_turn_of_others(
    text: TextModel, monkeypatch: pytest.MonkeyPatch, keys: KeyRing
) -> None:
    held = Held()

    def held_back(_: SyntaxTrial, syntax: str) -> tuple[None, float]:
        held.hold("long" if len(syntax) > LONG_BYTES else "short")
        return None, 0.0

    monkeypatch.setattr(SyntaxTrial, "_try", held_back)
    monkeypatch.setattr(SyntaxTrial, "find_fault", lambda self, syntax, _: self._try(syntax)[0])

    async def work(ask: Ask) -> None:
        slow = [
            asyncio.create_task(ask(caller, "/v1/completions", prompt="Hi", guided_regex=f"{caller}{number}"))
            for caller in ("ann", "bob")
            for number in range(MANY)
        ]
        await held.begins()
        for caller in ("cat", "ann"):
            assert (await ask(caller, "/v1/completions", prompt="Hi")).status_code == 200
            assert (await ask(caller, "/tokenize", prompt="Hi")).status_code == 200
        slow.append(asyncio.create_task(ask("ann", "/v1/completions", prompt="Hi", guided_regex=LONG)))
        while "long" not in held.begun:
            await asyncio.sleep(0.001)
        held.go_on.set()
        assert {(await answer).status_code for answer in slow} == {200}

    ask_each(text, work, keys)
    assert len(held.begun) == 2 * MANY + 1


@pytest.fixture
def _settings_of_python() -> Iterator[None]:
    thresholds, switch_s = gc.get_threshold(), sys.getswitchinterval()
    yield
    gc.set_threshold(*thresholds)
    sys.setswitchinterval(switch_s)
    gc.unfreeze()


@pytest.mark.usefixtures("_settings_of_python")
def test_a_thread_that_works_soon_gives_the_lock_of_python_to_the_event_loop(text: TextModel) -> None:
    """The loop gives it away several times before a first token, and got it back after 5 ms each time."""
    server = HttpServer(http_settings(Gateway(text, FakeOwner()).app, None))
    server.should_exit = True  # as soon as it has begun
    asyncio.run(server.serve([]))
    assert sys.getswitchinterval() <= 0.001


def test_work_that_never_ends_is_given_up_and_others_go_on(text: TextModel, monkeypatch: pytest.MonkeyPatch) -> None:
    held, ids = Held(), TextModel.prompt_ids

    def held_back(self: TextModel, said: str, with_special: bool = True) -> list[int]:
        if said == "endless":
            held.hold(said)
        return ids(self, said, with_special)

    monkeypatch.setattr(TextModel, "prompt_ids", held_back)
    monkeypatch.setattr(bounded_threads, "WORK_S", 0.1)

    async def work(ask: Ask) -> None:
        for _ in range(3):  # more than there are threads
            endless = await ask("ann", "/v1/completions", prompt="endless")
            assert (endless.status_code, endless.json()["error"]["code"]) == (500, "body_takes_too_long")
            assert endless.headers["x-should-retry"] == "false"
        assert (await ask("ann", "/v1/completions", prompt="Hi")).status_code == 200
        assert held.inside == 3
        held.go_on.set()

    ask_each(text, work)


@pytest.mark.parametrize("place", [(TextModel, "prompt_ids"), (AnswerReader, "read")], ids=["thread", "answer"])
@pytest.mark.parametrize("fields", [{}, {"n": 2}, {"stream": True}], ids=["whole", "choices", "stream"])
def test_a_panic_of_a_library_is_an_error_of_its_request(
    text: TextModel, monkeypatch: pytest.MonkeyPatch, place: tuple[type, str], fields: dict[str, Any]
) -> None:
    """Libraries in Rust raise what is no Exception where they panic."""

    class PanicException(BaseException):
        pass

    def panics(*_: object) -> None:
        raise PanicException

    async def work(ask: Ask) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(*place, panics)
            answer = await ask("ann", "/v1/completions", prompt="Hi", **fields)
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal_error")
        assert (await ask("ann", "/v1/completions", prompt="Hi")).status_code == 200

    ask_each(text, work)
