"""The time of a step on a GPU that nobody measured: a roofline, written as the grids that a measured GPU has.

A matrix product takes as long as reading its weights and as its arithmetic, at the shares of the peaks that kernels
reach; near the ridge the two add up like the sides of a right angle, as was measured on five GPUs. A kernel takes 3 µs
at least. Attention of decodes reads K and V; attention of prompts computes, each multiprocessor on tiles of 64 queries,
key after key. How steps of prompts and decodes, and unequal lengths, slow attention down follows from no data sheet:
these factors are those of a measured GPU, where the device does not give its own.
Quantised weights take fewer bytes and the arithmetic of bf16, at the same shares of the peaks: nobody measured that.
Nor did anybody measure mixtures, where a step reads the experts that its tokens choose and computes those of each
token, or latent attention, where all heads share what is kept: there attention of decodes computes for longer than it
reads, on some GPUs.

docs/how/simulate.md states how far this is from measured GPUs. Left out: the host's work, as in measured grids.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil, hypot
from typing import Any

from alignedserve.lab.devices.devices import Device
from alignedserve.lab.devices.gpu_truth import FORMAT

_KERNEL_US = 3.0  # measured: 2 to 5 µs for kernels that do next to nothing (LLMServingSim, Vidur)
_LAYER_KERNELS = 4  # beside the matrix products: two norms, positions, activation
_PREFILL_KERNELS, _DECODE_KERNELS = 3, 4  # of attention; decodes are computed in parts, which a kernel adds up
_TILE = 64  # queries
_WASTED = 32  # tokens: half of the last tile of a matrix product, on average
_BLOCK = 64  # tokens that a decode reads beyond the prefix, on average
_SAMPLER_US, _SAMPLER_READS = 20.0, 2  # reads of the logits, in fp32 (LLMServingSim)
_BF16, _FP32 = 2, 4  # bytes
_KILO, _MEGA = 1e3, 1e6

_TOKENS = sorted({size for power in range(15) for size in (1 << power, 3 << power >> 1)})
_CHUNKS = [_TILE << power for power in range(9)]
_FAR = 1 << 15  # tokens: times grow in a straight line with prefixes and with decodes, so the ends are enough
_MANY = 512


def profile(device: Device) -> dict[str, Any]:
    """Return the device's profile, without the factors that no data sheet tells."""
    times = Roofline(device)
    ends = [0, _FAR]
    return {
        "format": FORMAT,
        "about": {
            "gpu": device.gpu.name,
            "model": device.model.name,
            "tensor_parallel": device.ranks,
            "layers": device.model.layers,
            "source": "lab/devices/roofline.py",
        },
        "linear": _grid(times.linear_us, _TOKENS),
        "per_sequence": _grid(times.sampling_us, _TOKENS),
        "prefill": _grid(times.prefill_us, [1, *_CHUNKS], ends),
        "decode": _grid(times.decode_us, [1, _MANY], ends),
        "hidden_token_us": times.hidden_token_us,
        **({"all_reduce": device.all_reduce("devices.py")} if device.ranks > 1 else {}),
        **_unequal(device.gpu.unequal_share),
    }


def _unequal(share: float | None) -> dict[str, Any]:
    """Return by how much unequal prefixes slow attention down, where the device says so."""
    names = () if share is None else ("skew_decode", "skew_mixed")
    return {name: _grid(lambda *_: _KILO * (share or 0.0), [1, _MANY], [0, 1]) for name in names}


class Roofline:
    """The times of one rank, in microseconds."""

    def __init__(self, device: Device) -> None:
        gpu, self._model, self._ranks = device.gpu, device.model, device.ranks
        self._byte_us = 1 / (_KILO * gpu.bandwidth_gb_s * gpu.bandwidth_share)
        self._flop_us = 1 / (_MEGA * gpu.tflops * gpu.tflops_share)
        self._processors = gpu.processors
        self._attention_flop_us = gpu.processors / (_MEGA * gpu.tflops * gpu.attention_share)  # of one multiprocessor
        self._heads, self._kv_heads = self._model.heads / self._ranks, max(1, self._model.kv_heads / self._ranks)
        self._kv_bytes = _BF16 * self._model.kept(self._kv_heads)
        self._pair_flops = 2 * (self._model.compared + self._model.summed)  # of a head, for a query and a key

    def linear_us(self, tokens: float) -> float:
        """Return the time of all layers without attention, and of the embedding."""
        model, ffn = self._model, self._model.ffn_size / self._ranks
        attention = [
            self._product_us(tokens, *sizes, model.layer_byte) for sizes in model.attention(self._heads, self._kv_heads)
        ]
        dense = self._mlp_us(tokens, ffn)
        dense_us = sum((*attention, *dense)) + self._rest_us(tokens, ffn)
        once_us = (model.layers - model.mixtures) * dense_us + _KERNEL_US
        return once_us + model.mixtures * (sum(attention) + self._mixture_us(tokens)) if model.mixtures else once_us

    def _mlp_us(self, tokens: float, ffn: float) -> tuple[float, float]:
        model, hidden = self._model, self._model.hidden_size
        up_us = self._product_us(tokens, hidden, (1 + model.gated) * ffn, model.layer_byte)
        return up_us, self._product_us(tokens, ffn, hidden, model.layer_byte)

    def _mixture_us(self, tokens: float) -> float:
        """Return the time of a layer's experts, of what chooses them and of what all tokens take, and of the rest."""
        model, hidden = self._model, self._model.hidden_size
        ffn, shared = model.expert_size / self._ranks, model.shared_size / self._ranks
        rows, read = tokens * model.chosen, model.experts_read(tokens)
        experts_us = self._product_us(rows, hidden, (1 + model.gated) * ffn, model.layer_byte, read)
        experts_us += self._product_us(rows, ffn, hidden, model.layer_byte, read)
        router_us = self._product_us(tokens, hidden, model.experts or 0, _BF16)
        shared_us = sum(self._mlp_us(tokens, shared)) if shared else 0.0
        moved_us = _BF16 * 2 * hidden * rows * self._byte_us  # rows are taken to their experts, and summed up
        return experts_us + router_us + shared_us + moved_us + self._rest_us(tokens, model.chosen * ffn + shared)

    def _rest_us(self, tokens: float, ffn: float) -> float:
        """Return the time of a layer's norms, which read and write the hidden vectors and the residuals, of positions,
        which do so with queries and keys, and of the activation."""
        model = self._model
        numbers = self._heads * model.compared + model.kept(self._kv_heads) / 2
        channels = 8 * model.hidden_size + 2 * numbers + (2 + model.gated) * ffn
        return _LAYER_KERNELS * _KERNEL_US + _BF16 * channels * tokens * self._byte_us

    def sampling_us(self, requests: float) -> float:
        """Return the time of the output layer and of sampling."""
        model = self._model
        logits = _SAMPLER_READS * _FP32 * requests * model.vocabulary * self._byte_us
        head_us = self._product_us(requests, model.hidden_size, model.vocabulary / self._ranks, model.head_byte)
        return head_us + _SAMPLER_US + logits

    def prefill_us(self, length: float, cached: float) -> float:
        """Return the time of attention in a layer for a prompt chunk."""
        keys = cached + length / 2
        tiles = max(1.0, self._heads * ceil(length / _TILE) / self._processors)  # one after the other
        arithmetic_us = tiles * (keys + _TILE) * _TILE * self._pair_flops * self._attention_flop_us
        return _PREFILL_KERNELS * _KERNEL_US + max(arithmetic_us, keys * self._kv_bytes * self._byte_us)

    def decode_us(self, requests: float, prefix: float) -> float:
        """Return the time of attention in a layer for decodes of this prefix."""
        keys = requests * (prefix + _BLOCK)
        arithmetic_us = keys * self._heads * self._pair_flops * self._attention_flop_us / self._processors
        return _DECODE_KERNELS * _KERNEL_US + max(keys * self._kv_bytes * self._byte_us, arithmetic_us)

    @property
    def hidden_token_us(self) -> float:
        """Return the time to make K and V of a token, in all layers, from hidden vectors; 0 if these are larger."""
        model = self._model
        keys = self._kv_heads * model.head_dim
        return 4 * model.layers * model.hidden_size * keys * self._flop_us if model.hidden_size <= keys else 0.0

    def _product_us(self, rows: float, inputs: float, outputs: float, byte: float, matrices: float = 1) -> float:
        """Return the time to multiply rows, each with one of `matrices` matrices of this shape."""
        numbers, rows = inputs * outputs, rows + matrices * _WASTED
        return _KERNEL_US + hypot(byte * matrices * numbers * self._byte_us, 2 * rows * numbers * self._flop_us)


def _grid(time_us: Callable[..., float], *axes: Sequence[float]) -> dict[str, Any]:
    return {"axes": [[*axis] for axis in axes], "values": _values(time_us, axes, ())}


def _values(time_us: Callable[..., float], axes: Sequence[Sequence[float]], sizes: tuple[float, ...]) -> Any:
    if not axes:
        return time_us(*sizes)
    return [_values(time_us, axes[1:], (*sizes, size)) for size in axes[0]]
