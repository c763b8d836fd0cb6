"""What a person does with chats on the chat page: keep, open, delete, edit, ask again, stop, copy, set."""

from __future__ import annotations

import json

import pytest

from tests.browser import Page
from tests.dashboard.chatting import ask, ended, menu, shows, texts
from tests.scripted_server import HOLD, Refusal, ScriptedServer, full, streamed

SHIFT = 8
BROKEN = Refusal(400, '{"error": {"message": "it is broken"}}')


def reload(page: Page) -> None:
    page.value("isOld = true")
    page.send("Page.reload")
    page.until("typeof isOld === 'undefined' && document.readyState === 'complete' && byId('model').value !== ''")


def chat(page: Page, server: ScriptedServer, *said: str) -> None:
    """Ask these questions; the answers are A and the question."""
    for number, words in enumerate(said):
        server.replies = [streamed(f"A {words}")]
        ask(page, words)
        ended(page, 2 * number + 2)


def messages(server: ScriptedServer) -> list[str]:
    """Return what the last request has said."""
    return [message["content"] for message in server.bodies[-1]["messages"]]


def test_a_chat_is_there_after_a_reload_and_goes_on(page: Page, server: ScriptedServer) -> None:
    chat(page, server, "one", "two")
    reload(page)
    shows(page, user="one,two", assistant="A one,A two")
    server.replies = [streamed("yes")]
    ask(page, "three")
    ended(page, 6)
    assert messages(server) == ["one", "A one", "two", "A two", "three"]


def test_chats_are_listed_opened_and_deleted(page: Page, server: ScriptedServer) -> None:
    for words in ("first chat", "second chat"):
        chat(page, server, words)
        page.click("#anew")
        shows(page)
    menu(page, "#past-open")
    assert texts(page, "#past .open") == ["second chat", "first chat"]
    page.click("#past li:nth-child(2) .open")
    shows(page, user="first chat", assistant="A first chat")
    menu(page, "#past-open")
    page.click("#past li:nth-child(1) .delete")
    page.until("document.querySelectorAll('#past .open').length === 1")
    assert texts(page, "#past .open") == ["first chat"]
    page.click("#delete-all")
    assert texts(page, "#past .open") == ["first chat"], "once is not enough"
    page.click("#delete-all")
    page.until("document.querySelectorAll('#past .open').length === 0")
    page.press("Escape")
    shows(page)
    reload(page)
    shows(page)


def test_the_oldest_chats_make_room(desk: Page, server: ScriptedServer) -> None:
    add = (
        "for (let at = 1; at <= %d; at++) localStorage.setItem(`alignedserve-chat-old-${at}`, JSON.stringify("
        "{id: `old-${at}`, at, turns: [{role: 'user', content: 'old'}, {role: 'assistant', content: 'x'.repeat(%d)}]}))"
    )
    desk.value(add % (100, 10))
    chat(desk, server, "new")
    assert "made room" in desk.text("#times")
    assert desk.value("[chats().length, chats()[0].turns[0].content, chats().at(-1).id]") == [100, "new", "old-2"]
    desk.value(add % (5, 600_000))
    server.replies = [streamed("fine")]
    ask(desk, "newer")
    ended(desk, 4)
    sizes = desk.value("chats().map(chat => JSON.stringify(chat).length)")
    assert 1_800_000 < sum(sizes) < 2_000_000
    assert desk.value("chats()[0].turns.length") == 4


def test_a_browser_without_room_says_so_and_chats_on(desk: Page, server: ScriptedServer) -> None:
    desk.value(
        "for (let size = 1 << 22; size; size >>= 1) try { localStorage['y' + size] = 'x'.repeat(size); } catch { }"
    )
    desk.value("try { for (let at = 0; ; at++) localStorage['z' + at] = ''; } catch { }")
    chat(desk, server, "one", "two")
    assert len(texts(desk, "#chat .bad")) == 1
    assert "no room" in texts(desk, "#chat .bad")[0]
    assert texts(desk, ".assistant") == ["A one", "A two"]


def test_words_that_wait_are_in_the_box_after_a_reload(desk: Page, server: ScriptedServer) -> None:
    server.replies = [full("it is full", "500"), streamed("fine")]
    ask(desk, "Hi")
    shows(desk, user="Hi", assistant="Asked again in N s: it is full")
    desk.type("there")
    reload(desk)
    shows(desk, words="Hi\nthere")
    desk.click("#send")
    ended(desk, 2)
    shows(desk, user="Hi\nthere", assistant="fine")


def test_a_question_is_edited(page: Page, server: ScriptedServer) -> None:
    chat(page, server, "one", "two")
    page.click("#words")
    page.type("half")
    page.value("byId('chat').scrollTop = 0")
    page.click(".edit")
    shows(page, user="one,two", assistant="A one,A two", words="one")
    assert "replaces" in page.text("#editing")
    page.press("Escape")
    shows(page, user="one,two", assistant="A one,A two", words="half")
    assert texts(page, "#editing") == []
    page.click(".edit")
    page.value("byId('words').select()")
    page.type("uno")
    server.replies = [full("it is full", "1"), BROKEN]
    page.press("Enter")
    shows(page, user="uno", assistant="Asked again in N s: it is full")
    shows(page, user="one,two", assistant="A one,A two", bad="it is broken", words="uno")
    server.replies = [streamed("fine")]
    page.press("Enter")
    ended(page, 2)
    shows(page, user="uno", assistant="fine", words="half")
    assert messages(server) == ["uno"]


def test_an_answer_is_asked_for_again(page: Page, server: ScriptedServer) -> None:
    chat(page, server, "one", "two")
    server.replies = [BROKEN]
    page.click(".retry")
    shows(page, user="one,two", assistant="A one,A two", bad="it is broken")
    server.replies = [full("it is full", "1"), streamed("better")]
    page.click(".retry")
    shows(page, user="one,two", assistant="A one,Asked again in N s: it is full")
    shows(page, user="one,two", assistant="A one,better")
    assert messages(server) == ["one", "A one", "two"]
    reload(page)
    shows(page, user="one,two", assistant="A one,better")


@pytest.mark.parametrize("how", ["Escape", "#send"])
def test_an_answer_is_stopped_and_kept(desk: Page, server: ScriptedServer, how: str) -> None:
    server.replies = [[*streamed("Once upon"), HOLD], streamed("Yes")]
    ask(desk, "Go")
    shows(desk, user="Go", assistant="Once upon")
    assert desk.text("#send") == "Stop"
    desk.press(how) if how == "Escape" else desk.click(how)
    ended(desk, 2)
    shows(desk, user="Go", assistant="Once upon")
    ask(desk, "And?")
    ended(desk, 4)
    assert messages(server) == ["Go", "Once upon", "And?"]


def test_shift_and_enter_begin_a_line(desk: Page, server: ScriptedServer) -> None:
    server.replies = [streamed("fine")]
    desk.click("#words")
    desk.type("one")
    desk.press("Enter", "\r", SHIFT)
    desk.type("two")
    desk.press("Enter")
    ended(desk, 2)
    assert messages(server) == ["one\ntwo"]


def test_code_and_answers_are_copied(desk: Page, server: ScriptedServer) -> None:
    answer = "Do:\n\n```sh\nls  -l\nrm *\n```\n**now**"
    server.replies = [streamed(answer)]
    ask(desk, "How?")
    ended(desk, 2)
    desk.value("copied = []; document.addEventListener('copy', () => copied.push(document.activeElement.value))")
    desk.click(".code .copy")
    assert texts(desk, ".code .copy") == ["Copied"]
    desk.click(".code .copy")
    desk.click(".tools .copy")
    desk.click("#copy")
    code, again, whole, curl = desk.value("copied")
    assert (code, again, whole) == ("ls  -l\nrm *", code, answer)
    desk.until("document.querySelector('.code .copy').textContent === 'Copy'", 20)
    assert curl.startswith("curl http://127.0.0.1:")
    font = desk.value("getComputedStyle(document.querySelector('.code code')).fontFamily")
    assert "monospace" in font


def test_settings_are_sent_and_kept(page: Page, server: ScriptedServer) -> None:
    menu(page, "#settings-open")
    page.click("#system")
    page.type("Talk like a pirate.")
    page.click("#temperature")
    page.type("0.5")
    page.press("Escape")
    assert page.text("#settings-open") == "Settings: yours"
    chat(page, server, "one")
    reload(page)
    server.replies = [streamed("fine")]
    ask(page, "two")
    ended(page, 4)
    assert messages(server) == ["Talk like a pirate.", "one", "A one", "two"]
    assert server.bodies[-1]["messages"][0]["role"] == "system"
    assert server.bodies[-1]["temperature"] == 0.5
    menu(page, "#settings-open")
    page.click("#temperature")
    page.value("byId('temperature').select()")
    page.type("7")  # it is too much, so the last one counts
    page.press("Escape")
    server.replies = [streamed("fine")]
    ask(page, "three")
    ended(page, 6)
    assert messages(server)[0] == "Talk like a pirate."
    assert server.bodies[-1]["temperature"] == 0.5
    menu(page, "#settings-open")
    for box in ("#system", "#temperature"):
        page.click(box)
        page.value(f"document.querySelector('{box}').select()")
        page.press("Backspace")
    page.press("Escape")
    server.replies = [streamed("fine")]
    ask(page, "four")
    ended(page, 8)
    assert messages(server)[0] == "one"
    assert "temperature" not in server.bodies[-1]


def test_the_oldest_turns_are_forgotten_where_the_context_is_full(desk: Page, server: ScriptedServer) -> None:
    menu(desk, "#settings-open")
    desk.click("#system")
    desk.type("Be brief.")
    desk.press("Escape")
    chat(desk, server, "one", "two")
    server.replies = [Refusal(400, '{"error": {"message": "the maximum context length is 9"}}'), streamed("fine")]
    ask(desk, "three")
    ended(desk, 6)
    assert messages(server) == ["Be brief.", "two", "A two", "three"]
    assert "forgotten" in desk.text("#times")
    assert texts(desk, ".user") == ["one", "two", "three"], "they are seen still"
    server.replies = [streamed("fine")]
    ask(desk, "four")
    ended(desk, 8)
    assert messages(server)[:2] == ["Be brief.", "two"], "it is not tried again"


def test_on_a_phone_the_question_stays_above_its_answer(page: Page, server: ScriptedServer) -> None:
    """And what one needs is in reach: `click` sees that."""
    chat(page, server, "before")
    server.replies = [[*streamed(*(f"Line {number} of a long answer.\n\n" for number in range(80))), HOLD]]
    ask(page, "Tell me a long story")
    page.until("current.turns.length === 4 && document.querySelectorAll('.assistant p').length > 80", 20)
    question, answer = (
        "[...document.querySelectorAll('.user')].at(-1)",
        "[...document.querySelectorAll('.assistant p')].at(-1)",
    )
    top = page.value(f"{question}.getBoundingClientRect().top")
    assert 0 < top < page.value(f"{answer}.getBoundingClientRect().top") < 800, "the end of the answer is seen too"
    seen = f"document.elementFromPoint({question}.getBoundingClientRect().left + 20, {top} + 10).className"
    assert page.value(seen) == "user"
    page.value("byId('chat').scrollTop = 0")  # who reads above stays there
    page.click("#send")
    ended(page, 4)
    assert page.value("byId('chat').scrollTop") == 0
    page.click("#anew")
    shows(page)


def test_a_model_that_makes_vectors_is_not_offered(desk: Page, server: ScriptedServer) -> None:
    server.vector_models = ["minilm"]
    reload(desk)
    assert desk.value("[...byId('model').options].map(option => option.value)") == ["first", "second"]


def test_all_that_one_can_do_has_a_name(desk: Page, server: ScriptedServer) -> None:
    chat(desk, server, "one")
    for button in ("#past-open", "#settings-open"):
        menu(desk, button)
        desk.send("Accessibility.enable")
        nodes = desk.send("Accessibility.getFullAXTree")["nodes"]
        roles = ("button", "textbox", "spinbutton", "combobox", "dialog", "log")
        named = [
            (node["role"]["value"], node.get("name", {}).get("value", ""))
            for node in nodes
            if not node["ignored"] and node["role"]["value"] in roles
        ]
        assert [role for role, name in named if not name] == []
        assert {role for role, _ in named} >= {"button", "dialog"}
        desk.press("Escape")
    assert desk.value("byId('chat').role") == "log"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_words_can_be_read_in_light_and_dark(desk: Page, server: ScriptedServer, scheme: str) -> None:
    desk.prefer(scheme)
    server.replies = [BROKEN, streamed("See **this** `code`\n```sh\nls\n```")]
    ask(desk, "Go")
    shows(desk, bad="it is broken", words="Go")
    bad = desk.value("getComputedStyle(document.querySelector('#chat .bad')).color")
    desk.press("Enter")
    ended(desk, 2)
    background = "getComputedStyle(document.querySelector('.asked')).backgroundColor"
    assert light(desk.value(background)) == (scheme == "light")
    for selector in (".user", ".assistant p", ".code code", ".tools button", "#times"):
        colour = desk.value(f"getComputedStyle(document.querySelector({json.dumps(selector)})).color")
        assert light(colour) == (scheme == "dark"), selector
    assert light(bad, 450) == (scheme == "dark")


def light(colour: str, most: int = 384) -> bool:
    """Return whether a colour, as `rgb(1, 2, 3)`, is light."""
    return sum(map(int, colour.removeprefix("rgb(").removesuffix(")").split(", "))) > most
