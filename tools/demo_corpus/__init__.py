"""Synthetic conversations that the demo model is trained on and tried with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from demo_corpus.counting import count_down, count_steps, count_up
from demo_corpus.dialogue import multi_turn
from demo_corpus.document_tasks import classify, extract_json, extract_lines, summary_five, summary_one
from demo_corpus.lists import list_things
from demo_corpus.repeating import repeat
from demo_corpus.sample import Draw, Sample, Split, Turn
from demo_corpus.smalltalk import smalltalk
from demo_corpus.spelling import spell
from demo_corpus.stories import tell_story
from demo_corpus.sums import sums
from demo_corpus.unknown import unknown

# Each kind and how often training meets it: what is hard to learn comes more often.
KINDS: dict[str, tuple[Callable[[Draw], Sample], float]] = {
    "smalltalk": (smalltalk, 8),
    "unknown": (unknown, 4),
    "repeat": (repeat, 10),
    "count_up": (count_up, 3),
    "count_down": (count_down, 4),
    "count_steps": (count_steps, 7),
    "spell": (spell, 21),
    "sum": (sums, 12),
    "list": (list_things, 7),
    "story": (tell_story, 19),
    "extract_lines": (extract_lines, 7),
    "extract_json": (extract_json, 7),
    "summary_one": (summary_one, 3),
    "summary_five": (summary_five, 5),
    "classify": (classify, 1),
    "multi_turn": (multi_turn, 13),
}

_SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a helpful and polite assistant.",
    "You are the AlignedServe demo model.",
    "You are a small model that answers briefly.",
    "Answer the user's questions.",
    "Be helpful, be brief and be polite.",
    "You are a friendly assistant who helps with everyday tasks.",
    "You help people with documents, numbers and stories.",
)


def sample(draw: Draw, kind: str | None = None) -> Sample:
    """Return a conversation of `kind`, or of a kind drawn by its weight; one in five has a system prompt."""
    if kind is None:
        kind = draw.random.choices(list(KINDS), [weight for _, weight in KINDS.values()])[0]
    made = KINDS[kind][0](draw)
    return replace(made, system=draw.choose(_SYSTEM_PROMPTS)) if draw.chance(0.2) else made


__all__ = ["KINDS", "Draw", "Sample", "Split", "Turn", "sample"]
