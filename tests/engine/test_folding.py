"""Tests that the answer is that of transformers where some layers have a window or stretches, and decodes fold blocks.

Real cores, real engines, a real arena. The device holds one of the longest requests and little more.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from alignedserve.architectures.config import fold_of
from alignedserve.architectures.families.model_config import read_config
from alignedserve.architectures.kv_dtype import KvDtype
from alignedserve.core import (
    AttentionPattern,
    Decode,
    Fold,
    KvForm,
    Request,
    Sampling,
    ServiceClass,
    StepPlan,
    units_for,
)
from alignedserve.engine.engine import Engine
from alignedserve.engine.models.folding import FoldedAttention, fold_blocks
from alignedserve.engine.models.runs import Run
from alignedserve.errors import PlanError, UnsupportedModel
from alignedserve.kernels.common.scoring import Scoring
from alignedserve.kernels.common.spans import QuerySpan, Spans
from alignedserve.kernels.dispatch.dispatcher import Kernels
from alignedserve.lab.fuzzing.worker_views import num_preemptions
from alignedserve.scheduling.policy import Policy
from tests.engine.deployment import BLOCK, Deployment, deployed
from tests.engine.driver import prompt_of
from tests.engine.transformers_families import FULL, SLIDING, make
from tests.kernels.test_adapters import ALL
from tests.models import MAX_POSITIONS, gpt_oss, llama4, qwen2
from tests.rare import rarely
from tests.reference import Tally, compare, load
from tests.samples import request

WINDOW, BLOCKS = 12, 40
W, S = AttentionPattern(window=8), AttentionPattern(stretch=13)
WIDE = 0.25  # numbers of random weights: with the usual ones attention hardly counts
CHATS = Policy()
NOTHING_SHARED = replace(CHATS, reuse=False)
MAKERS: dict[str, tuple[Callable[[Path], Path], int]] = {  # and how many blocks become one
    "gemma3": (
        lambda folder: make(
            folder,
            "gemma3_text",
            initializer_range=WIDE,
            tie_word_embeddings=False,  # else it says the last word again
            sliding_window=WINDOW,
            num_hidden_layers=7,
            layer_types=[*[SLIDING] * 5, FULL, SLIDING],
            max_position_embeddings=MAX_POSITIONS,
        ),
        7,
    ),
    "gemma2": (
        lambda folder: make(
            folder,
            "gemma2",
            initializer_range=WIDE,
            tie_word_embeddings=False,  # else it says the last word again
            attn_logit_softcapping=0.7,
            sliding_window=WINDOW,
            num_hidden_layers=4,
            layer_types=[SLIDING, FULL] * 2,
            max_position_embeddings=MAX_POSITIONS,
        ),
        2,
    ),
    "gpt_oss": (
        lambda folder: gpt_oss(
            folder, sliding_window=WINDOW, num_hidden_layers=3, layer_types=[SLIDING, FULL, SLIDING]
        ),
        3,
    ),
    "qwen2": (  # its layers with windows come last, and the rooms of the others lie apart
        lambda folder: qwen2(folder, sliding_window=WINDOW, num_hidden_layers=6, max_window_layers=2, layer_types=None),
        3,
    ),
    "llama4": (lambda folder: llama4(folder, initializer_range=WIDE, attention_chunk_size=WINDOW), 4),
}
SIGHTS = {
    name: AttentionPattern(stretch=WINDOW) if name == "llama4" else AttentionPattern(window=WINDOW) for name in MAKERS
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: make(tmp_path_factory.mktemp(name)) for name, (make, _) in MAKERS.items()}


def fold_in(folder: Path) -> Fold:
    layers = read_config(folder).fold
    assert layers is not None
    return layers.fold


@pytest.mark.parametrize("name", list(MAKERS))
def test_each_family_folds_as_its_layers_allow(folders: dict[str, Path], name: str) -> None:
    assert fold_in(folders[name]) == Fold(SIGHTS[name], MAKERS[name][1])
    assert Engine(folders[name], num_blocks=1, dtype="float32").config.fold == read_config(folders[name]).fold


@pytest.mark.parametrize(("family", "layers", "blocks"), [("gemma2", 4, 2), ("gemma3_text", 6, 6), ("cohere2", 4, 4)])
def test_older_files_that_name_no_types_have_the_windows_of_their_family(
    tmp_path: Path, family: str, layers: int, blocks: int
) -> None:
    folder = make(tmp_path, family, sliding_window=WINDOW, num_hidden_layers=layers, layer_types=None)
    config = json.loads((folder / "config.json").read_text())
    del config["layer_types"]
    (folder / "config.json").write_text(json.dumps(config))
    assert fold_in(folder) == Fold(AttentionPattern(WINDOW), blocks)
    assert Engine(folder, num_blocks=1, dtype="float32").config.fold == read_config(folder).fold


@pytest.mark.parametrize(
    ("name", "topology", "policy", "look_ahead"),
    [
        rarely(("gemma3", "colocated", CHATS, 0)),
        rarely(("gemma3", "colocated", CHATS, 1)),
        ("gemma3", "1+1", CHATS, 0),
        rarely(("gemma2", "colocated", NOTHING_SHARED, 0)),
        ("gpt_oss", "colocated", CHATS, 1),
        rarely(("gpt_oss", "1+1", NOTHING_SHARED, 0)),
        ("qwen2", "colocated", CHATS, 0),
        rarely(("llama4", "colocated", CHATS, 1)),
        ("llama4", "1+1", NOTHING_SHARED, 0),
    ],
)
def test_long_requests_are_answered_right(
    folders: dict[str, Path], tmp_path: Path, name: str, topology: str, policy: Policy, look_ahead: int
) -> None:
    folder = folders[name]
    options: dict[str, Any] = {"fold": fold_in(folder), "blocks": BLOCKS, "prefill_blocks": BLOCKS}
    if (name, topology) == ("gemma3", "1+1"):
        options["blocks"] = 30  # else all fit, since the prefill worker decodes too
    with deployed(folder, topology, policy, tmp_path, look_ahead=look_ahead, **options) as deployment:
        requests = asked(deployment)
        assert num_preemptions(deployment.decodes), "requests left, and came back"
        assert deployment.num_folds > 0
        # The pool keeps prompts only where requests share beginnings.
        assert (deployment.num_folded_out > 0) is policy.reuse
        assert deployment.decodes.held["blocks"] == 0
    check_outputs(deployment, requests, folder)


def test_folded_numbers_of_int8_stay_as_they_are(folders: dict[str, Path], tmp_path: Path) -> None:
    long = replace(request("long", max_tokens=40), prompt=prompt_of(5, 100), stop_tokens=())
    outputs = []
    for fold in (None, fold_in(folders["gpt_oss"])):
        options: dict[str, Any] = {"fold": fold, "blocks": BLOCKS, "kv_dtype": KvDtype.INT8}
        with deployed(folders["gpt_oss"], "colocated", CHATS, tmp_path, **options) as deployment:
            deployment.asks(long)
            deployment.works(300)
            assert (deployment.num_folds > 0) is (fold is not None)
            outputs.append(deployment.outputs["long"])
    assert len(outputs[0]) == 40
    assert outputs[0] == outputs[1]


def test_a_decode_holds_a_share_of_what_lies_behind_the_window(folders: dict[str, Path], tmp_path: Path) -> None:
    folder, fold = folders["gemma3"], fold_in(folders["gemma3"])
    with deployed(folder, "colocated", CHATS, tmp_path, fold=fold, blocks=BLOCKS) as deployment:
        deployment.asks(replace(request("long", max_tokens=100), prompt=prompt_of(5, 50), stop_tokens=()))
        held = dict[int, int]()
        while not deployment.is_idle:
            deployment.works(1)
            for running in deployment.decodes.here.residents.values():
                held[running.prefix] = len(running.blocks)
        assert len(deployment.outputs["long"]) == 100
    last = max(held)
    folded = fold.foldable(last, BLOCK)
    assert held[last] == folded // (BLOCK * fold.blocks) + units_for(last + 1 - folded, BLOCK)
    assert held[last] < units_for(last, BLOCK) / 2


def test_a_beginning_that_others_read_is_not_folded(folders: dict[str, Path], tmp_path: Path) -> None:
    folder, common = folders["gemma2"], prompt_of(1, 60)
    asks = [
        replace(request(f"r{number}", max_tokens=30), prompt=(*common, *prompt_of(number, 3)), stop_tokens=())
        for number in range(3)
    ]
    with deployed(folder, "colocated", CHATS, tmp_path, fold=fold_in(folder), blocks=BLOCKS) as deployment:
        for each in asks:
            deployment.asks(each)
        deployment.works(20)
        here = deployment.decodes.here.residents.values()
        assert len(here) == 3
        assert not any(running.kv.folded for running in here)
        deployment.works(600)
        assert deployment.is_idle
        assert deployment.decodes.memory.pages.num_shared_tokens > 0
        assert deployment.decodes.held["blocks"] == 0
    check_outputs(deployment, asks, folder)


@pytest.mark.parametrize(
    ("dropped", "why"),
    [
        (4, "spared 4 tokens, which no folded blocks spare"),
        (-24, "spared -24 tokens"),
        (72, "folded its first 84 tokens, which a layer reads"),
    ],
)
def test_the_engine_refuses_what_is_not_folded_so(folders: dict[str, Path], dropped: int, why: str) -> None:
    engine = Engine(folders["gemma3"], num_blocks=32, block_size=BLOCK, dtype="float32")
    good = Decode("r", 5, 60, KvForm(tuple(range(20)), 24), Sampling(), 3)
    engine.step(StepPlan(1, decodes=(good,)))
    with pytest.raises(PlanError, match=why):
        engine.step(StepPlan(2, decodes=(replace(good, kv=replace(good.kv, dropped=dropped)),)))


def test_the_engine_refuses_a_fold_of_other_blocks(folders: dict[str, Path]) -> None:
    engine = Engine(folders["gemma2"], num_blocks=8, block_size=BLOCK, dtype="float32")
    for wrong in ((1, 2), (1, 2, 8), (1, 2, 3, 4)):
        with pytest.raises(PlanError, match=r"a fold is not of a block and 2 others within 0\.\.7"):
            engine.fold([wrong])


def test_a_fold_copies_what_layers_without_a_window_keep(folders: dict[str, Path]) -> None:
    engine = Engine(folders["gemma2"], num_blocks=8, block_size=BLOCK, dtype="float32")
    engine.cache.copy_(torch.rand(engine.cache.shape))
    before = engine.cache.clone()
    engine.fold([(5, 1, 3), (6, 0, 2)])
    for into, first, second in ((5, 1, 3), (6, 0, 2)):
        room, of_first, of_second = (slice(2 * block, 2 * block + 2) for block in (into, first, second))
        for narrow, whole in ((0, 1), (2, 3)):
            assert torch.equal(engine.cache[whole, room], before[whole, of_first])
            assert torch.equal(engine.cache[narrow, room], before[whole, of_second])
    others = [half for block in (0, 1, 2, 3, 4, 7) for half in (2 * block, 2 * block + 1)]
    assert torch.equal(engine.cache[:, others], before[:, others])


@pytest.mark.parametrize("kernels", ALL, ids=[kernels.name for kernels in ALL])
@pytest.mark.parametrize(
    "sights",
    [[W, W, None, W], [S, S, None, S], *map(rarely, ([None, W, W, None, W, W, W], [W, None] * 2))],
)
def test_every_kernel_reads_folded_blocks_as_if_they_were_not(
    kernels: Kernels, sights: list[AttentionPattern | None]
) -> None:
    torch.manual_seed(len(sights))
    layers, heads, kv_heads, head_dim, into = fold_of(sights, MAX_POSITIONS), 4, 2, 16, 30
    assert layers is not None
    fold = layers.fold
    whole = torch.randn(len(sights), 2 * 40, BLOCK, kv_heads * head_dim)
    blocks, groups = Random(1).sample(range(30), 25), 2
    old = [blocks[at * fold.blocks : (at + 1) * fold.blocks] for at in range(groups)]
    long = Run("long", [1] * 3, 55, KvForm(tuple(blocks[:15])), None, 0)
    short = Run("short", [1] * 5, 12, KvForm(tuple(blocks[15:])), None, 0)
    folded = whole.clone()
    fold_blocks(folded, layers, [(into + at, *group) for at, group in enumerate(old)])
    for group in old:
        folded[:, [half for block in group for half in (2 * block, 2 * block + 1)]] = torch.nan
    left = [*range(into, into + groups), *long.kv.blocks[groups * fold.blocks :]]
    spared = groups * (fold.blocks - 1) * BLOCK
    attention = FoldedAttention([replace(long, kv=KvForm(tuple(left), spared)), short], folded, layers, kernels)
    spans = Spans([QuerySpan(len(run.tokens), run.end, run.kv.blocks) for run in (long, short)], BLOCK)
    for layer, sight in enumerate(sights):
        read = sight or AttentionPattern()
        query, scoring = torch.randn(8, heads, head_dim), Scoring(head_dim**-0.5, read.window, stretch=read.stretch)
        k, v = torch.randn(2, 8, kv_heads * head_dim).unbind()
        kernels.write(whole[layer], spans, k, v)
        expected = kernels.attend(query, whole[layer], spans, scoring)
        got = attention.attend(layer, query, k, v, scoring)
        assert torch.allclose(got, expected, atol=1e-5), layer


def test_a_layer_that_reads_more_than_config_json_says_is_refused(tmp_path: Path) -> None:
    folder = make(tmp_path, "granite")
    path = folder / "config.json"
    path.write_text(path.read_text().replace("{", f'{{"sliding_window": 9, "layer_types": ["{SLIDING}", "{FULL}"],', 1))
    with pytest.raises(UnsupportedModel, match=r"reads more than the last 9 tokens.*set it to null$"):
        Engine(folder, num_blocks=1, dtype="float32")


def asked(deployment: Deployment) -> list[Request]:
    """Send requests of all lengths, some of them chats, and return them when all have ended."""
    random, asked = Random(7), list[Request]()
    for number in range(10):
        service = ServiceClass.RT if number % 3 == 2 else ServiceClass.BE
        length = random.choice((3, 30, 100, 110))
        new = replace(request(f"r{number}", max_tokens=random.randint(4, 40)), prompt=prompt_of(number, length))
        asked.append(replace(new, stop_tokens=(), service=service, arrival_at=deployment.now))
        deployment.asks(asked[-1])
        deployment.works(random.randint(0, 6))
    deployment.works(3000)
    assert deployment.is_idle
    return asked


def check_outputs(deployment: Deployment, requests: Sequence[Request], folder: Path) -> None:
    tally, reference = Tally(), load(folder)
    for each in requests:
        served = deployment.outputs[each.id]
        assert len(served) == each.max_tokens
        compare(reference, each.prompt, served, tally, each.id)
    tally.check()
