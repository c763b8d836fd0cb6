"""OPT: LayerNorms, an MLP without a gate, and vectors of positions that are added to those of tokens."""

from __future__ import annotations

from dataclasses import dataclass

from alignedserve.architectures.config import Activation, OurConfig, activation, common, whole_head
from alignedserve.architectures.given import Given


@dataclass(frozen=True, kw_only=True)
class OptConfig(OurConfig):
    norm_first: bool  # whether attention and the MLP read norms; else what each was added to goes through its norm
    norm_affine: bool  # whether norms have weights and biases
    final_norm: bool
    bias: bool  # of linear layers
    embedding_dim: int  # numbers of a token's vector, which may be fewer than layers have
    activation: Activation

    @property
    def inner_size(self) -> int:
        return 2 * self.intermediate_size


def read_opt(given: Given) -> OptConfig:
    """Read OPT; in the 350m norms come last, and the vectors of tokens are narrower than the layers."""
    known = common(given)
    norm_first = given.flag("do_layer_norm_before", True)
    return OptConfig(
        **known,
        norm_first=norm_first,
        num_kv_heads=known["num_heads"],
        head_dim=whole_head(given, known["hidden_size"], known["num_heads"]),
        intermediate_size=given.whole("ffn_dim"),
        embedding_dim=given.whole("word_embed_proj_dim", known["hidden_size"]),
        final_norm=norm_first and not given.flag("_remove_final_layer_norm"),
        norm_affine=given.flag("layer_norm_elementwise_affine", True),
        bias=given.flag("enable_bias", True),
        activation=activation(given, "activation_function", "relu"),
        tied_embeddings=given.flag("tie_word_embeddings", True),
    )
