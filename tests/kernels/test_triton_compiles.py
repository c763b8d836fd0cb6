"""Tests that the Triton kernels compile to machine code of GPUs that are not here, which shows what only a compiler
refuses.

The three largest kernels by default; with SOAK=1 all kernels, for more GPUs and dtypes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import SOAK

triton = pytest.importorskip("triton", reason="Triton is not installed")
ROOT = Path(__file__).parents[2]
PTXAS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
LEAST_SHARED = 99 << 10  # shared memory of a block on every GPU from compute capability 8.0 on; 8.6 has the least


@pytest.mark.skipif(not PTXAS.exists(), reason="this Triton brings no compiler for NVIDIA's GPUs")
def test_kernels_compile_for_gpus() -> None:
    options = "--archs 80 86 90 --dtypes bf16 fp16 fp32" if SOAK else "--archs 90 --kernels _attend _draw _multiply"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.kernels.compile_triton", *options.split()],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    told = [json.loads(line) for line in done.stdout.splitlines()]
    further = (
        {
            "merge",
            "_write",
            "_logprobs",
            "_expand",
            "_norm",
            "_finish",
            "_shrink",
            "_attend_latent",
            "_sum_ranks",
            "_add_panels",
        }
        if SOAK
        else set()
    )
    assert {kernel["kernel"] for kernel in told} >= {"_attend", "_draw", "_multiply"} | further
    for kernel in told:
        assert kernel["bytes"] > 0
        assert kernel["shared"] <= LEAST_SHARED, kernel
