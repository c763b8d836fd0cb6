"""What a person does on the chat page, and sees."""

from __future__ import annotations

import json

from tests.browser import Page


def ask(page: Page, words: str) -> None:
    """Type words behind those that are in the box, and press Enter."""
    page.click("#words")
    page.type(words)
    page.press("Enter")


def ended(page: Page, turns: int) -> None:
    """Wait until the chat has this many turns, and nothing is asked."""
    page.until(f"current.turns.length === {turns} && byId('send').textContent === 'Send'", 20)


def texts(page: Page, selector: str) -> list[str]:
    """Return the texts of the elements that are seen."""
    seen: list[str] = page.value(
        f"[...document.querySelectorAll({json.dumps(selector)})].filter(one => one.checkVisibility())"
        ".map(one => one.textContent)"
    )
    return seen


def shows(page: Page, **said: str) -> None:
    """Wait until these elements are seen with these texts, and the box with these words. N stands for a count."""
    texts_of = (
        "[...document.querySelectorAll('#chat {}')].filter(of => of.checkVisibility()).map(of => of.textContent).join()"
        ".replace(/in \\d+ s/, 'in N s')"
    )
    names = ("user", "assistant", "bad")
    is_shown = [f"{texts_of.format('.' + name)} === {json.dumps(said.get(name, ''))}" for name in names]
    page.until(" && ".join([*is_shown, f"byId('words').value === {json.dumps(said.get('words', ''))}"]), 20)


def menu(page: Page, button: str) -> None:
    """Open a dialog by its button."""
    page.click(button)
    page.until("document.querySelector('dialog[open]') !== null")
