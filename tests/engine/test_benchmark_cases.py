"""Tests that the cases of benchmarks.engine fit the models on which they run, and what benchmarks of quantised weights
print."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from alignedserve.config.choices import Dtype
from alignedserve.engine.engine import Engine
from alignedserve.kernels.common.experts import ExpertPacking
from alignedserve.lab.benchmarks import gpu
from alignedserve.lab.benchmarks.common.gpu_shapes import (
    BLOCK_SIZE,
    MODELS,
    PAGE,
    head_weights,
    kv_dim,
    num_read,
    step_bytes,
)
from alignedserve.lab.benchmarks.common.models import POSITIONS
from alignedserve.lab.benchmarks.engine import (
    BENCH,
    BLOCK,
    Case,
    LlamaCpp,
    Ours,
    Peer,
    Times,
    Versus,
    cases,
    compare,
    main,
    ratio_to,
)
from alignedserve.lab.benchmarks.gpu import Quantised
from tests.models import gqa
from tests.quantised_folders import quantised_folder


@pytest.mark.parametrize("model", POSITIONS)
def test_every_case_fits_or_is_cut_and_says_so(model: str) -> None:
    for case in cases(full=True):
        fitting = case.within(POSITIONS[model])
        assert fitting.longest <= POSITIONS[model]
        assert len(fitting.prompts) == len(case.prompts)
        assert (fitting == case) == (case.longest <= POSITIONS[model])
        assert fitting == case or fitting.name == f"{case.name} cut to {max(fitting.prompts)}"


def test_copies_of_a_gpu_close_their_arena_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU and a runtime that pins nothing stand for the GPU. A second close ends the part with an error."""
    runtime = SimpleNamespace(cudaHostRegister=lambda *_: 0, cudaHostUnregister=lambda *_: 0)
    monkeypatch.setattr(gpu, "cudart_for", lambda _: runtime)
    bench = gpu.Bench(model := MODELS["8b"])
    cache = torch.zeros(model.layers, 2 * PAGE // BLOCK_SIZE, BLOCK_SIZE, kv_dim(model), dtype=torch.bfloat16)
    bench.device, bench.engine = torch.device("cpu"), cast(Engine, SimpleNamespace(cache=cache))
    with bench.copier(1) as copier:
        copier.copy_out(range(PAGE // BLOCK_SIZE), [0], [1] * PAGE)


# --- Quantised weights


class Slow:
    """A peer that takes a second for everything."""

    def run(self, case: Case) -> Times:
        return Times(1.0, [] if case.is_prefill else [1.0] * (case.output - 1))


@pytest.fixture
def quantised(tmp_path: Path) -> Path:
    quantised_folder(gqa(tmp_path / "plain", vocab_size=32_000), tmp_path / "w8a8", "w8a8")
    return tmp_path / "w8a8"


def printed(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_rates_are_reported_against_the_peer(quantised: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wanted = [Case("decode 2 x 4", (4, 4), 4), Case("prefill 8", (8,), 1)]
    engines: dict[str, Peer] = {"ours": Ours(quantised, 64 // BLOCK, dtype=Dtype.FLOAT32), "vLLM": Slow()}
    pair = Versus("against vLLM", "ours", "vLLM", partial(ratio_to, "vLLM"))
    assert [case for case, _ in compare("w8a8", wanted, 1, engines, [pair])] == wanted
    decode, prefill = printed(capsys)
    assert (decode["name"], decode["baseline"]) == ("w8a8, decode 2 x 4, against vLLM", 2.0)
    assert (prefill["name"], prefill["baseline"]) == ("w8a8, prefill 8, against vLLM", 8.0)
    assert decode["goal"] == pytest.approx(1.3 * 2)
    assert prefill["goal"] == pytest.approx(8)
    assert decode["value"] > 2
    assert prefill["value"] > 8


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--model", "none.gguf"], "none.gguf is not there"),
        (["--model", "here.gguf"], "--model FILE.gguf and --llama-cpp go together"),
        (["--model", "here.gguf", "--llama-cpp", "folder"], "a folder that has llama-batched-bench"),
        (["--model", "folder", "--llama-cpp", "folder"], "go together"),
        (["--peer-python", "none"], "none is no program"),
    ],
)
def test_the_benchmark_of_engines_asks_for_the_peer(
    flags: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "here.gguf").touch()
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        main(flags)
    assert said in capsys.readouterr().err


def test_llama_cpp_is_asked_for_the_case_and_its_figures_are_read(tmp_path: Path) -> None:
    program = tmp_path / BENCH
    program.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/asked\necho noise\necho \'{{"t_pp": 2.0, "t_tg": 3.0}}\'\n')
    program.chmod(0o755)
    times = LlamaCpp(tmp_path, tmp_path / "a.gguf", 2).run(Case("decode 8 x 4", (64,) * 8, 4))
    assert times == Times(2.0, [1.0, 1.0, 1.0])
    asked = (tmp_path / "asked").read_text()
    assert "-t 2 -tb 2 -ctk bf16 -ctv bf16 -npp 64 -ntg 3 -npl 8" in asked


def test_gpu_counts_what_a_step_reads() -> None:
    model = MODELS["8b"]
    head = head_weights(model)
    layers = num_read(model) - head
    assert Quantised.NONE.read_bytes(model) == 2 * num_read(model)
    assert num_read(model) < Quantised.INT8.read_bytes(model) < 1.07 * num_read(model)
    assert Quantised.FP8.read_bytes(model) == layers + 2 * head
    assert layers // 2 < Quantised.INT4.read_bytes(model) - head < 0.65 * layers


def test_gpu_counts_the_experts_that_rows_hit() -> None:
    dense, mixture = MODELS["8b"], MODELS["moe"]
    assert step_bytes(dense, 3, 10) == 2 * num_read(dense) + 30 * dense.kv_bytes
    assert step_bytes(mixture, 1, 0) == pytest.approx(2 * num_read(mixture))
    every = 2 * (mixture.weights + head_weights(mixture))
    assert step_bytes(mixture, 10_000, 0) == pytest.approx(every)
    assert step_bytes(mixture, 64, 0, 1) < 0.65 * step_bytes(mixture, 64, 0) < 0.65 * every


def test_experts_of_8_bit_floats_are_packed() -> None:
    tensors = gpu.FloatExperts()
    assert tensors.quantised("model.layers.0.self_attn.q_proj", (8, 256)) is None
    weight = tensors.quantised("model.layers.0.mlp.experts.3.up_proj", (8, 256))
    assert weight is not None
    packing = ExpertPacking.from_weight(weight)
    assert packing is not None
    assert packing.scale.shape == (2, 8)


def test_gpu_says_that_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["gpu"])
    with pytest.raises(SystemExit, match="no GPU"):
        gpu.main()
