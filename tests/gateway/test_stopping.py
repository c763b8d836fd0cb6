"""Tests of stop strings: the output ends at the same place, however the text is cut into pieces."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alignedserve.text.decoding import StopStrings

TEXT, STOP = st.text("ab.", max_size=14), st.text("ab.", min_size=1, max_size=4)


def said(stops: list[str], pieces: list[str], include: bool = False) -> tuple[str, bool]:
    watch, given_ = StopStrings(stops, include), ""
    for piece in pieces:
        given_ += watch.feed(piece)
        if watch.found:
            return given_, True
    return given_ + watch.flush(), False


@given(text=TEXT, stops=st.lists(STOP, max_size=3), cuts=st.sets(st.integers(0, 14)), include=st.booleans())
def test_pieces_do_not_matter(text: str, stops: list[str], cuts: set[int], include: bool) -> None:
    borders = [0, *sorted(cuts), 99]
    pieces = [text[start:end] for start, end in pairwise(borders)]
    assert said(stops, pieces, include) == said(stops, list(text), include) == plainly(stops, text, include)


def plainly(stops: list[str], text: str, include: bool) -> tuple[str, bool]:
    for end in range(len(text) + 1):
        ends = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if ends:
            return text[: end if include else end - max(ends)], True
    return text, False


@pytest.mark.parametrize(("piece", "given_"), [("ab", ""), ("xab", "x"), ("aba", "ab"), ("b", "b")])
def test_only_what_may_begin_a_stop_string_is_held_back(piece: str, given_: str) -> None:
    assert StopStrings(["abc"]).feed(piece) == given_


@pytest.mark.parametrize("stops", [("X", "Y"), ("Y", "X")])
def test_of_two_in_one_piece_the_first_to_be_complete_ends_the_output(stops: tuple[str, str]) -> None:
    watched = StopStrings([*stops])
    assert watched.feed("abXcdY") == "ab"
    assert watched.found == "X"


@pytest.mark.parametrize("stops", [("end", "the end"), ("the end", "end")])
def test_of_two_that_end_together_it_is_the_longest(stops: tuple[str, str]) -> None:
    watched = StopStrings([*stops])
    assert watched.feed("so the end.") == "so "
    assert watched.found == "the end"
