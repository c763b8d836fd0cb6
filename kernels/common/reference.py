"""What every kernel means, in plain torch: the fastest kernels are tested against these, and it runs everywhere.

A layer's cache is one tensor of vector blocks in adjacent pairs, [2 * pairs, block_size, kv_dim]:

    block    0      1      2      3      4      5    ...
           K of   V of   K of   V of   K of   V of
           pair 0 pair 0 pair 1 pair 1 pair 2 pair 2

A token's place is a slot = block * block_size + offset; its V lies block_size slots after its K. A request fills a pair
from its left end, the first token at offset 0, or from its right end, the first at block_size - 1. A slot that nobody
has written may hold anything, NaN included: it is never read.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from alignedserve.errors import NotFinite
from alignedserve.kernels.common import drawing
from alignedserve.kernels.common.decoder import Decoder, DecoderLayer
from alignedserve.kernels.common.drawing import Likeliest, Wish
from alignedserve.kernels.common.linear import Linear
from alignedserve.kernels.common.spans import Spans

LEVELS = 255  # between the least and the most of int8
TINY_STEP, ENLARGE = 2.0**-100, 2.0**64
LARGEST = torch.finfo(torch.float32).max


class Reference:
    name = "torch reference"

    @property
    def captures(self) -> bool:
        """Whether a step of decodes may be captured and replayed: all that it reads is on the device."""
        return False

    @property
    def identity(self) -> str:
        return f"{self.name}, torch {torch.__version__}"

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
        """A layer with the weight [out, inputs] and the bias [out]; what it is stands in linear.py."""
        return Linear(weight, bias)

    def decoder(self, layers: Sequence[DecoderLayer]) -> Decoder | None:
        return None

    # --- Attention over paged blocks

    def write(self, cache: torch.Tensor, spans: Spans, k: torch.Tensor, v: torch.Tensor) -> None:
        """Put the K and V vectors of the step's tokens, [rows, kv_dim], into their slots of a layer's cache."""
        vectors = cache.view(-1, cache.shape[-1])
        slots = spans.new_slots.to(cache.device)
        vectors[slots] = k
        vectors[slots + cache.shape[1]] = v

    def attend(
        self, query: torch.Tensor, cache: torch.Tensor, spans: Spans, scale: float, window: int | None = None
    ) -> torch.Tensor:
        """Causal attention of each span's queries over its own tokens; query and result are [rows, heads, head_dim].

        With a window a query sees so many tokens, itself included.
        """
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        head_dim = query.shape[-1]
        vectors = cache.view(-1, cache.shape[-1] // head_dim, head_dim)
        rows = spans.rows.tolist()
        for span in range(len(spans)):
            of = slice(rows[span], rows[span + 1])
            slots = spans.slots(span).to(cache.device)
            out[of] = _attend(query[of], vectors[slots], vectors[slots + cache.shape[1]], scale, window)
        return out

    # --- Hidden vectors, which take single blocks: those of a token lie in one slot, its first numbers

    def write_hidden(self, cache: torch.Tensor, slots: torch.Tensor, vectors: torch.Tensor) -> None:
        """Put vectors, [tokens, hidden_size] with hidden_size <= kv_dim, into these slots of a layer's cache."""
        cache.view(-1, cache.shape[-1])[slots.to(cache.device), : vectors.shape[-1]] = vectors

    def read_hidden(self, cache: torch.Tensor, slots: torch.Tensor, hidden_size: int) -> torch.Tensor:
        """The way back: [tokens, hidden_size]."""
        return cache.view(-1, cache.shape[-1])[slots.to(cache.device), :hidden_size]

    # --- What is done to each token by itself

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Over the last dimension, of any shape; in fp32, rounded where transformers rounds."""
        wide = x.float()
        return weight * (wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt()).to(x.dtype)

    def add_rms_norm(self, x: torch.Tensor, more: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x += more, in place; then its norm."""
        x += more
        return self.rms_norm(x, weight, eps)

    def layer_norm(
        self, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
    ) -> torch.Tensor:
        return F.layer_norm(x, x.shape[-1:], weight, bias, eps)

    def add_layer_norm(
        self, x: torch.Tensor, more: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
    ) -> torch.Tensor:
        """x += more, in place; then its norm."""
        x += more
        return self.layer_norm(x, weight, bias, eps)

    def rotate(self, heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
        """Rotary positions, in place: heads [rows, heads, head_dim], cos and sin [rows, rotary_dim / 2] in fp32.

        The halves of the first rotary_dim of a head's vector are the two axes of each rotation; the rest stays. cos and
        sin are rounded to the vectors' dtype first, as transformers does.
        """
        half = cos.shape[-1]
        cos, sin = cos[:, None].to(heads.dtype), sin[:, None].to(heads.dtype)
        left, right = heads[..., :half].clone(), heads[..., half : 2 * half].clone()
        heads[..., :half] = left * cos - right * sin
        heads[..., half : 2 * half] = right * cos + left * sin

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """silu of the left half of each row, times its right half."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    # --- From logits to tokens: drawing.py

    def draw(self, logits: torch.Tensor, wishes: Sequence[Wish], numbers: Sequence[float]) -> torch.Tensor:
        """A token of each row, [rows]; NONE where none is possible. The logits are changed on the way."""
        return drawing.draw(logits, wishes, numbers)

    def logprobs(self, logits: torch.Tensor, tokens: torch.Tensor, tops: Sequence[int]) -> Likeliest:
        """Of a token of each row, [rows], and of its likeliest `tops`."""
        return drawing.logprobs(logits, tokens, tops)

    # --- Between the device and pages

    def gather(self, cache: torch.Tensor, slots: torch.Tensor, out: torch.Tensor) -> None:
        """Vectors of all layers, cache [layers, 2 * pairs, block_size, kv_dim], at these slots: K where `slots` say and
        V a block later. To `out`, [layers, 2, tokens, kv_dim], which may be a strided view of a page.

        From a GPU to the CPU's memory they may be on their way when this returns, as in `scatter`: `devices.finish`."""
        vectors = cache.view(len(cache), -1, cache.shape[-1])
        both = torch.stack((slots, slots + cache.shape[2])).to(cache.device)
        out.copy_(vectors[:, both])

    def scatter(self, cache: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
        """The way back: rows [layers, 2, tokens, kv_dim] to the slots."""
        vectors = cache.view(len(cache), -1, cache.shape[-1])
        both = torch.cat((slots, slots + cache.shape[2])).to(cache.device)
        vectors.index_copy_(1, both, rows.to(cache.device).reshape(len(cache), -1, cache.shape[-1]))

    # --- int8, per channel

    def quantise(self, rows: torch.Tensor, q: torch.Tensor, least: torch.Tensor, step: torch.Tensor) -> None:
        """From rows [groups, tokens, channels] to uint8 `q` of that shape: x is about least + step * q, with least and
        step fp32, [groups, channels], each channel of a group by itself.

        x and what comes back differ by half a step at most, rounding aside, for any finite numbers: a channel that is
        constant has step 0 and comes back as it was, a range larger than any finite number does not overflow, and
        denormal numbers count. Numbers that are not finite raise NotFinite, since int8 has no place for them; nothing
        of what is written then may be used.
        """
        wide = rows.float()
        low, high = wide.amin(1), wide.amax(1)
        if not (low.isfinite() & high.isfinite()).all():
            raise NotFinite("numbers that are to be quantised are not finite: their page stays as it is")
        apart = (high * 0.5 - low * 0.5) / (LEVELS * 0.5)
        # Halved, since the range need not be finite; enlarged where the step is tiny, since its inverse need not be.
        by = torch.where(apart < TINY_STEP, ENLARGE, 0.5) * (apart > 0)
        inverse = torch.where(apart > 0, 1 / (apart * by), 0.0)
        q.copy_(((wide * by[:, None] - (low * by)[:, None]) * inverse[:, None]).round().clamp(0, LEVELS))
        least.copy_(low)
        step.copy_(apart)

    def dequantise(self, q: torch.Tensor, least: torch.Tensor, step: torch.Tensor, out: torch.Tensor) -> None:
        """least + step * q, rounded to the dtype of `out`, [groups, tokens, channels]."""
        half_way = step[:, None] * (q.float() * 0.5)  # in two steps, so that neither leaves the finite numbers
        out.copy_((least[:, None] + half_way + half_way).clamp(-LARGEST, LARGEST))

    def expand(
        self, cache: torch.Tensor, slots: torch.Tensor, q: torch.Tensor, least: torch.Tensor, step: torch.Tensor
    ) -> None:
        """To the slots, as `scatter`, what `dequantise` makes of a page: q [layers, 2, tokens, kv_dim], least and step
        [layers, 2, kv_dim]."""
        rows = torch.empty(q.shape, dtype=cache.dtype, device=q.device)
        self.dequantise(q.flatten(0, 1), least.flatten(0, 1), step.flatten(0, 1), rows.flatten(0, 1))
        self.scatter(cache, slots, rows)


def _attend(query: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int | None) -> torch.Tensor:
    queries, tokens = query.shape[0], k.shape[0]
    mask = torch.ones(queries, tokens, dtype=torch.bool, device=query.device).tril(tokens - queries)
    if window is not None:
        mask = mask.triu(tokens - queries - window + 1)
    q, k, v = (x.transpose(0, 1)[None] for x in (query, k, v))
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=grouped)[0].transpose(0, 1)
