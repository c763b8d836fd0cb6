"""GPT-NeoX (Pythia): part of each head turns; attention and MLP run side by side or one after the other."""

from __future__ import annotations

from dataclasses import dataclass

from alignedserve.architectures.config import Activation, OurConfig, activation, common, whole_head
from alignedserve.architectures.given import Given
from alignedserve.architectures.rope import THETA, Rope, read_rope, rope_section


@dataclass(frozen=True, kw_only=True)
class NeoxConfig(OurConfig):
    norm_eps: float
    rope: Rope
    parallel: bool  # attention and MLP read the same input
    attention_bias: bool
    activation: Activation

    @property
    def inner_size(self) -> int:
        return 2 * self.intermediate_size


def read_gpt_neox(given: Given) -> NeoxConfig:
    known, head_dim = common(given), whole_head(given)
    theta, share = given.number("rotary_emb_base", THETA), given.number("rotary_pct", 0.25)
    rope = rope_section(given)
    turned = read_rope(given, rope, theta, head_dim, share)
    if not 0 < turned.dim + turned.dim % 2 <= head_dim:  # numbers turn in pairs
        raise given.wrong("rotary_pct", f"a share of the head's {head_dim} numbers", share)
    return NeoxConfig(
        **known,
        num_kv_heads=known["num_heads"],
        head_dim=head_dim,
        intermediate_size=given.whole("intermediate_size"),
        norm_eps=given.number("layer_norm_eps", 1e-5),
        rope=turned,
        parallel=given.flag("use_parallel_residual", True),
        attention_bias=given.flag("attention_bias", True),
        activation=activation(given, "hidden_act", "gelu"),
        tied_embeddings=given.flag("tie_word_embeddings"),
    )
