"""The encoder of prompts by meaning."""

from __future__ import annotations

import numpy as np
import pytest

from alignedserve.core import Sketch
from alignedserve.router.side.minilm import PACKAGE, MiniLM

TEXTS = ("Why do cats purr?", "What makes a kitten purr?", "Which taxes does a company pay?")


def test_prompts_of_like_meaning_are_near_each_other() -> None:
    pytest.importorskip(PACKAGE)
    encoder, prompts = MiniLM(), [Sketch(text=text) for text in TEXTS]
    vectors = encoder.vectors(prompts)
    assert vectors.shape == (len(TEXTS), encoder.dimensions)
    cat, kitten, company = vectors.astype(np.int64)
    assert cat @ kitten > 2 * abs(cat @ company)
    assert (encoder.vectors(prompts[::-1]) == vectors[::-1]).all()
