"""Tests of adapters (LoRA) in the engine: greedy output is that of PEFT, in fp32, whatever else is in a step."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from alignedserve.architectures.families.lora import read_lora
from alignedserve.architectures.families.model_config import read_config
from alignedserve.architectures.quantization import Quantization
from alignedserve.core import Chunk, Decode, StepPlan
from alignedserve.engine.copying.copies import PageCopier
from alignedserve.engine.engine import Engine
from alignedserve.errors import PlanError
from alignedserve.fallbacks import fallbacks
from alignedserve.kernels.common.adapters import StepAdapters
from alignedserve.kernels.common.reference import Reference
from alignedserve.kernels.dispatch.dispatcher import Kernels
from alignedserve.kvpool.arena.arena import Arena
from tests.adapters import make_adapter, named, with_adapter
from tests.conftest import SOAK
from tests.engine.driver import PLENTY, Driver, Live, Replays, prompt_of
from tests.engine.test_graphs import triton
from tests.engine.test_ranks import Both
from tests.rare import rarely, thinned
from tests.reference import Tally, compare

FAMILIES = (
    "mha-tied",
    "gqa-untied",
    "llama-biases",
    "mistral",
    "qwen2",
    "qwen3",
    "opt",
    "opt-350m",
    "llama4",
    "gemma2",
    "gemma3",
    "phi3",
    "glm4",
    "qwen2-moe",
)
USUAL = ("mha-tied", "opt", "llama4", "qwen2-moe")  # one for each way to name layers
TOKENS = 6
SOME = r".*\.1\..*(q_proj|v_proj|down_proj|fc2)"  # layers of the model's second layer
OTHERS: dict[str, dict[str, Any]] = {  # options of adapters: rank, which layers, how A and B are scaled
    "wide": {"rank": 16, "lora_alpha": 16},
    "few-layers": {"rank": 3, "lora_alpha": 7, "use_rslora": True, "targets": SOME},
}


@pytest.fixture(scope="session")
def adapters_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], dict[str, Path]]:
    @cache
    def make(model: Path) -> dict[str, Path]:
        above = tmp_path_factory.mktemp("adapters")
        return {
            name: make_adapter(model, above / name, seed=seed, **options)
            for seed, (name, options) in enumerate(OTHERS.items())
        }

    return make


def run_all(driver: Driver, lives: list[Live]) -> None:
    """Run prompts in chunks beside decodes of the other requests, until all have their output."""
    for live in lives:
        while live.in_prompt:
            going = [other for other in lives if other.output and len(other.output) < TOKENS]
            driver.run(*lives, parts=[live.chunk(9), *(other.decode() for other in going)])
    while going := [live for live in lives if len(live.output) < TOKENS]:
        driver.run(*going, parts=[live.decode() for live in going])


@pytest.mark.parametrize("name", [name if name in USUAL else rarely(name) for name in FAMILIES])
def test_requests_with_and_without_adapters_in_one_step_get_what_peft_says(
    name: str,
    folder_of: Callable[[str], Path],
    engine_of: Callable[[Path, int], Engine],
    reference_of: Callable[[Path], Any],
    adapters_of: Callable[[Path], dict[str, Path]],
    tally: Tally,
) -> None:
    folder = folder_of(name)
    driver, made = Driver(engine_of(folder, 8), 3), adapters_of(folder)
    adapters = {key: named(key, path, folder) for key, path in made.items()}
    lives = []
    for number, key in enumerate(("wide", None, "few-layers", "wide")):
        lives.append(driver.start_either_way(f"r{number}", prompt_of(number, 11 + 5 * number), TOKENS))
        lives[-1].adapter = None if key is None else adapters[key]
    run_all(driver, lives)
    plain, outputs = reference_of(folder), [live.output for live in lives]
    models = {key: with_adapter(folder, path) for key, path in made.items()}
    for live in lives:
        model = plain if live.adapter is None else models[live.adapter.name]
        compare(model, live.prompt, live.output, tally, f"{name} {live.adapter and live.adapter.name}")
    assert outputs[0] != greedy(plain, lives[0].prompt), "the adapter changes what the model says"


def test_preempted_requests_keep_their_adapters(
    folder_of: Callable[[str], Path],
    engine_of: Callable[[Path, int], Engine],
    reference_of: Callable[[Path], Any],
    adapters_of: Callable[[Path], dict[str, Path]],
    tally: Tally,
    tmp_path: Path,
) -> None:
    """One comes back from the pool and one is recomputed, while others with and without adapters are in each step."""
    folder = folder_of("gqa-untied")
    driver, made = Driver(engine_of(folder, 8), 3), adapters_of(folder)
    adapters = {key: named(key, path, folder) for key, path in made.items()}
    keys = ("wide", "few-layers", "", "few-layers")
    lives = [driver.start(f"r{number}", prompt_of(number, 12 + 5 * number), TOKENS) for number in range(len(keys))]
    for live, key in zip(lives, keys, strict=True):
        live.adapter = adapters.get(key)
        driver.prefill(live)
    away, dropped, *others = lives
    driver.run(*lives, parts=[live.decode() for live in lives])
    page_bytes = driver.engine.config.kv_bytes(16, "float32")
    arena = Arena.create(tmp_path / "arena", pages=8, payload_bytes=page_bytes, page_size=16, incarnation=1)
    copier, pages, written = PageCopier(driver.engine.cache, arena, 16, verify=True), [5, 0], tokens_of(away)
    copier.copy_out(away.blocks, pages, written)
    for block in (*away.blocks, *dropped.blocks):
        driver.engine.cache[:, 2 * block : 2 * block + 2] = float("nan")
    driver.run(*others, parts=[live.decode() for live in others])

    away.blocks = driver.units_for(len(away.prompt) + TOKENS)
    assert copier.copy_in(pages, away.blocks, written)
    again = driver.start("again", (*dropped.prompt, *dropped.output), TOKENS)
    again.adapter = dropped.adapter
    driver.run(away, again, *others, parts=[again.chunk(99), *(live.decode() for live in (away, *others))])
    while going := [live for live in (away, *others, again) if len(live.output) < TOKENS]:
        driver.run(*going, parts=[live.decode() for live in going])
    arena.close()
    dropped.output += again.output[: TOKENS - len(dropped.output)]
    for live, key in zip(lives, keys, strict=True):
        model = with_adapter(folder, made[key]) if key else reference_of(folder)
        compare(model, live.prompt, live.output, tally, f"{live.name} {key}, preempted")


def tokens_of(live: Live) -> tuple[int, ...]:
    """Return the tokens that have KV."""
    return (*live.prompt, *live.output[:-1])


def greedy(model: Any, prompt: tuple[int, ...]) -> list[int]:
    import torch

    said = list(prompt)
    with torch.inference_mode():
        for _ in range(TOKENS):
            said.append(int(model(input_ids=torch.tensor([said]), use_cache=False).logits[0, -1].argmax()))
    return said[len(prompt) :]


@pytest.mark.parametrize("name", thinned(("gqa-untied", "glm4", "opt", "phi3"), usual=2))
def test_two_ranks_say_what_a_single_rank_says(
    name: str,
    folder_of: Callable[[str], Path],
    adapters_of: Callable[[Path], dict[str, Path]],
) -> None:
    folder = folder_of(name)
    adapters = {key: named(key, path, folder) for key, path in adapters_of(folder).items()}

    def said(engine: Any) -> list[list[int]]:
        driver = Driver(engine, 7)
        lives = [driver.start(f"r{number}", prompt_of(number, 9 + 7 * number), TOKENS) for number in range(3)]
        lives[0].adapter, lives[2].adapter = adapters["wide"], adapters["few-layers"]
        run_all(driver, lives)
        return [live.output for live in lives]

    with ThreadPoolExecutor(2) as pool:
        shared = said(Both(folder, pool))
    assert shared == said(Engine(folder, num_blocks=40, block_size=8, dtype="float32"))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    ("name", "kind"),
    [("gqa-untied", "reference"), ("opt", "reference"), rarely(("qwen2", "triton")), ("gqa-untied", "c++")],
)
def test_captured_steps_with_and_without_adapters_say_what_peft_says(
    name: str,
    kind: str,
    folder_of: Callable[[str], Path],
    reference_of: Callable[[Path], Any],
    adapters_of: Callable[[Path], dict[str, Path]],
    tally: Tally,
) -> None:
    """The steps are captured before an adapter is loaded. Most are begun before the step before is read."""
    folder, count, sizes = folder_of(name), 5, (6, 20)
    if kind == "triton":  # whose interpreter takes a second for a step
        count, sizes = 3, (3, 8)
    driver, replays = captured(folder, {"reference": Reference, "triton": triton}.get(kind, lambda: None)(), *sizes)
    made = adapters_of(folder)
    adapters = {key: named(key, path, folder) for key, path in made.items()}
    keys = ("wide", "few-layers", "", "wide", "")[:count]
    lives = [driver.start_either_way(f"r{n}", prompt_of(n, 3 + 4 * n), TOKENS) for n in range(count)]
    for live, key in zip(lives, keys, strict=True):
        live.adapter = adapters.get(key)
        driver.prefill(live, [5])
    driver.engine.reads_later, number = True, driver.steps
    while opened := [live for live in lives if len(live.output) < TOKENS]:
        chosen, begun = driver.random.sample(opened, driver.random.randint(1, len(opened))), []
        for ahead in range(min(2, TOKENS - max(len(live.output) for live in chosen))):
            number += 1
            decodes = [live.decode_ahead(None if ahead else live.output[-1], ahead) for live in chosen]
            begun.append(driver.engine.begin(StepPlan(number, (), tuple(decodes))))
        for step in begun:
            for live, (request, token) in zip(chosen, step.result().tokens, strict=True):
                assert live.name == request
                live.output.append(token)
    for live, key in zip(lives, keys, strict=True):
        model = with_adapter(folder, made[key]) if key else reference_of(folder)
        compare(model, live.prompt, live.output, tally, f"{name} {key}, captured")
    assert len(replays.sizes) == number, "all were replayed"


def captured(
    folder: Path, kernels: Kernels | None, most: int = 6, most_tokens: int = 20, **options: Any
) -> tuple[Driver, Replays]:
    engine = Engine(folder, num_blocks=60, block_size=8, dtype="float32", kernels=kernels, has_graphs=True, **options)
    replays = Replays()
    engine.capture(most, replays, lambda: PLENTY, 0, most_tokens=most_tokens, with_adapters=True)
    return Driver(engine, 5), replays


def test_a_captured_step_has_whatever_adapters_its_plan_names(
    folder_of: Callable[[str], Path], adapters_of: Callable[[Path], dict[str, Path]], tmp_path: Path
) -> None:
    """Random steps, with adapters of ranks that were not there when steps were captured, and one that cannot be read;
    the engine keeps one adapter at a time, and the weights are quantised."""
    folder = folder_of("gqa-untied")
    paths = adapters_of(folder) | {
        "large": make_adapter(folder, tmp_path / "large", seed=9, rank=70, scale=0.1),
        "gone": make_adapter(folder, tmp_path / "gone", seed=8),
    }
    adapters = [None, *(named(key, path, folder) for key, path in paths.items())]
    shutil.rmtree(paths["gone"])
    options: dict[str, Any] = {"quantization": Quantization.INT8, "adapter_bytes": 1}
    for seed in range(60 if SOAK else 8):
        (ours, replays), chance = captured(folder, Reference(), **options), random.Random(seed)
        plain = Driver(
            Engine(folder, num_blocks=60, block_size=8, dtype="float32", kernels=Reference(), **options), seed
        )
        lives = [plain.start(f"r{n}", prompt_of(seed + n, chance.randint(1, 12)), 5) for n in range(5)]
        for live in lives:
            live.adapter = chance.choice(adapters)
        number, ended, replayed = 0, set[str](), 0
        while going := [live for live in lives if live.name not in ended and len(live.output) < 5]:
            number += 1
            parts = [
                live.chunk(chance.randint(1, 6)) if live.in_prompt else live.decode()
                for live in chance.sample(going, chance.randint(1, min(3, len(going))))
            ]
            chunks = tuple(part for part in parts if isinstance(part, Chunk))
            plan = StepPlan(number, chunks, tuple(part for part in parts if isinstance(part, Decode)))
            expected, found = plain.engine.step(plan), ours.engine.step(plan)
            assert (found.tokens, found.unsampled) == (expected.tokens, expected.unsampled)
            ended |= {*found.unsampled}
            for live in going:
                live.output += [token for request, token in found.tokens if request == live.name]
            replayed += 1
        assert len(replays.sizes) == replayed
        held = ours.engine._captured_adapters
        assert held is not None
        assert len(held.groups) <= 3, "no graph keeps adapters of an earlier step"


def test_captured_ranks_say_what_a_single_rank_says(
    folder_of: Callable[[str], Path], adapters_of: Callable[[Path], dict[str, Path]]
) -> None:
    folder = folder_of("gqa-untied")
    adapters = {key: named(key, path, folder) for key, path in adapters_of(folder).items()}

    def said(engine: Any) -> tuple[list[list[int]], int]:
        driver = Driver(engine, 7)
        lives = [driver.start(f"r{number}", prompt_of(number, 9 + 7 * number), TOKENS) for number in range(3)]
        lives[0].adapter, lives[2].adapter = adapters["wide"], adapters["few-layers"]
        run_all(driver, lives)
        return [live.output for live in lives], driver.steps

    with ThreadPoolExecutor(2) as pool:
        both, replays = Both(folder, pool, has_graphs=True), [Replays(), Replays()]

        def capture(engine: Engine, replays: Replays) -> None:
            engine.capture(4, replays, lambda: PLENTY, 0, most_tokens=20, with_adapters=True)

        assert [*pool.map(capture, both.engines, replays)] == [None, None]
        shared = said(both)
    assert [len(one.sizes) for one in replays] == [shared[1]] * 2
    assert shared == said(Engine(folder, num_blocks=40, block_size=8, dtype="float32"))


def test_where_memory_is_short_steps_with_adapters_are_the_first_that_are_not_captured(
    folder_of: Callable[[str], Path], adapters_of: Callable[[Path], dict[str, Path]]
) -> None:
    folder, free = folder_of("gqa-untied"), count(100, -11)
    engine, replays = Engine(folder, num_blocks=60, block_size=8, dtype="float32", has_graphs=True), Replays()
    engine.capture(2, replays, lambda: next(free), 50, most_tokens=16, with_adapters=True)
    assert [told.why for told in fallbacks()] == [
        "there was too little memory for those of 16 tokens with prompts and adapters"
    ]
    driver = Driver(engine, 1)
    live = driver.start("r", prompt_of(5, 10), TOKENS)
    live.adapter = named("wide", adapters_of(folder)["wide"], folder)
    driver.prefill(live)
    assert not replays.sizes, "it ran as it is"
    driver.run(live, parts=[live.decode()])
    assert replays.sizes == [1]


class _Failing(Reference):
    """Adapters' kernel that fails at its first call, so that torch takes its place."""

    fails = True

    @property
    def captures_adapters(self) -> bool:
        return self.fails

    def adapt(self, step: StepAdapters, layer: int, x: Tensor, out: Tensor) -> None:
        self.fails = False
        super().adapt(step, layer, x, out)


def test_a_kernel_that_fails_while_it_is_captured_leaves_steps_without_adapters_captured(
    folder_of: Callable[[str], Path], adapters_of: Callable[[Path], dict[str, Path]]
) -> None:
    folder = folder_of("gqa-untied")
    driver, replays = captured(folder, _Failing())
    for adapter in (named("wide", adapters_of(folder)["wide"], folder), None):
        live = driver.start(f"{adapter}", prompt_of(5, 10), TOKENS)
        live.adapter = adapter
        driver.prefill(live)
        assert len(replays.sizes) == (adapter is None)


@pytest.mark.parametrize(("adapter_bytes", "captures"), [(0, False), (1 << 20, True)])
def test_a_worker_without_memory_for_adapters_captures_nothing_for_them(
    folder_of: Callable[[str], Path], adapter_bytes: int, captures: bool
) -> None:
    """And a worker with Reference's kernels captures none, as these read on the CPU which rows have which adapter."""
    options: dict[str, Any] = {"num_blocks": 40, "dtype": "float32", "adapter_bytes": adapter_bytes}
    assert not Engine(folder_of("gqa-untied"), kernels=Reference(), **options).captures_adapters
    assert Engine(folder_of("gqa-untied"), kernels=triton(), **options).captures_adapters is captures


def test_adapters_change_a_quantised_model(
    folder_of: Callable[[str], Path], adapters_of: Callable[[Path], dict[str, Path]]
) -> None:
    """The quantised model alone gives other logits than the whole one, so it is held against itself."""
    folder = folder_of("gqa-untied")
    adapter = named("wide", adapters_of(folder)["wide"], folder)
    engine = Engine(folder, num_blocks=40, block_size=8, dtype="float32", quantization=Quantization.INT8)
    driver = Driver(engine, 1)
    lives = [driver.start(f"r{number}", prompt_of(3, 20), TOKENS) for number in range(2)]
    lives[1].adapter = adapter
    run_all(driver, lives)
    alone = driver.start("alone", prompt_of(3, 20), TOKENS)
    run_all(driver, [alone])
    assert lives[0].output == alone.output != lives[1].output


def test_the_least_recently_used_is_forgotten_and_read_again(
    folder_of: Callable[[str], Path], adapters_of: Callable[[Path], dict[str, Path]]
) -> None:
    folder = folder_of("gqa-untied")
    wide, few = (named(key, path, folder) for key, path in adapters_of(folder).items())
    most = read_lora(Path(wide.folder), read_config(folder)).num_bytes(4)
    engine = Engine(folder, num_blocks=40, block_size=8, dtype="float32", adapter_bytes=most)
    engine.adapters.load([wide])
    assert engine.adapters.num_bytes == most, "what the files say that it takes is what it takes"
    driver, outputs = Driver(engine, 2), []
    for number, adapter in enumerate((wide, few, wide)):
        live = driver.start(f"r{number}", prompt_of(4, 12), TOKENS)
        live.adapter = adapter
        run_all(driver, [live])
        outputs.append(live.output)
        assert adapter in engine.adapters
        assert engine.adapters.num_bytes <= most
    assert wide in engine.adapters
    assert few not in engine.adapters
    assert outputs[0] == outputs[2] != outputs[1]


def test_an_adapter_whose_files_have_changed_ends_its_own_requests_alone(
    folder_of: Callable[[str], Path],
    adapters_of: Callable[[Path], dict[str, Path]],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = folder_of("gqa-untied")
    path = Path(shutil.copytree(adapters_of(folder)["wide"], tmp_path / "adapter"))
    adapter = named("changing", path, folder)
    driver = Driver(Engine(folder, num_blocks=40, block_size=8, dtype="float32"), 2)
    lives = [driver.start(name, prompt_of(5, 10), TOKENS) for name in ("sound", "spoilt")]
    lives[1].adapter = adapter
    (path / "adapter_config.json").write_text((path / "adapter_config.json").read_text() + " ")
    result = driver.engine.step(StepPlan(1, tuple(live.chunk(10) for live in lives)))
    assert [request for request, _ in result.tokens] == ["sound"]
    assert result.unsampled == ("spoilt",)
    assert "has other content than when it was loaded" in caplog.text
    shutil.rmtree(path)
    later = driver.start("later", prompt_of(5, 10), TOKENS)
    later.adapter = adapter
    assert driver.engine.step(StepPlan(2, (later.chunk(10),))).unsampled == ("later",)
    alone = driver.start("alone", prompt_of(5, 10), TOKENS)
    run_all(driver, [alone])
    assert alone.output[0] == dict(result.tokens)["sound"]


def test_a_request_with_an_adapter_keeps_no_hidden_vectors(
    folder_of: Callable[[str], Path], adapters_of: Callable[[Path], dict[str, Path]]
) -> None:
    folder = folder_of("mha-tied")
    driver = Driver(Engine(folder, num_blocks=40, block_size=8, dtype="float32"), 2)
    live = driver.start_hidden("r", prompt_of(5, 10), TOKENS)
    live.adapter = named("wide", adapters_of(folder)["wide"], folder)
    with pytest.raises(PlanError, match="has an adapter"):
        driver.engine.step(StepPlan(1, (live.chunk(10),)))
