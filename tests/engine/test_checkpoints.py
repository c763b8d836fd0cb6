"""Tests that vectors go from slot to slot, to the worker's own memory and back, bit for bit, and as if all at once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from alignedserve.engine.engine import Engine
from alignedserve.engine.forms.performing import Checkpoints
from alignedserve.errors import PlanError
from alignedserve.executor.hands import EngineHands
from alignedserve.protocol.form_orders import CopySlots
from tests.conftest import examples

LAYERS, BLOCKS, KV_DIM, PLACES = 3, 5, 8, 7


def copies(random: Random, num_slots: int, filled: set[int]) -> CopySlots:
    """Return copies between random slots and places; each target is written once."""
    targets = random.sample(range(num_slots), random.randint(0, num_slots))
    restored = random.randint(0, len(targets)) if filled else 0
    places = random.sample(range(PLACES), random.randint(0, PLACES))
    return CopySlots(
        tuple((random.randrange(num_slots), place) for place in places),
        tuple((random.choice(sorted(filled)), slot) for slot in targets[:restored]),
        tuple((random.randrange(num_slots), slot) for slot in targets[restored:]),
    )


@given(
    seed=st.integers(0, 1000),
    block_size=st.sampled_from((1, 4, 16)),
    dtype=st.sampled_from((torch.float32, torch.bfloat16, torch.float16)),
)
@settings(deadline=None, max_examples=examples(50))
def test_any_copies_mean_what_plain_dictionaries_say(seed: int, block_size: int, dtype: torch.dtype) -> None:
    cache = torch.randn((LAYERS, 2 * BLOCKS, block_size, KV_DIM), generator=torch.Generator().manual_seed(seed))
    cache = cache.to(dtype)
    random, num_slots = Random(seed), BLOCKS * block_size

    def vectors(slot: int) -> torch.Tensor:
        block, offset = divmod(slot, block_size)
        return cache[:, 2 * block : 2 * block + 2, offset]

    slots = {slot: vectors(slot).clone() for slot in range(num_slots)}
    places: dict[int, torch.Tensor] = {}
    checkpoints = Checkpoints(cache, PLACES)
    for _ in range(4):
        command = copies(random, num_slots, set(places))
        saved = {place: slots[slot] for slot, place in command.checkpoints}
        restored = {slot: places[place] for place, slot in command.restores}
        moved = {target: slots[source] for source, target in command.moves}
        places, slots = places | saved, slots | restored | moved
        checkpoints.copy(command)
        assert all(torch.equal(vectors(slot), held) for slot, held in slots.items())
        numbers = sorted(places)
        read = checkpoints.read(numbers)
        assert all(torch.equal(read[:, :, at], places[place]) for at, place in enumerate(numbers))


@pytest.mark.parametrize(
    "command",
    [
        CopySlots(checkpoints=((BLOCKS * 4, 0),)),
        CopySlots(checkpoints=((0, PLACES),)),
        CopySlots(restores=((PLACES, 0),)),
        CopySlots(restores=((0, -1),)),
        CopySlots(moves=((0, BLOCKS * 4),)),
        CopySlots(moves=((0, 1), (2, BLOCKS * 4))),
    ],
)
def test_what_is_outside_is_refused(command: CopySlots) -> None:
    with pytest.raises(PlanError, match="outside"):
        Checkpoints(torch.zeros(LAYERS, 2 * BLOCKS, 4, KV_DIM), PLACES).copy(command)


def test_a_worker_has_hands_for_it(
    folder_of: Callable[[str], Path], engine_of: Callable[[Path, int], Engine], tmp_path: Path
) -> None:
    engine = engine_of(folder_of("gqa-untied"), 4)
    engine.cache.normal_(generator=torch.Generator().manual_seed(1))
    before = engine.cache.clone()
    hands = EngineHands(engine, tmp_path / "arena", 8, verify=True, num_on_host=2)
    assert hands.perform(CopySlots(checkpoints=((4 * 3 + 1, 1),))) is None
    engine.cache[:, 6:8, 1] = float("nan")
    hands.perform(CopySlots(restores=((1, 4 * 3 + 1),), moves=((5, 0),)))
    assert torch.equal(engine.cache[:, 6:8], before[:, 6:8])
    assert torch.equal(engine.cache[:, 0:2, 0], before[:, 2:4, 1])
