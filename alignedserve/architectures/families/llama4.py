"""Llama 4's text part: layers that turn read stretches of the request, the others all of it; mixtures of experts.

A layer whose heads do not turn tells positions by nothing but what it reads. There the queries of late positions may be
multiplied with a factor above one, so that attention stays as sharp among more tokens.
"""

from __future__ import annotations

from alignedserve.architectures.config import Activation, activation, stored_dtype
from alignedserve.architectures.families.llama import LayerNames, LlamaConfig, Temperature
from alignedserve.architectures.given import Given
from alignedserve.architectures.rope import read_rope, rope_section
from alignedserve.architectures.routing import ExpertNames, Routing, Scores, Stack
from alignedserve.architectures.stored_form import stored_form

_THETA = 500_000.0
_KINDS = ("chunked_attention", "full_attention")
_NAMES = LayerNames(mlp="feed_forward")
_EXPERTS = ExpertNames(
    router="feed_forward.router", experts="feed_forward.experts", shared="feed_forward.shared_expert"
)


def read_llama4(given: Given) -> LlamaConfig:
    return _read(given, given, prefix="")


def read_llama4_with_images(given: Given) -> LlamaConfig:
    """Read the text part of a model that reads images too; nothing else of it is read."""
    return _read(given, given.text, prefix="language_model.")


def _read(given: Given, text: Given, prefix: str) -> LlamaConfig:
    layers, heads = text.whole("num_hidden_layers"), text.whole("num_attention_heads")
    kv_heads = text.whole("num_key_value_heads", heads if text.has("num_key_value_heads") else 8)
    head_dim = text.whole("head_dim", 128)
    if heads % kv_heads:
        raise text.wrong("num_key_value_heads", f"a divisor of num_attention_heads {heads}", kv_heads)
    if activation(text, "hidden_act", "silu") is not Activation.SILU:
        raise text.unsupported(f"hidden_act {text.get('hidden_act')}")
    rope = read_rope(text, rope_section(text), text.number("rope_theta", _THETA), head_dim, 1.0)
    if rope.dim != head_dim or head_dim % 2:
        raise text.unsupported(f"rotation of {rope.dim} of a head's {head_dim} numbers")
    turns, expert, bias = _turns(text, layers), text.whole("intermediate_size", 8192), text.flag("attention_bias")
    return LlamaConfig(
        prefix=f"{prefix}model",
        head=f"{prefix}lm_head",
        names=_NAMES,
        vocab_size=text.whole("vocab_size"),
        hidden_size=text.whole("hidden_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_positions=text.whole("max_position_embeddings"),
        dtype=stored_dtype(given, text),
        stored=stored_form(given, text),
        eos_tokens=given.token_ids("eos_token_id") or text.token_ids("eos_token_id"),
        tied_embeddings=text.flag("tie_word_embeddings"),
        stretches=_stretches(text, turns),
        intermediate_size=text.whole("intermediate_size_mlp", 16_384),
        expert_size=expert,
        shared_size=expert,
        routing=_routing(text, layers),
        norm_eps=text.number("rms_norm_eps", 1e-5),
        rope=rope,
        turns_neighbours=True,
        still=frozenset(layer for layer, turned in enumerate(turns) if not turned),
        are_turned_of_one=text.flag("use_qk_norm", True),
        temperature=_temperature(text),
        qkv_bias=bias,
        out_bias=bias,
    )


def _routing(text: Given, layers: int) -> Routing:
    experts, chosen = text.whole("num_local_experts", 16), text.whole("num_experts_per_tok", 1)
    if chosen > experts:
        raise text.wrong("num_experts_per_tok", f"at most num_local_experts {experts}", chosen)
    dense = frozenset(range(layers)) - _mixtures(text, layers)
    return Routing(
        experts=experts,
        chosen=chosen,
        scores=Scores.SIGMOID,
        dense_layers=dense,
        weighs_inputs=True,
        stack=Stack.HALVES,
        names=_EXPERTS,
    )


def _temperature(text: Given) -> Temperature | None:
    if not text.get("attn_temperature_tuning", True):  # true or, in the first folders, a number
        return None
    return Temperature(text.whole("floor_scale", 8192), text.number("attn_scale", 0.1))


def _turns(text: Given, layers: int) -> tuple[bool, ...]:
    listed = text.get("no_rope_layers")  # 1 for a layer that turns
    if not listed:
        interval = text.whole("no_rope_layer_interval", 4)
        return tuple((layer + 1) % interval != 0 for layer in range(layers))
    if not isinstance(listed, list) or len(listed) < layers or not all(turns in (0, 1) for turns in listed):
        raise text.wrong("no_rope_layers", f"{layers} of 0 and 1", listed)
    return tuple(map(bool, listed[:layers]))


def _stretches(text: Given, turns: tuple[bool, ...]) -> tuple[int | None, ...]:
    kinds = text.get("layer_types") or [_KINDS[0] if turned else _KINDS[1] for turned in turns]
    if not isinstance(kinds, list) or len(kinds) != len(turns) or not all(kind in _KINDS for kind in kinds):
        raise text.wrong("layer_types", f"{len(turns)} of {' and '.join(_KINDS)}", kinds)
    stretch = text.whole("attention_chunk_size", 8192)
    return tuple(stretch if kind == _KINDS[0] else None for kind in kinds)


def _mixtures(text: Given, layers: int) -> frozenset[int]:
    listed = text.get("moe_layers")
    if listed is None:
        step = text.whole("interleave_moe_layer_step", 1)
        return frozenset(range(step - 1, layers, step))
    if not isinstance(listed, list) or not all(type(layer) is int for layer in listed):
        raise text.wrong("moe_layers", "a list of the numbers of layers", listed)
    return frozenset(listed)
