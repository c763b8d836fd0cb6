"""Tests of what only a GPU needs, as far as a machine without a GPU can tell: that it is missing, or has too little
memory."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from alignedserve.engine.device.devices import CPU, cache_room, check_shared, device_of, use
from alignedserve.engine.engine import Engine
from alignedserve.errors import ConfigError, MemoryTooSmall
from alignedserve.kernels.common.failing import guard
from alignedserve.kernels.dispatch.probing import KERNELS
from alignedserve.lab.benchmarks import gpu
from alignedserve.sizing.memory import MemoryDemand
from tests.engine.driver import Driver, prompt_of
from tests.models import WINDOW
from tests.rare import rare, rarely
from tests.reference import Tally, compare

MIB = 1 << 20
NAMES = ("opt", *map(rarely, ("gqa-untied", "qwen2", "qwen3", "deepseek-v2")))  # see test_graphs.py


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_the_error_says_what_to_set() -> None:
    with pytest.raises(ConfigError, match=r"engine\.device cuda needs a GPU that torch sees.*: set it to cpu"):
        device_of("cuda", 0)


def test_there_is_a_single_cpu_device() -> None:
    assert {device_of("cpu", number) for number in range(4)} == {torch.device("cpu")}


@pytest.mark.parametrize(("asked", "number"), [("cuda", 2), ("cuda:1", 1)])
def test_a_gpu_without_a_number_is_the_gpu_in_use(monkeypatch: pytest.MonkeyPatch, asked: str, number: int) -> None:
    """torch sets no device for a name without a number."""
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    monkeypatch.setattr(torch._C, "_cuda_setDevice", chosen.append, raising=False)
    assert use(torch.device(asked)) == torch.device("cuda", number)
    assert chosen == [number]


RESERVE = 1024 * MIB


def test_memory_of_a_gpu_is_kept_in_reserve() -> None:
    demand = MemoryDemand(weights=9000 * MIB, cache=4096 * MIB, step=512 * MIB, dtype="bfloat16")
    assert cache_room("cuda:0", 4096 * MIB + 512 * MIB + RESERVE, 4096, demand, RESERVE) == 4096 * MIB
    with pytest.raises(MemoryTooSmall) as refused:
        cache_room("cuda:0", 4096 * MIB + 412 * MIB + RESERVE, 4096, demand, RESERVE)
    assert str(refused.value) == (
        "cuda:0 has 5532 MB free beside the weights, 4096 MB of KV, 512 for a step and a reserve of 1024 are needed: "
        "lower engine.kv_memory_mb from 4096 to 3996"
    )


def test_without_a_number_the_cache_is_what_a_gpu_has_left() -> None:
    demand = MemoryDemand(weights=9000 * MIB, cache=0, step=512 * MIB, dtype="bfloat16")
    assert cache_room("cuda:0", 40_000 * MIB, None, demand, RESERVE) == (40_000 - 512 - 1024) * MIB
    with pytest.raises(MemoryTooSmall) as refused:
        cache_room("cuda:0", 1500 * MIB, None, demand, RESERVE)
    assert str(refused.value) == (
        "cuda:0 has 1500 MB free beside the weights, and beside KV 512 for a step and a reserve of 1024 are needed: "
        "free some of it, or lower engine.max_step_tokens, or engine.gpu_reserve_mb"
    )


def test_two_processes_on_a_gpu_have_to_say_what_each_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    check_shared(2)
    with pytest.raises(ConfigError, match=r"^3 processes of workers share 2 GPUs: set engine\.kv_memory_mb"):
        check_shared(3)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", NAMES)
def test_an_engine_on_the_triton_kernels_says_what_transformers_says(
    folder_of: Callable[[str], Path], reference_of: Callable[[Path], Any], tally: Tally, name: str
) -> None:
    """Run the kernels in Triton's interpreter: chunks, both ends of the blocks, windows, and hidden vectors where the
    model allows."""
    kernels = pytest.importorskip("alignedserve.kernels.triton.kernels", reason="Triton is not installed")
    launch = pytest.importorskip("alignedserve.kernels.triton.launch")
    if not launch.interpreting():
        pytest.skip("Triton compiles here: tests/gpu runs engines on the GPU")
    engine = Engine(folder_of(name), num_blocks=40, block_size=8, dtype="float32", kernels=kernels.TritonKernels())
    driver = Driver(engine, 3)
    live = driver.start_either_way("a", prompt_of(1, WINDOW + 3), 3)
    driver.prefill(live, [17])
    compare(reference_of(folder_of(name)), live.prompt, driver.generate(live, 3), tally, name)
    if engine.config.why_not_hidden is None:
        hidden = driver.start_hidden("b", prompt_of(2, 11), 2)
        driver.prefill(hidden, [4])
        compare(reference_of(folder_of(name)), hidden.prompt, driver.generate(hidden, 2), tally, f"{name}, hidden")


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_kernel_that_fails_in_the_middle_of_a_step_changes_nothing_of_what_is_said(
    folder_of: Callable[[str], Path],
    reference_of: Callable[[Path], Any],
    tally: Tally,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The kernel fails at the second decode, like a kernel for a shape that does not fit on the GPU."""
    kernels_of = pytest.importorskip("alignedserve.kernels.triton.kernels", reason="Triton is not installed")
    attention = pytest.importorskip("alignedserve.kernels.triton.attention")
    if not pytest.importorskip("alignedserve.kernels.triton.launch").interpreting():
        pytest.skip("Triton compiles here")
    kernels = kernels_of.TritonKernels()
    guard(kernels, KERNELS, CPU)
    engine = Engine(folder_of("qwen2"), num_blocks=10, block_size=8, dtype="float32", kernels=kernels)
    driver = Driver(engine, 3)
    live = driver.start("a", prompt_of(1, 11), 4)
    driver.prefill(live)
    driver.generate(live, 2)

    def no_room(*_: object, **__: object) -> None:
        raise RuntimeError("out of resource: shared memory, Required: 300000, Hardware limit: 232448")

    monkeypatch.setattr(attention.TritonAttention, "_run", no_room)
    compare(reference_of(folder_of("qwen2")), live.prompt, driver.generate(live, 4), tally, "qwen2")
    why = "(RuntimeError: out of resource: shared memory, Required: 300000, Hardware limit: 232448)"
    assert [record.message for record in caplog.records if record.message.startswith("kernel ")] == [
        f"kernel attend_new: two kernels do what it did {why}",
        f"kernel attend: torch reference takes its place {why}",
    ]


# Modules that a machine for GPU checks need not have.
ABSENT = (
    "msgspec",
    "zmq",
    "fastapi",
    "pydantic",
    "uvicorn",
    "anyio",
    "httpx",
    "prometheus_client",
    "ray",
    "hypothesis",
    "llguidance",
)


@rare
def test_gpu_checks_need_few_packages() -> None:
    script = "import sys\n" + "".join(f"sys.modules[{name!r}] = None\n" for name in ABSENT)
    script += "import alignedserve.engine.engine, alignedserve.engine.copying.copies\n"
    script += "import alignedserve.lab.benchmarks.gpu\n"
    script += "import tests.gpu.test_kernels, tests.gpu.test_engine, tests.gpu.test_sampling\n"
    # test_transports.py needs msgspec
    script += "import tests.gpu.test_rehearsing, tests.gpu.test_products, tests.gpu.test_sums\n"
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=root,
        env=os.environ | {"PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_the_gpu_benchmark_says_in_a_line_that_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["gpu"])
    with pytest.raises(SystemExit, match=r"^[^\n]*no GPU[^\n]*$"):
        gpu.main()
