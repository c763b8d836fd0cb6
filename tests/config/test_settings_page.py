"""Tests that the reference page of settings agrees with the declarations."""

from __future__ import annotations

import settings_page


def test_the_page_is_what_the_declarations_say() -> None:
    """If this fails, run `python tools/settings_page.py`."""
    assert settings_page.PAGE.read_text(encoding="utf-8") == settings_page.page()
