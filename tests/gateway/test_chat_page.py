"""The chat page in a real browser, at a server that is full: how long it waits is shown, and no words are lost."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.browser import Browser, Page, chromium
from tests.chromium import program
from tests.scripted_server import HOLD, Refusal, Reply, ScriptedServer, full, piece, scripted, streamed

TOO_LONG = Refusal(400, '{"error": {"message": "the prompt is too odd"}}')

WATCH = """
  const texts = [];
  new MutationObserver(() => {
    const text = document.querySelector("#chat .assistant")?.textContent;
    if (text !== texts.at(-1)) texts.push(text);
  }).observe(byId("chat"), {childList: true, subtree: true, characterData: true});
"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    program()  # skips before anything starts
    with chromium(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with scripted() as opened:
        yield opened


@pytest.fixture(params=[1280, 400])
def page(request: pytest.FixtureRequest, server: ScriptedServer, browser: Browser) -> Iterator[Page]:
    with browser.page(f"{server.root}/", request.param, 800) as opened:
        opened.until("byId('model').value === 'first'")
        yield opened
        assert opened.value("document.documentElement.scrollWidth") <= request.param
        assert [error for error in opened.errors if "Failed to load resource" not in error] == []


def ask(page: Page, words: str) -> None:
    page.value(f"byId('words').value = {json.dumps(words)}; byId('ask').requestSubmit()")


def shows(page: Page, **texts: str) -> None:
    """Wait until these elements have these texts, and the box these words. N stands for the seconds of a count."""
    said = {name: texts.get(name, "") for name in ("user", "assistant", "bad")}
    texts_of = (
        "[...document.querySelectorAll('#chat {}')].map(of => of.textContent).join().replace(/in \\d+ s/, 'in N s')"
    )
    is_shown = " && ".join(f"{texts_of.format('.' + name)} === {json.dumps(text)}" for name, text in said.items())
    page.until(f"{is_shown} && byId('words').value === {json.dumps(texts.get('words', ''))}", 20)


def test_it_shows_its_place_until_the_first_word_comes(page: Page, server: ScriptedServer) -> None:
    waits = ["keep-alive", "3 before you, about 12 s", HOLD, "0 before you, about 4 s", HOLD]
    server.replies = [[*streamed("Hel", "lo!", waits=waits)]]
    ask(page, "Hi")
    for place in ("3 before you, about 12 s", "0 before you, about 4 s"):
        shows(page, user="Hi", assistant=place)
        assert page.text("#send") == "Cancel"
        server.hold.set()
    shows(page, user="Hi", assistant="Hello!")
    page.until("byId('send').textContent === 'Send'")
    assert page.value("turns.map(turn => turn.content)") == ["Hi", "Hello!"]


def test_a_full_server_is_asked_again_when_it_says(page: Page, server: ScriptedServer) -> None:
    server.replies = [full("it is full", "3"), full("it starts", status=503), streamed("fine")]
    page.value(WATCH)
    ask(page, "Hi")
    shows(page, user="Hi", assistant="fine")
    counted = [text for text in page.value("texts") if "again" in text]
    assert (counted[0], counted[-1]) == ("Asked again in 3 s: it is full", "Asked again in 1 s: it starts")
    assert len(counted) > 2, "it counts"
    assert counted == sorted(counted, key=lambda text: -int(text.split()[3]))
    assert server.bodies == server.bodies[:1] * 3
    assert server.retries == [0, 1, 2], "who comes again may wait longer in line"
    first, second, third = server.times
    assert second - first >= 3
    assert third - second >= 1


def test_cancel_puts_the_words_back_before_what_was_typed_meanwhile(page: Page, server: ScriptedServer) -> None:
    server.replies = [full("it is full", "500"), streamed("fine", waits=["3 before you, about 12 s", HOLD])]
    ask(page, "Hi\nyou")
    shows(page, user="Hi\nyou", assistant="Asked again in N s: it is full")
    page.value("byId('words').value = 'there'; byId('words').focus()")
    page.press("Enter")  # sends nothing, and does not cancel
    shows(page, user="Hi\nyou", assistant="Asked again in N s: it is full", words="there")
    page.value("byId('send').click()")
    shows(page, words="Hi\nyou\nthere")
    page.value("byId('send').click()")
    shows(page, user="Hi\nyou\nthere", assistant="3 before you, about 12 s")
    page.value("byId('anew').click()")
    shows(page, words="Hi\nyou\nthere")
    assert page.value("turns") == []


BROKEN = {
    "an error": (TOO_LONG, "the prompt is too odd"),
    "no JSON": (Refusal(502, "<h1>oh</h1>"), "the server answers with 502"),
    "longer than patience": (full("it is full", "601"), "it is full"),
    "told not to": (full("spent", "1", 429, ("x-should-retry", "false")), "spent"),
    "an error in the stream": ([": 3 before you, about 12 s", '{"error": {"message": "lost"}}'], "lost"),
    "no words": ([piece(None)], "no words came as an answer"),
}


@pytest.mark.parametrize(("reply", "said"), BROKEN.values(), ids=BROKEN)
def test_any_error_puts_the_words_back(page: Page, server: ScriptedServer, reply: Reply, said: str) -> None:
    server.replies = [streamed("Hello!"), reply, streamed("fine")]
    ask(page, "Hi")
    page.until("turns.length === 2")
    ask(page, "And?")
    shows(page, user="Hi", assistant="Hello!", bad=said, words="And?")
    page.until("byId('send').textContent === 'Send'")
    page.value("byId('send').click()")
    page.until("turns.length === 4")
    shows(page, user="Hi,And?", assistant="Hello!,fine")
    assert [message["content"] for message in server.bodies[-1]["messages"]] == ["Hi", "Hello!", "And?"]
