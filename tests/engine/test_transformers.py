"""Tests of models that transformers runs: a served model says what transformers says, others are refused in a line."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from alignedserve.architectures.families.model_config import read_config
from alignedserve.architectures.quantization import Quantization
from alignedserve.engine.engine import Engine
from alignedserve.engine.models.transformers_checks import window_of
from alignedserve.errors import ModelError, UnsupportedModel
from tests.conftest import examples
from tests.engine.driver import Driver, prompt_of
from tests.engine.expanded import expanded_reference
from tests.engine.test_quantised_models import QUANTIZED
from tests.engine.transformers_families import REFUSED, SERVED, WINDOW, make
from tests.models import MAX_POSITIONS, VOCAB
from tests.rare import rarely, thinned
from tests.reference import Tally, compare, load

# One family for each way to differ is in each run.
_SERVED = "gpt2 gpt_bigcode gptj phimoe cohere2 starcoder2 hunyuan_v1_moe granite nemotron vaultgemma".split()
_SERVED += "bloom falcon gpt_neox mpt phi".split()
_REFUSED = "bart cpmant minicpm3 diffllama doge gpt_neo falcon_h1 roberta".split()
served = pytest.mark.parametrize("family", [each if each in _SERVED else rarely(each) for each in SERVED])
refused = pytest.mark.parametrize("family", [each if each in _REFUSED else rarely(each) for each in REFUSED])


@pytest.fixture
def folder(tmp_path: Path) -> Callable[..., Path]:
    def made(family: str, **special: Any) -> Path:
        if family not in transformers.CONFIG_MAPPING:
            pytest.skip(f"this version of transformers has no {family}")
        return make(tmp_path / family, family, **special)

    return made


def change(folder: Path, **changes: Any) -> Path:
    """Set keys of the configuration; `...` takes a key away."""
    path = folder / "config.json"
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not ...}))
    return folder


def refusal(folder: Path, kind: type[ModelError] = UnsupportedModel) -> str:
    with pytest.raises(ModelError) as raised:
        Engine(folder, num_blocks=1, dtype="float32")
    assert type(raised.value) is kind
    said = str(raised.value)
    assert "\n" not in said
    assert said.startswith(str(folder))
    return said.removeprefix(f"{folder}: ")


def check_greedy(
    folder: Path, tally: Tally, quantization: Quantization = Quantization.NONE, reference: Any = None
) -> Engine:
    """Compare two requests, in chunks, together and apart, both longer than any window."""
    engine = Engine(folder, num_blocks=40, block_size=4, dtype="float32", quantization=quantization)
    driver = Driver(engine, 1)
    first = driver.start_either_way("first", prompt_of(1, 37), 8)
    second = driver.start_either_way("second", prompt_of(2, 21), 8)
    driver.prefill(first, [13, 9])
    driver.run(first, second, parts=[first.decode(), second.chunk(8)])
    driver.run(first, second, parts=[second.chunk(21), first.decode()])
    driver.run(first, second, parts=[second.decode(), first.decode()])
    model = reference
    if model is None:
        model = load(folder) if quantization is Quantization.NONE else expanded_reference(folder, quantization)
    for live in (first, second):
        compare(model, live.prompt, driver.generate(live, 8), tally, f"{folder.name}, {live.name}")
    return engine


@served
def test_greedy_output_is_that_of_transformers(family: str, folder: Callable[..., Path], tally: Tally) -> None:
    check_greedy(folder(family, **SERVED[family]), tally)


@pytest.mark.parametrize(
    ("family", "special"),
    [
        ("falcon", {"multi_query": True}),
        ("falcon", {"multi_query": False, "alibi": True, "parallel_attn": False, "bias": True}),
        ("bloom", {"apply_residual_connection_post_layernorm": True, "seq_length": MAX_POSITIONS}),
        ("gpt_neox", {"use_parallel_residual": False}),
    ],
)
def test_older_forms_of_families(
    family: str, special: dict[str, Any], folder: Callable[..., Path], tally: Tally
) -> None:
    check_greedy(folder(family, **special), tally)


@pytest.mark.parametrize("family", ["bloom", "falcon", "mpt"])
def test_layers_that_attend_by_themselves_read_no_int8(family: str, folder: Callable[..., Path]) -> None:
    """Their weights may be quantised, their K and V may not."""
    config = read_config(folder(family))
    assert config.why_not_int8 == "layers of this model attend by themselves, to plain K and V"
    assert config.step_bytes(8, 1, "float32") > 2 * config.kv_bytes(config.max_positions, "float32")


@pytest.mark.parametrize(("family", "quantization"), thinned(product(_SERVED, QUANTIZED), usual=3))
def test_quantised_layers_say_what_their_weights_expanded_say(
    family: str, quantization: Quantization, folder: Callable[..., Path], tally: Tally
) -> None:
    engine = check_greedy(folder(family, **SERVED[family]), tally, quantization)
    assert engine.weights_as == f"float32, layers {quantization.value}"


@refused
def test_another_kind_of_model_is_refused(family: str, folder: Callable[..., Path]) -> None:
    special, why = REFUSED[family]
    assert why in refusal(folder(family, **special))


@pytest.mark.parametrize("family", ["zamba", "zamba2", "lfm2_moe", "qwen3_5_moe_text", "nemotron_h"])
def test_a_state_is_refused_before_weights_are_read(family: str, tmp_path: Path) -> None:
    """The folder has no weights at all."""
    if family not in transformers.CONFIG_MAPPING:
        pytest.skip(f"this version of transformers has no {family}")
    transformers.CONFIG_MAPPING[family](architectures=["SomeForCausalLM"]).save_pretrained(tmp_path)
    why = "it has layers that keep a state in place of K and V of each token"
    assert refusal(tmp_path) == f"SomeForCausalLM is not supported: {why}"


def test_windows_and_scales_are_those_of_the_layers(folder: Callable[..., Path]) -> None:
    config = Engine(folder("vaultgemma", **SERVED["vaultgemma"], query_pre_attn_scalar=16), num_blocks=1).config
    assert config.windows == (WINDOW, None)
    assert config.scales == (0.25, 0.25)


@pytest.mark.parametrize("dtype", ["bfloat16", rarely("float16")])
def test_half_precision_is_close_enough(dtype: str, folder: Callable[..., Path]) -> None:
    """The comparison at load distinguishes rounding from another model."""
    engine = Engine(folder("hunyuan_v1_moe"), num_blocks=10, block_size=4, dtype=dtype)
    driver = Driver(engine, 1)
    live = driver.start("r", prompt_of(1, 20), 4)
    driver.prefill(live)
    assert all(0 <= token < VOCAB for token in driver.generate(live, 4))
    assert engine.cache.dtype == getattr(torch, dtype)


def test_no_farther_than_angles_are_those_of_short_requests(folder: Callable[..., Path], tally: Tally) -> None:
    turned = {"short_factor": [1.5] * 4, "long_factor": [9.0] * 4, "rope_type": "longrope", "rope_theta": 1e4}
    rope = {**turned, "short_mscale": 1.0, "long_mscale": 1.0, "original_max_position_embeddings": 64}
    made = folder("phimoe", rope_parameters=rope)
    assert read_config(made).max_positions == 64 < MAX_POSITIONS
    check_greedy(made, tally)


# --- The options of config.json


def test_facts_go_by_many_names(folder: Callable[..., Path]) -> None:
    made = folder("gpt_bigcode")
    config = read_config(change(made, torch_dtype="bfloat16", dtype=..., eos_token_id=[2, 5]))
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (2, 4, 1, 8)
    assert (config.vocab_size, config.max_positions, config.dtype) == (VOCAB, MAX_POSITIONS, "bfloat16")
    assert config.eos_tokens == {2, 5}
    assert config.kv_bytes(3, "bfloat16") == 2 * 2 * 3 * 8 * 2
    nested = json.loads((made / "config.json").read_text())
    (made / "config.json").write_text(json.dumps({"architectures": nested["architectures"], "text_config": nested}))
    assert read_config(made) == config


@pytest.mark.parametrize(
    ("key", "named"),
    [
        ("n_layer", "num_hidden_layers, n_layer"),
        ("n_head", "num_attention_heads, n_head"),
        ("n_embd", "hidden_size, n_embd"),
        ("n_positions", "max_position_embeddings, n_positions"),
    ],
)
def test_a_fact_that_goes_by_no_name(key: str, named: str, folder: Callable[..., Path]) -> None:
    made = change(folder("gpt2"), **{key: ...})
    assert refusal(made).startswith(f"GPT2LMHeadModel is not supported: its config.json has none of {named}")


def test_a_config_that_is_not_the_model_s(folder: Callable[..., Path]) -> None:
    made = folder("cohere", num_key_value_heads=4)
    said = refusal(change(made, num_kv_heads=2, num_key_value_heads=None))
    assert said.endswith("has K of 4 x 8 for each of 9 tokens, config.json says 2 x 8 for each token")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"architectures": ["BertLMHeadModel"]}, "for its model_type gpt2, transformers has GPT2LMHeadModel"),
        ({"model_type": "nobody_knows"}, "cannot be read by transformers"),
        (
            {"quantization_config": {"quant_method": "hqq"}},
            "quantization hqq (read are compressed-tensors",
        ),
        ({"dtype": "int8"}, "dtype int8 is not supported"),
    ],
)
def test_what_transformers_does_not_run(changes: dict[str, Any], said: str, folder: Callable[..., Path]) -> None:
    assert said in refusal(change(folder("gpt2"), **changes))


# --- Loading


def test_code_of_the_folder_is_not_run(folder: Callable[..., Path], tmp_path: Path) -> None:
    made, trace = folder("gpt2"), tmp_path / "trace"
    (made / "code.py").write_text(f"open({str(trace)!r}, 'w').close()\n")
    change(made, model_type="unheard_of", auto_map={"AutoConfig": "code.A", "AutoModelForCausalLM": "code.B"})
    refusal(made)
    assert not trace.exists()


def test_a_missing_tensor(folder: Callable[..., Path]) -> None:
    made = folder("starcoder2")
    tensors = load_file(made / "model.safetensors")
    del tensors["model.layers.1.mlp.c_fc.weight"]
    save_file(tensors, made / "model.safetensors", metadata={"format": "pt"})
    assert refusal(made, ModelError).startswith("tensor model.layers.1.mlp.c_fc.weight is missing")


def test_without_transformers(folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    made = folder("starcoder2")
    monkeypatch.setitem(sys.modules, "transformers", None)
    said = refusal(made, ModelError)
    assert said.endswith(f"is not installed: {sys.executable} -m pip install 'alignedserve[transformers]'")


def test_nothing_is_said_on_the_console(folder: Callable[..., Path], capfd: pytest.CaptureFixture[str]) -> None:
    made = folder("phimoe")
    capfd.readouterr()
    Engine(made, num_blocks=1)
    assert capfd.readouterr() == ("", "")


# --- The rule of a mask

POSITIONS = st.integers(4, 3000)


@given(POSITIONS)
def test_a_causal_mask_has_no_window(positions: int) -> None:
    assert window_of(transformers.masking_utils.causal_mask_function, positions) is None


@given(POSITIONS, st.integers(1, 3500))
def test_a_window_is_as_wide_as_its_rule_says(positions: int, window: int) -> None:
    found = window_of(transformers.masking_utils.sliding_window_causal_mask_function(window), positions)
    assert found == (window if window < positions else None)


@given(POSITIONS, st.integers(2, 2000))
@settings(max_examples=examples(200))
def test_chunks_are_no_window(positions: int, size: int) -> None:
    found = window_of(
        transformers.masking_utils.chunked_causal_mask_function(size, torch.zeros(1, dtype=torch.long)), positions
    )
    assert found == (0 if size < positions else None)


def test_a_model_that_sees_what_comes_is_not_causal() -> None:
    assert window_of(transformers.masking_utils.bidirectional_mask_function, 100) == 0
