"""Tests of engines on the GPU, in fp32: greedy output is that of transformers, and KV comes back from pages
unchanged."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from alignedserve.architectures.quantization import Quantization
from alignedserve.core import Sampling, StepPlan
from alignedserve.engine.copying.copies import PageCopier
from alignedserve.engine.device.devices import beside_steps, free_memory
from alignedserve.engine.device.pinning import cudart_for, pin
from alignedserve.engine.engine import Engine
from alignedserve.engine.graphs import CudaCapture
from alignedserve.engine.weights.dummy import DummyWeights
from alignedserve.engine.weights.tensors import Cut
from alignedserve.kvpool.arena.arena import Arena
from tests.engine import transformers_families
from tests.engine.driver import Driver, Live, prompt_of
from tests.engine.expanded import expanded_reference
from tests.gpu.cases import GPU
from tests.models import MODELS, qwen3_moe
from tests.quantised_folders import float8, quantised_folder
from tests.reference import Tally, compare, load

pytestmark = pytest.mark.usefixtures("unmeasured", "by_triton")
PAGE = 64
OWN = [name for name in MODELS if name != "wide-heads"]


@pytest.fixture(autouse=True, scope="module")
def exact() -> Iterator[None]:
    """Keep fp32 products exact, instead of rounding them to TF32."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.parametrize("name", OWN)
def test_chunks_and_decodes_say_what_transformers_says(name: str, tmp_path: Path) -> None:
    folder = MODELS[name](tmp_path / "model")
    driver, reference, tally = (
        Driver(Engine(folder, num_blocks=40, dtype="float32", device=GPU), 1),
        load(folder),
        Tally(),
    )
    lives = [driver.start_either_way(f"r{length}", prompt_of(length, length), 30) for length in (3, 40, 100)]
    for live in lives:
        driver.prefill(live, [17])
        compare(reference, live.prompt, driver.generate(live, 30), tally, f"{name}, {len(live.prompt)} tokens")
    tally.check()


def test_a_model_that_transformers_runs_is_on_the_gpu_too(tmp_path: Path) -> None:
    folder = transformers_families.make(tmp_path / "model", "gpt2")
    engine, tally = Engine(folder, num_blocks=40, dtype="float32", device=GPU), Tally()
    assert engine.why_no_graphs == "transformers runs this model"
    driver = Driver(engine, 1)
    live = driver.start_either_way("r", prompt_of(1, 40), 20)
    driver.prefill(live, [17])
    compare(load(folder), live.prompt, driver.generate(live, 20), tally, "gpt2")
    tally.check()


def captured(folder: Path, most: int = 6, num_blocks: int = 90, most_tokens: int = 0) -> Engine:
    engine = Engine(folder, num_blocks=num_blocks, dtype="float32", device=GPU, has_graphs=True)
    assert engine.why_no_graphs is None
    engine.capture(most, CudaCapture(GPU), lambda: free_memory(GPU) or 0, 0, most_tokens=most_tokens)
    return engine


MIXTURES = ("mixtral", "qwen2-moe", "deepseek-v3", "llama4", "gpt-oss")  # their experts run at once


@pytest.mark.parametrize("name", ["gqa-untied", "opt", "qwen2", "youtu", *MIXTURES])
def test_captured_decodes_say_what_transformers_says(name: str, tmp_path: Path) -> None:
    """Some requests are long enough to be split; some sit out steps; chunks run uncaptured in between."""
    folder = MODELS[name](tmp_path / "model")
    driver, reference, tally = Driver(captured(folder), 1), load(folder), Tally()
    lives = [driver.start_either_way(f"r{n}", prompt_of(n, 3 + 20 * n), 20) for n in range(5)]
    for live in lives:
        driver.prefill(live, [17])
    while opened := [live for live in lives if len(live.output) < 20]:
        chosen = driver.random.sample(opened, driver.random.randint(1, len(opened)))
        driver.run(*chosen, parts=[live.decode() for live in chosen])
    for live in lives:
        compare(reference, live.prompt, live.output, tally, f"{name}, {len(live.prompt)} tokens")
    tally.check()


@pytest.mark.parametrize("name", ["gqa-untied", "opt", "qwen2", "youtu", *MIXTURES])
def test_captured_steps_with_prompts_say_what_transformers_says(name: str, tmp_path: Path) -> None:
    """Chunks run beside decodes, in steps of up to 64 tokens."""
    folder = MODELS[name](tmp_path / "model")
    driver, reference, tally = Driver(captured(folder, most_tokens=64), 1), load(folder), Tally()
    lives = [driver.start_either_way(f"r{n}", prompt_of(n, 3 + 40 * n), 20) for n in range(5)]
    while opened := [live for live in lives if len(live.output) < 20]:
        chosen = driver.random.sample(opened, driver.random.randint(1, min(3, len(opened))))
        parts = [live.chunk(driver.random.randint(1, 20)) if live.in_prompt else live.decode() for live in chosen]
        driver.run(*chosen, parts=parts)
    for live in lives:
        compare(reference, live.prompt, live.output, tally, f"{name}, {len(live.prompt)} tokens")
    tally.check()


def test_captured_experts_in_8_bit_floats_say_what_transformers_says(tmp_path: Path) -> None:
    """In blocks with a scale each, as DeepSeek-V3 and Qwen3-FP8 have them."""
    blocks = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}
    plain = qwen3_moe(tmp_path / "plain", hidden_size=256, moe_intermediate_size=128)
    form = blocks, lambda weight: float8(weight, 128, 128, "weight_scale_inv")
    network, tally = quantised_folder(plain, tmp_path / "model", form), Tally()
    driver = Driver(captured(tmp_path / "model"), 1)
    lives = [driver.start(f"r{n}", prompt_of(n, 3 + 20 * n), 12) for n in range(5)]
    for live in lives:
        driver.prefill(live, [17])
    for _ in range(11):
        driver.run(*lives, parts=[live.decode() for live in lives])
    for live in lives:
        compare(network, live.prompt, live.output, tally, live.name)
    tally.check()


def test_captured_requests_that_share_a_beginning_say_what_transformers_says(tmp_path: Path) -> None:
    """Six requests read the same 9 blocks: a step names 60 blocks where the device has 20."""
    folder = MODELS["gqa-untied"](tmp_path / "model")
    driver, reference, tally = Driver(captured(folder, num_blocks=20), 1), load(folder), Tally()
    common = prompt_of(1, 9 * driver.engine.block_size)
    lives = [driver.start("r0", (*common, 0), 10)]
    driver.prefill(lives[0])
    for n in range(1, 6):
        own = driver.units_for(driver.engine.block_size)
        lives.append(Live(f"r{n}", (*common, n), (*lives[0].blocks[:9], *own), done=len(common)))
        driver.prefill(lives[-1])
    for _ in range(9):
        driver.run(*lives, parts=[live.decode() for live in lives])
    for live in lives:
        compare(reference, live.prompt, live.output, tally, live.name)
    tally.check()


@pytest.mark.parametrize("quantization", [Quantization.INT8, Quantization.INT4])
@pytest.mark.parametrize("name", ["qwen2", "opt"])
def test_quantised_weights_say_what_transformers_says_with_them_expanded(
    name: str, quantization: Quantization, tmp_path: Path
) -> None:
    """Decodes are captured, after all that is measured was measured in a rehearsal."""
    folder = MODELS[name](tmp_path / "model")
    engine = Engine(folder, num_blocks=90, dtype="float32", quantization=quantization, device=GPU, has_graphs=True)
    engine.rehearse()
    engine.capture(6, CudaCapture(GPU), lambda: free_memory(GPU) or 0, 0)
    driver, reference, tally = Driver(engine, 1), expanded_reference(folder, quantization), Tally()
    lives = [driver.start_either_way(f"r{length}", prompt_of(length, length), 30) for length in (3, 40, 100)]
    for live in lives:
        driver.prefill(live, [17])
        compare(reference, live.prompt, driver.generate(live, 30), tally, f"{name}, {quantization.value}")
    tally.check()


@pytest.mark.parametrize("has_graphs", [False, True])
def test_steps_that_are_begun_before_the_last_step_is_read_say_the_same(has_graphs: bool, tmp_path: Path) -> None:
    folder = MODELS["gqa-untied"](tmp_path / "model")
    engine = captured(folder) if has_graphs else Engine(folder, num_blocks=90, dtype="float32", device=GPU)
    assert engine.reads_later
    driver, reference, tally = Driver(engine, 1), load(folder), Tally()
    lives = [driver.start(f"r{n}", prompt_of(n, 30 + n), 20) for n in range(3)]
    for live in lives:
        driver.prefill(live)
    plans = [
        StepPlan(n + 1, (), tuple(live.decode_ahead(None if n else live.output[-1], n) for live in lives))
        for n in range(16)
    ]
    begun = [engine.begin(plan) for plan in plans]
    for step in begun:
        sampled = dict(step.result().tokens)
        for live in lives:
            live.output.append(sampled[live.name])
    for live in lives:
        compare(reference, live.prompt, live.output, tally, f"graphs: {has_graphs}, {live.name}")
    tally.check()


def test_captured_steps_draw_what_others_draw(tmp_path: Path) -> None:
    """One request is greedy, two are sampled; all steps are begun before the first is read."""
    folder, said = MODELS["gqa-untied"](tmp_path / "model"), list[list[int]]()
    ways = Sampling(), Sampling(1.5, seed=3), Sampling(1.2, top_k=40, top_p=0.95, seed=4)
    for engine in (captured(folder), Engine(folder, num_blocks=90, dtype="float32", device=GPU)):
        driver = Driver(engine, 1)
        lives = [driver.start(f"r{n}", prompt_of(n, 30 + n), 20) for n in range(3)]
        begun = [engine.begin(StepPlan(0, tuple(live.chunk(40, way) for live, way in zip(lives, ways, strict=True))))]
        for ahead in range(1, 16):
            decodes = (live.decode_ahead(None, ahead, way) for live, way in zip(lives, ways, strict=True))
            begun.append(engine.begin(StepPlan(ahead, (), tuple(decodes))))
        said.append([token for step in begun for _, token in step.result().tokens])
    assert said[0] == said[1]


def test_a_step_waits_for_its_tokens_alone(tmp_path: Path) -> None:
    """CUDA's own check is on: any other wait raises an error."""
    driver = Driver(captured(MODELS["gqa-untied"](tmp_path / "model")), 1)
    live = driver.start("r", prompt_of(1, 40), 20)
    driver.prefill(live)
    driver.generate(live, 3)
    for ahead, is_eager in ((0, False), (1, True), (2, True)):
        driver.engine._graphs = None if is_eager else driver.engine._graphs
        torch.cuda.set_sync_debug_mode("error")
        try:
            step = driver.engine.begin(
                StepPlan(50 + ahead, (), (live.decode_ahead(None if ahead else live.output[-1], ahead),))
            )
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert step.result().tokens


def test_a_step_without_memory_fails_and_the_next_step_runs(tmp_path: Path) -> None:
    driver = Driver(Engine(MODELS["gqa-untied"](tmp_path / "model"), num_blocks=90, dtype="float32", device=GPU), 1)
    live = driver.start("r", prompt_of(1, 40), 20)
    driver.prefill(live)
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(0.0, GPU)
    taken = all_that_is_left()
    try:
        chunk = driver.start("long", prompt_of(2, 100), 1).chunk(100)
        failed = driver.engine.step(StepPlan(9, (chunk,)))
    finally:
        taken.clear()
        torch.cuda.set_per_process_memory_fraction(1.0, GPU)
    assert failed.failure is not None
    assert "out of memory" in failed.failure.why
    driver.generate(live, 5)


def all_that_is_left() -> list[torch.Tensor]:
    """Take what torch holds of the GPU unused: otherwise a small step would fit there."""
    taken = []
    for size in (1 << 20, 1 << 16, 1 << 12, 1 << 9):
        with suppress(torch.OutOfMemoryError):
            while True:
                taken.append(torch.empty(size, dtype=torch.uint8, device=GPU))
    return taken


def test_a_chunk_in_the_middle_of_a_prompt_has_ended_when_it_is_in_the_blocks(tmp_path: Path) -> None:
    """Other threads copy the blocks then, on streams of their own. The GPU is kept busy before the chunk."""
    driver = Driver(Engine(MODELS["gqa-untied"](tmp_path / "model"), num_blocks=90, dtype="float32", device=GPU), 1)
    driver.prefill(driver.start("first", prompt_of(1, 40), 1))  # compiles the kernels
    driver.engine.cache.fill_(torch.nan)
    torch.cuda.synchronize()
    live = driver.start("r", prompt_of(2, 40), 1)
    torch.cuda._sleep(200_000_000)
    driver.engine.step(StepPlan(1, (live.chunk(20),)))
    aside = torch.cuda.Stream(GPU)
    with torch.cuda.stream(aside):
        written = driver.engine.cache[:, 2 * live.blocks[0] : 2 * live.blocks[0] + 2].clone()
    aside.synchronize()
    assert written.isfinite().all()


def test_pages_that_are_under_way_at_once_arrive(tmp_path: Path) -> None:
    """Pages are pinned, the last page is not full, and steps run meanwhile."""
    engine = Engine(MODELS["gqa-untied"](tmp_path / "model"), num_blocks=60, dtype="float32", device=GPU)
    engine.cache.copy_(torch.randn(engine.cache.shape, generator=torch.Generator().manual_seed(1)))
    tokens = prompt_of(1, 5 * PAGE + 7)
    page_bytes = 2 * PAGE * engine.config.kv_dim * engine.config.num_layers * 4
    arena = Arena.create(tmp_path / "arena", pages=6, payload_bytes=page_bytes, page_size=PAGE, incarnation=1)
    cudart = cudart_for(GPU)
    assert cudart is not None
    unpin, copier = pin(arena, cudart, GPU), PageCopier(engine.cache, arena, PAGE, verify=True)
    assert copier.num_turns(6) == 1
    count = -(-len(tokens) // engine.block_size)
    here, there = tuple(range(count)), tuple(range(59, 59 - count, -1))
    with beside_steps(GPU):
        copier.copy_out(here, range(6), tokens)
        assert copier.copy_in(range(6), there, tokens)
    for before, after in zip(here[:-1], there[:-1], strict=True):
        assert torch.equal(engine.cache[:, 2 * before : 2 * before + 2], engine.cache[:, 2 * after : 2 * after + 2])
    unpin()
    copier.close()


def test_kv_comes_back_from_pages_as_it_went(tmp_path: Path) -> None:
    engine = Engine(MODELS["gqa-untied"](tmp_path / "model"), num_blocks=40, dtype="float32", device=GPU)
    driver = Driver(engine, 1)
    tokens = prompt_of(1, 2 * PAGE)
    live = driver.start("r", tokens, 2)
    driver.prefill(live)
    page_bytes = 2 * PAGE * engine.config.kv_dim * engine.config.num_layers * 4
    arena = Arena.create(tmp_path / "arena", pages=4, payload_bytes=page_bytes, page_size=PAGE, incarnation=1)
    copier = PageCopier(engine.cache, arena, PAGE, verify=True)
    blocks = live.blocks[: 2 * PAGE // engine.block_size]
    copier.copy_out(blocks, (0, 1), tokens)
    elsewhere = driver.units_for(2 * PAGE)
    assert copier.copy_in((0, 1), elsewhere, tokens)
    for before, after in zip(blocks, elsewhere, strict=True):
        assert torch.equal(engine.cache[:, 2 * before : 2 * before + 2], engine.cache[:, 2 * after : 2 * after + 2])
    copier.close()


def test_dummy_weights_are_those_of_a_cpu() -> None:
    """More numbers than are made at once, some rows, and some columns."""
    for shape, cut in (((5000, 4096), None), ((700, 512), Cut(0, 300, 2000)), ((700, 512), Cut(1, 512, 2048))):
        for dtype in (torch.float32, torch.bfloat16):
            here, there = torch.empty(shape, dtype=dtype), torch.empty(shape, dtype=dtype, device=GPU)
            for out in (here, there):
                DummyWeights().read_into(out, "a.weight", cut=cut)
            assert torch.equal(there.cpu(), here)
