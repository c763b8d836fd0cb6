"""Tests that folders which are quantised already give the logits and the words of transformers with their weights
expanded to fp32, and that what cannot be read is refused in one line.

quantised_layers/ has a layer of each form as the tools themselves wrote it, with the numbers that it stands for:
compressed-tensors 0.20.0, llm-compressor 0.14.0, GPTQModel 7.7.0 and AutoAWQ 0.2.9.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file

from alignedserve.architectures.families.model_config import read_config
from alignedserve.architectures.quantization import Quantization
from alignedserve.architectures.stored_form import ZeroForm
from alignedserve.architectures.weight_files import quantised_bytes
from alignedserve.config.config import load as load_config
from alignedserve.engine.engine import Engine
from alignedserve.engine.models.families.choice import load_model
from alignedserve.engine.models.loading import Loader
from alignedserve.engine.weights.forms import Awq, CompressedTensors, Gptq, weights_of
from alignedserve.engine.weights.tensors import Cut, Form, Tensors
from alignedserve.errors import AlignedServeError, ConfigError, ModelError, UnsupportedModel
from alignedserve.kernels.common import quantised
from alignedserve.kernels.common.fp8 import Fp8Linear, in_fp8, why_none
from alignedserve.kernels.common.linear import Linear
from alignedserve.kernels.common.quantised import AnyQuantised, Fp8Weight, QuantisedWeight
from alignedserve.sizing.capacity import capacity
from tests.engine.driver import Driver, prompt_of
from tests.engine.test_models import TOKENS, furthest, logits_of
from tests.engine.test_quantised_models import kernels_here, loaded_bytes
from tests.engine.test_ranks import Both
from tests.engine.transformers_families import make
from tests.models import gqa
from tests.quantised_folders import FORMS, WEIGHTS, Rounded, awq, bytes_each, gptq, packed_by_inputs, quantised_folder
from tests.rare import thinned
from tests.reference import CLOSE, Tally, compare

Quantised = tuple[Path, Any]  # a folder, and the network that it stands for
QuantisedOf = Callable[..., Quantised]
IN_PARTS = ("gptq-8", "fp8-tensor", "fp8-channel", "fp8-block")
EVERY_LAYER = ("gqa-untied", "qwen2", "opt", "phi3")  # biases, ties, fused layers


@pytest.fixture(scope="module")
def quantised_of(folder_of: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> QuantisedOf:
    @cache
    def make(model: str, form: str, ignore: str = "lm_head") -> Quantised:
        folder = tmp_path_factory.mktemp("quantised") / form
        return folder, quantised_folder(folder_of(model), folder, form, ignore)

    return make


@pytest.mark.parametrize("form", FORMS)
def test_logits_are_those_of_the_expanded_weights(form: str, quantised_of: QuantisedOf) -> None:
    folder, network = quantised_of("gqa-untied", form)
    tokens = prompt_of(1, TOKENS)
    with torch.inference_mode():
        expected = network(torch.tensor([tokens])).logits[0]
    for kernels in kernels_here():
        assert furthest(logits_of(folder, tokens, kernels=kernels), expected) < CLOSE


@pytest.mark.parametrize(
    ("model", "form"),
    thinned(product(EVERY_LAYER[1:], ("gptq-4-act-order", "awq", "w4a16-asymmetric", "fp8-channel")), usual=5),
)
def test_layers_of_every_family(model: str, form: str, quantised_of: QuantisedOf) -> None:
    folder, network = quantised_of(model, form)
    tokens = prompt_of(2, 30)
    with torch.inference_mode():
        expected = network(torch.tensor([tokens])).logits[0]
    assert furthest(logits_of(folder, tokens), expected) < CLOSE


@pytest.mark.parametrize(("model", "form"), thinned(product(("gqa-untied", "opt"), IN_PARTS), usual=3))
def test_layers_that_are_expanded_or_packed_some_rows_at_a_time(
    form: str, model: str, quantised_of: QuantisedOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = quantised_of(model, form)
    tokens = prompt_of(1, 30)
    expected = [logits_of(folder, tokens, kernels=kernels) for kernels in kernels_here()]
    monkeypatch.setattr(quantised, "_AT_ONCE", 150)
    for kernels, at_once in zip(kernels_here(), expected, strict=True):
        assert torch.equal(logits_of(folder, tokens, kernels=kernels), at_once)


@pytest.mark.parametrize("form", thinned(FORMS, usual=2))  # the logits of all are compared
def test_greedy_output_is_that_of_the_expanded_weights(form: str, quantised_of: QuantisedOf, tally: Tally) -> None:
    folder, network = quantised_of("gqa-untied", form)
    driver = Driver(Engine(folder, num_blocks=30, dtype="float32"), 0)
    live = driver.start("r", prompt_of(3, 20), 20)
    driver.prefill(live, [7])
    compare(network, live.prompt, driver.generate(live, 20), tally, form)


@pytest.mark.parametrize(("form", "kept"), [("fp8-tensor", True), ("fp8-channel", True), ("fp8-block", False)])
def test_8_bit_floats_are_multiplied_as_they_are_by_kernels_that_can(
    form: str, kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton's kernels for GPUs, with torch's product for CPUs; layers of a rank too."""
    products = pytest.importorskip("alignedserve.kernels.triton.products", reason="Triton is not installed")
    if why_none(torch.device("cpu"), torch.bfloat16) is not None:
        pytest.skip("torch has no such product for this CPU")
    monkeypatch.setattr(products, "rows_in_fp8", in_fp8)  # the interpreter rounds some floats down by half
    kernels = pytest.importorskip("alignedserve.kernels.triton.kernels").TritonKernels()
    plain = gqa(tmp_path / "plain", hidden_size=64, intermediate_size=96, head_dim=16)
    network = quantised_folder(plain, tmp_path / form, form)
    made = list[Linear]()

    def make_linear(weight: torch.Tensor | AnyQuantised, bias: torch.Tensor | None) -> Linear:
        made.append(kernels.layer(weight, bias, torch.bfloat16))
        return made[-1]

    loader = Loader(weights_of(tmp_path / form), torch.bfloat16, kernels, make_linear)
    load_model(read_config(tmp_path / form), loader)
    floats = [linear for linear in made if isinstance(linear, Fp8Linear)]
    layers = network.config.num_hidden_layers
    assert len(floats) == (4 * layers if kept else 0)
    if floats:
        down = network.get_submodule(DOWN).weight.detach()
        assert torch.allclose(floats[3].weight.float(), down, rtol=2**-8, atol=0)
        part = weights_of(tmp_path / form).quantised(DOWN, (40, 96), Cut(0, 16, 64))
        assert isinstance(part, Fp8Weight)
        assert torch.allclose(part.expanded(), down[16:56])


@pytest.mark.parametrize("form", ["gptq-8", "w4a16-asymmetric", "fp8-block"])
def test_a_fused_layer_of_which_a_part_is_plain_and_a_head_that_is_not(form: str, quantised_of: QuantisedOf) -> None:
    """Query, key and value become numbers of the served type then."""
    folder, network = quantised_of("gqa-untied", form, ignore="k_proj")
    tokens = prompt_of(1, 30)
    with torch.inference_mode():
        expected = network(torch.tensor([tokens])).logits[0]
    assert furthest(logits_of(folder, tokens), expected) < CLOSE


# --- Folders of older tools, whose config.json says nothing


@pytest.mark.parametrize(
    ("form", "file", "said", "weights"),
    [
        ("gptq-4", "quantize_config.json", {"bits": 4, "group_size": 16}, "gptq_model-4bit-16g.safetensors"),
        ("gptq-4-act-order", "quantize_config.json", {"bits": 4, "group_size": 8, "desc_act": True}, WEIGHTS),
        ("awq", "quant_config.json", {"zero_point": True, "q_group_size": 8, "w_bit": 4, "version": "GEMM"}, WEIGHTS),
    ],
)
def test_a_file_beside_the_configuration_says_how_weights_are_quantised(
    form: str, file: str, said: dict[str, Any], weights: str, quantised_of: QuantisedOf, tmp_path: Path
) -> None:
    folder, network = quantised_of("gqa-untied", form)
    content = json.loads((folder / "config.json").read_text())
    del content["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(content))
    (tmp_path / file).write_text(json.dumps(said))
    (tmp_path / weights).symlink_to(folder / WEIGHTS)
    tokens = prompt_of(1, 30)
    with torch.inference_mode():
        expected = network(torch.tensor([tokens])).logits[0]
    assert furthest(logits_of(tmp_path, tokens), expected) < CLOSE
    assert quantised_bytes(tmp_path, 4) == quantised_bytes(folder, 4)
    (tmp_path / file).write_text(json.dumps({**said, "bits": 3, "w_bit": 3}))
    refused(tmp_path, "of 3 bits", UnsupportedModel)


# --- Other families: fused layers, other orders of rows, models that transformers runs


FAMILIES = [
    ("phi3", "w4a16"),
    ("gemma3_text", "gptq-4"),
    ("phi", "fp8-channel"),
    ("gpt_neox", "w4a16"),
    ("glm", "awq"),
    ("glm4", "gptq-4-act-order"),
    ("cohere", "awq"),
    ("stablelm", "gptq-4-act-order"),
    ("starcoder2", "w8a8"),
]


@pytest.mark.parametrize(("family", "form"), thinned(FAMILIES, usual=3))
def test_layers_of_other_families(family: str, form: str, tmp_path: Path, tally: Tally) -> None:
    network = quantised_folder(make(tmp_path / "plain", family), tmp_path / form, form)
    engine = Engine(tmp_path / form, num_blocks=30, dtype="float32")
    driver = Driver(engine, 0)
    live = driver.start("r", prompt_of(3, 20), 12)
    driver.prefill(live, [7])
    compare(network, live.prompt, driver.generate(live, 12), tally, f"{family}, {form}")


@pytest.mark.parametrize(("family", "form"), thinned(FAMILIES, usual=2))
def test_they_take_the_memory_that_is_planned(family: str, form: str, tmp_path: Path) -> None:
    plain = make(tmp_path / "plain", family, hidden_size=256, intermediate_size=512, head_dim=64)
    quantised_folder(plain, tmp_path / form, form)
    folder = tmp_path / form
    assert quantised_bytes(folder, whole=4) == pytest.approx(loaded_bytes(folder, torch.float32), rel=0.03)


def test_experts_that_are_quantised_are_refused(tmp_path: Path) -> None:
    plain = make(tmp_path / "plain", "hunyuan_v1_moe")
    tensors = {name: tensor for name, tensor in load_file(plain / WEIGHTS).items() if "experts" not in name}
    save_file(tensors, plain / WEIGHTS)
    content = json.loads((plain / "config.json").read_text()) | {"quantization_config": FORMS["awq"][0]}
    (plain / "config.json").write_text(json.dumps(content))
    refused(plain, "experts of a mixture are not read where they are quantised", UnsupportedModel)


# --- Layers that the tools wrote

LAYERS = Path(__file__).parent / "quantised_layers"
SHAPE = (32, 64)


def form_of(layer: str) -> Form:
    if layer.startswith("gptq"):
        group = 32 if layer in ("gptq-4-v2", "gptq-8") else 16
        return Gptq(ZeroForm.PLAIN if layer.endswith("v2") else ZeroForm.LESS_ONE, group)
    return Awq() if layer.startswith("awq") else CompressedTensors((16, 32) if layer.endswith("block") else None)


def read_layer(layer: str) -> AnyQuantised | torch.Tensor:
    tensors = Tensors(LAYERS, form_of(layer))
    found = tensors.quantised(layer, SHAPE)
    if found is not None:
        return found
    out = torch.empty(SHAPE)
    tensors.read_into(out, f"{layer}.weight")
    return out


def layers_of_tools() -> dict[str, torch.Tensor]:
    tensors = load_file(LAYERS / WEIGHTS)
    named = (name.removesuffix(".expected") for name in tensors if name.endswith(".expected"))
    return {layer: tensors[f"{layer}.expected"] for layer in named}


def test_a_layer_that_a_tool_wrote_is_what_the_tool_says() -> None:
    for layer, expected in layers_of_tools().items():
        found = read_layer(layer)
        wide = found if isinstance(found, torch.Tensor) else found.expanded()
        assert isinstance(found, QuantisedWeight) == ("fp8" not in layer)
        assert torch.allclose(wide, expected, rtol=1e-5, atol=1e-6), layer


def test_the_writers_of_these_tests_write_what_the_tools_write() -> None:
    tensors = load_file(LAYERS / WEIGHTS)
    for layer in layers_of_tools():
        found = read_layer(layer)
        if not isinstance(found, QuantisedWeight):
            continue
        group_of = torch.arange(SHAPE[1]) // found.group
        back = torch.arange(SHAPE[1]) if found.order is None else found.order.argsort()
        weight = Rounded(found.q[:, back].int(), found.scale, found.zeros.int(), group_of[back], found.bits)
        match layer.split("-"):
            case ["gptq", *rest]:
                written = gptq(weight, less_one="v2" not in rest)
            case ["awq", *_]:
                written = awq(weight)
            case [_, "w8a8", *_]:
                written = bytes_each(weight)
            case _:
                written = packed_by_inputs(weight)
        stored = {name.removeprefix(f"{layer}."): tensor for name, tensor in tensors.items() if f"{layer}." in name}
        assert stored.keys() - written.keys() == {"expected"}, layer
        assert all(torch.equal(tensor, stored[name]) for name, tensor in written.items()), layer


# --- Ranks


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


@pytest.fixture(scope="module")
def even(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model whose halves end where groups of 16 inputs do."""
    return gqa(tmp_path_factory.mktemp("even") / "plain", intermediate_size=64)


@pytest.mark.parametrize(
    "form", thinned(("gptq-4", "awq", "w8a8", "w4a16-asymmetric", "fp8-block", "fp8-channel"), usual=3)
)
def test_two_ranks_say_what_the_expanded_weights_say(
    form: str, even: Path, tmp_path: Path, pool: ThreadPoolExecutor, tally: Tally
) -> None:
    network = quantised_folder(even, tmp_path / form, form)
    both: Any = Both(tmp_path / form, pool)
    driver = Driver(both, 0)
    live = driver.start("r", prompt_of(3, 20), 12)
    driver.prefill(live, [7])
    compare(network, live.prompt, driver.generate(live, 12), tally, form)


@pytest.mark.parametrize("form", thinned(("fp8-block", "w8a8"), usual=1))
def test_compressed_vectors_and_experts_in_a_quantised_folder(
    form: str, folder_of: Callable[[str], Path], tmp_path: Path, pool: ThreadPoolExecutor, tally: Tally
) -> None:
    """One rank, and two, say what the expanded weights say; DeepSeek V3 itself is in 8-bit floats with blocks."""
    network = quantised_folder(folder_of("deepseek-v3"), tmp_path / form, form)
    alone = Engine(tmp_path / form, num_blocks=40, block_size=8, dtype="float32")
    for engine in (alone, cast(Engine, Both(tmp_path / form, pool))):
        driver = Driver(engine, 0)
        live = driver.start("r", prompt_of(3, 20), 12)
        driver.prefill(live, [7])
        compare(network, live.prompt, driver.generate(live, 12), tally, form)


def test_ranks_that_would_cut_a_small_group_or_an_order(
    even: Path, folder_of: Callable[[str], Path], tmp_path: Path, pool: ThreadPoolExecutor
) -> None:
    for plain, form in ((even, "w4a16-act-order"), (folder_of("gqa-untied"), "awq")):
        quantised_folder(plain, tmp_path / form, form)
        with pytest.raises(ConfigError, match=r"ranks cannot divide its inputs.*set engine\.tensor_parallel_size to 1"):
            Both(tmp_path / form, pool)


# --- What is planned, and what is refused


@pytest.mark.parametrize("form", ["gptq-4", "awq", "w8a8", "w4a16", "fp8-channel"])
def test_as_many_bytes_are_planned_as_weights_take(form: str, tmp_path: Path) -> None:
    plain = gqa(tmp_path / "plain", hidden_size=256, intermediate_size=512, head_dim=64)
    quantised_folder(plain, tmp_path / form, form)
    folder = tmp_path / form

    assert quantised_bytes(folder, whole=2) == pytest.approx(loaded_bytes(folder, torch.bfloat16), rel=0.03)


def refused(folder: Path, said: str, kind: type[AlignedServeError], **options: Any) -> None:
    with pytest.raises(kind, match=re.escape(said)) as raised:
        Engine(folder, num_blocks=1, **options)
    assert "\n" not in str(raised.value)


def test_quantising_otherwise_is_refused(quantised_of: QuantisedOf) -> None:
    folder, _ = quantised_of("gqa-untied", "gptq-4")
    said = "engine.quantization cannot be int8: the model is quantised already (gptq of 4 bits): set it to none"
    refused(folder, said, ConfigError, quantization=Quantization.INT8)
    with pytest.raises(ConfigError, match=re.escape(said)):
        capacity(load_config({"engine.quantization": "int8"}, {}, None), read_config(folder))
    asked = Engine(folder, num_blocks=1, quantization=Quantization.INT4)
    assert asked.weights_as == Engine(folder, num_blocks=1).weights_as == "float32, layers gptq of 4 bits"


def changed(quantised: Quantised, folder: Path, **changes: Any) -> Path:
    """Copy a folder with changes of its quantization_config; a change may go into inner objects: {"a": {"b": 1}}."""
    folder.mkdir()
    (folder / WEIGHTS).symlink_to(quantised[0] / WEIGHTS)
    content = json.loads((quantised[0] / "config.json").read_text())
    merge(content["quantization_config"], changes)
    (folder / "config.json").write_text(json.dumps(content))
    return folder


def merge(into: dict[str, Any], changes: dict[str, Any]) -> None:
    for key, value in changes.items():
        if isinstance(value, dict) and into.get(key):
            merge(into[key], value)
        else:
            into[key] = value


@pytest.mark.parametrize(
    ("form", "changes", "said"),
    [
        ("gptq-4", {"bits": 3}, "quantization gptq of 3 bits is not supported"),
        ("gptq-4", {"is_marlin_format": True}, "quantization gptq in the format marlin is not supported"),
        ("gptq-4", {"checkpoint_format": "bitblas"}, "gptq in the format bitblas"),
        ("gptq-4", {"pack_dtype": "int64"}, "gptq packed as int64"),
        ("gptq-4", {"group_size": 12}, "gptq with groups of 12 inputs"),
        ("awq", {"version": "gemv"}, "quantization awq in the format gemv"),
        ("awq", {"bits": 8}, "quantization awq of 8 bits"),
        ("awq", {"zero_point": False}, "quantization awq without zero_point"),
        ("w8a8", {"format": "sparse-24-bitmask"}, "compressed-tensors in the format sparse-24-bitmask"),
        ("w8a8", {"format": "nvfp4-pack-quantized"}, "compressed-tensors in the format nvfp4-pack-quantized"),
        ("w8a8", {"kv_cache_scheme": {"num_bits": 8, "type": "float"}}, "with a kv_cache_scheme"),
        ("w8a8", {"sparsity_config": {"format": "sparse-bitmask"}}, "with the sparse format sparse-bitmask"),
        ("w8a8", {"transform_config": {"config_groups": {"u": {}}}}, "with a transform_config"),
        ("w4a16", {"config_groups": {"group_0": {"weights": {"num_bits": 2}}}}, "compressed-tensors of 2 bits"),
        ("w4a16", {"config_groups": {"group_0": {"weights": {"type": "float"}}}}, "of 4-bit floats"),
        ("w4a16", {"config_groups": {"group_0": {"weights": {"strategy": "tensor_group"}}}}, "by tensor_group"),
        ("fp8-block", {"fmt": "e5m2"}, "quantization fp8 of e5m2 numbers"),
    ],
)
def test_a_form_that_is_not_read(
    form: str, changes: dict[str, Any], said: str, quantised_of: QuantisedOf, tmp_path: Path
) -> None:
    folder = changed(quantised_of("gqa-untied", form), tmp_path / "changed", **changes)
    refused(folder, said, UnsupportedModel)


DOWN = "model.layers.0.mlp.down_proj"


@pytest.mark.parametrize(
    ("form", "tensor", "new", "said", "kind"),
    [
        ("gptq-4", "scales", None, f"tensor {DOWN}.scales is missing", ModelError),
        ("gptq-4", "qweight", None, f"tensor {DOWN}.weight is missing", ModelError),
        ("gptq-4", "qweight", (5, 32), "keeps 56 numbers in 5 words", UnsupportedModel),
        ("gptq-4-act-order", "g_idx", (56,), "its groups do not have 8 inputs each (g_idx)", UnsupportedModel),
        ("awq", "qweight", (56, 3), "has shape (24, 56), the configuration says (32, 56)", ModelError),
        ("w4a16", "weight_scale", (32, 5), "5 groups do not divide its 56 inputs", UnsupportedModel),
        ("w4a16", "weight_scale", (32, 14), "groups of 4 inputs, not a multiple of 8", UnsupportedModel),
        ("fp8-tensor", "weight_scale", None, f"there is no {DOWN}.weight_scale", ModelError),
    ],
)
def test_a_broken_layer(
    form: str,
    tensor: str,
    new: tuple[int, ...] | None,
    said: str,
    kind: type[ModelError],
    quantised_of: QuantisedOf,
    tmp_path: Path,
) -> None:
    source, _ = quantised_of("gqa-untied", form)
    tensors = load_file(source / WEIGHTS)
    old = tensors.pop(f"{DOWN}.{tensor}")
    if new is not None:
        tensors[f"{DOWN}.{tensor}"] = torch.zeros(new, dtype=old.dtype)
    save_file(tensors, tmp_path / WEIGHTS)
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    refused(tmp_path, said, kind)
