"""The files that the gateways of a deployment share, in memory that may be small."""

from __future__ import annotations

from pathlib import Path

import pytest

from alignedserve.errors import ArenaTooSmall
from alignedserve.gateway.access.adapters import Adapters
from alignedserve.gateway.access.keys import MOST_KEYS
from alignedserve.gateway.access.ledger import Ledger
from alignedserve.sizing.memory import SHARED_RECORDS
from tests.small_disk import small_disk


@pytest.mark.parametrize("made", [Ledger, Adapters])
def test_a_file_without_room_is_an_error_with_its_reason(tmp_path: Path, made: type[Ledger | Adapters]) -> None:
    """Else the first page that is missing would end the process."""
    with small_disk(tmp_path / "shm", "1m") as disk:
        disk.fill(but=65536)
        with pytest.raises(ArenaTooSmall, match=r"no room for the \d+ KiB that parts share .* raise its --shm-size"):
            made(disk.folder / "records")


def test_a_start_counts_with_both(tmp_path: Path) -> None:
    Ledger(tmp_path / "limits")
    Adapters(tmp_path / "adapters")
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) <= SHARED_RECORDS


def test_keys_that_come_and_go_find_rows_and_one_with_open_requests_keeps_its_own(tmp_path: Path) -> None:
    """Two gateways share the rows: each finds a caller's row again that the other has given to another."""
    first, second = (Ledger(tmp_path / "limits", place) for place in (0, 1))
    with first.row("stays") as row:
        row.open_at[0] = 1
    for number in range(3 * MOST_KEYS):
        for ledger, place in ((first, 0), (second, 1)):
            with ledger.row(f"key-{number}") as row:
                assert row.open_at[place] == 0
                row.open_at[place] += 1
                row.requests.at = float(number + 1)
        for ledger, place in ((first, 0), (second, 1)):
            with ledger.row(f"key-{number}") as row:
                assert row.open_at[:2] == ([1, 1] if ledger is first else [0, 1])
                row.open_at[place] -= 1
    with second.row("stays") as row:
        assert row.open_at[:2] == [1, 0]
    with first.row("key-0") as row:
        assert row.requests.at == 0, "it has a new row"
