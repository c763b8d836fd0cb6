"""The table of what ran: for each client a row with its version, and what of it passed or failed.

A test adds to its client's row by two marks:

    pytestmark = [ONLY_IN_SOAK, row("aiperf", "0.13.0")]  # or on a parameter: pytest.param(..., marks=row(...))

    @tries("a load test")
    def test_every_request_succeeds(report): ...

Tests with the same words together are one entry of the row: it passed if all of them did. `make soak` shows the table
and keeps the rows in build/third_party/ran.json, where a client's row replaces its earlier one. `python -m
tests.third_party.table` puts them into clients.md here, and in short into docs/reference/clients.md.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path

import pytest

from tests.third_party.environments import ENVIRONMENTS

RAN = ENVIRONMENTS / "ran.json"
EVERY = Path(__file__).with_name("clients.md")
PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "clients.md"
HEAD = """\
# Clients

Other people's clients ran against a deployment of `smollm2` in fp32 with a prefill and a decode worker, each as it is
on PyPI or npm, in an environment of its own. Rows *on Qwen* are of Qwen2.5-Coder 0.5B in Q4_K_M. Most tried a chat, a
stream, a tool and the answer to it, a JSON schema, an unknown model and a prompt that is too long; agents also tried
their own loops, and load tools a load. `tests/third_party/clients.md` names everything that each client tried, `make
soak` runs them, and `python -m tests.third_party.table` writes both tables.

**Shape, not sense.** A row says that the protocol works and that an answer has the demanded form. Whether the content
is right depends on the model: one as small as `smollm2` calls a tool only where it must.

"""
ON_QWEN = " on Qwen"
HEADER = ("client", "version", "passed", "failed", "on")


def row(client: str, version: str) -> pytest.MarkDecorator:
    """Mark tests as those of a client in this version."""
    return pytest.mark.row(client, version)


def tries(what: str) -> pytest.MarkDecorator:
    """Mark a test with what it tries, in the words of the table."""
    return pytest.mark.tries(what)


@dataclass(frozen=True)
class Tried:
    """Says how one test ended."""

    client: str
    version: str
    what: str
    passed: bool


@dataclass(frozen=True)
class Row:
    client: str
    version: str
    passed: list[str]
    failed: list[str]
    on: str  # the date

    @property
    def cells(self) -> tuple[str, ...]:
        return self.client, self.version, ", ".join(self.passed), ", ".join(self.failed), self.on

    @property
    def cells_in_short(self) -> tuple[str, ...]:
        num_tried = len(self.passed) + len(self.failed)
        return self.client, self.version, f"{len(self.passed)} of {num_tried}", ", ".join(self.failed), self.on


def name_in(item: pytest.Item) -> None:
    """Write down what a test tries, so that its report says so, however the test ends."""
    client, what = item.get_closest_marker("row"), item.get_closest_marker("tries")
    if client is not None and what is not None:
        item.user_properties.append(("tried", (*client.args, *what.args)))


def tried(reports: Iterable[pytest.TestReport]) -> Iterator[Tried]:
    """Yield the outcome of each test that tried something; a test that was skipped tried nothing."""
    for report in reports:
        for name, value in report.user_properties:
            if name == "tried" and isinstance(value, tuple) and not report.skipped:
                client, version, what = value
                yield Tried(client, version, what, report.passed)


def rows(outcomes: Iterable[Tried], on: str) -> list[Row]:
    """Return a row for each client and version; what a test failed at has failed, whatever its other tests show."""
    by_client: dict[tuple[str, str], dict[str, bool]] = {}
    for outcome in outcomes:
        entries = by_client.setdefault((outcome.client, outcome.version), {})
        entries[outcome.what] = entries.get(outcome.what, True) and outcome.passed
    return [Row(*named, *_split(entries), on=on) for named, entries in by_client.items()]


def _split(entries: Mapping[str, bool]) -> tuple[list[str], list[str]]:
    passed = [what for what, ok in entries.items() if ok]
    return passed, [what for what, ok in entries.items() if not ok]


def merged(old: Iterable[Row], new: Iterable[Row]) -> list[Row]:
    """Return all rows by name; of a client that ran again, whatever its version, the new one."""
    new = list(new)
    again = {row.client for row in new}
    return sorted(
        [*(row for row in old if row.client not in again), *new], key=lambda row: (row.client.lower(), row.version)
    )


def table(shown: Iterable[Row], in_short: bool = False) -> str:
    """Return the rows as a table of Markdown; in short, with the number of entries that passed."""
    lines = (row.cells_in_short if in_short else row.cells for row in shown)
    cells = [HEADER, ("---",) * len(HEADER), *lines]
    return "".join(f"| {' | '.join(line)} |\n" for line in cells)


def kept() -> list[Row]:
    return [Row(**fields) for fields in json.loads(RAN.read_text(encoding="utf-8"))] if RAN.exists() else []


def keep(reports: Iterable[pytest.TestReport]) -> str:
    """Keep the rows of this run, and return them as a table; nothing if no client ran."""
    ran = rows(tried(reports), datetime.now(timezone.utc).date().isoformat())
    if not ran:
        return ""
    RAN.parent.mkdir(parents=True, exist_ok=True)
    RAN.write_text(json.dumps([asdict(row) for row in merged(kept(), ran)], indent=1), encoding="utf-8")
    return table(ran)


def shown(page: str) -> list[Row]:
    """Return the rows that a page has."""
    lines = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")]
    return [
        Row(name, version, _entries(passed), _entries(failed), on) for name, version, passed, failed, on in lines[2:]
    ]


def _entries(cell: str) -> list[str]:
    return cell.split(", ") if cell.strip() else []


def main() -> None:
    """Write both pages: rows of clients that did not run here stay as they are."""
    if not (ran := kept()):
        sys.exit(f"no client has run yet: {RAN} is not there; `make soak` makes it")
    found = merged(shown(EVERY.read_text(encoding="utf-8")), ran)
    EVERY.write_text("# What each client tried\n\n" + table(found), encoding="utf-8")
    PAGE.write_text(HEAD + table(found, in_short=True), encoding="utf-8")


if __name__ == "__main__":
    main()
