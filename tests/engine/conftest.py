"""Tiny models, made once, and the engines and references that run them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import llguidance
import pytest
import torch

from alignedserve.engine.engine import Engine
from tests.kernels.interpreter import patched_once as patched_once
from tests.models import MODELS, OPTIONS, STORED
from tests.reference import Tally, load

NUM_TOKEN_PLACES = 480  # in the cache of an engine


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Use one thread: in models as tiny as these, more threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @cache
    def make(name: str) -> Path:
        return (MODELS | STORED | OPTIONS)[name](tmp_path_factory.mktemp("models") / name)

    return make


@pytest.fixture
def folder(request: pytest.FixtureRequest, folder_of: Callable[[str], Path]) -> Path:
    """Return the folder of the model that a test names: `parametrize("folder", [...], indirect=True)`."""
    return folder_of(request.param)


@pytest.fixture(scope="session")
def reference_of() -> Callable[[Path], Any]:
    return cache(load)


@pytest.fixture(scope="session")
def engine_of() -> Callable[[Path, int], Engine]:
    """Return a function that makes one engine per folder and block size; its cache is as dirty as earlier tests left
    it."""

    @cache
    def make(folder: Path, block_size: int) -> Engine:
        return Engine(folder, num_blocks=NUM_TOKEN_PLACES // block_size, block_size=block_size, dtype="float32")

    return make


@pytest.fixture(scope="session")
def tally() -> Iterator[Tally]:
    """Count all greedy comparisons of this folder, and check the count at the end."""
    tally = Tally()
    yield tally
    tally.check()


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the syntaxes that were compiled, in their order."""
    syntaxes = list[str]()
    matcher = llguidance.LLMatcher

    def make(tokens: llguidance.LLTokenizer, syntax: str, **options: Any) -> llguidance.LLMatcher:
        syntaxes.append(syntax)
        return matcher(tokens, syntax, **options)

    monkeypatch.setattr(llguidance, "LLMatcher", make)
    return syntaxes
