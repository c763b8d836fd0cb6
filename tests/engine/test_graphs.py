"""Tests of decode steps of fixed sizes.

In place of a GPU's graphs the same function runs again, on the same buffers: the tests see what is left in a buffer, or
is read from anywhere else.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from dataclasses import replace
from itertools import cycle, pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from alignedserve.config.choices import DeviceKind, Graphs
from alignedserve.config.config import Config
from alignedserve.config.sections import EngineConfig
from alignedserve.core import Chunk, Decode, Sampling, StepPlan
from alignedserve.core import Scoring as Scored
from alignedserve.engine import graphs as graphs_module
from alignedserve.engine.engine import Engine
from alignedserve.engine.graphs import Step, StepGraphs, places_for, sizes, sizes_with_prompts
from alignedserve.engine.inputs import Inputs
from alignedserve.errors import ConfigError, NotCaptured
from alignedserve.executor import loading as engine_loading
from alignedserve.fallbacks import fallbacks
from alignedserve.kernels.common.adapters import StaticAdapters
from alignedserve.kernels.common.reference import Reference
from alignedserve.kernels.common.scoring import Scoring
from alignedserve.kernels.common.spans import LongChunks, QuerySpan, Spans, StaticSpans, StepSize
from alignedserve.kernels.dispatch.dispatcher import Kernels
from alignedserve.kernels.dispatch.paged_libraries import requests_of
from tests.conftest import examples
from tests.engine.driver import GREEDY, PLENTY, Drawing, Driver, Live, Replays, prompt_of, spoil
from tests.models import MODELS
from tests.rare import rare, rarely
from tests.reference import Tally, compare

FolderOf = Callable[[str], Path]
CPU = torch.device("cpu")


def test_sizes_are_close_together_and_end_with_the_largest() -> None:
    assert sizes(1) == [1]
    assert sizes(6) == [1, 2, 4, 6]
    assert sizes(8) == [1, 2, 4, 8]
    assert sizes(35) == [1, 2, 4, 8, 16, 24, 32, 35]
    assert sizes(256)[-3:] == [240, 248, 256]
    assert sizes(300)[-5:] == [248, 256, 272, 288, 300]
    assert all(later - earlier <= 8 for earlier, later in pairwise(sizes(256)))


def test_steps_with_prompts_have_few_sizes_none_larger_than_a_step_can_be() -> None:
    assert sizes_with_prompts(0) == []
    assert sizes_with_prompts(9) == [9]
    assert sizes_with_prompts(512) == [16, 32, 64, 128, 192, 256, 320, 384, 512]
    assert sizes_with_prompts(2048) == [16, 32, 64, 128, 192, 256, 320, 384, 512, 640]


def triton() -> Kernels:
    kernels = pytest.importorskip("alignedserve.kernels.triton.kernels", reason="Triton is not installed")
    if not pytest.importorskip("alignedserve.kernels.triton.launch").interpreting():
        pytest.skip("Triton compiles here: tests/gpu has real graphs")
    made: Kernels = kernels.TritonKernels()
    return made


def captured(folder: Path, kernels: Kernels | None, most: int = 6, most_tokens: int = 0) -> tuple[Driver, Replays]:
    engine = Engine(folder, num_blocks=90, block_size=4, dtype="float32", kernels=kernels, has_graphs=True)
    replays = Replays()
    engine.capture(most, replays, lambda: PLENTY, 0, most_tokens=most_tokens)
    return Driver(engine, 5), replays


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    ("name", "made", "count", "most"),
    [
        ("gqa-untied", Reference, 5, 6),
        ("opt", Reference, 5, 6),
        ("qwen2", triton, 2, 2),
        rarely(("youtu", triton, 3, 4)),
        ("gqa-untied", lambda: None, 5, 6),
    ],
    ids=["llama", "opt", "triton", "compressed vectors", "c++"],
)
def test_requests_that_come_and_go_say_what_transformers_says(
    folder_of: FolderOf,
    reference_of: Callable[[Path], Any],
    tally: Tally,
    name: str,
    made: Callable[[], Kernels | None],
    count: int,
    most: int,
) -> None:
    """Requests of different lengths sit out some steps; blocks are filled from either end; steps are planned ahead and
    not."""
    driver, replays = captured(folder_of(name), made(), most)
    lives = [driver.start_either_way(f"r{n}", prompt_of(n, 3 + 7 * n), 3 + n) for n in range(count)]
    for live in lives:
        driver.prefill(live, [5])
    while opened := [live for n, live in enumerate(lives) if len(live.output) < 3 + n]:
        chosen = driver.random.sample(opened, driver.random.randint(1, len(opened)))
        driver.run(*chosen, parts=[live.decode() for live in chosen])
    for live in lives:
        compare(reference_of(folder_of(name)), live.prompt, live.output, tally, name)
    tally.check()
    assert len(set(replays.sizes)) > 1


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    ("name", "made"),
    [
        ("gqa-untied", Reference),
        ("opt", Reference),
        rarely(("qwen2", triton)),
        rarely(("youtu", triton)),
        rarely(("gemma2", triton)),
        ("gqa-untied", lambda: None),
    ],
    ids=["llama", "opt", "triton", "compressed vectors", "windows", "c++"],
)
def test_steps_with_prompts_say_what_transformers_says(
    folder_of: FolderOf,
    reference_of: Callable[[Path], Any],
    tally: Tally,
    name: str,
    made: Callable[[], Kernels | None],
) -> None:
    """Chunks of some requests run beside decodes of others; blocks are filled from either end."""
    driver, replays = captured(folder_of(name), made(), most=6, most_tokens=20)
    lives = [driver.start_either_way(f"r{n}", prompt_of(n, 2 + 9 * n), 3 + n) for n in range(4)]
    while opened := [live for n, live in enumerate(lives) if len(live.output) < 3 + n]:
        chosen, room, parts = driver.random.sample(opened, driver.random.randint(1, len(opened))), 20, []
        for live in chosen:
            parts.append(live.chunk(driver.random.randint(1, room - 4)) if live.in_prompt else live.decode())
            room -= len(parts[-1].tokens) if isinstance(parts[-1], Chunk) else 1
            if room < 6:
                break
        driver.run(*chosen[: len(parts)], parts=parts)
    for live in lives:
        compare(reference_of(folder_of(name)), live.prompt, live.output, tally, name)
    tally.check()
    assert len(replays.sizes) == driver.steps, "all were replayed"


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> tuple[Engine, Engine, Replays]:
    """Return two engines; the second one replays captured steps, of up to 8 requests and 32 tokens."""
    folder, replays = MODELS["gqa-untied"](tmp_path_factory.mktemp("twins")), Replays()
    made = [
        Engine(folder, num_blocks=60, block_size=4, dtype="float32", kernels=Drawing(), has_graphs=True)
        for _ in range(2)
    ]
    made[1].capture(8, replays, lambda: PLENTY, 0, most_tokens=32)
    return made[0], made[1], replays


@given(seed=st.integers(0, 1 << 30))
@settings(max_examples=examples(40))
def test_any_mix_leaves_what_the_step_leaves_that_is_not_captured(
    twins: tuple[Engine, Engine, Replays], seed: int
) -> None:
    """Chunks in the middle of prompts and at their ends, scored or not, beside decodes, in right-filled blocks and in
    shared ones; some steps are too large."""
    plain, graphs, replays = twins
    driver = Driver(plain, seed)
    spoil(graphs)
    chance, parts, lives = driver.random, list[Chunk | Decode](), list[Live]()
    for number in range(chance.randint(1, 9)):
        prompt = prompt_of(seed + number, chance.randint(1, 14))
        live = driver.start_either_way(f"r{number}", prompt, 2)
        lives.append(live)
    for live in lives[: chance.randint(0, len(lives))]:  # these decode
        driver.prefill(live)
    graphs.cache.copy_(plain.cache)
    for live in lives:
        if not live.in_prompt:
            parts.append(live.decode())
            continue
        chunk = live.chunk(chance.choice((1, 3, 20)))
        if chance.random() < 0.2:
            chunk = replace(chunk, scoring=Scored(prompt_of(seed, chance.randint(1, len(chunk.tokens))), 2))
        parts.append(chunk)
    chance.shuffle(parts)
    plan = StepPlan(
        1, tuple(p for p in parts if isinstance(p, Chunk)), tuple(p for p in parts if isinstance(p, Decode))
    )
    num_replayed = len(replays.sizes)
    expected, found = plain.step(plan), graphs.step(plan)
    assert found.tokens == expected.tokens
    for (_, own), (_, others) in zip(found.prompt_logprobs, expected.prompt_logprobs, strict=True):
        assert [one.value for one in own] == pytest.approx([one.value for one in others], abs=1e-5)
    torch.testing.assert_close(graphs.cache[:, :120], plain.cache[:, :120], equal_nan=True, rtol=0, atol=1e-5)
    rows = sum(len(part.tokens) if isinstance(part, Chunk) else 1 for part in parts)
    wanted = sum(part.sampling is not None for part in parts)
    wanted += sum(len(chunk.scoring.tokens) for chunk in plan.chunks if chunk.scoring is not None)
    assert len(replays.sizes) - num_replayed == (rows <= 32 and wanted <= 8)


@given(seed=st.integers(0, 1 << 30))
@settings(max_examples=examples(20))
def test_steps_that_are_read_later_say_what_steps_say_that_are_read_at_once(
    twins: tuple[Engine, Engine, Replays], seed: int
) -> None:
    """All steps are begun before the first is read: prompts go on behind their chunks, and then decode, while others
    end. Decodes have as inputs tokens that nobody has read. Steps draw their tokens themselves, unless one request
    wants log-probabilities."""
    plain, graphs, replays = twins
    driver = Driver(plain, seed)
    spoil(graphs)
    chance, expected = driver.random, dict[str, list[int]]()
    lives = [
        driver.start_either_way(f"r{n}", prompt_of(seed + n, chance.randint(1, 20)), chance.randint(1, 6))
        for n in range(chance.randint(1, 5))
    ]
    ways = (GREEDY, Sampling(0.9, seed=seed), Sampling(1.5, 20, 0.9, seed), Sampling(0.7, min_p=0.1, logprobs=2))
    samplings = {live.name: chance.choice(ways) for live in lives}
    left = {live.name: len(live.blocks) * 4 - len(live.prompt) for live in lives}  # tokens that have a place
    plans, graphs.reads_later = list[StepPlan](), True
    while going := [live for live in lives if left[live.name]]:
        chunks, decodes = list[Chunk](), list[Decode]()
        for live in going:
            if live.in_prompt:
                chunks.append(live.chunk(chance.choice((1, 4, 9)), samplings[live.name]))
            else:
                decodes.append(live.decode_ahead(None, 0, samplings[live.name]))
            if not live.in_prompt:  # the step samples a token, whose number is all that is known of it
                live.output.append(0)
                left[live.name] -= 1
        plans.append(StepPlan(len(plans) + 1, tuple(chunks), tuple(decodes)))
    for plan in plans:
        for request, token in plain.step(plan).tokens:
            expected.setdefault(request, []).append(token)
    num_replayed, found = len(replays.sizes), dict[str, list[int]]()
    with patch.object(graphs._sampler, "draw", wraps=graphs._sampler.draw) as draw:
        begun = [graphs.begin(plan) for plan in plans]
    for step in begun:
        for request, token in step.result().tokens:
            found.setdefault(request, []).append(token)
    graphs.reads_later = False
    assert found == expected
    assert len(replays.sizes) - num_replayed == sum(plan.num_tokens <= 32 for plan in plans)
    drawn = [(plan, [part.sampling for part in plan.parts if part.sampling is not None]) for plan in plans]
    assert draw.call_count == sum(
        bool(of) and (plan.num_tokens > 32 or any(one.logprobs is not None for one in of)) for plan, of in drawn
    )


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_the_triton_kernels_draw_in_a_captured_step_what_they_draw_behind_others(folder_of: FolderOf) -> None:
    """Steps of three requests run in the size of four; the first is greedy, the others are not."""
    kernels, folder, said = triton(), folder_of("qwen2"), list[list[int]]()
    for is_captured in (True, False):
        engine, replays = (
            Engine(folder, num_blocks=30, block_size=4, dtype="float32", kernels=kernels, has_graphs=True),
            Replays(),
        )
        if is_captured:
            engine.capture(4, replays, lambda: PLENTY, 0)
        engine.reads_later, driver = True, Driver(engine, 1)
        lives = [driver.start(f"r{n}", prompt_of(n, 5), 6) for n in range(3)]
        ways = GREEDY, Sampling(1.5, seed=3), Sampling(1.2, top_k=40, top_p=0.95, seed=4)
        begun = [engine.begin(StepPlan(0, tuple(live.chunk(5, way) for live, way in zip(lives, ways, strict=True))))]
        for ahead in range(1, 4):
            decodes = tuple(live.decode_ahead(None, ahead, way) for live, way in zip(lives, ways, strict=True))
            begun.append(engine.begin(StepPlan(ahead, (), decodes)))
        said.append([token for step in begun for _, token in step.result().tokens])
        assert replays.sizes == [4] * 3 * is_captured
    assert said[0] == said[1]


class FailsToDraw(Drawing):
    """Kernels whose drawing fails while steps are captured: each time, or from a second size on."""

    def __init__(self, sizes_that_work: int = 0) -> None:
        super().__init__()
        self._left = sizes_that_work

    def draw_by(self, logits: torch.Tensor, table: torch.Tensor, out: torch.Tensor) -> None:
        if not self._left:
            raise RuntimeError("ptxas fatal: no such architecture")
        self._left -= 1
        super().draw_by(logits, table, out)


@pytest.mark.parametrize("sizes_that_work", [0, 1])
def test_where_drawing_cannot_be_captured_tokens_are_drawn_behind_captured_steps(
    folder_of: FolderOf, caplog: pytest.LogCaptureFixture, sizes_that_work: int
) -> None:
    driver, replays = captured(folder_of("gqa-untied"), FailsToDraw(sizes_that_work), most=4)
    usual, _ = captured(folder_of("gqa-untied"), Reference(), most=4)
    assert [record.message for record in caplog.records if record.levelno == logging.WARNING] == [
        "drawing in captured steps: tokens are drawn behind them (RuntimeError: ptxas fatal: no such architecture)"
    ]
    said = []
    for of in (driver, usual):
        live = of.start("r", prompt_of(1, 5), 6)
        of.prefill(live)
        said.append(of.generate(live, 6))
    assert said[0] == said[1]
    assert replays.sizes == [1] * 5


def test_too_little_memory_for_drawing_leaves_a_size_out(folder_of: FolderOf) -> None:
    class Large(Drawing):
        def draw_by(self, logits: torch.Tensor, table: torch.Tensor, out: torch.Tensor) -> None:
            if len(logits) > 2:
                raise torch.OutOfMemoryError("CUDA out of memory")
            super().draw_by(logits, table, out)

    captured(folder_of("gqa-untied"), Large(), most=4)
    assert [told.why for told in fallbacks()] == ["there was too little memory for those of 4 requests"]


def test_where_nothing_decodes_steps_with_prompts_alone_are_captured(
    folder_of: FolderOf, reference_of: Callable[[Path], Any], tally: Tally
) -> None:
    """A chunk of one token, which is like a decode, runs in their graphs."""
    engine = Engine(folder_of("gqa-untied"), num_blocks=90, block_size=4, dtype="float32", has_graphs=True)
    replays = Replays()
    engine.capture(6, replays, lambda: PLENTY, 0, most_tokens=20, only_prompts=True)
    assert engine._graphs is not None
    assert [(size.rows, size.chunks > 0) for size in engine._graphs.captured] == [(16, True), (20, True)]
    driver = Driver(engine, 1)
    lives = [driver.start_either_way(f"r{n}", prompt_of(n, 5 + 3 * n), 1) for n in range(2)]
    driver.run(*lives, parts=[live.chunk(len(live.prompt) - 1) for live in lives])
    driver.run(*lives, parts=[live.chunk(1) for live in lives])
    for live in lives:
        compare(reference_of(folder_of("gqa-untied")), live.prompt, live.output, tally, live.name)
    assert len(replays.sizes) == 2


def test_more_chunks_than_there_is_room_for_run_as_they_are() -> None:
    graphs = graphs_of(lambda step: step, most=80, most_tokens=80)
    graphs.capture_all(lambda: PLENTY, 0)
    for chunks, is_replayed in ((32, True), (33, False)):
        found = graphs.replay([QuerySpan(2, 2, (1,))] * chunks, Inputs([5] * 2 * chunks, {}, None), [1, 3])
        assert (found is not None) is is_replayed
        assert found is None or found.logits.flatten().tolist() == [6, 6]
    assert not fallbacks()


def test_the_step_before_may_be_unread(folder_of: FolderOf, reference_of: Callable[[Path], Any], tally: Tally) -> None:
    driver, replays = captured(folder_of("gqa-untied"), Reference())
    driver.engine.reads_later = True
    lives = [driver.start(name, prompt_of(n, 9 + n), 8) for n, name in enumerate("abc")]
    for live in lives:
        driver.prefill(live)
    begun = [
        driver.engine.begin(
            StepPlan(
                ahead + 1, (), tuple(live.decode_ahead(live.output[-1] if not ahead else None, ahead) for live in lives)
            )
        )
        for ahead in range(6)
    ]
    for step in begun:
        for request, token in step.result().tokens:
            next(live for live in lives if live.name == request).output.append(token)
    for live in lives:
        compare(reference_of(folder_of("gqa-untied")), live.prompt, live.output, tally, live.name)
    assert replays.sizes == [4] * 6


def test_other_steps_run_as_they_are(folder_of: FolderOf) -> None:
    driver, replays = captured(folder_of("opt"), Reference(), most=2)
    hidden = driver.start_hidden("hidden", prompt_of(1, 9), 4)
    lives = [driver.start(f"r{n}", prompt_of(n, 6), 4) for n in range(3)]
    for live in (hidden, *lives):
        driver.prefill(live)
    driver.run(hidden, parts=[hidden.decode()])
    driver.run(*lives, parts=[live.decode() for live in lives])
    new = driver.start("new", prompt_of(7, 5), 2)
    driver.run(new, lives[0], parts=[new.chunk(9), lives[0].decode()])
    assert not replays.sizes
    driver.run(*lives[:2], parts=[live.decode() for live in lives[:2]])
    assert replays.sizes == [2]


def test_requests_that_share_a_beginning_are_captured(
    folder_of: FolderOf, reference_of: Callable[[Path], Any], tally: Tally
) -> None:
    """Four requests read the same 29 blocks: with 33 blocks of the device's 40 the step has 120 entries."""
    engine = Engine(folder_of("gqa-untied"), num_blocks=40, block_size=4, dtype="float32", has_graphs=True)
    replays = Replays()
    engine.capture(4, replays, lambda: PLENTY, 0)
    driver, common = Driver(engine, 1), prompt_of(1, 116)
    lives = [driver.start("r0", (*common, 0), 3)]
    driver.prefill(lives[0])
    for n in range(1, 4):
        own = Live(f"r{n}", (*common, n), (*lives[0].blocks[:29], *driver.units_for(4)), done=116)
        driver.prefill(own)
        lives.append(own)
    while len(lives[0].output) < 4:
        driver.run(*lives, parts=[live.decode() for live in lives])
    for live in lives:
        compare(reference_of(folder_of("gqa-untied")), live.prompt, live.output, tally, live.name)
    assert replays.sizes[3:] == [4] * 3, "behind three chunks of one token, which are like decodes"


def test_a_step_with_more_blocks_than_there_are_places_for_runs_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    graphs = graphs_of(lambda step: step)  # 50 places
    graphs.capture_all(lambda: PLENTY, 0)
    tokens = Inputs([*range(3)], {}, None)
    for _ in range(2):
        assert (
            graphs.replay([QuerySpan(1, 68, range(17))] * 2 + [QuerySpan(1, 64, range(16))], tokens, range(3)) is None
        )
    assert [told.why for told in fallbacks()] == ["captured steps have room for 50 blocks"]
    assert len(caplog.messages) == 1
    assert graphs.replay([QuerySpan(1, 64, range(16))] * 3, tokens, range(3)) is not None


def test_there_is_a_place_for_each_block_of_each_request_unless_that_takes_too_much() -> None:
    assert places_for(most=256, longest=2048, num_blocks=60_000) == 256 * 2048
    assert places_for(most=8, longest=2048, num_blocks=100) == 800
    assert 4 << 20 <= places_for(most=1024, longest=600_000, num_blocks=60_000) < 8 << 20
    assert places_for(most=1024, longest=600_000, num_blocks=9_000_000) == 9_000_000


def test_another_cache_has_no_graphs(folder_of: FolderOf) -> None:
    driver, replays = captured(folder_of("gqa-untied"), Reference())
    driver.engine.resize(30)
    driver = Driver(driver.engine, 1)
    live = driver.start("r", prompt_of(1, 5), 3)
    driver.prefill(live)
    driver.generate(live, 3)
    assert not replays.sizes


class Failing(Reference):
    """Attention that fails at its first call, so that torch takes its place."""

    fails = True

    @property
    def captures(self) -> bool:
        return self.fails

    def attend(self, query: torch.Tensor, cache: torch.Tensor, spans: Spans, scoring: Scoring) -> torch.Tensor:
        self.fails = False
        return super().attend(query, cache, spans, scoring)


def test_attention_that_fails_while_it_is_captured_leaves_no_graph(folder_of: FolderOf) -> None:
    driver, replays = captured(folder_of("gqa-untied"), Failing())
    live = driver.start("r", prompt_of(1, 5), 3)
    driver.prefill(live)
    driver.generate(live, 3)
    assert not replays.sizes


def test_without_a_gpu_there_is_a_reason(folder_of: FolderOf, caplog: pytest.LogCaptureFixture) -> None:
    driver, _ = captured(folder_of("gqa-untied"), Reference())
    assert driver.engine.why_no_graphs == "cpu has no graphs"
    engine_loading.capture_steps(driver.engine, Config())
    assert not caplog.records, "that is no fault"


class Capturable(Engine):
    """An engine like one on a GPU, where CUDA refuses to capture."""

    @property
    def why_no_graphs(self) -> str | None:
        return None


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RuntimeError("operation not permitted when stream is capturing"), "RuntimeError: operation not permitted"),
        (torch.OutOfMemoryError("CUDA out of memory."), "CUDA out of memory"),
    ],
)
def test_where_nothing_can_be_captured_steps_run_as_they_are(
    folder_of: FolderOf, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception, said: str
) -> None:
    """Without graphs this is no error, unless graphs were asked for."""

    def refused(_device: torch.device) -> Callable[[Step], Step]:
        raise error

    monkeypatch.setattr(engine_loading, "CudaCapture", refused)
    engine = Capturable(folder_of("gqa-untied"), num_blocks=30, block_size=4, dtype="float32", has_graphs=True)
    with caplog.at_level(logging.INFO):
        engine_loading.capture_steps(engine, Config())
    assert [(record.levelname, record.name) for record in caplog.records if said in record.message] == [
        ("WARNING", "alignedserve.fallbacks")
    ]
    assert [(told.what, said in told.why) for told in fallbacks()] == [("captured steps", True)]
    driver = Driver(engine, 1)
    live = driver.start("r", prompt_of(1, 5), 3)
    driver.prefill(live)
    assert len(driver.generate(live, 3)) == 3
    asked_for = Config(engine=EngineConfig(device=DeviceKind.CUDA, cuda_graphs=Graphs.ON))
    with pytest.raises(ConfigError, match=f"cuda_graphs cannot be on: {said}.*: set it to auto"):
        engine_loading.capture_steps(engine, asked_for)


def test_sizes_that_are_left_out_are_a_fallback(folder_of: FolderOf) -> None:
    engine = Capturable(folder_of("gqa-untied"), num_blocks=30, block_size=4, dtype="float32", has_graphs=True)
    left = iter([300, 200, 90])
    engine.capture(20, lambda step: step, lambda: next(left) << 20, 100 << 20)
    (told,) = fallbacks()
    assert (told.what, told.instead) == ("captured steps", "the host launches each kernel of a step")
    assert told.why == "there was too little memory for those of 1, 2, 4, 8 requests"


# --- Memory


LONG = LongChunks(30, 50)


class ByLibrary:
    """Makes graphs; in some of them another library attends. `sizes` has the sizes of the steps that ran."""

    def __init__(self, takes: float = 1.0, error: Exception | None = None, attends: bool = True) -> None:
        self.sizes, self.positions = list[StepSize](), list[int]()
        self._takes, self._error, self._attends = takes, error, attends

    def graphs(self, adapters: StaticAdapters | None = None, ends_badly: bool = False) -> StepGraphs:
        def capture(step: Step) -> Step:
            try:
                step()
            except NotCaptured as error:
                if ends_badly:
                    raise RuntimeError("operation failed due to a previous error during capture") from error
                raise
            return step

        options = {"long": LONG, "seconds": self._seconds, "adapters": adapters}
        return StepGraphs(20, 64, 1, self._forward, capture, 4, 400, 60, CPU, **options)

    def _forward(self, tokens: torch.Tensor, spans: StaticSpans, rows: torch.Tensor | None) -> torch.Tensor:
        if self._error is not None and spans.size.long is not None:
            raise self._error
        if self._attends and spans.size.long is not None:
            requests_of(spans, CPU, decodes=False)
        self.sizes.append(spans.size)
        self.positions += spans.positions.tolist()
        made = tokens[:, None] + spans.positions[:, None]
        return made if rows is None else made[rows]

    def _seconds(self, work: Callable[[], object]) -> float:
        work()
        return self._takes if self.sizes[-1].long is not None else 2.0


@pytest.fixture
def small_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a library attend in steps of 16 tokens, too."""
    monkeypatch.setattr(graphs_module, "_LEAST_LONG_ROWS", 16)


DECODING, TURNED = QuerySpan(1, 9, (1, 2, 3)), QuerySpan(1, 9, (~1, 2, 3))


@pytest.mark.usefixtures("small_sizes")
@pytest.mark.parametrize(
    ("lies", "by_library"),
    [
        ([QuerySpan(12, 30, range(8))], True),
        ([DECODING, TURNED, QuerySpan(12, 30, range(8)), QuerySpan(2, 2, (9,))], True),
        ([*[DECODING] * 8, QuerySpan(8, 200, range(50))], True),
        ([*[DECODING] * 9, QuerySpan(7, 200, range(50))], False),
        ([*[DECODING] * 9, QuerySpan(8, 200, range(50))], False),
        ([QuerySpan(12, 29, range(8))], False),
        ([DECODING._replace(tokens=200, blocks=range(50)), QuerySpan(12, 29, range(8))], False),
        ([QuerySpan(12, 30, (*range(7), ~7))], False),
        ([QuerySpan(12, 30, range(8)), *[QuerySpan(2, 2, (9,))] * 7], True),
        ([QuerySpan(12, 30, range(8)), *[QuerySpan(2, 2, (9,))] * 8], False),
    ],
    ids=["long", "beside others", "half the rows", "less than half", "half with padding", "short", "a long decode",
         "from the right", "eight chunks", "nine chunks"],
)  # fmt: skip
def test_another_library_has_the_steps_with_chunks_of_long_requests(lies: list[QuerySpan], by_library: bool) -> None:
    made = ByLibrary()
    graphs = made.graphs()
    graphs.capture_all(lambda: PLENTY, 0)
    made.sizes.clear()
    rows = sum(lie.queries for lie in lies)
    found = graphs.replay(lies, Inputs([5] * rows, {}, None), [rows - 1])
    assert found is not None
    assert found.logits.flatten().tolist() == [5 + lies[-1].tokens - 1]
    (size,) = made.sizes
    assert (size.long is not None) is by_library


@pytest.mark.usefixtures("small_sizes")
def test_its_graphs_stay_where_they_are_faster(caplog: pytest.LogCaptureFixture) -> None:
    """They are compared by one chunk behind as many tokens as a request may have."""
    for takes, stays in ((1.9, True), (1.99, False)):
        made = ByLibrary(takes)
        graphs = made.graphs()
        with caplog.at_level(logging.INFO):
            graphs.capture_all(lambda: PLENTY, 0)
        assert [size.rows for size in graphs.captured if size.long is not None] == [16, 32, 64] * stays
        assert {size.rows: took for size, took in graphs.compared.items()} == dict.fromkeys((16, 32, 64), (takes, 2.0))
        assert not graphs.left_out
    assert "64 tokens with prompts of long requests: 1900.00 ms by another library, 2000.00 by ours" in caplog.text
    few = StepGraphs(20, 64, 1, ByLibrary()._forward, lambda step: step, 4, 400, 3, CPU, long=LONG)
    assert max(made.positions) == 4 * 49 - 1, "no place behind the longest request is read"
    assert len(few) == len(graphs_of(lambda step: step, most_tokens=64)) + 2, "16 behind 12 are not long"


@pytest.mark.usefixtures("small_sizes")
def test_where_no_library_attends_there_are_no_such_graphs() -> None:
    """For a cache in int8, say: ours would take the place of a library, in a graph that is captured for nothing."""
    graphs = ByLibrary(attends=False).graphs()
    graphs.capture_all(lambda: PLENTY, 0)
    assert not [size for size in graphs.captured if size.long is not None]
    assert not graphs.compared


@pytest.mark.usefixtures("small_sizes")
@pytest.mark.parametrize("ends_badly", [False, True], ids=["", "and the capture ends with another error"])
def test_a_library_that_cannot_be_captured_costs_no_other_graph(
    caplog: pytest.LogCaptureFixture, ends_badly: bool
) -> None:
    graphs = ByLibrary(error=NotCaptured("attention of it failed: TypeError")).graphs(ends_badly=ends_badly)
    graphs.capture_all(lambda: PLENTY, 0)
    assert [size.rows for size in graphs.captured] == [1, 2, 4, 8, 16, 20, 16, 32, 64]
    assert not graphs.left_out
    assert caplog.text.count("tokens with prompts of long requests are not captured") == 1
    found = graphs.replay([QuerySpan(12, 30, range(8))], Inputs([5] * 12, {}, None), [11])
    assert found is not None


@pytest.mark.usefixtures("small_sizes")
def test_steps_with_adapters_have_such_graphs_too() -> None:
    graphs = ByLibrary().graphs(StaticAdapters(64))
    graphs.capture_all(lambda: PLENTY, 0)
    long = [(size.rows, size.adapted) for size in graphs.captured if size.long is not None]
    assert long == [(rows, adapted) for adapted in (False, True) for rows in (16, 32, 64)]


@rare
@pytest.mark.usefixtures("small_sizes")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_steps_whose_chunks_another_library_attends_for_say_what_transformers_says(
    folder_of: FolderOf, reference_of: Callable[[Path], Any], tally: Tally, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Functions in torch stand for the library, and see what a graph would keep. A long prompt runs alone, beside a
    short one and beside a decode."""
    triton()
    fakes = importlib.import_module("tests.kernels.test_paged_libraries")
    fp32 = (torch.float32,)
    monkeypatch.setattr(fakes.paged_libraries, "_DTYPES", fp32)
    third, times = fakes.FakeFlashAttn3(fp32), cycle((1.0, 1.0, 1.0, 2.0, 2.0, 2.0))  # the library's is the faster
    kernels = fakes.PagedKernels([fakes.FlashAttn3(third)], long_chunk=12)
    engine = Engine(folder_of("qwen2"), num_blocks=60, block_size=4, dtype="float32", kernels=kernels, has_graphs=True)
    replays = Replays()
    engine.capture(2, replays, lambda: PLENTY, 0, most_tokens=16, seconds=lambda _: next(times))
    at_start, driver = third.calls, Driver(engine, 5)
    long = driver.start("long", prompt_of(1, 34), 2)
    short = driver.start_either_way("short", prompt_of(2, 9), 3)
    driver.run(long, parts=[long.chunk(12)])  # then padding
    driver.run(long, short, parts=[long.chunk(11), short.chunk(4)])  # and one row of padding
    assert third.calls > at_start + 1
    by_library = third.calls
    driver.run(short, parts=[short.chunk(5)])
    assert third.calls == by_library, "short chunks are left to ours"
    driver.run(long, short, parts=[long.chunk(11), short.decode()])
    driver.run(long, short, parts=[long.decode(), short.decode()])
    for live in (long, short):
        compare(reference_of(folder_of("qwen2")), live.prompt, live.output, tally, live.name)
    tally.check()
    assert len(replays.sizes) == driver.steps, "all were replayed"
    assert len({*third.asked}) == 2, "layers with a window, and without"


def graphs_of(capture: Callable[[Step], Step], most: int = 20, most_tokens: int = 0) -> StepGraphs:
    def forward(tokens: torch.Tensor, spans: StaticSpans, rows: torch.Tensor | None) -> torch.Tensor:
        made = tokens[:, None] + spans.positions[:, None]
        return made if rows is None else made[rows]

    return StepGraphs(most, most_tokens, 1, forward, capture, 4, 30, 30, CPU)


def test_large_steps_are_captured_first_as_long_as_memory_is_left(caplog: pytest.LogCaptureFixture) -> None:
    left = iter([300, 200, 90])
    graphs = graphs_of(lambda step: step)
    graphs.capture_all(lambda: next(left) << 20, 100 << 20)
    assert [size.rows for size in graphs.captured] == [16, 20]
    assert "decode steps of 8 requests and fewer are not captured: less than 100 MB are free" in caplog.text
    lies = [QuerySpan(1, 5, (1, 2))] * 3
    assert graphs.replay(lies, Inputs([1, 2, 3], {}, None), range(3)) is None
    found = graphs.replay(lies * 4, Inputs([*range(12)], {}, None), range(12))
    assert found is not None
    assert found.logits.flatten().tolist() == [token + 4 for token in range(12)]


@pytest.mark.parametrize("ends_badly", [False, True], ids=["", "and the capture ends with another error"])
def test_a_size_for_which_there_is_too_little_memory_is_left_out(
    caplog: pytest.LogCaptureFixture, ends_badly: bool
) -> None:
    def capture(step: Step) -> Step:
        try:
            if len(step()) >= 16:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB")
        finally:
            if ends_badly and len(step()) >= 16:
                raise RuntimeError("operation failed due to a previous error during capture")
        return step

    graphs = graphs_of(capture)
    with caplog.at_level(logging.INFO):
        graphs.capture_all(lambda: PLENTY, 0)
    assert [size.rows for size in graphs.captured] == [1, 2, 4, 8]
    for size in (20, 16):
        assert f"{size} requests are not captured: CUDA out of memory. Tried to allocate 2.00 MiB" in caplog.text
    assert "decode steps of up to 8 requests are captured, in 4 sizes" in caplog.text


def test_no_size_keeps_logits_of_its_own() -> None:
    """With a large vocabulary, logits per size would take gigabytes."""
    graphs = graphs_of(lambda step: step)
    graphs.capture_all(lambda: PLENTY, 0)
    found = [graphs.replay([QuerySpan(1, 1, (1,))] * n, Inputs([3] * n, {}, None), range(n)) for n in (3, 12)]
    assert len({computed.logits.data_ptr() for computed in found if computed is not None}) == 1


def test_another_fault_is_not_taken_for_it() -> None:
    def capture(_step: Step) -> Step:
        raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(RuntimeError, match="stream is capturing"):
        graphs_of(capture).capture_all(lambda: PLENTY, 0)
