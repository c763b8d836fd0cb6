"""Mixtures of experts whose attention is Llama's: Mixtral, Qwen, OLMoE, dots, GLM-4.5, MiniMax M2, gpt-oss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from alignedserve.architectures.families.deepseek import read_routing
from alignedserve.architectures.families.llama import LAYER_TYPES, LlamaConfig, by_type, read_family
from alignedserve.architectures.given import Given
from alignedserve.architectures.routing import Clamp, ExpertNames, Routing, Scores, Stack

_MIXTRAL = ExpertNames(
    router="block_sparse_moe.gate", experts="block_sparse_moe.experts", gate="w1", up="w3", down="w2"
)
_QWEN2 = ExpertNames(shared="mlp.shared_expert")


def read_mixtral(given: Given) -> LlamaConfig:
    config = read_family(given, kv_heads=8, windows=_windows(given, "sliding_attention"))
    routing = Routing(
        experts=given.whole("num_local_experts", 8),
        chosen=given.whole("num_experts_per_tok", 2),
        scores=Scores.SOFTMAX,
        is_normalised=True,
        names=_MIXTRAL,
    )
    return _with_experts(given, config, routing, config.intermediate_size)


def read_qwen2_moe(given: Given) -> LlamaConfig:
    config = read_family(given, kv_heads=16, windows=_qwen_windows(given, None), qkv_bias=given.flag("qkv_bias", True))
    routing = replace(_qwen_routing(given, experts=60, chosen=4), shared_is_gated=True, names=_QWEN2)
    shared = given.whole("shared_expert_intermediate_size", 5632)
    return _with_experts(given, config, routing, given.whole("moe_intermediate_size", 1408), shared)


def read_qwen3_moe(given: Given) -> LlamaConfig:
    bias, windows = given.flag("attention_bias"), _qwen_windows(given, "sliding_attention")
    config = read_family(given, kv_heads=4, windows=windows, qkv_bias=bias, out_bias=bias, qk_norm=True)
    routing = _qwen_routing(given, experts=128, chosen=8)
    return _with_experts(given, config, routing, given.whole("moe_intermediate_size", 768))


def read_dots1(given: Given) -> LlamaConfig:
    bias, windows = given.flag("attention_bias"), _windows(given, None)
    config = read_family(given, windows=windows, qkv_bias=bias, out_bias=bias, qk_norm=True)
    size, shared = given.whole("moe_intermediate_size", 1408), given.whole("n_shared_experts", 1)
    routing = read_routing(given, Scores.SIGMOID, normalises=False)
    return _with_experts(given, config, routing, size, size * shared)


def read_olmoe(given: Given) -> LlamaConfig:
    if given.get("clip_qkv") is not None:
        raise given.unsupported("clip_qkv")
    bias = given.flag("attention_bias")
    config = read_family(given, qkv_bias=bias, out_bias=bias, qk_norm=True, qk_norm_is_wide=True)
    return _with_experts(given, config, _qwen_routing(given, experts=64, chosen=8), config.intermediate_size)


def read_glm4_moe(given: Given) -> LlamaConfig:
    config = read_family(
        given,
        kv_heads=8,
        qkv_bias=given.flag("attention_bias"),
        qk_norm=given.flag("use_qk_norm"),
        turned_share=given.number("partial_rotary_factor", 0.5),
    )
    size, shared = given.whole("moe_intermediate_size", 1408), given.whole("n_shared_experts", 1)
    return _with_experts(given, config, read_routing(given, Scores.SIGMOID), size, size * shared)


def read_minimax_m2(given: Given) -> LlamaConfig:
    head_dim = given.whole("head_dim", 128)
    share = given.whole("rotary_dim", head_dim) / head_dim
    config = read_family(given, kv_heads=8, head_dim=128, qk_norm=True, qk_norm_is_wide=True, turned_share=share)
    routing = Routing(
        experts=given.whole("num_local_experts", 256),
        chosen=given.whole("num_experts_per_tok", 8),
        scores=Scores.SIGMOID,
        is_biased=True,
        is_normalised=True,
        names=replace(_MIXTRAL, bias="block_sparse_moe.e_score_correction_bias"),
    )
    return _with_experts(given, config, routing, config.intermediate_size)


def read_gpt_oss(given: Given) -> LlamaConfig:
    if not (given.get("rope_scaling") or given.get("rope_parameters")):
        raise given.unsupported("gpt_oss without rope_scaling")
    bias, layers = given.flag("attention_bias", True), given.whole("num_hidden_layers")
    windows = _windows(given, [LAYER_TYPES[1 - layer % 2] for layer in range(layers)])
    config = read_family(given, kv_heads=8, head_dim=64, windows=windows, qkv_bias=bias, out_bias=bias)
    routing = Routing(
        experts=given.whole("num_local_experts", 128),
        chosen=given.whole("num_experts_per_tok", 4),
        scores=Scores.SOFTMAX,
        is_normalised=True,
        has_biases=True,
        clamp=Clamp(limit=given.number("swiglu_limit", 7.0), slope=given.number("swiglu_alpha", 1.702)),
        stack=Stack.IN_TURN,
        names=ExpertNames(router="mlp.router"),
    )
    return _with_experts(given, replace(config, has_sinks=True), routing, config.intermediate_size)


def _qwen_routing(given: Given, experts: int, chosen: int) -> Routing:
    layers, step = range(given.whole("num_hidden_layers")), given.whole("decoder_sparse_step", 1)
    named = given.get("mlp_only_layers") or []
    if not isinstance(named, list) or not all(layer in layers for layer in named):
        raise given.wrong("mlp_only_layers", f"a list of layers below {len(layers)}", named)
    return Routing(
        experts=given.whole("num_experts", given.whole("num_local_experts", experts)),
        chosen=given.whole("num_experts_per_tok", chosen),
        scores=Scores.SOFTMAX,
        is_normalised=given.flag("norm_topk_prob"),
        dense_layers=frozenset(layer for layer in layers if layer in named or (layer + 1) % step),
    )


def _with_experts(given: Given, config: LlamaConfig, routing: Routing, size: int, shared: int = 0) -> LlamaConfig:
    if routing.chosen > routing.experts:
        raise given.wrong("num_experts_per_tok", f"at most the {routing.experts} experts of a layer", routing.chosen)
    return replace(config, routing=routing, expert_size=size, shared_size=shared)


def _qwen_windows(given: Given, usual: str | None) -> tuple[int | None, ...]:
    return _windows(given, usual) if given.flag("use_sliding_window") else ()


def _windows(given: Given, usual: str | Sequence[str] | None) -> tuple[int | None, ...]:
    """Return the window of each layer, by its type; `usual` is the type of all layers, or the types, where the file
    names none."""
    layers = given.whole("num_hidden_layers")
    if given.get("sliding_window") is None:
        return ()
    types = given.get("layer_types") or ([usual] * layers if isinstance(usual, str) else usual)
    return by_type(given, layers, types, given.whole("sliding_window"))
