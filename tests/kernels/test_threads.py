"""Tests that torch and the kernels share one pool of threads, and that torch's setting holds for the kernels."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.kernels.every import native_sets
from tests.rare import rare

# Runs in a process of its own, which then loads the same libraries as a worker.
_BOTH_RAN = """
import ctypes, json, threading, torch
from alignedserve.kernels.dispatch.dispatcher import choose
from alignedserve.kernels.common.threads import openmp_libraries
kernels = choose(torch.device("cpu"), torch.bfloat16).kernels
linear = kernels.linear(torch.ones(512, 512, dtype=torch.bfloat16))
x = torch.ones(300, 512, dtype=torch.bfloat16)
def both():
    linear(x), linear.by(list(linear.ways)[-1])(x), kernels.silu_mul(x), x.float().exp().sum()
both()
libraries = openmp_libraries()
openmp = ctypes.CDLL(next(line.split()[-1] for line in open("/proc/self/maps") if "/" + min(libraries) in line))
most = []
for count in (3, 1):
    torch.set_num_threads(count)
    both()
    most.append(openmp.omp_get_max_threads())
def elsewhere():
    torch.get_num_threads()
    most.append(openmp.omp_get_max_threads())
thread = threading.Thread(target=elsewhere)
thread.start()
thread.join()
print(json.dumps({"libraries": sorted(libraries), "most": most}))
"""


@rare  # each other test of the kernels runs in one thread
@pytest.mark.skipif(not native_sets(), reason="the C++ kernels were not built: python -m alignedserve.kernels.build")
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/maps")
def test_torch_and_the_kernels_share_one_openmp_and_its_number_of_threads() -> None:
    done = subprocess.run([sys.executable, "-c", _BOTH_RAN], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert len(said["libraries"]) == 1, said
    assert said["most"] == [3, 1, 1], "in the thread that set it, twice, and in one that asked torch first"
