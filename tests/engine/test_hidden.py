"""Tests that requests that keep hidden vectors in place of K and V say the same as other requests, at half the
memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from alignedserve.architectures.quantization import Quantization
from alignedserve.core import StepPlan
from alignedserve.engine.engine import Engine
from alignedserve.errors import PlanError
from alignedserve.protocol.form_orders import ProjectKv
from tests.engine.driver import Driver, Live, prompt_of
from tests.engine.expanded import expanded_reference
from tests.models import VOCAB
from tests.reference import Tally, compare

FolderOf = Callable[[str], Path]
EngineOf = Callable[[Path, int], Engine]
ReferenceOf = Callable[[Path], Any]
# qwen3: norms of k, and two heads of K with as many numbers as a hidden vector; opt-350m: a hidden vector without a
# norm.
ALLOWED = ["mha-tied", "qwen3", "opt", "opt-350m"]
PROMPTS = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=30).map(tuple)

shared = settings(deadline=None, max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.mark.parametrize("name", ALLOWED)
@given(
    prompts=st.lists(PROMPTS, min_size=2, max_size=5),
    seed=st.integers(0, 2**32),
    block_size=st.sampled_from([1, 4, 16]),
)
@shared
def test_any_mix_of_kinds(
    name: str,
    folder_of: FolderOf,
    engine_of: EngineOf,
    reference_of: ReferenceOf,
    tally: Tally,
    prompts: list[tuple[int, ...]],
    seed: int,
    block_size: int,
) -> None:
    driver = Driver(engine_of(folder_of(name), block_size), seed)
    lives = [
        (driver.start_hidden if driver.random.random() < 0.6 else driver.start_either_way)(f"r{number}", prompt, 5)
        for number, prompt in enumerate(prompts)
    ]
    while opened := [live for live in lives if len(live.output) < 5]:
        chosen = driver.random.sample(opened, driver.random.randint(1, len(opened)))
        size = driver.random.randint(1, 20)
        driver.run(*chosen, parts=[live.chunk(size) if live.in_prompt else live.decode() for live in chosen])
    for live in lives:
        compare(reference_of(folder_of(name)), live.prompt, live.output, tally, f"{name}, {live.kv.form or 'kv'}")


@pytest.mark.parametrize("name", ALLOWED)
@pytest.mark.parametrize("in_place", [False, True])
def test_a_hidden_request_becomes_a_request_with_kv(
    name: str,
    in_place: bool,
    folder_of: FolderOf,
    engine_of: EngineOf,
    reference_of: ReferenceOf,
    tally: Tally,
) -> None:
    """The request moves to other blocks, or to blocks of which the first are its own. What it held before may be
    lost."""
    driver = Driver(engine_of(folder_of(name), 4), 1)
    live = driver.start_hidden("r", prompt_of(3, 21), 12)
    blocks = driver.units_for(33)
    if in_place:
        live.blocks = blocks[: len(live.blocks)]
    driver.prefill(live, [10])
    driver.generate(live, 5)
    kept, live.blocks, live.is_hidden = live.blocks, blocks, False
    made = ProjectKv("r", kept, live.blocks, len(live.prompt) + len(live.output) - 1)
    driver.engine.form.perform(made, driver.engine.cache)
    if not in_place:
        for block in kept:
            driver.engine.cache[:, 2 * block : 2 * block + 2] = float("nan")
    compare(reference_of(folder_of(name)), live.prompt, driver.generate(live, 12), tally, f"{name}, projected")


@pytest.mark.parametrize(("name", "quantization"), [("mha-tied", Quantization.INT4), ("opt", Quantization.INT8)])
def test_quantised_layers_make_k_and_v_of_hidden_vectors(
    name: str, quantization: Quantization, folder_of: FolderOf, tally: Tally
) -> None:
    """One request keeps hidden vectors to its end, the other becomes one with KV."""
    folder = folder_of(name)
    engine = Engine(folder, num_blocks=60, block_size=4, dtype="float32", quantization=quantization)
    driver, network = Driver(engine, 1), expanded_reference(folder, quantization)
    stays, moves = (driver.start_hidden(name, prompt_of(seed, 21), 12) for seed, name in ((3, "stays"), (4, "moves")))
    for live in (stays, moves):
        driver.prefill(live, [10])
    driver.run(stays, moves, parts=[stays.decode(), moves.decode()])
    kept, moves.blocks, moves.is_hidden = moves.blocks, driver.units_for(33), False
    made = ProjectKv("moves", kept, moves.blocks, len(moves.prompt) + len(moves.output) - 1)
    engine.form.perform(made, engine.cache)
    for live in (stays, moves):
        compare(network, live.prompt, driver.generate(live, 12), tally, f"{name}, {quantization.value}, {live.name}")


def test_half_the_memory_is_written(folder_of: FolderOf, engine_of: EngineOf) -> None:
    written = {}
    for hidden in (False, True):
        driver = Driver(engine_of(folder_of("mha-tied"), 4), 1)
        live = (driver.start_hidden if hidden else driver.start)("r", prompt_of(3, 20), 4)
        driver.prefill(live)
        written[hidden] = int((~driver.engine.cache.isnan()).sum())
    assert written[False] == 2 * written[True] > 0


def start(driver: Driver) -> Live:
    live = driver.start_hidden("r", prompt_of(1, 9), 7)
    driver.prefill(live)
    return live


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"blocks": (3,)}, "request r has 1 blocks, too few for 10 tokens"),
        ({"blocks": (3, 120)}, "request r names a block outside 0..119"),
        ({"blocks": (3, ~4)}, "request r names a block outside 0..119"),
        ({"form": "other"}, "request r is kept in the form 'other', which this engine does not know"),
        ({"blocks": (1, 2, ~120), "form": "", "in_place": 1}, "request r names a block outside 0..119"),
    ],
)
def test_a_place_that_cannot_be(change: dict[str, Any], message: str, folder_of: FolderOf, engine_of: EngineOf) -> None:
    driver = Driver(engine_of(folder_of("mha-tied"), 4), 1)
    live = start(driver)
    before, decode = driver.engine.cache.clone(), live.decode()
    with pytest.raises(PlanError, match=message):
        driver.engine.step(StepPlan(9, decodes=(replace(decode, kv=replace(decode.kv, **change)),)))
    assert torch.equal(driver.engine.cache.nan_to_num(-1), before.nan_to_num(-1))


def test_where_hidden_does_not_pay_it_is_refused_with_the_arithmetic(folder_of: FolderOf, engine_of: EngineOf) -> None:
    driver = Driver(engine_of(folder_of("gqa-untied"), 4), 1)
    with pytest.raises(PlanError) as refused:
        start(driver)
    assert str(refused.value) == (
        "request r cannot keep hidden vectors: a hidden vector has 32 numbers and half a block holds 16 for a token:"
        " 32 instead of 32 for K and V together"
    )
    with pytest.raises(PlanError, match="cannot keep hidden vectors"):
        driver.engine.form.perform(ProjectKv("r", (0, 1), (4, 5), 8), driver.engine.cache)
