"""DeepSeek V2 and V3 and models that compute attention like them: Kimi K2, Moonlight, GLM-4.7-Flash, Youtu.

Of each token they keep one compressed vector, from which K and V of all heads are made (multi-head latent attention):

    what K and V are made of (kv_lora_rank) │ the part of K that turns, which all heads share (qk_rope_head_dim)

Its first half lies in the place of K and its second half in the place of V: so `num_kv_heads` is 1, and `head_dim` is
half of the vector. All that counts or copies K and V needs to know no more.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log

from alignedserve.architectures.config import check_silu, common
from alignedserve.architectures.given import Given
from alignedserve.architectures.rope import THETA, Rope, read_rope, rope_section
from alignedserve.architectures.routing import MixtureConfig, Routing, Scores


@dataclass(frozen=True, kw_only=True)
class DeepseekConfig(MixtureConfig):
    norm_eps: float
    rope: Rope
    is_interleaved: bool  # whether two neighbours of the turning part rotate together, or numbers of its halves
    query_rank: int | None  # what queries are compressed to before they are made; None: they are not compressed
    kv_rank: int
    plain_dim: int  # the numbers of a head's query and K that do not turn
    value_dim: int  # the numbers of a head's V
    bias: bool

    @property
    def divided(self) -> tuple[str, ...]:
        return tuple(name for name in super().divided if name != "num_kv_heads")  # each rank has the whole vector

    @property
    def projects(self) -> bool:
        return False

    @property
    def latent_rank(self) -> int:
        return self.kv_rank

    @property
    def plain_numbers(self) -> int:
        of_layer = self.num_heads * (self.plain_dim + self.value_dim) * self.kv_rank
        return super().plain_numbers + self.num_layers * of_layer

    @property
    def _numbers_of_attention(self) -> int:
        read, of_query = self.query_rank or self.hidden_size, self.num_heads * (self.plain_dim + self.rope.dim)
        query = self.hidden_size * (self.query_rank or 0) + read * of_query
        of_head = self.kv_rank * (self.plain_dim + self.value_dim) + self.hidden_size * self.value_dim
        return query + self.hidden_size * (self.kv_rank + self.rope.dim) + self.num_heads * of_head

    @property
    def numbers_on_all_ranks(self) -> int:
        of_query = self.query_rank or 0
        return super().numbers_on_all_ranks + self.num_layers * self.hidden_size * (of_query + self.compared_dim)

    @property
    def why_not_hidden(self) -> str | None:
        if self.hidden_size <= self.compared_dim:
            return super().why_not_hidden
        return (
            f"a hidden vector has {self.hidden_size} numbers, and the compressed vector that this model keeps"
            f" of a token in place of K and V has {self.compared_dim}"
        )

    @property
    def why_not_int8(self) -> str | None:
        return "this model keeps a compressed vector of each token in place of K and V, which is not rounded to int8"


def read_deepseek_v2(given: Given) -> DeepseekConfig:
    if given.flag("norm_topk_prob"):
        raise given.unsupported("norm_topk_prob of DeepSeek V2")
    return _read(given, Scores.SOFTMAX)


def read_deepseek_v3(given: Given) -> DeepseekConfig:
    return _read(given, Scores.SIGMOID, is_interleaved=given.flag("rope_interleave", True))


def read_youtu(given: Given) -> DeepseekConfig:
    return _read(given, None, is_interleaved=given.flag("rope_interleave", True))


def _read(given: Given, scores: Scores | None, is_interleaved: bool = True) -> DeepseekConfig:
    """Read a model whose layers choose experts by these scores, or which has no experts."""
    known, section = common(given), rope_section(given)
    kv_rank, turned = given.whole("kv_lora_rank"), given.whole("qk_rope_head_dim")
    plain = given.whole("qk_nope_head_dim")
    for key, size in (("kv_lora_rank", kv_rank), ("qk_rope_head_dim", turned)):
        if size % 2:
            raise given.wrong(key, "even", size)
    check_silu(given)
    inner = given.whole("intermediate_size")
    expert = given.whole("moe_intermediate_size") if scores else 0
    return DeepseekConfig(
        **known,
        num_kv_heads=1,
        head_dim=(kv_rank + turned) // 2,
        scales=(_scale(section, plain + turned),) * known["num_layers"],
        intermediate_size=inner,
        norm_eps=given.number("rms_norm_eps", 1e-6),
        rope=read_rope(given, section, given.number("rope_theta", THETA), turned),
        is_interleaved=is_interleaved,
        query_rank=None if given.get("q_lora_rank") is None else given.whole("q_lora_rank"),
        kv_rank=kv_rank,
        plain_dim=plain,
        value_dim=given.whole("v_head_dim"),
        bias=given.flag("attention_bias"),
        tied_embeddings=given.flag("tie_word_embeddings"),
        routing=read_routing(given, scores) if scores else None,
        expert_size=expert,
        shared_size=expert * given.whole("n_shared_experts") if scores else 0,
    )


def _scale(rope: Given, head_dim: int) -> float:
    """Return the factor of the products of query and K; with longer positions it is larger where the file says so."""
    kind = rope.get("rope_type") or rope.get("type") or "default"
    scale: float = head_dim**-0.5
    if kind == "default" or not rope.get("mscale_all_dim") or rope.number("factor") <= 1:
        return scale
    return scale * (0.1 * rope.number("mscale_all_dim") * log(rope.number("factor")) + 1.0) ** 2


def read_routing(given: Given, scores: Scores, normalises: bool = True) -> Routing:
    """Read how tokens choose; `normalises` holds where the file does not say whether sigmoids are to sum to one."""
    is_grouped = scores is Scores.SIGMOID or given.word("topk_method", "greedy") == "group_limited_greedy"
    if scores is Scores.SOFTMAX and given.word("topk_method", "greedy") not in ("greedy", "group_limited_greedy"):
        raise given.unsupported(f"topk_method {given.get('topk_method')}")
    experts = given.whole("n_routed_experts")
    groups, chosen_groups = (given.whole(key, 1) if is_grouped else 1 for key in ("n_group", "topk_group"))
    if experts % groups:
        raise given.wrong("n_group", f"a divisor of n_routed_experts {experts}", groups)
    first = given.get("first_k_dense_replace", 0)
    if type(first) is not int or first < 0:
        raise given.wrong("first_k_dense_replace", "a whole number", first)
    return Routing(
        experts=experts,
        chosen=given.whole("num_experts_per_tok"),
        dense_layers=frozenset(range(first)),
        scores=scores,
        groups=groups,
        chosen_groups=chosen_groups,
        is_biased=scores is Scores.SIGMOID,
        is_normalised=scores is Scores.SIGMOID and given.flag("norm_topk_prob", normalises),
        factor=given.number("routed_scaling_factor", 1.0),
    )
