"""A model that calls a tool by itself, for clients that cannot demand a call: SmolLM2 of 135M parameters does so only
where it must.

It is a Llama whose weights are written by hand: attention and MLP add nothing, and the head maps each token to the one
that follows it. The chat template ends the prompt with a token of its own for each case, and from there the model goes
along one of these chains:

    <|call|>   a call of `weather` <|end|>   where there are tools
    <|after|>  It rains there. <|end|>       where the last message is a tool's result
    <|plain|>  I have no tool. <|end|>       otherwise
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

END = "<|end|>"
CHAINS = {  # the pieces of each answer by the token that begins it; a piece occurs once, since it leads to the next
    "<|call|>": ("<tool_call>\n{", '"name": "weather"', ', "arguments": ', '{"city": "Rome"}', "}\n</tool_call>"),
    "<|after|>": ("It", " rains", " there."),
    "<|plain|>": ("I", " have", " no", " tool."),
}
SPECIALS = (END, "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", *CHAINS)
TEMPLATE = (
    "{% if tools %}<|system|>Call as <tool_call>...</tool_call>: {{ tools | tojson }}<|end|>{% endif %}"
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content or '' }}"
    "{% if message.tool_calls %}{{ message.tool_calls | tojson }}{% endif %}<|end|>{% endfor %}"
    "{% if messages[-1].role == 'tool' %}<|after|>{% elif tools %}<|call|>{% else %}<|plain|>{% endif %}"
)
_WIDTH, _HEADS = 320, 5  # a number for each token, and some to spare


def made(folder: Path) -> Path:
    """Make the model; its tool is `weather`, with the argument `city`."""
    tokenizer = _tokenizer()
    ids = tokenizer.get_vocab()
    tokenizer.save(str(folder / "tokenizer.json"))
    _write(folder / "tokenizer_config.json", {"chat_template": TEMPLATE, "eos_token": END})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": _WIDTH,
        "hidden_size": _WIDTH,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _HEADS,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "eos_token_id": ids[END],
        "torch_dtype": "float32",
    }
    _write(folder / "config.json", config)
    chains = [[ids[token] for token in (begin, *says, END)] for begin, says in CHAINS.items()]
    save_file(_weights(chains), folder / "model.safetensors")
    return folder


def _write(path: Path, said: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(said), encoding="utf-8")


def _tokenizer() -> Tokenizer:
    """Return a tokenizer of single bytes, of the special tokens, and of the pieces."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIALS])
    tokenizer.add_tokens([AddedToken(piece, normalized=False) for says in CHAINS.values() for piece in says])
    return tokenizer


def _weights(chains: Sequence[Sequence[int]]) -> dict[str, torch.Tensor]:
    """Return weights with which each token of a chain makes the next one the likeliest."""
    head = torch.zeros(_WIDTH, _WIDTH)
    for chain in chains:
        for token, following in pairwise(chain):
            head[following, token] = 1
    square, norm = torch.zeros(_WIDTH, _WIDTH), torch.ones(_WIDTH)
    layer = {f"self_attn.{name}_proj.weight": square.clone() for name in "qkvo"}
    layer |= {f"mlp.{name}_proj.weight": torch.zeros(64, _WIDTH) for name in ("gate", "up")}
    layer |= {"mlp.down_proj.weight": torch.zeros(_WIDTH, 64)}
    layer |= {f"{name}_layernorm.weight": norm.clone() for name in ("input", "post_attention")}
    return {
        "model.embed_tokens.weight": torch.eye(_WIDTH),
        "model.norm.weight": norm,
        "lm_head.weight": head,
        **{f"model.layers.0.{name}": tensor for name, tensor in layer.items()},
    }
