"""Tests of adapters (LoRA) in the engine: greedy output is that of PEFT, in fp32, whatever else is in a step."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from alignedserve.architectures.families.model_config import read_config
from alignedserve.architectures.quantization import Quantization
from alignedserve.core import StepPlan
from alignedserve.engine.adapters.lora import read_lora
from alignedserve.engine.copying.copies import PageCopier
from alignedserve.engine.engine import Engine
from alignedserve.errors import PlanError
from alignedserve.kvpool.arena.arena import Arena
from tests.adapters import make_adapter, named, with_adapter
from tests.engine.driver import Driver, Live, prompt_of
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
    "neox",
    "pythia",
    "bloom",
    "falcon",
    "mpt",
    "llama4",
    "gemma2",
    "gemma3",
    "phi3",
    "phi",
    "glm4",
    "qwen2-moe",
)
USUAL = ("mha-tied", "opt", "falcon", "llama4", "qwen2-moe")  # one for each way to name layers
TOKENS = 6
SOME = r".*\.1\..*(q_proj|v_proj|down_proj|fc2|query_key_value|dense_4h_to_h)"  # layers of the model's second layer
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


@pytest.mark.parametrize("name", thinned(("gqa-untied", "glm4", "opt", "falcon", "neox", "phi3"), usual=2))
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
