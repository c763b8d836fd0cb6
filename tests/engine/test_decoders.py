"""Tests of models whose layers a GPU's decoder runs: of several ranks, and mixtures of experts.

Its kernels are torch's here, or run in Triton's interpreter. What it says is held against transformers, and against the
same kernels layer by layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from triton.runtime import interpreter

from alignedserve.architectures.quantization import Quantization
from alignedserve.core import Sampling
from alignedserve.engine.engine import Engine
from alignedserve.kernels.common.decoder import Layer, Sums
from alignedserve.kernels.common.reference import Reference
from alignedserve.kernels.triton.decoder import TritonDecoder
from alignedserve.kernels.triton.kernels import TritonKernels
from alignedserve.kernels.triton.launch import interpreting
from tests.adapters import make_adapter, named
from tests.engine.driver import PLENTY, Driver, Live, Replays, prompt_of
from tests.engine.test_ranks import Both, said
from tests.rare import rarely
from tests.reference import Tally, compare

# Norms of what is added, biases, layer norms; experts in all layers, behind a dense one, beside a gated one.
NAMES = ("wide-heads", "gemma2", "llama-biases", "qwen3", "opt", "glm4", "mixtral", "gpt-oss", "qwen2-moe", "dots1")
USUAL = ("gemma2", "opt", "gpt-oss", "qwen2-moe")
TOKENS = 4


class Decoding(Reference):
    """The reference, whose layers a decoder runs as on a GPU."""

    def decoder(self, layers: Sequence[Layer], sums: Sums | None = None) -> TritonDecoder:
        return TritonDecoder(self, layers, sums)


class DecodingAtOnce(Decoding):
    """The same, where the experts of a layer run at once."""

    captures_experts = True


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


@pytest.mark.parametrize("name", [name if name in USUAL else rarely(name) for name in NAMES])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_decoder_says_what_is_said_layer_by_layer(
    folder_of: Callable[[str], Path], pool: ThreadPoolExecutor, name: str, num_ranks: int
) -> None:
    folder = folder_of(name)
    outputs = []
    for kernels in (Reference(), Decoding(), DecodingAtOnce()):
        both = Both(folder, pool, num_ranks=num_ranks, kernels=kernels)
        assert all((engine._decoder is None) == (type(kernels) is Reference) for engine in both.engines)
        outputs.append(said(both, Sampling()))
    assert outputs[1] == outputs[2] == outputs[0]


@pytest.mark.parametrize("name", ["opt", rarely("qwen2-moe")])
def test_quantised_layers_of_two_ranks_say_what_they_say_layer_by_layer(
    folder_of: Callable[[str], Path], pool: ThreadPoolExecutor, name: str
) -> None:
    def by(kernels: Reference) -> list[list[int]]:
        both = Both(folder_of(name), pool, kernels=kernels, quantization=Quantization.INT8)
        return said(both, Sampling())

    assert by(Decoding()) == by(Reference())


@pytest.mark.parametrize("name", ["gqa-untied", rarely("glm4"), rarely("qwen2-moe")])
def test_captured_steps_of_two_ranks_with_adapters_say_what_is_said_layer_by_layer(
    folder_of: Callable[[str], Path], pool: ThreadPoolExecutor, tmp_path: Path, name: str
) -> None:
    folder = folder_of(name)
    adapter = named("a", make_adapter(folder, tmp_path / "adapter", seed=1), folder)

    def by(kernels: Reference) -> tuple[list[list[int]], list[int]]:
        both: Any = Both(folder, pool, kernels=kernels, has_graphs=True)
        replays = [Replays(), Replays()]

        def capture(engine: Engine, replays: Replays) -> None:
            engine.capture(2, replays, lambda: PLENTY, 0, most_tokens=16, with_adapters=True)

        list(pool.map(capture, both.engines, replays))
        driver = Driver(both, 7)
        lives = [driver.start_either_way(f"r{number}", prompt_of(number, 5 + number), TOKENS) for number in range(2)]
        lives[1].adapter = adapter
        return outputs_of(driver, lives), [len(each.sizes) for each in replays]

    found = by(Decoding())
    assert found == by(Reference())
    assert min(found[1]) > 0, "steps are replayed"


def outputs_of(driver: Driver, lives: list[Live]) -> list[list[int]]:
    for live in lives:
        driver.prefill(live, [9])
    while going := [live for live in lives if len(live.output) < TOKENS]:
        driver.run(*going, parts=[live.decode() for live in going])
    return [live.output for live in lives]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.skipif(not interpreting(), reason="Triton compiles here: tests/gpu runs engines on the GPU")
@pytest.mark.parametrize(
    ("name", "num_ranks"), [("gpt-oss", 2), *map(rarely, (("gemma2", 2), ("opt", 2), ("qwen2-moe", 1), ("dots1", 2)))]
)
def test_a_decoder_of_triton_kernels_says_what_transformers_says(
    folder_of: Callable[[str], Path],
    reference_of: Callable[[Path], Any],
    tally: Tally,
    pool: ThreadPoolExecutor,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    num_ranks: int,
) -> None:
    run, one_at_a_time = interpreter.InterpretedFunction.run, Lock()

    def launch(kernel: Any, *args: Any, **named: Any) -> Any:
        # The interpreter has one place for the number of a program, and writes into the module of a kernel.
        with one_at_a_time:
            return run(kernel, *args, **named)

    monkeypatch.setattr(interpreter.InterpretedFunction, "run", launch)
    both: Any = Both(folder_of(name), pool, num_ranks=num_ranks, kernels=TritonKernels())
    driver = Driver(both, 7)
    lives = [driver.start_either_way(f"r{number}", prompt_of(number, 5 + number), TOKENS) for number in range(2)]
    outputs_of(driver, lives)
    for live in lives:
        compare(reference_of(folder_of(name)), live.prompt, live.output, tally, f"{name} {live.name}")
    tally.check()
