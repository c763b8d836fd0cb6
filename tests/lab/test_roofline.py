"""Devices that nobody measured: sizes, times that follow from data sheets, and what users write of a device."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from itertools import pairwise
from math import hypot
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import yaml

from alignedserve.core import NO_KV, Decode, KvForm, Sampling, StepPlan, WorkerLimits
from alignedserve.cost.model import Kind
from alignedserve.cost.trials import Bounds, random_trials
from alignedserve.errors import ProfileError
from alignedserve.lab.devices import device_file, gpu_truth, roofline
from alignedserve.lab.devices.devices import GPUS, MODELS, Device, Gpu, Model, model_named, named
from alignedserve.lab.devices.gpu_truth import FOLDER, GpuTruth
from alignedserve.lab.devices.hardware import from_file, from_gpu

BOUNDS = Bounds(WorkerLimits(100_000, 16, 64, max_step_tokens=2048, max_batch=128), longest=8192)
TRIALS = random_trials(BOUNDS, 100, seed=2)
PRO = "rtxpro6000-llama-3.1-8b-tp1"
NUMBERS = {"name": "B200", "memory_gb": 180, "bandwidth_gb_s": 8000, "tflops": 2250, "processors": 148, "pcie_gb_s": 50}


def truth_of(device: Device) -> GpuTruth:
    return GpuTruth(roofline.profile(device))


def smallest(gpu: Gpu, model: str) -> Device | None:
    """Return the device with the fewest GPUs on which the model fits."""
    for ranks in (1, 2, 4, 8):
        try:
            device = Device(gpu, MODELS[model], ranks)
            assert device.kv_tokens
            return device
        except ProfileError:
            continue
    return None


DEVICES = [device for gpu in GPUS.values() for model in MODELS if (device := smallest(gpu, model))]


class TestSizes:
    @pytest.mark.parametrize(
        ("model", "weights_gb", "kv_bytes"),
        [
            ("opt-6.7b", 13.3, 524_288),
            ("opt-13b", 25.7, 819_200),
            ("opt-30b", 59.9, 1_376_256),
            ("opt-66b", 131.4, 2_359_296),
            ("opt-175b", 349.1, 4_718_592),
            ("llama-2-7b", 13.48, 524_288),
            ("llama-2-13b", 26.03, 819_200),
            ("llama-3.1-8b", 16.06, 131_072),
            ("llama-3.1-70b", 141.1, 327_680),
            ("qwen3-32b", 65.5, 262_144),
            ("mixtral-8x7b", 93.4, 131_072),
            ("qwen3-30b-a3b", 61.0, 98_304),
            ("deepseek-v2-lite", 31.4, 31_104),
            ("deepseek-v3", 1342.0, 70_272),
        ],
    )
    def test_the_memory_of_models(self, model: str, weights_gb: float, kv_bytes: int) -> None:
        """Published sizes; norms, biases and positions are left out."""
        assert MODELS[model].weights_gb == pytest.approx(weights_gb, rel=0.01)
        assert MODELS[model].kv_bytes == kv_bytes

    @pytest.mark.parametrize(
        ("model", "billions"), [("mixtral-8x7b", 12.9), ("qwen3-30b-a3b", 3.35), ("deepseek-v3", 37.5)]
    )
    def test_the_weights_that_a_token_of_a_mixture_takes(self, model: str, billions: float) -> None:
        """Published sizes, with the embedding and the output layer."""
        found = MODELS[model]
        active = found.active_weights + 2 * found.vocabulary * found.hidden_size
        assert active / 1e9 == pytest.approx(billions, rel=0.01)

    @pytest.mark.parametrize(("model", "tokens", "read"), [("mixtral-8x7b", 1, 2), ("mixtral-8x7b", 2, 3.5)])
    def test_tokens_choose_some_of_the_experts_together(self, model: str, tokens: int, read: float) -> None:
        assert MODELS[model].experts_read(tokens) == pytest.approx(read)
        assert MODELS[model].experts_read(100) == pytest.approx(8)

    def test_every_gpu_that_shares_a_model_keeps_its_whole_compressed_vectors(self) -> None:
        assert [from_gpu(f"h100-deepseek-v2-lite-tp{ranks}").kv_bytes for ranks in (1, 4)] == [31_104, 4 * 31_104]

    @pytest.mark.parametrize(
        ("name", "kv_gb"), [("a100-40-opt-13b-tp1", 12), ("a100-40-opt-66b-tp4", 21), ("a100-80-opt-175b-tp8", 264)]
    )
    def test_the_room_for_kv_is_that_of_vllms_paper(self, name: str, kv_gb: float) -> None:
        hardware = from_gpu(name)
        assert hardware.kv_tokens * hardware.kv_bytes / 1e9 == pytest.approx(kv_gb, rel=0.05)

    def test_every_gpu_and_model_has_a_name(self) -> None:
        for gpu in GPUS:
            for model in MODELS:
                assert named(f"{gpu}-{model}-tp2") == Device(GPUS[gpu], MODELS[model], 2)
        assert named("a100-80-opt-13b") is None

    @pytest.mark.parametrize(("name", "weights_gb"), [("opt-13b-int8", 13.6), ("llama-3.1-70b-int8", 76.0)])
    def test_quantised_weights_take_fewer_bytes(self, name: str, weights_gb: float) -> None:
        model = model_named(name)
        assert model is not None
        assert model.weights_gb == pytest.approx(weights_gb, rel=0.01)
        assert model.kv_bytes == MODELS[name.removesuffix("-int8")].kv_bytes

    def test_a_70b_model_fits_on_one_gpu_with_4_bits(self) -> None:
        with pytest.raises(ProfileError, match=r"does not fit on 1 x H100.*take 2 of them"):
            from_gpu("h100-llama-3.1-70b-tp1")
        assert from_gpu("h100-llama-3.1-70b-int4-tp1").kv_tokens > 90_000
        with pytest.raises(ProfileError, match=r"Llama-3.1-70B-int8 does not fit on 1 x A100 40GB"):
            from_gpu("a100-40-llama-3.1-70b-int8-tp1")


def read_gb(model: Model) -> float:
    """Return about how many GB of weights a step of one token reads: of mixtures, the experts of this token."""
    return model.weights_gb * model.active_weights / model.weights


# Peaks that make a microsecond 1000 bytes, or a million operations; and a model with latent attention and experts.
PLAIN = Gpu("plain", 80, 1, 1.0, 64, 1, bandwidth_share=1.0, tflops_share=1.0, attention_share=1.0)
SMALL = Model(
    "small", 3, 64, 4, 4, 256, 100, head_dim=16, kv_rank=32, turned_dim=8, query_rank=24,
    experts=8, chosen=2, expert_size=48, shared_size=96, dense_layers=1,
)  # fmt: skip


class TestMixturesAndLatentAttention:
    """Each number is computed by hand: bytes over 1000 bytes/µs, operations over 1e6 operations/µs, kernels of 3 µs."""

    def test_weights(self) -> None:
        attention = 64 * 24 + 24 * 4 * (16 + 8) + 64 * (32 + 8) + 2 * (4 * 16 * 32) + 4 * 16 * 64
        dense, expert, shared, router = 3 * 64 * 256, 3 * 64 * 48, 3 * 64 * 96, 64 * 8
        assert SMALL.weights == 3 * attention + dense + 2 * (8 * expert + shared + router)
        assert SMALL.active_weights == 3 * attention + dense + 2 * (2 * expert + shared + router)
        assert SMALL.kv_bytes == 2 * 3 * (32 + 8)

    def test_linear_layers_read_the_experts_that_are_chosen_and_compute_those_of_each_token(self) -> None:
        def product_us(rows: float, inputs: int, outputs: int, matrices: float = 1) -> float:
            numbers = inputs * outputs
            return 3 + hypot(2 * matrices * numbers / 1e3, 2 * (rows + 32 * matrices) * numbers / 1e6)

        def rest_us(ffn: int) -> float:
            return 4 * 3 + 2 * (8 * 64 + 2 * (4 * 40 + 40 / 2) + 3 * ffn) * 5 / 1e3

        shapes = ((64, 24), (24, 96), (64, 40), (64, 32), (64, 32), (64, 64))
        attention_us = sum(product_us(5, *shape) for shape in shapes)
        dense_us = product_us(5, 64, 512) + product_us(5, 256, 64) + rest_us(256)
        chosen = 8 * (1 - 0.75**5)
        experts_us = product_us(10, 64, 96, chosen) + product_us(10, 48, 64, chosen) + product_us(5, 64, 8)
        shared_us = product_us(5, 64, 192) + product_us(5, 96, 64)
        mixture_us = experts_us + shared_us + 2 * 2 * 64 * 10 / 1e3 + rest_us(2 * 48 + 96)
        expected_us = 3 * attention_us + dense_us + 2 * mixture_us + 3
        assert roofline.Roofline(Device(PLAIN, SMALL)).linear_us(5) == pytest.approx(expected_us)

    def test_attention_compares_what_is_kept(self) -> None:
        """A key takes 2 · 4 heads · (40 + 32) operations, and 80 bytes: with one token to an operation it computes."""
        times = roofline.Roofline(Device(PLAIN, SMALL))
        assert times.decode_us(3, 1000) == pytest.approx(4 * 3 + 3 * 1064 * 80 / 1e3)
        slow = replace(PLAIN, tflops=1e-3)
        of_slow = roofline.Roofline(Device(slow, SMALL))
        assert of_slow.decode_us(3, 1000) == pytest.approx(4 * 3 + 3 * 1064 * 2 * 4 * 72 / 1e3)
        tiles = 4 * 2 / 64  # of 64 queries, over the processors: one at least
        assert tiles < 1
        assert of_slow.prefill_us(128, 100) == pytest.approx(3 * 3 + (164 + 64) * 64 * 2 * 72 / (1e3 / 64))

    def test_a_larger_batch_reads_more_experts_and_a_long_prompt_computes_only_those_of_its_tokens(self) -> None:
        truth = from_gpu("h100-qwen3-30b-a3b-tp1").truth
        one, eight, many = (truth.seconds_of([], [100] * count) for count in (1, 8, 128))
        assert 2 * one < eight < 8 * one
        assert many < 16 * eight
        dense = from_gpu("h100-qwen3-32b-tp1").truth
        assert truth.seconds_of([(2048, 0)], []) < dense.seconds_of([(2048, 0)], []) / 2

    @pytest.mark.parametrize(
        "wrong", [{"expert_size": 0}, {"chosen": 9}, {"dense_layers": 4}], ids=lambda wrong: next(iter(wrong))
    )
    def test_mixtures_that_cannot_be_are_refused(self, wrong: dict[str, Any]) -> None:
        with pytest.raises(ProfileError, match="a mixture has an expert_size, no more chosen than experts"):
            replace(SMALL, **wrong)


class TestTimes:
    @pytest.mark.parametrize("name", gpu_truth.names())
    def test_they_are_near_those_of_measured_gpus(self, name: str) -> None:
        measured = gpu_truth.load(name)
        computed = truth_of(device_file.described(measured.about))
        for kind in Kind:
            steps = [(trial.chunks, trial.prefixes) for trial in TRIALS if trial.shape.kind is kind]
            off = sorted(abs(computed.seconds_of(*step) / measured.seconds_of(*step) - 1) for step in steps)
            assert median(off) <= 0.1
            assert off[len(off) * 9 // 10] <= 0.25

    def test_more_work_takes_longer(self) -> None:
        lengths = (1, 2, 7, 64, 100, 500, 512, 2048, 5000, 20_000)
        for device in DEVICES:
            truth = truth_of(device)
            tokens = [truth.seconds_of([(length, 0)], []) for length in lengths]
            cached = [truth.seconds_of([(256, before)], []) for before in (0, 100, 4096, 40_000)]
            decodes = [truth.seconds_of([], [1000] * count) for count in (1, 3, 8, 100, 256, 600)]
            prefixes = [truth.seconds_of([], [prefix] * 16) for prefix in (1, 16, 100, 1000, 40_000)]
            for times in (tokens, cached, decodes, prefixes):
                assert all(less < more for less, more in pairwise(times)), (device.gpu.name, device.model.name)

    def test_unequal_lengths_and_mixed_steps_cost_what_they_cost_on_a_measured_gpu(self) -> None:
        truth = from_gpu("a100-80-opt-13b-tp1").truth
        assert isinstance(truth, GpuTruth)
        assert truth.attention_us([], [1000] * 64) < truth.attention_us([], [500] * 56 + [4500] * 8)
        apart = truth.attention_us([(512, 512)], []) + truth.attention_us([], [1000] * 16)
        assert truth.attention_us([(512, 512)], [1000] * 16) > 1.1 * apart

    def test_a_token_takes_as_long_as_reading_the_weights_at_least(self) -> None:
        for device in DEVICES:
            reading_s = read_gb(device.model) / device.ranks / device.gpu.bandwidth_gb_s
            of_layer_us = 20 * 3 + device.gpu.sum_us * device.ranks  # kernels and sums, however little they have to do
            small_s = 1e-6 * of_layer_us * device.model.mixtures
            assert reading_s < truth_of(device).seconds_of([], [1]) < 2.5 * reading_s + small_s

    def test_quantised_weights_are_read_faster_and_computed_with_no_faster(self) -> None:
        truths = [from_gpu(f"h100-llama-3.1-8b{kind}-tp1").truth for kind in ("", "-int8", "-int4")]
        decodes = [truth.seconds_of([], [100]) for truth in truths]
        prompts = [truth.seconds_of([(2048, 0)], []) for truth in truths]
        assert decodes[0] > 1.5 * decodes[1] > 1.5 * 1.3 * decodes[2]
        assert 1.15 * prompts[2] > prompts[0] > prompts[1] > prompts[2]

    def test_a_prompt_takes_as_long_as_its_arithmetic_at_least(self) -> None:
        for device in DEVICES:
            flops = 2 * 2048 * device.model.active_weights
            least_s = flops / device.ranks / device.gpu.tflops / 1e12
            assert least_s < truth_of(device).seconds_of([(2048, 0)], [])

    @pytest.mark.parametrize("gpu", ["a100-80", "h100"])
    def test_more_gpus_are_faster_and_less_than_in_proportion(self, gpu: str) -> None:
        steps: list[tuple[list[tuple[int, int]], list[int]]] = [([(2048, 0)], []), ([], [1000] * 32)]
        for step in steps:
            times = [from_gpu(f"{gpu}-opt-13b-tp{ranks}").truth.seconds_of(*step) for ranks in (1, 2, 4)]
            assert all(twice < once < 2 * twice for once, twice in pairwise(times))

    def test_gpus_without_nvlink_lose_their_gain_to_the_sums(self) -> None:
        one, two = (from_gpu(f"rtx4090-opt-6.7b-tp{ranks}").truth.seconds_of([(2048, 0)], []) for ranks in (1, 2))
        assert two > 0.8 * one

    def test_hidden_vectors_cost_their_product_where_they_are_smaller_than_k_and_v(self) -> None:
        truth = from_gpu("a100-80-opt-13b-tp1").truth
        kv = StepPlan(1, decodes=(Decode("a", 1, 1000, NO_KV, Sampling(), 1),))
        hidden = StepPlan(1, decodes=(Decode("a", 1, 1000, KvForm((1,), form="hidden", in_place=2), Sampling(), 1),))
        assert truth.seconds(hidden) - truth.seconds(kv) == pytest.approx(1000 * truth.hidden_token_s())
        assert truth.hidden_token_s() > 0
        for name in ("a100-80-opt-13b-tp2", "a100-80-llama-3.1-8b-tp1"):
            assert from_gpu(name).truth.hidden_token_s() == 0


class TestFiles:
    @pytest.fixture
    def written(self, tmp_path: Path) -> Callable[[Any, str], Path]:
        def write(tree: Any, name: str = "mine.yaml") -> Path:
            path = tmp_path / name
            path.write_text(json.dumps(tree) if path.suffix == ".json" else yaml.safe_dump(tree), encoding="utf-8")
            return path

        return write

    def test_a_device_of_known_names_is_the_named_device(self, written: Callable[..., Path]) -> None:
        found = from_file(written({"gpu": "a100-80", "model": "opt-13b", "tensor_parallel": 2}))
        same = from_gpu("a100-80-opt-13b-tp2")
        assert (found.name, found.kv_tokens, found.links) == ("mine", same.kv_tokens, same.links)
        assert found.truth.seconds_of([(300, 0)], [500] * 8) == same.truth.seconds_of([(300, 0)], [500] * 8)

    def test_a_quantised_model_by_its_name_or_by_numbers(self, written: Callable[..., Path]) -> None:
        named = from_file(written({"gpu": "h100", "model": "Llama-3.1-70B-int4"}))
        shape = asdict(MODELS["llama-3.1-70b"]) | {"quantization": "int4"}
        of_numbers = from_file(written({"gpu": "h100", "model": shape}))
        assert of_numbers.kv_tokens == named.kv_tokens == from_gpu("h100-llama-3.1-70b-int4-tp1").kv_tokens
        assert of_numbers.truth.seconds_of([], [5]) == named.truth.seconds_of([], [5])
        with pytest.raises(ProfileError, match="quantization cannot be 'int3', it is none, int8 or int4"):
            from_file(written({"gpu": "h100", "model": shape | {"quantization": "int3"}}))

    def test_a_device_of_numbers(self, written: Callable[..., Path]) -> None:
        model = {"name": "mine", "layers": 80, "hidden_size": 8192, "heads": 64, "kv_heads": 8}
        shape = {**model, "ffn_size": 28_672, "vocabulary": 128_256}
        found, h100 = from_file(written({"gpu": NUMBERS, "model": shape})), from_gpu("h100-llama-3.1-70b-tp4")
        assert found.kv_bytes == h100.kv_bytes
        assert found.kv_tokens == int((0.9 * 180 - MODELS["llama-3.1-70b"].weights_gb) * 1e9 / found.kv_bytes)
        assert found.truth.seconds_of([], [1000]) < 4 * h100.truth.seconds_of([], [1000])

    @pytest.mark.parametrize("share", [0.1, 0.5, 1.0])
    def test_a_device_may_say_what_unequal_prefixes_cost(self, written: Callable[..., Path], share: float) -> None:
        gpu = {**NUMBERS, "unequal_share": share}
        seconds_of = from_file(written({"gpu": gpu, "model": "opt-13b"})).truth.seconds_of
        for chunks in ([], [(64, 0)]):
            mean, longest = (seconds_of(chunks, [prefix] * 4) for prefix in (1000, 3700))
            unequal = seconds_of(chunks, [100, 100, 100, 3700])
            assert unequal == pytest.approx(mean + share * (longest - mean))

    def test_measured_grids(self, written: Callable[..., Path]) -> None:
        tree = json.loads((FOLDER / f"{PRO}.json").read_text(encoding="utf-8"))
        few = {name: tree[name] for name in ("format", "linear", "per_sequence", "prefill", "decode")}
        few["about"] = {"gpu": "rtxpro6000", "model": "llama-3.1-8b"}
        for grids in (tree, few):  # factors that were not measured are those of this same GPU
            found = from_file(written(grids, "mine.json"))
            assert found.kv_tokens == from_gpu(PRO).kv_tokens
            for step in (([(100, 70)], [500, 900] * 8), ([(700, 0)], []), ([], [50] * 90)):
                assert found.truth.seconds_of(*step) == from_gpu(PRO).truth.seconds_of(*step)

    def test_several_gpus_sum_over_their_link(self, written: Callable[..., Path]) -> None:
        name = "rtxpro6000-llama-3.1-8b-tp2"
        tree = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
        del tree["all_reduce"]
        assert from_file(written(tree, "mine.json")).truth.seconds_of([], [5]) == from_gpu(name).truth.seconds_of(
            [], [5]
        )

    @pytest.mark.parametrize(
        ("tree", "why"),
        [
            ({"gpu": "h200", "model": "opt-13b"}, "gpu is neither one of a100-40, a100-80"),
            ({"gpu": "h100"}, "model is neither one of opt-6.7b"),
            ({"gpu": "h100", "model": "opt-13b", "tensor_parallel": "two"}, "tensor_parallel is a number of GPUs"),
            ({"gpu": "h100", "model": "opt-13b", "tensor_parallel": 3}, "has 40 heads, which 3 GPUs cannot share"),
            ({"gpu": "h100", "model": "opt-13b", "tp": 1}, "has to have gpu, model and tensor_parallel"),
            ({"gpu": {**NUMBERS, "speed": 3}, "model": "opt-13b"}, "gpu has no 'speed': it has name, memory_gb"),
            ({"gpu": {"name": "B200"}, "model": "opt-13b"}, "gpu lacks memory_gb"),
            (
                {"gpu": {**NUMBERS, "tflops": -1}, "model": "opt-13b"},
                "tflops cannot be -1, it is a number",
            ),
            (
                {"gpu": {**NUMBERS, "processors": "many"}, "model": "opt-13b"},
                "it is a whole number above 0",
            ),
            ({"gpu": "rtx4090", "model": "opt-13b"}, "take 2 of them"),
            ({"gpu": "rtx4090", "model": "opt-175b"}, "take larger GPUs"),
            ([1], "has to have gpu, model and tensor_parallel"),
        ],
    )
    def test_refusals_of_numbers(self, written: Callable[..., Path], tree: Any, why: str) -> None:
        with pytest.raises(ProfileError, match=why) as refused:
            from_file(written(tree))
        assert "\n" not in str(refused.value)
        assert "mine.yaml" in str(refused.value)

    @pytest.mark.parametrize(
        ("changes", "why"),
        [
            ({"linear": {"axes": [[1, 2]], "values": [1.0]}}, "a grid needs two ascending sizes"),
            ({"linear": {"axes": [[2, 1]], "values": [1.0, 1.0]}}, "a grid needs two ascending sizes"),
            ({"linear": {"axes": [[1, 2]], "values": [1.0, -1.0]}}, "a grid needs two ascending sizes"),
            ({"decode": {"axes": [[1, 2]], "values": [1.0, 2.0]}}, "decode needs 2 axes"),
            ({"decode": None}, "broken profile"),
            ({"decodes": {}}, "measured grids have no 'decodes'"),
            ({"about": {"gpu": "rtxpro6000", "model": "llama-3.1-8b", "tp": 2}}, "measured grids have no 'about.tp'"),
            ({"format": 7}, "of format 1"),
            ({"about": {"gpu": "rtxpro6000", "model": "opt-175b"}}, "take 6 of them"),
        ],
    )
    def test_refusals_of_grids(self, written: Callable[..., Path], changes: dict[str, Any], why: str) -> None:
        tree = json.loads((FOLDER / f"{PRO}.json").read_text(encoding="utf-8"))
        with pytest.raises(ProfileError, match=why) as refused:
            from_file(written({**tree, **changes}, "mine.json"))
        assert "\n" not in str(refused.value)

    def test_a_file_that_is_not_yaml(self, tmp_path: Path) -> None:
        path = tmp_path / "mine.yaml"
        path.write_text("gpu: [", encoding="utf-8")
        with pytest.raises(ProfileError, match="is not YAML") as refused:
            from_file(path)
        assert "\n" not in str(refused.value)
