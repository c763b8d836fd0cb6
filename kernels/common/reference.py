"""Every kernel in plain torch: faster kernels are tested against these, and these run everywhere.

A layer's cache is one tensor of blocks in two halves each, [2 * blocks, block_size, kv_dim], or, in int8 and with
the scales of a vector's heads behind its numbers, [2 * blocks, block_size, bytes] (architectures/kv_dtype.py):

    half     0      1      2      3      4      5    ...
           K of   V of   K of   V of   K of   V of
           blk. 0 blk. 0 blk. 1 blk. 1 blk. 2 blk. 2

A token's place is a slot = half * block_size + offset; its V lies block_size slots after its K. A request fills a block
from offset 0 on, or as spans.py says. A slot that was never written may hold anything, NaN included: it is never read.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor

from alignedserve.architectures.routing import Routing
from alignedserve.core import Sampling
from alignedserve.kernels.common import drawing
from alignedserve.kernels.common.adapters import StepAdapters
from alignedserve.kernels.common.blocked import BlockedWeight
from alignedserve.kernels.common.decoder import Angles, Decoder, Heads, Inner, Layer, Norm, Sums
from alignedserve.kernels.common.drawing import Likeliest
from alignedserve.kernels.common.experts import ExpertWeights, add_experts, route
from alignedserve.kernels.common.int8_kv import dequantise_vectors, heads_written, keeps_int8, quantise_vectors
from alignedserve.kernels.common.linear import Linear
from alignedserve.kernels.common.placing import on_device
from alignedserve.kernels.common.quantised import AnyQuantised, Fp8Weight, PanelLinear, QuantisedLinear, QuantisedWeight
from alignedserve.kernels.common.scoring import Scoring
from alignedserve.kernels.common.spans import Spans, TextRows

LEVELS = 255  # between the least and the most of int8
TINY_STEP, ENLARGE = 2.0**-100, 2.0**64
LARGEST = torch.finfo(torch.float32).max


class Reference:
    name = "torch reference"

    @property
    def captures(self) -> bool:
        """Return whether a step of decodes may be captured and replayed: all that it reads is on the device."""
        return False

    @property
    def captures_latent(self) -> bool:
        """Return the same of models with compressed vectors."""
        return False

    @property
    def captures_experts(self) -> bool:
        """Return whether all experts of a layer run at once, without a wait to learn which of them run."""
        return False

    @property
    def captures_adapters(self) -> bool:
        """Return whether what adapters add can be captured: which rows have which adapter is read on the device."""
        return False

    @property
    def captures_draws(self) -> bool:
        """Return whether `draw_by` may be captured: it waits for nothing."""
        return False

    @property
    def long_chunk(self) -> int:
        """Return the tokens of a request from which on another library may attend for its chunks; 0 without one."""
        return 0

    @property
    def identity(self) -> str:
        return f"{self.name}, torch {torch.__version__}"

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """Return a layer with the weight [out, inputs] and the bias [out]; linear.py defines it."""
        return Linear(weight, bias)

    def layer(self, weight: Tensor | AnyQuantised, bias: Tensor | None, dtype: torch.dtype) -> Linear:
        """Return a layer with a weight of any kind."""
        match weight:
            case QuantisedWeight():
                return self.quantised(weight, bias, dtype)
            case Fp8Weight():
                return self.fp8(weight, bias, dtype)
            case _:
                return self.linear(weight, bias)

    def quantised(self, weight: QuantisedWeight, bias: Tensor | None, dtype: torch.dtype) -> QuantisedLinear:
        """Return a layer of a quantised weight, for rows of this dtype; quantised.py defines it."""
        return PanelLinear(weight, bias, None, dtype)

    def multiplies_fp8(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Return whether rows of this dtype are multiplied with 8-bit floats on this device."""
        return False

    def fp8(self, weight: Fp8Weight, bias: Tensor | None, dtype: torch.dtype) -> Linear:
        """Return a layer of a weight of 8-bit floats, expanded unless the device multiplies such floats."""
        return self.linear(weight.expanded().to(dtype), bias)

    def multiply(self, x: Tensor, weight: BlockedWeight, bias: Tensor | None, out: Tensor, adds: bool = False) -> None:
        """Write x W^T + b to `out` [rows, outputs], of x's dtype or fp32, or add it to what is there."""
        made = F.linear(x, weight.expanded().to(x.dtype), bias)
        if adds:
            out += made
        else:
            out.copy_(made)

    def route(self, logits: Tensor, routing: Routing, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the experts of each row and their shares, from its logits in fp32; experts.py defines it."""
        return route(logits, routing, bias)

    def add_experts(
        self, x: Tensor, experts: ExpertWeights, chosen: Tensor, shares: Tensor, out: Tensor | None = None
    ) -> Tensor:
        """Return what its experts make of each row of x, added to `out` where that is given; experts.py defines it."""
        return add_experts(x, experts, chosen, shares, out, self.silu_mul)

    def adapt(self, step: StepAdapters, layer: int, x: Tensor, out: Tensor) -> None:
        """Add to `out` [rows, outputs] what the step's adapters add to the layer of this number, from x."""
        for group, rows in zip(step.groups, step.indices, strict=True):
            adapter = group.weights.layers[layer]
            for part, added in () if adapter is None else adapter.added(x[rows]):
                own = out.narrow(1, part.first_out, part.outs)
                own[rows] += added

    def decoder(self, layers: Sequence[Layer], sums: Sums | None = None) -> Decoder | None:
        """Return what runs all layers in one call, where there is such; `sums`: those of several ranks."""
        return None

    def few_rows(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        norm: Norm | None = None,
        inner: Inner | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return x W^T + b of up to eight rows, contiguous like the weight and `out`: of the RMSNorm of x, with half of
        the outputs gating the others (`inner`), or added to `out`, where these are given."""
        if norm is not None and norm.weight is not None:
            x = self.rms_norm(x, norm.weight, norm.eps)
        made = F.linear(x, weight, bias)
        if inner is not None:
            made = self.silu_mul(made) if inner is Inner.SILU else self.gelu_mul(made)
        return made if out is None else out.add_(made)

    # --- Attention over paged blocks

    def write(self, cache: Tensor, spans: Spans, k: Tensor, v: Tensor) -> None:
        """Put the K and V vectors of the step's tokens, [rows, kv_dim], into their slots of a layer's cache."""
        vectors = cache.view(-1, cache.shape[-1])
        slots = spans.new_slots.to(cache.device)
        if keeps_int8(cache):
            heads = heads_written(cache, k.shape[1])
            k, v = quantise_vectors(k, heads), quantise_vectors(v, heads)
        vectors[slots] = k
        vectors[slots + cache.shape[1]] = v

    def rotate_and_write(self, cache: Tensor, spans: Spans, qkv: Tensor, heads: Heads, angles: Angles | None) -> Tensor:
        """Return queries [rows, heads, head_dim] from rows [rows, all heads * head_dim], and write K and V; where heads
        have norms and angles, queries and K are normed and rotated. The rows may be overwritten."""
        by_head = qkv.view(len(qkv), -1, heads.head_dim)
        query, k, v = by_head.split((heads.queries, heads.kv, heads.kv), dim=1)
        if heads.query_norm is not None and heads.k_norm is not None:
            query, k = self.rms_norm(query, heads.query_norm, heads.eps), self.rms_norm(k, heads.k_norm, heads.eps)
        if angles is not None:
            self.rotate(query, *angles)
            self.rotate(k, *angles)
        self.write(cache, spans, k.flatten(1), v.flatten(1))
        return query

    def attend_new(
        self, cache: Tensor, spans: Spans, qkv: Tensor, heads: Heads, angles: Angles | None, scoring: Scoring
    ) -> Tensor | None:
        """Do what `rotate_and_write` and `attend` do, in one kernel; return None where there is none, and then do
        nothing."""
        return None

    def attend(self, query: Tensor, cache: Tensor, spans: Spans, scoring: Scoring) -> Tensor:
        """Causal attention of each span's queries over its own tokens; query and result are [rows, heads, head_dim]."""
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        vectors, head_dim = cache.view(-1, cache.shape[-1]), query.shape[-1]
        rows = spans.rows.tolist()
        for span in range(len(spans)):
            of = slice(rows[span], rows[span + 1])
            slots = spans.slots(span).to(cache.device)
            k, v = (_by_head(vectors[each], head_dim, query.dtype) for each in (slots, slots + cache.shape[1]))
            out[of] = attend_to(query[of], k, v, scoring)
        return out

    def attend_latent(self, query: Tensor, cache: Tensor, spans: Spans, scale: float, rank: int) -> Tensor:
        """Causal attention of all heads to one compressed vector of each token: query [rows, heads, its size].

        The whole vector is a token's K and its first `rank` numbers are V, so the result is [rows, heads, rank].
        """
        out = torch.empty((*query.shape[:2], rank), dtype=query.dtype, device=query.device)
        rows = spans.rows.tolist()
        for span in range(len(spans)):
            of = slice(rows[span], rows[span + 1])
            kept = latent_vectors(cache, spans.slots(span))[:, None]
            out[of] = attend_to(query[of], kept, kept[..., :rank], Scoring(scale))
        return out

    def attend_texts(
        self, query: Tensor, k: Tensor, v: Tensor, texts: TextRows, scale: float, window: int | None = None
    ) -> Tensor:
        """Attention of whole texts in both directions, each over itself; all are [rows, heads, head_dim].

        With a window, a token sees those nearer than it, before and after.
        """
        parts, start = [], 0
        for length, same in groupby(texts.lengths):  # texts of one length, side by side, are one call
            count = len([*same])
            rows = slice(start, start + length * count)
            start = rows.stop
            q, its_k, its_v = (x[rows].unflatten(0, (count, length)).transpose(1, 2) for x in (query, k, v))
            mask = None if window is None or length <= window else _near(length, window, query.device)
            attended = F.scaled_dot_product_attention(q, its_k, its_v, attn_mask=mask, scale=scale)
            parts.append(attended.transpose(1, 2).flatten(0, 1))
        return torch.cat(parts) if parts else torch.empty_like(query)

    # --- Elementwise: each token by itself

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Return the RMSNorm over the last dimension of any shape; in fp32, rounded where transformers rounds.

        With a weight in fp32 the norm is rounded once, after the product.
        """
        wide = x.float()
        normed = wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
        return (weight * normed.to(weight.dtype)).to(x.dtype)

    def layer_norm(self, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], weight, bias, eps)

    def normed(self, x: Tensor, norm: Norm) -> Tensor:
        """Return a norm of either kind."""
        if norm.centred:
            return self.layer_norm(x, norm.weight, norm.bias, norm.eps)
        assert norm.weight is not None
        return self.rms_norm(x, norm.weight, norm.eps)

    def add_and_norm(self, x: Tensor, part: Tensor, norm: Norm, after: Norm | None = None) -> Tensor:
        """Add `part` to x in place, or the norm `after` of it, and return the norm of x; all are [rows, hidden]. Each
        step is rounded."""
        x += part if after is None else self.normed(part, after)
        return self.normed(x, norm)

    def rotate(self, heads: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Apply rotary positions in place: heads [rows, heads, head_dim], cos and sin [rows, rotary_dim / 2] in fp32.

        The halves of the first rotary_dim of a head's vector are the two axes of each rotation; the rest stays. cos and
        sin are rounded to the vectors' dtype first, as transformers does.
        """
        half = cos.shape[-1]
        cos, sin = cos[:, None].to(heads.dtype), sin[:, None].to(heads.dtype)
        left, right = heads[..., :half].clone(), heads[..., half : 2 * half].clone()
        heads[..., :half] = left * cos - right * sin
        heads[..., half : 2 * half] = right * cos + left * sin

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """Return silu of the left half of each row, times its right half."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        """Return gelu, approximated by tanh, of the left half of each row, times its right half."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.gelu(gate, approximate="tanh") * up

    def gelu(self, x: Tensor) -> Tensor:
        """Return gelu of each number; x may be overwritten."""
        return F.gelu(x)

    # --- From logits to tokens: drawing.py

    def allow(self, logits: Tensor, rows: Sequence[int], masks: Sequence[Tensor]) -> None:
        """Set to -inf, in each of these rows, the tokens that its mask forbids: [vocabulary] of bool, on the CPU."""
        for row, mask in zip(rows, masks, strict=True):
            logits[row].masked_fill_(~on_device(mask, logits.device), -torch.inf)

    def draw(self, logits: Tensor, wishes: Sequence[Sampling], numbers: Sequence[float]) -> Tensor:
        """Return a token of each row, [rows]; NONE where no token is possible. The logits are overwritten."""
        return drawing.draw(logits, wishes, numbers)

    def draw_by(self, logits: Tensor, table: Tensor, out: Tensor) -> None:
        """Write to `out` what `draw` returns, by a table on the device (`drawing.table_of`). Rows that are greedy keep
        their logits."""
        *of, numbers = table.tolist()
        wishes = [Sampling(t, int(k), p, min_p=least) if t else Sampling() for t, k, p, least in zip(*of, strict=True)]
        out.copy_(drawing.draw(logits, wishes, numbers))

    def logprobs(self, logits: Tensor, tokens: Tensor, tops: Sequence[int]) -> Likeliest:
        """Return the log-probabilities of a token of each row, [rows], and of its likeliest `tops`."""
        return drawing.logprobs(logits, tokens, tops)

    # --- Between the device and pages

    def gather(self, cache: Tensor, slots: Tensor, out: Tensor) -> None:
        """Copy the vectors of all layers at these slots to `out`: K at the slot, V half a block later.

        The cache is [layers, 2 * blocks, block_size, kv_dim]; `out` is [layers, 2, tokens, kv_dim] and may be a strided
        view of a page. Between a GPU and the CPU's memory the copy may still run when this returns, as in `scatter`:
        `devices.finish` waits for it.
        """
        vectors = cache.view(len(cache), -1, cache.shape[-1])
        both = torch.stack((slots, slots + cache.shape[2])).to(cache.device)
        out.copy_(vectors[:, both])

    def scatter(self, cache: Tensor, slots: Tensor, rows: Tensor) -> None:
        """Copy rows [layers, 2, tokens, kv_dim] to the slots: the inverse of `gather`."""
        vectors = cache.view(len(cache), -1, cache.shape[-1])
        both = torch.cat((slots, slots + cache.shape[2])).to(cache.device)
        vectors.index_copy_(1, both, rows.to(cache.device).reshape(len(cache), -1, cache.shape[-1]))

    def gather_and_sum(self, cache: Tensor, slots: Tensor, out: Tensor) -> int:
        """Copy as `gather` does on a CPU, and return the CRC-32 of the vectors in `out`, in their order."""
        self.gather(cache, slots, out)
        return self.crc32(bytes_of(out))

    def scatter_and_sum(self, cache: Tensor, slots: Tensor, rows: Tensor) -> int:
        """Copy as `scatter` does on a CPU, and return the CRC-32 of the rows."""
        self.scatter(cache, slots, rows)
        return self.crc32(bytes_of(rows))

    def crc32(self, rows: Tensor) -> int:
        """Return the CRC-32, as zlib has it, of rows of bytes on the CPU, one after the other."""
        crc = 0
        for row in rows:
            crc = zlib.crc32(row.numpy().data, crc)
        return crc

    # --- int8, per channel

    def quantise(self, rows: Tensor, q: Tensor, least: Tensor, step: Tensor) -> None:
        """Quantise rows [groups, tokens, channels] to uint8 `q` of that shape: x is about least + step * q.

        least and step are fp32, [groups, channels]: each channel of a group has its own.

        x and the restored number differ by half a step at most, rounding aside, for any finite numbers: a constant
        channel has step 0 and is restored exactly, a range larger than any finite number does not overflow, denormal
        numbers count. Where a number is not finite, int8 has no place for it: its channel's step is not finite either,
        and the other outputs are undefined.
        """
        wide = rows.float()
        low, high = wide.amin(1), wide.amax(1)
        apart = (high * 0.5 - low * 0.5) / (LEVELS * 0.5)
        # Halved, since the range may be infinite; enlarged where the step is tiny, since its inverse may be infinite.
        by = torch.where(apart < TINY_STEP, ENLARGE, 0.5) * (apart > 0)
        inverse = torch.where(apart > 0, 1 / (apart * by), 0.0)
        q.copy_(((wide * by[:, None] - (low * by)[:, None]) * inverse[:, None]).round().clamp(0, LEVELS))
        least.copy_(low)
        step.copy_(apart)

    def dequantise(self, q: Tensor, least: Tensor, step: Tensor, out: Tensor) -> None:
        """Write least + step * q to `out` [groups, tokens, channels], rounded to its dtype."""
        half_way = step[:, None] * (q.float() * 0.5)  # added in two steps, so that no sum overflows
        out.copy_((least[:, None] + half_way + half_way).clamp(-LARGEST, LARGEST))

    def expand(self, cache: Tensor, slots: Tensor, q: Tensor, least: Tensor, step: Tensor) -> None:
        """Dequantise a page into the slots: q [layers, 2, tokens, kv_dim], least and step [layers, 2, kv_dim]."""
        rows = torch.empty(q.shape, dtype=cache.dtype, device=q.device)
        self.dequantise(q.flatten(0, 1), least.flatten(0, 1), step.flatten(0, 1), rows.flatten(0, 1))
        self.scatter(cache, slots, rows)


def bytes_of(rows: Tensor) -> Tensor:
    """Return the bytes of vectors [layers, 2, tokens, kv_dim], where those of a layer's K or V lie side by side, as a
    row for each layer's K and V."""
    return rows.flatten(0, 1).flatten(1).view(torch.uint8)


def latent_vectors(cache: Tensor, slots: Tensor) -> Tensor:
    """Return the compressed vectors of these slots, [tokens, size]."""
    vectors, slots = cache.view(-1, cache.shape[-1]), slots.to(cache.device)
    return torch.cat((vectors[slots], vectors[slots + cache.shape[1]]), dim=1)


def _near(tokens: int, window: int, device: torch.device) -> Tensor:
    places = torch.arange(tokens, device=device)
    return (places[:, None] - places).abs() < window


def _by_head(vectors: Tensor, head_dim: int, dtype: torch.dtype) -> Tensor:
    if keeps_int8(vectors):
        return dequantise_vectors(vectors, head_dim).to(dtype)
    return vectors.view(len(vectors), -1, head_dim)


def attend_to(query: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
    """Return the attention of a request's last tokens, [queries, heads, head_dim], to K and V of all its tokens."""
    queries, tokens = query.shape[0], k.shape[0]
    mask = torch.ones(queries, tokens, dtype=torch.bool, device=query.device).tril(tokens - queries)
    if scoring.window is not None:
        mask = mask.triu(tokens - queries - scoring.window + 1)
    if scoring.stretch is not None:
        stretches = torch.arange(tokens, device=query.device) // scoring.stretch
        mask &= stretches == stretches[tokens - queries :, None]
    q, k, v = (x.transpose(0, 1)[None] for x in (query, k, v))
    grouped = q.shape[1] != k.shape[1]
    if scoring.is_usual:
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scoring.scale, enable_gqa=grouped)
        return attended[0].transpose(0, 1)
    group = q.shape[1] // k.shape[1]
    k, v = (x[0].repeat_interleave(group, 0).float() for x in (k, v))
    weights = _weights(q[0].float() @ k.transpose(1, 2) * scoring.scale, mask, scoring)
    return (weights @ v).transpose(0, 1).to(query.dtype)


def _weights(scores: Tensor, mask: Tensor, scoring: Scoring) -> Tensor:
    """Return each token's weight from scaled products [heads, queries, tokens]."""
    heads, queries, tokens = scores.shape
    if scoring.softcap is not None:
        scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
    scores = scores.masked_fill(~mask, -torch.inf)
    if scoring.sinks is not None:
        scores = torch.cat((scores, scoring.sinks[:, None, None].expand(heads, queries, 1)), 2)
    return scores.softmax(-1)[..., :tokens]
