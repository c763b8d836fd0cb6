"""How people put a request: the small variations around a phrasing that do not change its meaning."""

from __future__ import annotations

from demo_corpus.sample import Draw

NUMBER_WORDS = "zero one two three four five six seven eight nine ten eleven twelve".split()

_OPENINGS = ("Please ", "Can you ", "Could you ", "Could you please ", "Hi, ", "Hello! ", "Now ", "I need you to ")
_QUESTIONS = ("Can you ", "Could you ", "Could you please ")


def number(draw: Draw, value: int) -> str:
    """Return digits, or now and then a word as people write small numbers."""
    if value < len(NUMBER_WORDS) and draw.chance(0.3):
        return NUMBER_WORDS[value]
    return str(value)


def request(draw: Draw, order: str) -> str:
    """Return an imperative ("Count to 5") in one of the ways in which people ask for it."""
    if draw.chance(0.25):
        opening = draw.choose(_OPENINGS)
        ending = "?" if opening in _QUESTIONS else draw.choose(("", "."))
        text = opening + order[0].lower() + order[1:] + ending
    else:
        text = order + draw.choose(("", ".", ".", ", please.", "!"))
    return text.lower() if draw.chance(0.1) else text
