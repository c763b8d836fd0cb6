"""OPT: learned positions; LayerNorm before each block, or after it as in the 350m."""

from __future__ import annotations

from dataclasses import dataclass

from alignedserve.architectures.config import Activation, OurConfig, activation, common, whole_head
from alignedserve.architectures.given import Given


@dataclass(frozen=True, kw_only=True)
class OptConfig(OurConfig):
    embedding_dim: int  # size of word vectors; projected to hidden_size, and back for the logits, where it differs
    norm_first: bool
    final_norm: bool
    bias: bool
    affine_norm: bool
    activation: Activation

    @property
    def inner_size(self) -> int:
        return 2 * self.intermediate_size


def read_opt(given: Given) -> OptConfig:
    known, head_dim = common(given), whole_head(given)
    norm_first = given.flag("do_layer_norm_before", True)
    return OptConfig(
        **known,
        num_kv_heads=known["num_heads"],
        head_dim=head_dim,
        intermediate_size=given.whole("ffn_dim"),
        embedding_dim=given.whole("word_embed_proj_dim", known["hidden_size"]),
        norm_first=norm_first,
        final_norm=norm_first and not given.flag("_remove_final_layer_norm"),
        bias=given.flag("enable_bias", True),
        affine_norm=given.flag("layer_norm_elementwise_affine", True),
        activation=activation(given, "activation_function", "relu"),
        tied_embeddings=given.flag("tie_word_embeddings", True),
    )
