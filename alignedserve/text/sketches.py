"""What the length predictor is to see of a prompt: made where the prompt became tokens, off the event loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from alignedserve.core import Sketch
from alignedserve.scheduling.policy import Predictor
from alignedserve.scheduling.sketch import sketch_of
from alignedserve.text.text import TextModel

MOST_TOKENS = 256  # of a prompt's end, whose text goes to an encoder of text: it reads no more
Sketcher = Callable[[Sequence[int]], Sketch | None]


def sketcher(predictor: Predictor, text: TextModel) -> Sketcher:
    """Only with minilm do texts leave the gateway."""
    if predictor is Predictor.HASH:
        return sketch_of
    if predictor is Predictor.MINILM:
        return lambda prompt: Sketch(text=text.decode(tuple(prompt[-MOST_TOKENS:])))
    return lambda _: None
