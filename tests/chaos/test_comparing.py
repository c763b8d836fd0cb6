"""Tests that an answer under faults is told from the undisturbed answer, and what is wrong with it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.chaos.comparing import Difference, Undisturbed, difference
from tests.end_to_end.client import EOS, Wanted

WANTED = Wanted((5, 6), max_tokens=5, stream=True)
UNDISTURBED = Undisturbed((10, 11, 12, 13, 14), "abcde")


def never(*_: object) -> int:
    raise AssertionError("a wrong token")


def once(*_: object) -> int:
    return 1


def test_the_same_answer_and_its_beginning_do_not_differ() -> None:
    assert difference(WANTED, UNDISTURBED, (10, 11, 12, 13, 14), "abcde", is_whole=True, excuse=never) is None
    assert difference(WANTED, UNDISTURBED, (10, 11), "ab", is_whole=False, excuse=never) is None
    assert difference(WANTED, UNDISTURBED, (), "", is_whole=False, excuse=never) is None


@pytest.mark.parametrize(
    ("tokens", "found"),
    [
        ((10, 11, 13, 14), Difference(lost=1)),
        ((10, 11), Difference(lost=3)),
        ((), Difference(lost=5)),
        ((10, 11, 11, 12, 13, 14), Difference(repeated=1)),
        ((10, 11, 99, 13, 14), Difference(other=1)),
    ],
)
def test_lost_repeated_and_other_tokens_are_counted(tokens: Sequence[int], found: Difference) -> None:
    assert difference(WANTED, UNDISTURBED, tokens, "", is_whole=True, excuse=never) == found
    assert found.is_wrong


def test_a_beginning_with_a_wrong_token_differs() -> None:
    assert difference(WANTED, UNDISTURBED, (10, 99), "a?", is_whole=False, excuse=never) == Difference(other=1)


def test_the_reference_excuses_near_ties_but_no_early_end() -> None:
    other = (10, 11, 99, 98, 97)
    assert difference(WANTED, UNDISTURBED, other, "ab", is_whole=True, excuse=once) == Difference(near_ties=1)
    assert difference(WANTED, UNDISTURBED, (10, 99, EOS), "a", is_whole=True, excuse=once) == Difference(near_ties=1)
    early = difference(WANTED, UNDISTURBED, (10, 99), "a", is_whole=True, excuse=once)
    assert early is not None
    assert early.is_wrong


def test_text_that_does_not_fit_its_tokens_is_wrong() -> None:
    found = difference(WANTED, UNDISTURBED, UNDISTURBED.tokens, "abcd", is_whole=True, excuse=never)
    assert found == Difference(other=1)
