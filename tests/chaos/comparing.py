"""An answer under faults against the undisturbed answer to the same question."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

from tests.end_to_end.client import EOS, Wanted, reference
from tests.reference import Tally, compare

Excuse = Callable[[Wanted, Sequence[int]], int]  # near ties that explain an output; raises AssertionError at a fault


@dataclass(frozen=True)
class Difference:
    """Tokens of one answer that the undisturbed answer has otherwise."""

    other: int = 0  # other tokens in their place, or text that does not fit the tokens
    lost: int = 0
    repeated: int = 0  # tokens that the undisturbed answer does not have in between
    near_ties: int = 0  # excused by the reference (tests/reference.py)

    @property
    def is_wrong(self) -> bool:
        return bool(self.other or self.lost or self.repeated)


@dataclass(frozen=True)
class Undisturbed:
    tokens: Sequence[int]
    text: str


def near_ties(wanted: Wanted, tokens: Sequence[int]) -> int:
    """Return how many tokens differ from the reference's by a near tie; raise AssertionError where one is wrong."""
    tally = Tally()
    compare(reference(), wanted.prompt, tokens, tally)
    return len(tally.excused)


def difference(
    wanted: Wanted,
    undisturbed: Undisturbed,
    tokens: Sequence[int],
    text: str,
    is_whole: bool,
    excuse: Excuse = near_ties,
) -> Difference | None:
    """Return how an answer differs from the undisturbed answer, or None. An answer that broke off is compared as far
    as it goes."""
    expected = undisturbed.tokens if is_whole else undisturbed.tokens[: len(tokens)]
    if list(tokens) == list(expected):
        fits = text == undisturbed.text if is_whole else undisturbed.text.startswith(text)
        return None if fits else Difference(other=1)
    try:
        if is_whole and not _ends_well(wanted, tokens):
            raise AssertionError("it ends too early or too late")
        return Difference(near_ties=max(1, excuse(wanted, tokens)))
    except AssertionError:
        return _edits(expected, tokens)


def _ends_well(wanted: Wanted, tokens: Sequence[int]) -> bool:
    return len(tokens) == wanted.max_tokens or (not wanted.ignore_eos and list(tokens[-1:]) == [EOS])


def _edits(expected: Sequence[int], tokens: Sequence[int]) -> Difference:
    other = lost = repeated = 0
    for what, first, last, begin, end in SequenceMatcher(None, expected, tokens, autojunk=False).get_opcodes():
        if what == "delete":
            lost += last - first
        elif what == "insert":
            repeated += end - begin
        elif what == "replace":
            other += max(last - first, end - begin)
    return Difference(other, lost, repeated)
