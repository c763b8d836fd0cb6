"""Near ties: transformers tells which answers are right although they differ from the first one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from tests.chaos.oracle import Answer, History, other_answers
from tests.end_to_end.client import EOS, reference
from tests.reference import Tally, compare


def is_right(prompt: Sequence[int], tokens: Sequence[int]) -> bool:
    """Whether the reference gives these tokens, or hardly tells them from its own (tests/reference.py)."""
    try:
        compare(reference(), prompt, tokens, Tally())
    except AssertionError:
        return False
    return True


def near_ties(
    history: History,
    prompts: Mapping[str, Sequence[int]],
    is_right: Callable[[Sequence[int], Sequence[int]], bool] = is_right,
) -> Iterator[Answer]:
    """Yield the answers that differ from the first ones to their questions, and are right all the same."""
    for first, answer in other_answers(history):
        differs = answer.tokens != first.tokens[: len(answer.tokens)]  # else it lacks tokens, or its text is not theirs
        ends_well = not answer.is_whole or answer.finish != "stop" or answer.tokens[-1:] == [EOS]
        prompt = prompts.get(answer.question)
        if prompt and differs and ends_well and is_right(prompt, answer.tokens):
            yield answer
