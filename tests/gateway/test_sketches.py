"""Tests of what the gateway sends of a prompt besides its tokens: counts, or its text for an encoder that reads it."""

from __future__ import annotations

import pytest

from alignedserve.core import Sketch
from alignedserve.scheduling.policy import Predictor
from alignedserve.scheduling.sketch import sketch_of
from alignedserve.text.sketches import MOST_TOKENS, sketcher
from alignedserve.text.text_model import TextModel


def test_counts_of_its_tokens(text: TextModel) -> None:
    prompt = text.prompt_ids("hello there")
    assert sketcher(Predictor.HASH, text)(prompt) == sketch_of(prompt)


def test_its_text_for_an_encoder_that_reads_it(text: TextModel) -> None:
    prompt = text.prompt_ids("hello there")
    assert sketcher(Predictor.MINILM, text)(prompt) == Sketch(text="hello there")
    long = sketcher(Predictor.MINILM, text)([*prompt] * MOST_TOKENS)
    assert long is not None
    assert len(text.prompt_ids(long.text)) <= MOST_TOKENS + 2


@pytest.mark.parametrize("predictor", [Predictor.OFF, Predictor.CONSTANT, Predictor.ORACLE])
def test_nothing_where_nobody_looks_at_it(predictor: Predictor, text: TextModel) -> None:
    assert sketcher(predictor, text)([1, 2]) is None
