"""No hot path runs more lines than were accepted."""

from __future__ import annotations

import sys

import pytest

from alignedserve.protocol.page_names import chained_hashes
from tests.ratchets import MOST, accepted
from tests.ratchets.counting import Lines
from tests.ratchets.paths import PATHS


@pytest.mark.parametrize("path", PATHS)
def test_no_hot_path_runs_more_lines_than_were_accepted(path: str) -> None:
    count, most = PATHS[path](), MOST * accepted()[path]
    if count > most:  # on a busy machine a stream has more pauses, and each takes some lines
        count = min(count, PATHS[path]())
    assert count <= most, (
        f"{path}: {count:.0f} lines run, {most / MOST:.0f} were accepted. Find what runs more often than it has to; "
        "where it has to, `python -m tests.ratchets` accepts the number, and the commit says why"
    )


def test_every_number_is_of_a_path() -> None:
    assert set(accepted()) == set(PATHS)


def test_lines_of_the_package_count_and_the_tracer_before_is_put_back() -> None:
    before, counts = sys.gettrace(), []
    for pages in (0, 1, 11):
        with Lines() as lines:
            chained_hashes(range(pages), 1)
            [number * number for number in range(100)]  # not of the package
        counts.append(lines.number)
    none, one, eleven = counts
    assert 0 < none < one
    assert eleven - none == 11 * (one - none)
    assert sys.gettrace() is before
