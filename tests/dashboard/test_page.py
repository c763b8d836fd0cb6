"""The page as a file: it needs nothing else, and a recorded run cannot end its script."""

from __future__ import annotations

import json
import re

from alignedserve.dashboard.page import live_page, policy, recorded_page


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
