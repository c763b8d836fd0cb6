"""Write induction heads into the demo model before its training, so that it can copy from the start.

Most tasks of the demo model need copying: a name, a field's value, the next digit. A trained model copies
with *induction heads*: heads of one layer note at each position which tokens came before, and heads of the
next layer find the position whose notes fit the current tokens and copy the token there. From random
weights such heads need most of an hour's training to appear. So training starts with heads that are
written by hand, and may change them like all other weights.

The residual stream at the start:

    0           1 .. 127              128 .. 191                192 .. 255
    the same    the token's           a note of the token       a note of the token
    for all     random embedding      two places before         one place before

Heads 0 and 1 of layer 1 look for the position after the current token, heads 2 and 3 for the position after
the current two tokens. In each pair of heads, each head copies one half of the embedding found there.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaForCausalLM

HIDDEN, HEAD, HALF = 256, 64, 32  # the sizes for which this layout is made

_TOKEN, _NOTE_2, _NOTE_1 = slice(1, 128), slice(128, 192), slice(192, 256)
_STD = 0.08  # standard deviation of embeddings
_FAST = range(8)  # rotary frequencies whose angle changes visibly from a position to the next
_SLOW = range(20, HALF)  # rotary frequencies whose angle hardly changes over a few hundred positions
_SHARP = 3.5  # sharpness of a match
_COPY = {1: 3.0, 2: 7.0}  # weight of a copied embedding by the number of tokens that match


@torch.no_grad()
def start_with_induction(model: LlamaForCausalLM, seed: int) -> None:
    """Write the heads into layers 0 and 1 of a new model."""
    config = model.config
    if (config.hidden_size, config.hidden_size // config.num_attention_heads) != (HIDDEN, HEAD):
        raise ValueError(f"the induction heads are made for hidden size {HIDDEN} and head size {HEAD}")
    random = torch.Generator().manual_seed(seed)
    for layer in model.model.layers:  # a clean residual stream: at the start, a block adds nothing
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    embedding = model.model.embed_tokens.weight
    embedding.mul_(_STD / embedding.std())
    embedding[:, 0], embedding[:, _NOTE_2], embedding[:, _NOTE_1] = 4 * _STD, 0.0, 0.0

    width = _TOKEN.stop - _TOKEN.start
    basis = torch.linalg.qr(torch.randn(width, width, generator=random)).Q
    noted, copied = basis[:HEAD], (basis[:HEAD], basis[HEAD:])
    noting: Any = model.model.layers[0].self_attn
    matching: Any = model.model.layers[1].self_attn
    for head, (distance, note) in enumerate(((1, _NOTE_1), (2, _NOTE_2))):
        _look_back(noting, head, distance, config.rope_parameters["rope_theta"])
        _put(noting.v_proj.weight, head, (_TOKEN, noted))
        _put_out(noting.o_proj.weight, head, note, 1.5 * _STD * torch.eye(HEAD))
    for head in range(4):
        tokens = 1 if head < 2 else 2
        _match(matching, head, noted, tokens)
        half = copied[head % 2]
        _put(matching.v_proj.weight, head, (_TOKEN, torch.nn.functional.pad(half, (0, 0, 0, HEAD - len(half)))))
        _put_out(matching.o_proj.weight, head, _TOKEN, _COPY[tokens] * _STD * half.T)


def _look_back(attention: Any, head: int, distance: int, theta: float) -> None:
    """Write constant queries and keys whose rotations agree if the key is `distance` positions before the query."""
    query, key = torch.zeros(HEAD), torch.zeros(HEAD)
    for f in _FAST:
        angle = torch.tensor(distance * theta ** (-f / HALF))
        query[f], key[f], key[f + HALF] = 1.0, angle.cos(), angle.sin()
    _put(attention.q_proj.weight, head, (slice(0, 1), 1.6 * query[:, None]))
    _put(attention.k_proj.weight, head, (slice(0, 1), 1.6 * key[:, None]))


def _match(attention: Any, head: int, noted: torch.Tensor, tokens: int) -> None:
    """Write queries from the last `tokens` tokens and keys from the notes of earlier tokens: equal tokens fit best."""
    places = [*_SLOW, *(f + HALF for f in _SLOW)]
    token, note_1, key_1, key_2 = (torch.zeros(HEAD, width) for width in (noted.shape[1], HEAD, HEAD, HEAD))
    for row, place in enumerate(places):
        if row % tokens == 0:
            token[place], key_1[place, row] = noted[row], 1.0
        else:
            note_1[place, row], key_2[place, row] = 1.0, 1.0
    _put(attention.q_proj.weight, head, (_TOKEN, _SHARP * token), (_NOTE_1, _SHARP * note_1))
    _put(attention.k_proj.weight, head, (_NOTE_1, _SHARP * key_1), (_NOTE_2, _SHARP * key_2))


def _put(weight: torch.Tensor, head: int, *parts: tuple[slice, torch.Tensor]) -> None:
    rows = weight[HEAD * head : HEAD * (head + 1)]
    rows.zero_()
    for dims, values in parts:
        rows[:, dims] = values


def _put_out(weight: torch.Tensor, head: int, dims: slice, values: torch.Tensor) -> None:
    weight[dims, HEAD * head : HEAD * head + values.shape[1]] = values
