"""Tiny random folders of models that make vectors, as sentence-transformers saves them, and rerankers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors

VOCAB = 97
LONGEST = 120
WORDS = tuple(f"w{number}" for number in range(VOCAB - 5))
SIZE = 32
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": SIZE,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "initializer_range": 0.25,
    "pad_token_id": 0,
}
_MARKED = {"bos_token_id": 1, "eos_token_id": 2}


def encoder_config(family: str, **more: Any) -> transformers.PretrainedConfig:
    """Return the configuration of a family; positions of RoBERTa's begin behind that of padding."""
    match family:
        case "bert":
            return transformers.BertConfig(**_SHAPE, max_position_embeddings=LONGEST, **more)
        case "roberta":
            return transformers.RobertaConfig(**_SHAPE, max_position_embeddings=LONGEST + 1, type_vocab_size=1, **more)
        case "xlm-roberta":
            shape = {**_SHAPE, "pad_token_id": 1, "max_position_embeddings": LONGEST + 2}  # as it is published
            return transformers.XLMRobertaConfig(**shape, type_vocab_size=1, **more)
        case "electra":  # its embeddings are narrower
            return transformers.ElectraConfig(**_SHAPE, max_position_embeddings=LONGEST, embedding_size=24, **more)
        case "modernbert":  # every second layer sees 4 tokens to either side
            return transformers.ModernBertConfig(
                **_SHAPE,
                max_position_embeddings=LONGEST,
                local_attention=8,
                global_attn_every_n_layers=2,
                cls_token_id=1,
                sep_token_id=2,
                **_MARKED,
                **more,
            )
    raise ValueError(family)


def decoder_config(family: str, **more: Any) -> transformers.PretrainedConfig:
    shape = {**_SHAPE, "num_key_value_heads": 2, "max_position_embeddings": LONGEST, **_MARKED, **more}
    if family == "llama":
        return transformers.LlamaConfig(**shape)
    return (
        transformers.Gemma3TextConfig(**shape, head_dim=8)
        if family == "gemma3"
        else transformers.Qwen3Config(**shape, head_dim=8)
    )


def tokenizer_of(folder: Path, marks: str = "[CLS] $A [SEP]", marks_second: bool = False, pad: int = 0) -> None:
    """Write a tokenizer of words; `marks` are what it puts around a text, `pad` (0 or 1) is the token of padding."""
    first = ("[PAD]", "[CLS]") if pad == 0 else ("[CLS]", "[PAD]")
    named = {name: number for number, name in enumerate((*first, "[SEP]", "[UNK]", "[MASK]"))}
    tokenizer = Tokenizer(models.WordLevel({**named, **{word: 5 + at for at, word in enumerate(WORDS)}}, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    second = "$B:1 [SEP]:1" if marks_second else "[SEP] $B [SEP]"
    pair = f"{marks} {second}" if "[CLS]" in marks else "$A $B [SEP]"
    tokenizer.post_processor = processors.TemplateProcessing(marks, pair, [("[CLS]", 1 - pad), ("[SEP]", 2)])
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        model_max_length=LONGEST,
        model_input_names=["input_ids", "attention_mask", *(["token_type_ids"] if marks_second else [])],
    ).save_pretrained(folder)


def _saved(kind: Any, config: transformers.PretrainedConfig, folder: Path, seed: int) -> None:
    torch.manual_seed(seed)
    model = kind.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    model.to(torch.float32).save_pretrained(folder)


def embedding_folder(
    folder: Path,
    config: transformers.PretrainedConfig,
    kind: str,
    is_normalised: bool = True,
    dense: int = 0,
    **about: Any,
) -> Path:
    """Save a model of sentence-transformers: pooling of a kind, perhaps a Dense layer and vectors of length 1."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Pooling, Transformer

    plain = folder / "plain"
    _saved(transformers.AutoModel, config, plain, len(str(folder)))
    tokenizer_of(plain, "$A [SEP]" if kind == "lasttoken" else "[CLS] $A [SEP]", pad=config.pad_token_id)
    modules: list[torch.nn.Module] = [Transformer(str(plain)), Pooling(SIZE, kind)]
    if dense:
        modules.append(Dense(SIZE, dense))
    if is_normalised:
        modules.append(Normalize())
    SentenceTransformer(modules=modules, device="cpu", **about).save(str(folder / "whole"))
    return folder / "whole"


def encoder_folder(folder: Path, config: transformers.PretrainedConfig, kind: str = "mean") -> Path:
    """Save an encoder as most on the hub are, without loading sentence-transformers, which takes seconds."""
    _saved(transformers.AutoModel, config, folder, 3)
    tokenizer_of(folder, pad=config.pad_token_id)
    modules = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
    listed = [{"path": path, "type": f"sentence_transformers.models.{name}"} for path, name in modules]
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({f"pooling_mode_{kind}_tokens": True}))
    return folder


def reranker_folder(folder: Path, config: transformers.PretrainedConfig, marks: str = "[CLS] $A [SEP]") -> Path:
    """Save a model with a head for whole texts."""
    _saved(transformers.AutoModelForSequenceClassification, config, folder, 3)
    tokenizer_of(folder, marks, isinstance(config, transformers.BertConfig), config.pad_token_id)
    return folder


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
