"""Make the sketch of a prompt from which its output length is predicted, off the event loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from alignedserve.core import Sketch
from alignedserve.scheduling.policy import Predictor
from alignedserve.scheduling.sketch import sketch_of
from alignedserve.text.text_model import TextModel

MOST_TOKENS = 256  # of a prompt's end go to the text encoder, which reads no more
Sketcher = Callable[[Sequence[int]], Sketch | None]


def sketcher(predictor: Predictor, text: TextModel) -> Sketcher:
    """Return the function that sketches a prompt for this predictor; only with minilm does text leave the gateway."""
    if predictor is Predictor.HASH:
        return sketch_of
    if predictor is Predictor.MINILM:
        return lambda prompt: Sketch(text=text.decode(tuple(prompt[-MOST_TOKENS:])))
    return lambda _: None
