"""The facts that the engine needs about every model, of any family."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from math import lcm
from types import MappingProxyType
from typing import Any

from alignedserve.architectures.given import Given
from alignedserve.architectures.kv_dtype import KvDtype
from alignedserve.architectures.stored_form import StoredForm, stored_form
from alignedserve.core import AttentionPattern, Fold
from alignedserve.errors import ConfigError, UnsupportedModel

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class Activation(str, Enum):
    RELU = "relu"
    GELU = "gelu"
    GELU_TANH = "gelu_tanh"  # the approximation of gelu by tanh
    QUICK_GELU = "quick_gelu"
    SILU = "silu"


# transformers has many names for one function; they differ only in its speed.
_ACTIVATIONS = {
    "relu": Activation.RELU,
    "gelu": Activation.GELU,
    "gelu_python": Activation.GELU,
    "gelu_new": Activation.GELU_TANH,
    "gelu_fast": Activation.GELU_TANH,
    "gelu_accurate": Activation.GELU_TANH,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "gelu_python_tanh": Activation.GELU_TANH,
    "quick_gelu": Activation.QUICK_GELU,
    "silu": Activation.SILU,
    "swish": Activation.SILU,
}


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The shapes of a model, for the engine and for planning. Families add what they alone need."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    dtype: str  # type of the stored weights, or of what is not quantised among them
    eos_tokens: frozenset[int]
    tied_embeddings: bool = False  # whether the output head is the table of embeddings
    windows: tuple[int | None, ...] = ()  # layer -> tokens that a query sees, itself included; (): all
    stretches: tuple[int | None, ...] = ()  # layer -> tokens of a stretch: a query sees no earlier one; (): all
    stored: StoredForm | None = None  # how linear layers are quantised already
    scales: tuple[float, ...] = ()  # layer -> factor of the products of query and K; (): the usual one
    generates: bool = True  # whether it writes text; else it makes vectors alone
    labels: int = 0  # numbers of its head for whole texts; 0: it has none
    kv_copies: int = 1  # ranks that have the same heads of K and V

    @property
    def kv_dim(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def keeps_kv(self) -> bool:
        """Return whether anything of a token is kept between two steps."""
        return True

    @property
    def query_dim(self) -> int:
        return self.num_heads * self.compared_dim

    def kv_bytes(self, tokens: int, dtype: str, kept: KvDtype = KvDtype.AUTO) -> int:
        """Return the bytes of K and V of `tokens` tokens in all layers, computed in `dtype` and kept as `kept`."""
        return self.num_layers * 2 * tokens * kept.vector_bytes(self.num_kv_heads, self.head_dim, DTYPE_BYTES[dtype])

    def step_bytes(self, tokens: int, batch: int, dtype: str) -> int:
        """Return about how many bytes a step takes beside weights and cache, with logits of `batch` requests."""
        numbers = 4 * self.hidden_size + 2 * self.query_dim + 2 * self.kv_dim + self.inner_size
        logits = self.vocab_size * (DTYPE_BYTES[dtype] + DTYPE_BYTES["float32"])
        return tokens * numbers * DTYPE_BYTES[dtype] + batch * logits

    def window(self, layer: int) -> int | None:
        return self.windows[layer] if self.windows else None

    def stretch(self, layer: int) -> int | None:
        return self.stretches[layer] if self.stretches else None

    def sight(self, layer: int) -> AttentionPattern | None:
        """Return which tokens this layer reads; None: all."""
        window, stretch = self.window(layer), self.stretch(layer)
        return None if window is None and stretch is None else AttentionPattern(window, stretch)

    @property
    def reach(self) -> int | None:
        """Return how many tokens back any layer reads, the newest included; None where some layer reads all."""
        windows = [window for window in self.windows if window is not None]
        return max(windows) if windows and len(windows) == len(self.windows) else None

    @property
    def fold(self) -> LayerFold | None:
        """Return how layers that read all take the room of layers with a window or stretches; None where that spares
        nothing."""
        if self.latent_rank is not None:
            return None
        return fold_of([self.sight(layer) for layer in range(self.num_layers)], self.max_positions)

    def scale(self, layer: int) -> float:
        return self.scales[layer] if self.scales else self.head_dim**-0.5

    @property
    def inner_size(self) -> int:
        """Return the size of the widest vector that is computed of a token between two layers."""
        return 4 * self.hidden_size

    @property
    def numbers(self) -> int:
        """Return about how many numbers its weights have, for plans without files of weights."""
        tables = (1 if self.tied_embeddings else 2) * self.vocab_size * self.hidden_size
        return tables + self.num_layers * self._numbers_of_attention + self._numbers_of_mlps

    @property
    def _numbers_of_attention(self) -> int:
        return 2 * self.hidden_size * (self.query_dim + self.kv_dim)

    @property
    def _numbers_of_mlps(self) -> int:
        return self.num_layers * self.hidden_size * self.inner_size

    @property
    def latent_rank(self) -> int | None:
        """Return how many numbers V has in a compressed vector (families/deepseek.py); None where K and V are kept."""
        return None

    @property
    def compared_dim(self) -> int:
        """Return the size of a head's query as attention compares it with what is kept."""
        return self.head_dim if self.latent_rank is None else 2 * self.head_dim

    @property
    def has_experts(self) -> bool:
        """Return whether tokens choose which parts of our module run."""
        return False

    @property
    def plain_numbers(self) -> int:
        """Return how many numbers of layers stay as they are where layers are quantised."""
        return 0

    @property
    def numbers_on_all_ranks(self) -> int:
        """Return how many numbers of layers each rank has, and not only a share of them."""
        return 0

    @property
    def projects(self) -> bool:
        """Return whether K and V can be made again from the layers' inputs."""
        return False

    @property
    def divided(self) -> tuple[str, ...]:
        """Return the fields that ranks divide among them; empty where ranks cannot share the model."""
        return ()

    @property
    def copies_kv(self) -> bool:
        """Return whether several ranks have the same heads of K and V where there are fewer heads than ranks."""
        return False

    def share(self, ranks: int) -> ModelConfig:
        """Return the model as one of `ranks` ranks has it: a share of the heads and of the inner size."""
        if ranks == 1:
            return self
        if not self.divided:
            raise ConfigError(
                f"engine.tensor_parallel_size {ranks} needs a model that AlignedServe implements itself: set it to 1"
            )
        copies = max(1, ranks // self.num_kv_heads) if self.copies_kv else 1
        sizes = {name: getattr(self, name) * (copies if name == "num_kv_heads" else 1) for name in self.divided}
        for name, size in sizes.items():
            if size % ranks:
                raise ConfigError(f"engine.tensor_parallel_size {ranks} does not divide the model's {name} {size}")
        return replace(self, kv_copies=copies, **{name: size // ranks for name, size in sizes.items()})

    @property
    def why_not_hidden(self) -> str | None:
        """Return why no request can be of the kind HIDDEN, with the arithmetic; None where it can."""
        if not self.projects:
            return "this model cannot compute K and V again from hidden vectors"
        if self.hidden_size > self.kv_dim:
            return (
                f"a hidden vector has {self.hidden_size} numbers and half a block holds {self.kv_dim} for a token:"
                f" {self.hidden_size} instead of {2 * self.kv_dim} for K and V together"
            )
        return None

    @property
    def why_not_int8(self) -> str | None:
        """Return why K and V cannot be kept in int8; None where they can."""
        if self.head_dim % 2:
            return (
                f"this model has heads of {self.head_dim} numbers, an odd number, and scales of 16 bits lie behind them"
            )
        return None


@dataclass(frozen=True, kw_only=True)
class OurConfig(ModelConfig):
    """The shapes of a model that a module of our own runs."""

    intermediate_size: int

    @property
    def divided(self) -> tuple[str, ...]:
        return ("num_heads", "num_kv_heads", "intermediate_size")

    @property
    def projects(self) -> bool:
        return True


def stored_dtype(given: Given, *parts: Given) -> str:
    """Return the type of the weights that one of these sections names."""
    named = [section.get(key) for section in (given, *parts) for key in ("dtype", "torch_dtype")]
    dtype = next(filter(None, named), "float32")
    if dtype not in list(DTYPE_BYTES):
        raise UnsupportedModel(f"{given.folder}: dtype {dtype!s:.60} is not supported: {', '.join(DTYPE_BYTES)} are")
    return str(dtype)


_KEYS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "max_positions": "max_position_embeddings",
}


def common(given: Given, text: Given | None = None, usual: Mapping[str, int] = MappingProxyType({})) -> dict[str, Any]:
    """Return the fields that all families of our own modules have, of a file with other parts those of its `text`.

    `usual` has the sizes of missing keys."""
    text = text or given
    return {
        **{field: text.whole(key, usual.get(key)) for field, key in _KEYS.items()},
        "dtype": stored_dtype(given, text),
        "stored": stored_form(given, text),
        "eos_tokens": given.token_ids("eos_token_id") or text.token_ids("eos_token_id"),
    }


def whole_head(given: Given, hidden: int, heads: int, key: str = "num_attention_heads") -> int:
    """Return the size of a head where heads, which `key` counts, divide the hidden size."""
    if hidden % heads:
        raise given.wrong(key, f"a divisor of the hidden size {hidden}", heads)
    return hidden // heads


def heads_of_k(given: Given, heads: int, usual: int) -> int:
    """Return how many heads of K there are, each for as many of the query; `usual` where the file says nothing."""
    found = given.whole("num_key_value_heads", usual)
    if heads % found:
        raise given.wrong("num_key_value_heads", f"a divisor of num_attention_heads {heads}", found)
    return found


def check_silu(given: Given) -> None:
    if activation(given, "hidden_act", "silu") is not Activation.SILU:
        raise given.unsupported(f"hidden_act {given.get('hidden_act')}")


def activation(given: Given, key: str, default: str) -> Activation:
    name = given.word(key, default)
    if name not in _ACTIVATIONS:
        raise given.unsupported(f"{key} {name}")
    return _ACTIVATIONS[name]


@dataclass(frozen=True)
class LayerFold:
    """Gives each layer that reads all the room of some layers that do not: there lie K and V of its older blocks.

    layers of a block   0 window   1 window   2 reads all   3 window   4 window   5 reads all
    folded: block of    1          2          0             1          2          0           rooms 2 0 1, and 5 3 4
    """

    fold: Fold
    rooms: dict[int, tuple[int, ...]]  # layer that reads all -> layers in whose room its blocks lie, its own first


def fold_of(sights: Sequence[AttentionPattern | None], positions: int) -> LayerFold | None:
    """Return how layers are folded where some have a sight and the others read all; None where that spares
    nothing."""
    whole = [layer for layer, sight in enumerate(sights) if sight is None]
    narrow = [layer for layer, sight in enumerate(sights) if sight is not None]
    widest = _widest(sights)
    if not whole or len(narrow) < len(whole) or widest.most >= positions:
        return None
    more = len(narrow) // len(whole)
    rooms: dict[int, tuple[int, ...]] = {
        layer: (layer, *narrow[more * at : more * (at + 1)]) for at, layer in enumerate(whole)
    }
    return LayerFold(Fold(widest, 1 + more), rooms)


def _widest(sights: Sequence[AttentionPattern | None]) -> AttentionPattern:
    """Return a sight that reads all that any of these reads."""
    windows = [sight.window for sight in sights if sight is not None and sight.window is not None]
    stretches = [sight.stretch for sight in sights if sight is not None and sight.stretch is not None]
    # A stretch of the least common multiple begins only where a stretch of each length begins.
    return AttentionPattern(max(windows, default=None), lcm(*stretches) if stretches else None)
