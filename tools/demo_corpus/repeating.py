"""Repeat a text word for word: the simplest exercise for extracting and summarising."""

from __future__ import annotations

from demo_corpus.sample import Draw, Sample, Turn
from demo_corpus.spelling import TRAINED_WORDS
from demo_corpus.vocabulary import address, firm, person, town

_PHRASINGS = ("Repeat: {t}", "Repeat after me: {t}", "Repeat this: {t}", "Copy this: {t}", "Copy: {t}", "Repeat '{t}'")


def repeat(draw: Draw) -> Sample:
    pieces = [_piece(draw) for _ in range(draw.integer(0, 2))]
    text = draw.choose((" ", ", ", "; ")).join([person(draw), *pieces])
    return Sample("repeat", (Turn(draw.choose(_PHRASINGS).format(t=text), text),))


def _piece(draw: Draw) -> str:
    makers = (person, firm, town, address, _number, _words, _words)
    return draw.choose(makers)(draw)


def _number(draw: Draw) -> str:
    return str(draw.fresh(lambda: draw.integer(0, 10 ** draw.integer(1, 6))))


def _words(draw: Draw) -> str:
    return " ".join(draw.choose(TRAINED_WORDS) for _ in range(draw.integer(1, 3)))
