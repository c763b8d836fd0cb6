"""The chat page in a real browser, at a server that is full: how long it waits is shown, and no words are lost."""

from __future__ import annotations

import pytest

from tests.browser import Page
from tests.dashboard.chatting import ask, ended, shows
from tests.scripted_server import HOLD, Refusal, Reply, ScriptedServer, full, piece, streamed

TOO_LONG = Refusal(400, '{"error": {"message": "the prompt is too odd"}}')

WATCH = """
  const texts = [];
  new MutationObserver(() => {
    const text = document.querySelector("#chat .assistant")?.textContent;
    if (text !== texts.at(-1)) texts.push(text);
  }).observe(byId("chat"), {childList: true, subtree: true, characterData: true});
"""


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
    assert page.value("current.turns.map(turn => turn.content)") == ["Hi", "Hello!"]


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
    assert page.value("current.turns") == []


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
    ended(page, 2)
    ask(page, "And?")
    shows(page, user="Hi", assistant="Hello!", bad=said, words="And?")
    page.until("byId('send').textContent === 'Send'")
    page.value("byId('send').click()")
    page.until("current.turns.length === 4")
    shows(page, user="Hi,And?", assistant="Hello!,fine")
    assert [message["content"] for message in server.bodies[-1]["messages"]] == ["Hi", "Hello!", "And?"]
