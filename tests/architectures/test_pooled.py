"""A folder of sentence-transformers says which vectors a model gives, or in one line what is not done here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from alignedserve.architectures.families.model_config import read_config
from alignedserve.architectures.vectors import PooledRule, PoolKind, read_pooled
from alignedserve.errors import UnsupportedModel

MODULES = ("Transformer", "1_Pooling", "Normalize")


def read(folder: Path, pooling: dict[str, Any], modules: tuple[str, ...] = MODULES) -> PooledRule:
    sizes = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "max_position_embeddings": 64, "rms_norm_eps": 1e-5}
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **sizes, **heads}
    named = [{"type": f"models.{name.partition('_')[2] or name}", "path": name} for name in modules]
    (folder / "1_Pooling").mkdir()
    for path, content in (("config.json", config), ("1_Pooling/config.json", pooling), ("modules.json", named)):
        (folder / path).write_text(json.dumps(content))
    return read_pooled(folder, read_config(folder))


@pytest.mark.parametrize(
    ("pooling", "kind"),
    [
        ({"pooling_mode": "lasttoken"}, PoolKind.LAST),
        ({"pooling_mode": ["mean"]}, PoolKind.MEAN),
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, PoolKind.FIRST),
        ({"pooling_mode_mean_tokens": True, "include_prompt": True}, PoolKind.MEAN),
    ],
)
def test_new_and_old_words_for_a_kind_are_read(tmp_path: Path, pooling: dict[str, Any], kind: PoolKind) -> None:
    rule = read(tmp_path, pooling)
    assert (rule.kind, rule.size, rule.is_normalised, rule.embeds) == (kind, 32, True, True)


@pytest.mark.parametrize(
    ("pooling", "modules", "complaint"),
    [
        ({"pooling_mode": "weightedmean"}, MODULES, "pooling weightedmean is not supported"),
        ({"pooling_mode": ["mean", "max"]}, MODULES, "pooling mean, max is not supported"),
        ({"pooling_mode": "mean", "include_prompt": False}, MODULES, "include_prompt false is not supported"),
        ({"pooling_mode": "mean"}, ("Transformer", "Normalize"), "a module Normalize at this place"),
        ({"pooling_mode": "mean"}, ("Transformer",), "it has no module Pooling"),
        ({"pooling_mode": "mean"}, (*MODULES, "2_Dense"), "a module Dense at this place"),
    ],
)
def test_what_is_not_done_here_is_named(
    tmp_path: Path, pooling: dict[str, Any], modules: tuple[str, ...], complaint: str
) -> None:
    with pytest.raises(UnsupportedModel, match=complaint):
        read(tmp_path, pooling, modules)
