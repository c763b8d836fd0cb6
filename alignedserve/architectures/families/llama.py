"""The Llama family: Llama 1 to 3 and Yi, Mistral, Qwen2, Qwen3; they differ in biases, norms of q and k, windows.

Models of other names compute alike and differ more: mixtures, Gemma and Phi-3, whose files are beside this one, and GLM
below.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from alignedserve.architectures.config import Activation, check_silu, common, heads_of_k
from alignedserve.architectures.given import Given
from alignedserve.architectures.rope import THETA, Rope, positions_of_short, read_rope, rope_section
from alignedserve.architectures.routing import ExpertNames, MixtureConfig, Routing, Scores, Stack

LAYER_TYPES = ("full_attention", "sliding_attention")


@dataclass(frozen=True, kw_only=True)
class LayerNames:
    """The names in the files of those parts of a layer that some families name otherwise, or lack."""

    qkv: str | None = None  # one weight of query, key and value; None: they have one each
    gate_up: str | None = None  # one weight of gate and up; None: they have one each
    mlp: str = "mlp"
    mlp_norm: str = "post_attention_layernorm"
    after_attention: str | None = None  # the norm of what attention adds; None: there is none
    after_mlp: str | None = None  # the norm of what the MLP adds; None: there is none


@dataclass(frozen=True)
class Temperature:
    """A query is multiplied with 1 + weight * log(1 + position // tokens), the first position being 1."""

    tokens: int
    weight: float


@dataclass(frozen=True, kw_only=True)
class LlamaConfig(MixtureConfig):
    prefix: str = "model"  # of all names of tensors but the head's
    head: str = "lm_head"
    names: LayerNames = LayerNames()
    norm_eps: float
    rope: Rope
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # norms of each head's query and key before they are turned
    qk_norm_is_wide: bool = False  # whether one norm goes over all heads together
    has_sinks: bool = False  # whether each head has a score beside those of tokens
    local_rope: Rope | None = None  # of layers with a window; None: they turn as the others
    turns_neighbours: bool = False  # whether in the files neighbours among a head's numbers turn together
    still: frozenset[int] = frozenset()  # layers whose heads do not turn
    temperature: Temperature | None = None  # of those layers
    are_turned_of_one: bool = False  # whether heads that turn have the length one then, by root mean square
    score_cap: float | None = None  # of attention
    logit_cap: float | None = None
    activation: Activation = Activation.SILU  # of the gate of a dense MLP
    norms_lack_one: bool = False  # whether the files have the weights of norms less one
    embedding_factor: float = 1.0

    @property
    def copies_kv(self) -> bool:
        return not self.qk_norm_is_wide  # a sum over all ranks would count a head several times

    @property
    def ropes(self) -> tuple[Rope, ...]:
        return (self.rope,) if self.local_rope is None else (self.rope, self.local_rope)

    @property
    def has_kernel(self) -> bool:
        """Return whether a kernel may run all layers: none has norms over all heads, or turns some layers alone."""
        return not (self.qk_norm_is_wide or self.still or self.are_turned_of_one)

    def rope_of(self, layer: int) -> int:
        """Return which of the ropes turn the heads of a layer."""
        return int(self.local_rope is not None and self.window(layer) is not None)


def read_llama(given: Given) -> LlamaConfig:
    bias = given.flag("attention_bias")
    return read_family(given, qkv_bias=bias, out_bias=bias, mlp_bias=given.flag("mlp_bias"))


def read_mistral(given: Given) -> LlamaConfig:
    """Read a Mistral; missing keys for the window and the K and V heads take the values of transformers."""
    window = given.get("sliding_window", 4096)
    windows = () if window is None else (given.whole("sliding_window", 4096),) * given.whole("num_hidden_layers")
    return read_family(given, kv_heads=8, windows=windows)


def read_qwen2(given: Given) -> LlamaConfig:
    return read_family(given, kv_heads=32, windows=_qwen_windows(given), qkv_bias=True)


def read_qwen3(given: Given) -> LlamaConfig:
    bias = given.flag("attention_bias")
    windows = _qwen_windows(given)
    return read_family(given, kv_heads=32, head_dim=128, windows=windows, qkv_bias=bias, out_bias=bias, qk_norm=True)


def _qwen_windows(given: Given) -> tuple[int | None, ...]:
    layers = given.whole("num_hidden_layers")
    window = given.whole("sliding_window", 4096) if given.flag("use_sliding_window") else None
    if given.has("sliding_window") and given.get("sliding_window") is None:
        window = None
    types = given.get("layer_types")
    if types is None:
        first = given.get("max_window_layers", 28)
        if type(first) is not int:
            raise given.wrong("max_window_layers", "a whole number", first)
        types = ["full_attention" if layer < first else "sliding_attention" for layer in range(layers)]
        types = types if window is not None else ["full_attention"] * layers
    windows = by_type(given, layers, types, window)
    if window is None and "sliding_attention" in types:
        raise given.wrong("layer_types", "full_attention where use_sliding_window is false", types)
    return () if window is None else windows


def by_type(given: Given, layers: int, types: object, window: int | None) -> tuple[int | None, ...]:
    """Return the window of each layer, by the types of all layers."""
    if not isinstance(types, list) or len(types) != layers or not all(kind in LAYER_TYPES for kind in types):
        raise given.wrong("layer_types", f"{layers} of {' and '.join(LAYER_TYPES)}", types)
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def read_family(
    given: Given,
    *,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    windows: tuple[int | None, ...] = (),
    qkv_bias: bool = False,
    out_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
    qk_norm_is_wide: bool = False,
    turned_share: float | None = None,
) -> LlamaConfig:
    """Read a model of the family. `kv_heads` and `head_dim` hold where their keys are missing, but not where null.

    `turned_share` of a head's numbers turn, where the section of rotary positions does not say; None: all must turn.
    """
    known, rope = common(given), rope_section(given)
    heads = known["num_heads"]
    share = known["hidden_size"] // heads
    kv_heads = heads_of_k(given, heads, heads if given.has("num_key_value_heads") else kv_heads or heads)
    head_dim = given.whole("head_dim", share if given.has("head_dim") else head_dim or share)
    if head_dim % 2:
        raise given.wrong("head_dim", "even", head_dim)
    check_silu(given)
    turned = read_rope(given, rope, given.number("rope_theta", THETA), head_dim, turned_share, is_short=True)
    known["max_positions"] = min([known["max_positions"], *positions_of_short(given)])
    if turned.dim % 2:
        raise given.unsupported(f"partial_rotary_factor {rope.get('partial_rotary_factor')}")
    return LlamaConfig(
        **known,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        windows=windows,
        intermediate_size=given.whole("intermediate_size"),
        norm_eps=given.number("rms_norm_eps"),
        rope=turned,
        tied_embeddings=given.flag("tie_word_embeddings"),
        qkv_bias=qkv_bias,
        out_bias=out_bias,
        mlp_bias=mlp_bias,
        qk_norm=qk_norm,
        qk_norm_is_wide=qk_norm_is_wide,
    )


_ENDS = frozenset({151_329, 151_336, 151_338})
_NAMES = LayerNames(gate_up="gate_up_proj")


def read_glm(given: Given) -> LlamaConfig:
    share = given.number("partial_rotary_factor", 0.5)
    bias = given.flag("attention_bias", True)
    config = read_family(given, kv_heads=2, head_dim=128, qkv_bias=bias, turned_share=share)
    return replace(config, names=_NAMES, turns_neighbours=True, eos_tokens=config.eos_tokens or _ENDS)


def read_glm4(given: Given) -> LlamaConfig:
    """Read a GLM-4-0414, where what attention and MLP add goes through a norm."""
    names = replace(_NAMES, after_attention="post_self_attn_layernorm", after_mlp="post_mlp_layernorm")
    return replace(read_glm(given), names=names)


_THETA = 500_000.0
_KINDS = ("chunked_attention", "full_attention")
_LLAMA4_NAMES = LayerNames(mlp="feed_forward")
_EXPERTS = ExpertNames(
    router="feed_forward.router", experts="feed_forward.experts", shared="feed_forward.shared_expert"
)


def read_llama4(given: Given, reads_images: bool = False) -> LlamaConfig:
    """Read the model; of one that reads images too only the text part.

    Layers that turn read stretches of the request, the others all of it. A layer whose heads do not turn tells
    positions by nothing but what it reads. There the queries of late positions may be multiplied with a factor above
    one, so that attention stays as sharp among more tokens.
    """
    text, prefix = (given.text, "language_model.") if reads_images else (given, "")
    known, head_dim = common(given, text), text.whole("head_dim", 128)
    layers, heads = known["num_layers"], known["num_heads"]
    check_silu(text)
    turns, expert, bias = _turns(text, layers), text.whole("intermediate_size", 8192), text.flag("attention_bias")
    return LlamaConfig(
        prefix=f"{prefix}model",
        head=f"{prefix}lm_head",
        names=_LLAMA4_NAMES,
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


def read_phi3(given: Given) -> LlamaConfig:
    layers, has_window = given.whole("num_hidden_layers"), given.get("sliding_window") is not None
    windows = (given.whole("sliding_window"),) * layers if has_window else ()
    config = read_family(given, windows=windows, turned_share=given.number("partial_rotary_factor", 1.0))
    return replace(config, names=LayerNames(qkv="qkv_proj", gate_up="gate_up_proj"))
