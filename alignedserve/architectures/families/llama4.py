"""Llama 4's text part: layers that turn read stretches of the request, the others all of it; mixtures of experts.

A layer whose heads do not turn tells positions by nothing but what it reads. There the queries of late positions may be
multiplied with a factor above one, so that attention stays as sharp among more tokens.
"""

from __future__ import annotations

from alignedserve.architectures.config import check_silu, common, heads_of_k
from alignedserve.architectures.families.llama import LayerNames, LlamaConfig, Temperature
from alignedserve.architectures.given import Given
from alignedserve.architectures.rope import read_rope, rope_section
from alignedserve.architectures.routing import ExpertNames, Routing, Scores, Stack

_THETA = 500_000.0
_KINDS = ("chunked_attention", "full_attention")
_NAMES = LayerNames(mlp="feed_forward")
_EXPERTS = ExpertNames(
    router="feed_forward.router", experts="feed_forward.experts", shared="feed_forward.shared_expert"
)


def read_llama4(given: Given, reads_images: bool = False) -> LlamaConfig:
    """Read the model; of one that reads images too only the text part."""
    text, prefix = (given.text, "language_model.") if reads_images else (given, "")
    known, head_dim = common(given, text), text.whole("head_dim", 128)
    layers, heads = known["num_layers"], known["num_heads"]
    check_silu(text)
    turns, expert, bias = _turns(text, layers), text.whole("intermediate_size", 8192), text.flag("attention_bias")
    return LlamaConfig(
        prefix=f"{prefix}model",
        head=f"{prefix}lm_head",
        names=_NAMES,
        **known,
        num_kv_heads=heads_of_k(text, heads, heads if text.has("num_key_value_heads") else 8),
        head_dim=head_dim,
        tied_embeddings=text.flag("tie_word_embeddings"),
        stretches=_stretches(text, turns),
        intermediate_size=text.whole("intermediate_size_mlp", 16_384),
        expert_size=expert,
        shared_size=expert,
        routing=_routing(text, layers),
        norm_eps=text.number("rms_norm_eps", 1e-5),
        rope=read_rope(text, rope_section(text), text.number("rope_theta", _THETA), head_dim),
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
