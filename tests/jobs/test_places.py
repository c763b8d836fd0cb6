"""Tests that a line is read again at its place, whichever other lines are left out."""

from __future__ import annotations

from io import BytesIO

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alignedserve.jobs.lines import LinePlaces, raw_lines

LINES = st.lists(st.binary(max_size=30).map(lambda data: data.replace(b"\n", b"").replace(b"\r", b"")), max_size=20)


@given(LINES, st.sets(st.integers(1, 20)), st.sampled_from([b"\n", b"\r\n"]))
def test_every_line_is_found_at_its_place(lines: list[bytes], but: set[int], end: bytes) -> None:
    data = b"\xef\xbb\xbf" + end.join(lines)
    raws = [raw for raw in raw_lines(BytesIO(data), 1_000) if raw.number not in but]
    places = LinePlaces(raws)
    assert list(places.lines) == [raw.number for raw in raws]
    for raw in raws:
        offset, size = places.find(raw.number)
        assert data[offset : offset + size] == raw.data
    for number in but:
        with pytest.raises(LookupError):
            places.find(number)
