"""The chat page in a real browser, at a server that plays a script."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.browser import Browser, Page, chromium
from tests.chromium import program
from tests.scripted_server import ScriptedServer, scripted


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    program()  # skips before anything starts
    with chromium(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with scripted() as opened:
        yield opened


@contextmanager
def chat_page(server: ScriptedServer, browser: Browser, width: int) -> Iterator[Page]:
    with browser.page(f"{server.root}/", width, 800) as opened:
        opened.until("byId('model').value === 'first'")
        yield opened
        assert opened.value("document.documentElement.scrollWidth") <= width
        assert [error for error in opened.errors if "Failed to load resource" not in error] == []
        assert [url for url in opened.requests if not url.startswith((server.root, "data:"))] == []


@pytest.fixture(params=[1280, 400])
def page(request: pytest.FixtureRequest, server: ScriptedServer, browser: Browser) -> Iterator[Page]:
    with chat_page(server, browser, request.param) as opened:
        yield opened


@pytest.fixture
def desk(server: ScriptedServer, browser: Browser) -> Iterator[Page]:
    with chat_page(server, browser, 1280) as opened:
        yield opened
