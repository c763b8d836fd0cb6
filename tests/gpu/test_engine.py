"""Engines on the GPU, in fp32: greedy output is that of transformers, and KV comes back from pages as it went."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from alignedserve.engine.copies import PageCopier
from alignedserve.engine.engine import Engine
from alignedserve.kvpool.arena import Arena
from tests.engine.driver import Driver, prompt_of
from tests.models import MODELS
from tests.reference import Tally, compare, load

GPU, PAGE = torch.device("cuda"), 64
OWN = [name for name in MODELS if name != "wide-heads"]


@pytest.fixture(autouse=True, scope="module")
def exact() -> Iterator[None]:
    """Products in fp32 are not rounded to TF32."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.parametrize("name", OWN)
def test_chunks_and_decodes_say_what_transformers_says(name: str, tmp_path: Path) -> None:
    folder = MODELS[name](tmp_path / "model")
    driver, reference, tally = (
        Driver(Engine(folder, num_pairs=40, dtype="float32", device=GPU), 1),
        load(folder),
        Tally(),
    )
    lives = [driver.start_either_way(f"r{length}", prompt_of(length, length), 30) for length in (3, 40, 100)]
    for live in lives:
        driver.prefill(live, [17])
        compare(reference, live.prompt, driver.generate(live, 30), tally, f"{name}, {len(live.prompt)} tokens")
    tally.check()


def test_kv_comes_back_from_pages_as_it_went(tmp_path: Path) -> None:
    engine = Engine(MODELS["gqa-untied"](tmp_path / "model"), num_pairs=40, dtype="float32", device=GPU)
    driver = Driver(engine, 1)
    tokens = prompt_of(1, 2 * PAGE)
    live = driver.start("r", tokens, 2)
    driver.prefill(live)
    page_bytes = 2 * PAGE * engine.config.kv_dim * engine.config.num_layers * 4
    arena = Arena.create(tmp_path / "arena", pages=4, payload_bytes=page_bytes, page_size=PAGE, incarnation=1)
    copier = PageCopier(engine.cache, arena, PAGE, verify=True)
    pairs = live.pairs[: 2 * PAGE // engine.block_size]
    copier.copy_out(pairs, (0, 1), tokens)
    elsewhere = driver.units_for(2 * PAGE)
    assert copier.copy_in((0, 1), elsewhere, tokens)
    for one, other in zip(pairs, elsewhere, strict=True):
        assert torch.equal(engine.cache[:, 2 * one : 2 * one + 2], engine.cache[:, 2 * other : 2 * other + 2])
    copier.close()
