"""Tests that greedy output equals the reference token for token, however a request was cut, mixed and moved."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from alignedserve.core import KvForm, Logprob, Sampling, Scoring, StepPlan, StepResult
from alignedserve.engine.copying.copies import PageCopier
from alignedserve.engine.engine import Engine
from alignedserve.errors import PlanError
from alignedserve.kvpool.arena.arena import Arena
from tests.conftest import examples
from tests.engine.driver import Driver, Live, prompt_of
from tests.models import MAX_POSITIONS, MODELS, STORED, VOCAB
from tests.rare import rarely, thinned
from tests.reference import CLOSE, Tally, compare

EngineOf = Callable[[Path, int], Engine]
ReferenceOf = Callable[[Path], Any]
BLOCK_SIZES = [1, 4, 16]
PROMPTS = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=40).map(tuple)

# In each run one family for each form of K and V and each rule of who sees whom. The others differ within a layer
# alone, whose logits test_models.py compares.
FEW = ("gqa-untied", "qwen2", "opt", "llama4", "deepseek-v2", "gpt-oss", "gemma2")
FOR_ALL = ("gqa-untied", "opt", "llama4", "deepseek-v2")  # of tests of what no family changes
of_few = pytest.mark.parametrize("folder", [each if each in FEW else rarely(each) for each in MODELS], indirect=True)
of_fewer = pytest.mark.parametrize(
    "folder", [each if each in FOR_ALL else rarely(each) for each in MODELS], indirect=True
)

# The engine and the references are made once, the driver again for each example.
shared = settings(deadline=None, max_examples=examples(12), suppress_health_check=[HealthCheck.function_scoped_fixture])


@of_few
def test_a_prompt_in_one_chunk(folder: Path, engine_of: EngineOf, reference_of: ReferenceOf, tally: Tally) -> None:
    for seed, (tokens, output) in enumerate([(1, 20), (2, 2), (15, 3), (16, 2), (17, 2), (100, 20)]):
        driver = Driver(engine_of(folder, 16), seed)
        live = driver.start("r", prompt_of(seed, tokens), output)
        driver.prefill(live)
        served = driver.generate(live, output)
        compare(reference_of(folder), live.prompt, served, tally, f"{folder.name}, {tokens} tokens")


@pytest.mark.parametrize("name", thinned(STORED, usual=2))  # test_models.py compares the logits of all
def test_the_same_from_other_files(
    name: str, folder_of: Callable[[str], Path], engine_of: EngineOf, reference_of: ReferenceOf, tally: Tally
) -> None:
    driver = Driver(engine_of(folder_of(name), 16), 0)
    live = driver.start("r", prompt_of(1, 20), 20)
    driver.prefill(live, [7])
    compare(reference_of(folder_of(name)), live.prompt, driver.generate(live, 20), tally, name)


@of_few
def test_up_to_the_last_position(folder: Path, engine_of: EngineOf, reference_of: ReferenceOf, tally: Tally) -> None:
    driver = Driver(engine_of(folder, 16), 0)
    live = driver.start("r", prompt_of(5, MAX_POSITIONS - 5), 5)
    driver.prefill(live, [31])
    compare(reference_of(folder), live.prompt, driver.generate(live, 5), tally, f"{folder.name}, last positions")


@of_few
@given(prompt=PROMPTS, sizes=st.lists(st.integers(1, 20), max_size=12), block_size=st.sampled_from(BLOCK_SIZES))
@shared
def test_any_chunking(
    folder: Path,
    engine_of: EngineOf,
    reference_of: ReferenceOf,
    tally: Tally,
    prompt: tuple[int, ...],
    sizes: list[int],
    block_size: int,
) -> None:
    driver = Driver(engine_of(folder, block_size), len(sizes))
    live = driver.start_either_way("r", prompt, 8)
    driver.prefill(live, sizes)
    compare(reference_of(folder), prompt, driver.generate(live, 8), tally, f"{folder.name}, chunks {sizes}")


@of_few
@given(
    prompts=st.lists(PROMPTS, min_size=2, max_size=5),
    seed=st.integers(0, 2**32),
    block_size=st.sampled_from(BLOCK_SIZES),
)
@shared
def test_mixed_steps(
    folder: Path,
    engine_of: EngineOf,
    reference_of: ReferenceOf,
    tally: Tally,
    prompts: list[tuple[int, ...]],
    seed: int,
    block_size: int,
) -> None:
    """Each step runs some of the open requests: each of them with a chunk or with a decode."""
    driver = Driver(engine_of(folder, block_size), seed)
    lives = [driver.start_either_way(f"r{number}", prompt, 6) for number, prompt in enumerate(prompts)]
    while opened := [live for live in lives if len(live.output) < 6]:
        chosen = driver.random.sample(opened, driver.random.randint(1, len(opened)))
        size = driver.random.randint(1, 20)
        driver.run(*chosen, parts=[live.chunk(size) if live.in_prompt else live.decode() for live in chosen])
    for live in lives:
        compare(reference_of(folder), live.prompt, live.output, tally, f"{folder.name}, mixed")


@of_fewer
def test_the_token_of_the_step_before_by_name(
    folder: Path, engine_of: EngineOf, reference_of: ReferenceOf, tally: Tally
) -> None:
    """Two requests are planned one step ahead of their results, the first from a chunk on, the second from a decode
    on."""
    driver = Driver(engine_of(folder, 4), 3)
    first, second = (driver.start(name, prompt_of(seed, 21), 12) for seed, name in enumerate("ab"))
    driver.prefill(first)
    driver.generate(first, 2)
    results = [driver.step(second.chunk(99), first.decode())]
    for ahead in range(1, 10):
        results.append(driver.step(first.decode_ahead(None, ahead), second.decode_ahead(None, ahead)))
    for live in (first, second):
        live.output += [sampled[live.name] for sampled in results]
        compare(reference_of(folder), live.prompt, live.output, tally, f"{folder.name}, by name")


@of_few
def test_a_request_that_moves_goes_on_as_if_nothing_had_happened(
    folder: Path, engine_of: EngineOf, reference_of: ReferenceOf, tally: Tally, tmp_path: Path
) -> None:
    """The request goes out to the arena in the middle of decoding, then into other blocks, and into an engine with
    other blocks."""
    here, there = Driver(engine_of(folder, 4), 1), Driver(engine_of(folder, 16), 2)
    live = here.start("r", prompt_of(7, 45), 30)
    here.prefill(live, [10])
    arena = Arena.create(
        tmp_path / "arena",
        pages=8,
        payload_bytes=here.engine.config.kv_bytes(16, "float32"),
        page_size=16,
        incarnation=1,
    )
    pages = [5, 0, 3, 7, 1, 2]
    for driver, until in ((here, 5), (here, 17), (there, 23), (here, 30)):
        driver.generate(live, until)
        move(live, driver, here if until != 17 else there, arena, pages)
    compare(reference_of(folder), live.prompt, live.output, tally, f"{folder.name}, moved")
    arena.close()


def move(live: Live, source: Driver, target: Driver, arena: Arena, pages: list[int]) -> None:
    tokens = (*live.prompt, *live.output[:-1])
    PageCopier(source.engine.cache, arena, 16, verify=True).copy_out(live.blocks, pages, tokens)
    for block in live.blocks:
        source.engine.cache[:, 2 * block : 2 * block + 2] = float("nan")
    live.blocks = target.units_for(len(live.prompt) + 30)
    assert PageCopier(target.engine.cache, arena, 16, verify=True).copy_in(pages, live.blocks, tokens)


@of_fewer
def test_a_recomputed_request_goes_on_with_what_was_emitted(
    folder: Path, engine_of: EngineOf, reference_of: ReferenceOf, tally: Tally
) -> None:
    """The next attempt takes prompt and emitted tokens as one prompt, and samples its first token at that token's own
    index."""
    driver = Driver(engine_of(folder, 4), 1)
    live = driver.start("r", prompt_of(9, 20), 12)
    driver.prefill(live)
    driver.generate(live, 6)
    again = driver.start("r2", (*live.prompt, *live.output), 6)
    driver.prefill(again, [7])
    output = live.output + driver.generate(again, 6)
    compare(reference_of(folder), live.prompt, output, tally, f"{folder.name}, recomputed")


@of_fewer
def test_sampled_tokens_do_not_depend_on_the_way(folder: Path, engine_of: EngineOf) -> None:
    sampling = Sampling(temperature=0.8, top_k=20, top_p=0.9, seed=11)
    outputs = []
    for sizes, block_size in (([99], 16), ([3, 1, 5, 99], 4)):
        driver = Driver(engine_of(folder, block_size), block_size)
        live, neighbour = driver.start("r", prompt_of(3, 24), 12), driver.start("o", prompt_of(4, 30), 1)
        for size in sizes:
            if len(sizes) > 1:
                neighbour.done = 0
                driver.run(live, parts=[neighbour.chunk(30), live.chunk(size, sampling)])
            else:
                driver.run(live, parts=[live.chunk(size, sampling)])
        while len(live.output) < 12:
            driver.run(live, parts=[live.decode(sampling)])
        outputs.append(live.output)
    assert outputs[0] == outputs[1]
    assert len(set(outputs[0])) > 1


@of_fewer
@pytest.mark.parametrize("sizes", [(99,), (7, 1, 99), rarely(((1,) * 24,))])
def test_log_probabilities_equal_transformers(
    folder: Path, engine_of: EngineOf, reference_of: ReferenceOf, sizes: tuple[int, ...]
) -> None:
    """Compare every prompt token but the first, for each way to cut chunks, and the output."""
    driver, top = Driver(engine_of(folder, 4), 1), 3
    sampling = Sampling(logprobs=top, prompt_logprobs=top)
    live, neighbour = driver.start("r", prompt_of(3, 24), 8), driver.start("o", prompt_of(4, 30), 1)
    logprobs: list[Logprob] = []
    for size in sizes:
        neighbour.done = 0
        chunk = live.chunk(size, sampling)
        follow = live.prompt[chunk.start + 1 : chunk.start + len(chunk.tokens) + 1]
        step = StepPlan(1, (neighbour.chunk(30), replace(chunk, scoring=Scoring(follow, top))))
        result = driver.engine.step(step)
        logprobs += dict(result.prompt_logprobs)["r"]
        if not live.in_prompt:
            break
    while True:
        live.output.append(dict(result.tokens)["r"])
        logprobs += dict(result.logprobs).values()
        if len(live.output) == 8:
            break
        result = driver.engine.step(StepPlan(2, decodes=(live.decode(sampling),)))
    with torch.inference_mode():
        tokens = (*live.prompt, *live.output)
        expected = reference_of(folder)(torch.tensor([tokens[:-1]])).logits[0].log_softmax(-1)
    assert len(logprobs) == len(tokens) - 1
    for row, token, logprob in zip(expected, tokens[1:], logprobs, strict=True):
        assert logprob.value == pytest.approx(float(row[token]), abs=1e-4)
        assert [value for _, value in logprob.top] == pytest.approx(row.topk(top).values.tolist(), abs=1e-4)
        assert [float(row[token]) for token, _ in logprob.top] == pytest.approx(row.topk(top).values.tolist(), abs=1e-4)


def test_a_request_whose_logits_are_broken_fails_alone(folder_of: Callable[[str], Path], engine_of: EngineOf) -> None:
    """Its KV is not a number; the next request that uses the same places sees nothing of it."""
    driver = Driver(engine_of(folder_of("gqa-untied"), 4), 1)
    healthy, broken = driver.start("h", prompt_of(1, 9), 6), driver.start("b", prompt_of(2, 9), 6)
    for live in (healthy, broken):
        driver.prefill(live)
    expected = driver.generate(Live("again", healthy.prompt, healthy.blocks, [*healthy.output], 9), 3)[1]
    for block in broken.blocks:
        driver.engine.cache[:, 2 * block : 2 * block + 2] = float("nan")
    result = driver.engine.step(StepPlan(1, decodes=(broken.decode(), healthy.decode())))
    assert (result.tokens, result.unsampled) == ((("h", expected),), ("b",))
    after = Live("n", prompt_of(1, 9), broken.blocks)
    driver.prefill(after)
    assert after.output == healthy.output


def test_an_empty_step_and_a_step_that_samples_nothing(folder_of: Callable[[str], Path], engine_of: EngineOf) -> None:
    driver = Driver(engine_of(folder_of("gqa-untied"), 4), 1)
    assert driver.step() == {}
    live = driver.start("r", prompt_of(1, 10), 4)
    assert driver.step(live.chunk(4)) == {}
    assert driver.engine.step(StepPlan(77)) == StepResult(77, ())


def test_bfloat16_stays_near_the_reference(folder_of: Callable[[str], Path], reference_of: ReferenceOf) -> None:
    """What the engine serves in bf16 is, by fp32 logits, close to the best token: within a few of bf16's steps."""
    folder = folder_of("bfloat16")
    engine = Engine(folder, num_blocks=40, block_size=4)
    assert engine.cache.dtype is torch.bfloat16, "the type of the stored weights, by default"
    driver = Driver(engine, 1)
    live = driver.start("r", prompt_of(1, 30), 20)
    driver.prefill(live, [7])
    driver.generate(live, 20)
    with torch.inference_mode():
        logits = reference_of(folder)(torch.tensor([[*live.prompt, *live.output[:-1]]])).logits[0, 29:]
    behind = logits.max(-1).values - logits[torch.arange(20), torch.tensor(live.output)]
    assert float((behind / logits.abs().max(-1).values).max()) < 0.06


# --- Impossible plans: they are refused, and change nothing


def too_few_blocks(live: Live) -> StepPlan:
    return StepPlan(9, decodes=(replace(live.decode(), kv=KvForm(live.blocks[:5])),))


def past_the_last_position(live: Live) -> StepPlan:
    return StepPlan(9, decodes=(replace(live.decode(), start=MAX_POSITIONS, kv=KvForm((0,) * 99)),))


def block_out_of_range(live: Live) -> StepPlan:
    return StepPlan(9, decodes=(replace(live.decode(), kv=KvForm((*live.blocks, 120))),))


def negative_block(live: Live) -> StepPlan:
    return StepPlan(9, decodes=(replace(live.decode(), kv=KvForm((~120, *live.blocks[1:]))),))


def no_tokens(live: Live) -> StepPlan:
    return StepPlan(9, chunks=(replace(live.chunk(0), sampling=None),))


def nothing_sampled_before(live: Live) -> StepPlan:
    return StepPlan(9, decodes=(replace(live.decode(), request="stranger", token=None),))


def behind_a_good_one(live: Live) -> StepPlan:
    return StepPlan(9, decodes=(live.decode(), *block_out_of_range(live).decodes))


def token_outside_the_vocabulary(live: Live) -> StepPlan:
    return StepPlan(9, decodes=(replace(live.decode(), token=VOCAB),))


def negative_token(live: Live) -> StepPlan:
    return StepPlan(9, decodes=(replace(live.decode(), token=-1),))


def negative_start(live: Live) -> StepPlan:
    return StepPlan(9, decodes=(replace(live.decode(), start=-1),))


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (too_few_blocks, "request r has 5 blocks, too few for 23 tokens"),
        (past_the_last_position, f"would reach {MAX_POSITIONS + 1} tokens, the model has {MAX_POSITIONS} positions"),
        (block_out_of_range, "block outside 0..119"),
        (negative_block, "block outside 0..119"),
        (no_tokens, "request r is to run no token"),
        (nothing_sampled_before, "request stranger is to go on from the step before"),
        (behind_a_good_one, "block outside 0..119"),
        (token_outside_the_vocabulary, "request r names a token outside 0..96"),
        (negative_token, "request r names a token outside 0..96"),
        (negative_start, "request r is to start at -1"),
    ],
)
def test_a_plan_that_cannot_be_leaves_the_engine_as_it_was(
    plan: Callable[[Live], StepPlan],
    message: str,
    folder_of: Callable[[str], Path],
    engine_of: EngineOf,
    reference_of: ReferenceOf,
    tally: Tally,
) -> None:
    folder = folder_of("gqa-untied")
    driver = Driver(engine_of(folder, 4), 1)
    live = driver.start("r", prompt_of(2, 20), 12)
    driver.prefill(live)
    driver.generate(live, 3)
    before = driver.engine.cache.clone()
    with pytest.raises(PlanError, match=message) as refused:
        driver.engine.step(plan(live))
    assert "\n" not in str(refused.value)
    assert torch.equal(driver.engine.cache.nan_to_num(math.pi), before.nan_to_num(math.pi))
    live.output.append(driver.step(live.decode_ahead(None, 0))["r"])  # the step before is still the last good step
    compare(reference_of(folder), live.prompt, driver.generate(live, 12), tally, "after a refused plan")


def test_the_reference_notices_a_forgotten_token(folder_of: Callable[[str], Path], reference_of: ReferenceOf) -> None:
    """The tiny models do attend: another first token of the prompt changes the output."""
    for name in ("mha-tied", "gqa-untied", "wide-heads"):
        model, prompt = reference_of(folder_of(name)), prompt_of(1, 40)
        with torch.inference_mode():
            right, wrong = (
                model(torch.tensor([[first, *prompt[1:]]])).logits[0, -1] for first in (prompt[0], prompt[0] ^ 1)
            )
        assert float((right - wrong).abs().max()) > 100 * CLOSE * float(right.abs().max()), name
