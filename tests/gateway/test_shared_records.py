"""The files that the gateways of a deployment share, in memory that may be small."""

from __future__ import annotations

from pathlib import Path

import pytest

from alignedserve.errors import ArenaTooSmall
from alignedserve.gateway.access.adapters import Adapters
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
