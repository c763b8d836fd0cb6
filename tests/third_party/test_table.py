"""The table of what ran says of each client what passed and what failed."""

from __future__ import annotations

from typing import Literal

import pytest

from tests.third_party.table import HEADER, Row, Tried, merged, name_in, row, rows, shown, table, tried, tries

DAY = "2026-11-23"


def test_an_entry_passed_if_all_its_tests_did() -> None:
    outcomes = [
        Tried("a", "1", "chat", passed=True),
        Tried("a", "1", "tools", passed=True),
        Tried("b", "2", "chat", passed=True),
        Tried("a", "1", "tools", passed=False),
        Tried("a", "1", "tools", passed=True),
    ]
    assert rows(outcomes, DAY) == [Row("a", "1", ["chat"], ["tools"], DAY), Row("b", "2", ["chat"], [], DAY)]


def test_a_client_that_ran_again_has_its_new_row_alone() -> None:
    old = [Row("b", "1", ["chat"], [], DAY), Row("c", "1", [], ["chat"], DAY)]
    new = [Row("c", "2", ["chat"], [], DAY), Row("a", "1", ["chat"], [], DAY)]
    assert merged(old, new) == [new[1], old[0], new[0]]


def test_a_row_is_a_line_of_the_table() -> None:
    *_, line = table([Row("a", "1", ["chat", "tools"], ["streaming"], DAY)]).splitlines()
    assert line == f"| a | 1 | chat, tools | streaming | {DAY} |"
    assert len(HEADER) == line.count("|") - 1
    *_, line = table([Row("a", "1", ["chat", "tools"], ["streaming"], DAY)], in_short=True).splitlines()
    assert line == f"| a | 1 | 2 of 3 | streaming | {DAY} |"


def test_a_page_gives_its_rows_back() -> None:
    ran = [Row("a", "1", ["chat", "tools"], [], DAY), Row("b", "2", [], ["chat"], DAY)]
    assert shown(f"# Clients\n\nWords.\n\n{table(ran)}") == ran


@pytest.mark.parametrize(("outcome", "passed"), [("passed", [True]), ("failed", [False]), ("skipped", [])])
def test_a_report_says_what_its_test_tried(
    outcome: Literal["passed", "failed", "skipped"], passed: list[bool], request: pytest.FixtureRequest
) -> None:
    for mark in (row("a", "1"), tries("chat")):
        request.node.add_marker(mark)
    name_in(request.node)
    named = request.node.user_properties.copy()
    request.node.user_properties.clear()  # this test itself is no row
    report = pytest.TestReport("test", ("", 0, ""), {}, outcome, None, "call", user_properties=named)
    assert list(tried([report])) == [Tried("a", "1", "chat", passed=ok) for ok in passed]
