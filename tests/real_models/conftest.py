"""SmolLM2-135M-Instruct as it was published, and transformers, with which all answers are compared."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import gguf
import pytest
import torch

from alignedserve.architectures.model_source import resolve
from alignedserve.engine.engine import Engine
from alignedserve.lab.benchmarks.accuracy import FORMS, ReferenceModel, expand, published
from alignedserve.text.text_model import TextModel
from tests.conftest import SOAK
from tests.real_models.answers import is_kept
from tests.real_models.prompts import CONVERSATIONS, PLAIN
from tests.reference import Tally, compare
from tests.smollm2 import smollm2

TOKENS = 16  # of an answer
SHARED_TOKENS = 1000  # of the engine that tests share
TOKENS_OF_TEXT = 400 if SOAK else 120  # in comparisons of logits


@dataclass(frozen=True)
class Real:
    """A published model: its file, the folder that we make of it, and its prompts."""

    file: Path
    folder: Path
    scratch: Path
    tally: Tally = field(default_factory=Tally)
    _right: set[tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=set)

    @cached_property
    def text(self) -> TextModel:
        return TextModel.load(self.folder)

    @cached_property
    def prompts(self) -> list[tuple[int, ...]]:
        chats = [tuple(self.text.chat_ids(turns)) for turns in CONVERSATIONS]
        return [*chats, *(tuple(self.text.prompt_ids(text)) for text in PLAIN)]

    @cached_property
    def short(self) -> list[tuple[int, ...]]:
        """Return every fourth prompt: of each kind, and none that is long."""
        return [prompt for prompt in self.prompts[::4] if len(prompt) < 100]

    @cached_property
    def reference(self) -> Any:
        return published(self.file)

    @cached_property
    def plain(self) -> Path:
        """Write the weights as a folder of fp32, which transformers and PEFT read."""
        expand(self.reference, self.scratch / "in fp32", torch.float32)
        return self.scratch / "in fp32"

    @cached_property
    def shared(self) -> Engine:
        """Return an engine that is made once, with nothing but the defaults."""
        return self.engine(SHARED_TOKENS)

    def engine(self, num_tokens: int, **options: Any) -> Engine:
        """Return an engine whose cache holds so many tokens."""
        given: dict[str, Any] = {"dtype": "float32", **options}
        return Engine(self.folder, num_blocks=-(-num_tokens // 16), **given)

    def check(self, prompt: Sequence[int], output: Sequence[int], label: str) -> None:
        """Compare an answer with transformers' in fp32: with the kept one, or live where that differs.

        The long form compares all live. Answers that are alike are compared once.
        """
        asked = tuple(prompt), tuple(output)
        if not SOAK and is_kept(*asked):
            self.tally.compared += len(output)
        elif asked not in self._right:
            compare(self.reference, *asked, self.tally, label)
            self._right.add(asked)


@contextmanager
def opened() -> Iterator[Real]:
    file = smollm2()
    with TemporaryDirectory(prefix="real-model-") as scratch, pytest.MonkeyPatch.context() as patch:
        for name in ("GGUFReader", "get_tensor_name_map"):  # take 4 s each time; transformers asks for each thrice
            patch.setattr(gguf, name, cache(getattr(gguf, name)))
        yield Real(file, resolve(str(file), f"{scratch}/cache"), Path(scratch))


@pytest.fixture(scope="session")
def real() -> Iterator[Real]:
    with opened() as found:
        yield found
        found.tally.check()


class Forms:
    """The model in one form at a time: each takes memory, and seconds to make."""

    def __init__(self, real: Real) -> None:
        self.model = ReferenceModel("smollm2", real.file, real.scratch, TOKENS_OF_TEXT)
        vars(self.model)["network"] = real.reference  # which takes ten seconds to read
        self.of = cache(lambda name: FORMS[name](name, self.model))


@pytest.fixture(scope="session")
def forms(real: Real) -> Forms:
    return Forms(real)
