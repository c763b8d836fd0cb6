"""The page as a file: it needs nothing else, and a recorded run cannot end its script."""

from __future__ import annotations

import json
import re
from pathlib import Path

from alignedserve.core import Role
from alignedserve.dashboard.page import live_page, policy, recorded_page
from alignedserve.dashboard.picture import PartPicture, Picture
from alignedserve.metrics.recent import RecentRequests
from tests.browser import Browser
from tests.dashboard.chatting import texts


def test_it_names_no_other_server() -> None:
    named = re.findall(r"""(?:src|href|url|import|fetch|EventSource)\s*[=(]\s*["']([^"']+)""", live_page())
    assert "dashboard/events?slot_s=" in named
    assert [name for name in named if not re.match(r"#|data:,|\w|\.$", name)] == []
    assert "://" not in live_page()


def test_its_policy_allows_its_own_script_and_no_other() -> None:
    allowed = dict(rule.split(" ", 1) for rule in policy(live_page()).split("; "))
    assert allowed["default-src"] == "'none'"
    assert allowed["connect-src"] == "'self'"
    assert allowed["script-src"].startswith("'sha256-")
    assert "unsafe" not in policy(live_page())


def test_a_recorded_run_is_in_the_page_whatever_its_text_is() -> None:
    bad = {"why": "</script><script>alert(1)</script><!--"}
    page = recorded_page([json.dumps(bad).encode(), b"{}"])
    (inside,) = re.findall(r'<script id="recording" type="application/json">(.*?)</script>', page, re.DOTALL)
    assert json.loads(inside) == [bad, {}]
    assert page.count("<script>") == live_page().count("<script>")


def test_it_says_in_words_that_other_work_slows_a_machine(browser: Browser, tmp_path: Path) -> None:
    def picture(*workers: tuple[str, str, float]) -> bytes:
        parts = (
            PartPicture(name, Role.DECODE, node, 1, True, 0.0, slowdown=slowdown) for name, node, slowdown in workers
        )
        return Picture(100.0, "ready", ("demo",), tuple(parts), None, None, (), (), RecentRequests()).to_json()

    one = picture(("decode-0", "here", 4.16), ("decode-1", "here", 1.2))
    quiet, two = picture(("decode-0", "here", 1.1)), picture(("decode-0", "here", 1.0), ("decode-1", "far", 2.0))
    (page := tmp_path / "run.html").write_text(recorded_page([one, quiet, two]))
    with browser.page(page.as_uri()) as opened:
        said = []
        for number in range(3):
            opened.value(f"choose({number})")
            said.append(texts(opened, "#alerts p"))
        assert opened.errors == []
    slowed = "Other work slows {}: steps take {} times as long as on a quiet one."
    assert said == [[slowed.format("this machine", "4.2")], [], [slowed.format("far", "2.0")]]
