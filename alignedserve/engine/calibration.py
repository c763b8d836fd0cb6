"""What a model says before its weights are quantised: by how much each input of a layer counts, and how far the
quantised model is from it.

The plain model reads two short texts, and is given back before the quantised one is loaded. By the first, each layer is
quantised (kernels/common/quantised.py). On the second, by which none was, both models are compared. A worker keeps what
it said in a file for the others and for later starts (executor/precision.py).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from tokenizers import Tokenizer
from torch import Tensor

from alignedserve.architectures.families.model_config import ModelConfig, read_config
from alignedserve.architectures.gguf.folder import identity
from alignedserve.architectures.gguf.places import PLACES, read_places
from alignedserve.architectures.weight_files import weight_files
from alignedserve.core import units_for
from alignedserve.engine.device.devices import CPU
from alignedserve.engine.models.encoder import Encoder
from alignedserve.engine.models.families.choice import load
from alignedserve.engine.models.loading import Loader
from alignedserve.engine.models.model import Model, attention_of
from alignedserve.engine.weights.adapters import AdaptedLayers
from alignedserve.engine.weights.forms import weights_of
from alignedserve.kernels.common.placing import on_device
from alignedserve.kernels.common.reference import Reference
from alignedserve.kernels.common.spans import QuerySpan, Spans
from alignedserve.kernels.dispatch.dispatcher import Kernels
from alignedserve.signs import NO_SIGNS, Signs

READ = """The library opens at nine in the morning. Bring your card, and ask at the desk where the newspapers are kept;
children may borrow two books for three weeks. "I have no time," said the old man, "but come back tomorrow."
for line in open("names.txt"):
    first, last = line.split(",")
User: How far is it from Paris to Berlin?
Assistant: About 880 kilometres by road, which takes nine hours. 17 + 25 = 42."""
COMPARED = """Water boils at 100 degrees at sea level, and at less than that in the mountains, because the air above is
thinner. In 1911 Marie Curie received her second Nobel Prize, and in 1912 she went back to work."""
_BLOCK_SIZE = 16
_FORMAT = 1  # raised whenever the plain model says something else of the same files, or it is kept otherwise
_SQUARES = "squares."  # begins the names of these in the file


@dataclass(frozen=True)
class PlainModel:
    """What the plain model said."""

    squares: Mapping[str, Tensor]  # the mean square of each input of a layer, by the layer's name in the files
    tokens: tuple[int, ...]  # of the text that is compared
    words: Tensor  # log-probabilities, [tokens, vocabulary]

    def divergence(self, logits: Tensor) -> float:
        """Return the mean Kullback-Leibler divergence of a token, in nats, from the plain model to these logits."""
        said = logits.float().log_softmax(-1)
        return float(F.kl_div(said, self.words, reduction="batchmean", log_target=True))

    def packed(self) -> bytes:
        """Return the content of a safetensors file."""
        tensors = {f"{_SQUARES}{name}": square for name, square in self.squares.items()}
        tensors |= {"tokens": torch.tensor(self.tokens), "words": self.words}
        return save_tensors({name: of.to("cpu", copy=True) for name, of in tensors.items()})  # parts of a layer share

    @classmethod
    def unpacked(cls, content: bytes, device: torch.device) -> PlainModel:
        """Return what a file holds. Raises SafetensorError or KeyError where that is something else."""
        tensors = {name: of.to(device) for name, of in load_tensors(content).items()}
        tokens, words = tensors.pop("tokens"), tensors.pop("words")
        return cls({name.removeprefix(_SQUARES): of for name, of in tensors.items()}, tuple(tokens.tolist()), words)


def kept_name(folder: Path, dtype: torch.dtype) -> str:
    """Return the name of the file for a model: another one where the model's files or the texts change."""
    digest = hashlib.sha256(repr((_FORMAT, dtype, READ, COMPARED)).encode())
    is_gguf = (folder / PLACES).is_file()
    weights = {place.file for place in read_places(folder).values()} if is_gguf else weight_files(folder)
    for file in (*sorted(weights), folder / "config.json", folder / "tokenizer.json"):
        digest.update(identity(file))
    return f"{digest.hexdigest()[:24]}.safetensors"


@torch.inference_mode()
def read_plain(folder: Path, dtype: torch.dtype, device: torch.device = CPU, signs: Signs = NO_SIGNS) -> PlainModel:
    """Load the plain model with torch alone, and let it read both texts."""
    heard, kernels, config = _HeardLayers(signs), Reference(), read_config(folder)
    make_linear = partial(kernels.layer, dtype=dtype)
    loader = Loader(weights_of(folder), dtype, kernels, make_linear, device=device, adapted=heard, signs=signs)
    config, model = load(folder, config, loader)
    assert not isinstance(model, Encoder), "a model that makes vectors is not compared"
    compared, read = (tokens_of(folder, config, text) for text in (COMPARED, READ))

    def logits(tokens: Sequence[int]) -> Tensor:
        blocks = units_for(len(tokens), _BLOCK_SIZE)
        shape = config.num_layers, 2 * blocks, _BLOCK_SIZE, config.num_kv_heads * config.head_dim
        cache = torch.zeros(shape, dtype=dtype, device=device)
        return logits_of(tokens, model, kernels, cache)

    words = logits(compared).log_softmax(-1)
    heard.squares.clear()
    logits(read)
    return PlainModel(heard.squares, compared, words)


def tokens_of(folder: Path, config: ModelConfig, text: str) -> tuple[int, ...]:
    """Return the tokens of a text that the model can read at once."""
    tokens: list[int] = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids
    return tuple(token for token in tokens[: config.max_positions] if token < config.vocab_size)


def logits_of(tokens: Sequence[int], model: Model, kernels: Kernels, cache: Tensor) -> Tensor:
    """Return the logits of all tokens of a text, whose K and V are written to the first blocks of the cache."""
    block_size = cache.shape[2]
    blocks = range(units_for(len(tokens), block_size))
    spans = Spans([QuerySpan(len(tokens), len(tokens), blocks)], block_size)
    attention = attention_of(spans, cache, kernels)
    read, positions = (on_device(of, cache.device) for of in (torch.tensor(tokens), spans.positions))
    return model.forward(read, positions, None, attention)


class _HeardLayers(AdaptedLayers):
    """Hears what goes into each layer."""

    def __init__(self, signs: Signs) -> None:
        super().__init__()
        self.squares: dict[str, Tensor] = {}
        self._signs = signs

    def add_to(self, layer: int, x: Tensor, out: Tensor) -> None:
        square = x.float().square().mean(0)
        if bool(square.isfinite().all()):  # not where an expert has no row, or fp16 has overflown
            self.squares |= {part.name: square for part in self.layers[layer].parts}
        self._signs.advance()
