"""Tests that the Triton kernels compile to machine code of GPUs that are not here, which shows what only a compiler
refuses.

The largest kernels by default; with SOAK=1 all kernels, for more GPUs and dtypes, and all choices of the tuner.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import SOAK
from tests.rare import rare

triton = pytest.importorskip("triton", reason="Triton is not installed")
ROOT = Path(__file__).parents[2]
PTXAS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
HOPPER_SHARED = 227 << 10  # shared memory of a block on compute capability 9.0
_STACK_OF_DRAWS = 64  # bytes that a thread keeps over its loops, not within them
LEAST_SHARED = 99 << 10  # shared memory of a block on every GPU from compute capability 8.0 on; 8.6 has the least


def _compiled(options: str) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.kernels.compile_triton", *options.split()],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@rare  # `make kernels-elsewhere`
@pytest.mark.skipif(not PTXAS.exists(), reason="this Triton brings no compiler for NVIDIA's GPUs")
@pytest.mark.parametrize("arch", [80, 86, 90] if SOAK else [90])
def test_kernels_compile_for_gpus(arch: int) -> None:
    few = "--kernels _attend _forbid _look _weigh _draw _multiply _by_expert _route _few_rows"
    told = _compiled(f"--archs {arch} {'--dtypes bf16 fp16 fp32' if SOAK else few}")
    further = (
        {
            "_rotate_and_write",
            "_write",
            "_logprobs",
            "_expand",
            "_norm",
            "_finish",
            "_shrink",
            "_attend_latent",
            "_add_and_norm",
            "_sum_add_norm",
            "_sum_ranks",
            "_add_panels",
            "_count",
            "_place",
            "_sum",
        }
        if SOAK
        else set()
    )
    assert {kernel["kernel"] for kernel in told} >= {
        "_attend",
        "_look",
        "_weigh",
        "_draw",
        "_multiply",
        "_by_expert",
        "_route",
        "_few_rows",
    } | further
    for kernel in told:
        assert kernel["bytes"] > 0
        assert kernel["shared"] <= LEAST_SHARED, kernel
        assert not kernel.get("early"), f"memory is touched before the kernels before are waited for: {kernel}"


@rare
@pytest.mark.skipif(not PTXAS.exists(), reason="this Triton brings no compiler for NVIDIA's GPUs")
def test_all_choices_of_the_tuner_compile_well_for_hopper() -> None:
    """The tuner measures each choice when a worker starts, so none may take long for nothing.

    Attention of decodes by default, with SOAK=1 all tuned kernels, at the sizes of an 8B.
    """
    told = _compiled("--choices" if SOAK else "--choices --kernels _attend --rows 16")
    kernels = {choice["kernel"] for choice in told}
    assert kernels == (
        {"_attend", "_attend_latent", "_multiply", "_few_rows", "_by_expert", "_draw", "_logprobs"}
        if SOAK
        else {"_attend"}
    )
    for choice in told:
        assert choice["shared"] <= HOPPER_SHARED, choice
        if choice["kernel"] in ("_draw", "_logprobs"):
            assert choice["stack"] <= _STACK_OF_DRAWS, choice
            continue
        assert choice["stack"] == 0, f"a thread has more numbers than registers: {choice}"
        assert choice["mma"] + choice["wgmma"] > 0 or choice.get("ROWS") == 1, f"no tensor cores: {choice}"
        assert choice["stages"] == 1 or choice["copies"] > 0, f"nothing is copied beside the products: {choice}"
