"""Tests that SmolLM2 answers real prompts in fp32 as transformers does, token for token, whatever happens on the
way."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers

from alignedserve.architectures.kv_dtype import KvDtype
from alignedserve.core import ServiceClass
from alignedserve.kvpool.arena.arena import Arena
from alignedserve.scheduling.policy import Policy, Room
from tests.adapters import make_adapter, named
from tests.conftest import SOAK
from tests.engine.deployment import deployed
from tests.engine.driver import Driver, Live
from tests.engine.test_engine import move
from tests.engine.test_int8_kv import Rounding
from tests.engine.test_pressure import happened
from tests.engine.test_ranks import Both
from tests.kernels.every import kernels_of, sets_for_whole_models
from tests.rare import rare, rarely
from tests.real_models.answers import kept, key_of
from tests.real_models.conftest import TOKENS, Real
from tests.real_models.prompts import CONVERSATIONS
from tests.reference import Tally, compare, load
from tests.samples import request

# The last bit of K or V may decide between two levels of int8; logits then differ by this share of the largest at most.
A_LEVEL = 0.01
LENGTHS = [8000, 4000] if SOAK else [500]  # of long contexts
ROOT = Path(__file__).parents[2]
TEXTS = ("LICENSE", "CHANGELOG.md", "README.md", "docs/guides/models.md", "docs/architecture.md")
LIVE = 8  # in a run that is not long, transformers answers each 8th prompt: chats, code, French, turns, a text


def test_prompts_are_those_that_were_answered(real: Real) -> None:
    """So the tokenizer and the chat template are those of transformers, as the next test says."""
    assert len(real.prompts) == 50
    assert all(len(kept()[key_of(prompt)]) == TOKENS for prompt in real.prompts)


@rare
def test_prompts_are_those_of_transformers(real: Real) -> None:
    """The tokenizer and the chat template of the file, against transformers' reading of it."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(real.file.parent, gguf_file=real.file.name)
    for turns, prompt in zip(CONVERSATIONS, real.prompts, strict=False):
        text = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
        assert prompt == tuple(real.text.prompt_ids(text, with_special=False)), text
        assert real.text.decode(prompt) == tokenizer.decode(prompt, skip_special_tokens=True), text


@rare
def test_kept_answers_are_those_of_transformers(real: Real) -> None:
    """The tests below compare with these answers. The long form computes all of them again."""
    live = [prompt for at, prompt in enumerate(real.prompts) if SOAK or (at % LIVE == 0 and len(prompt) < 100)]
    assert len(live) >= 6
    for prompt in live:
        compare(real.reference, prompt, kept()[key_of(prompt)], real.tally, "kept")


def room(prompts: list[tuple[int, ...]]) -> int:
    return sum(len(prompt) + TOKENS + 16 for prompt in prompts)


def check(real: Real, lives: list[Live], label: str, tokens: int = TOKENS) -> None:
    for live in lives:
        assert len(live.output) == tokens
        real.check(live.prompt, live.output, f"{label}, {live.name}")


def finish(driver: Driver, lives: list[Live], tokens: int = TOKENS) -> None:
    """Run all together to their end."""
    while opened := [live for live in lives if len(live.output) < tokens]:
        driver.run(*opened, parts=[live.chunk(512) if live.in_prompt else live.decode() for live in opened])


def test_all_prompts_together(real: Real) -> None:
    """The short form has every eighth one."""
    prompts = real.prompts if SOAK else real.prompts[1::8]
    driver = Driver(real.engine(room(prompts)) if SOAK else real.shared, 0)
    lives = [driver.start(f"prompt {number}", prompt, TOKENS) for number, prompt in enumerate(prompts)]
    for live in lives:
        driver.prefill(live)
    finish(driver, lives)
    check(real, lives, "together")


@rare  # tests/engine/test_engine.py has both ends for each family
def test_chunks_from_either_end_beside_decodes(real: Real) -> None:
    few = real.short[:: 1 if SOAK else 3]
    driver = Driver(real.engine(2 * room(few), block_size=8), 3)
    lives = [driver.start_either_way(f"prompt {number}", prompt, TOKENS) for number, prompt in enumerate(few)]
    while opened := [live for live in lives if len(live.output) < TOKENS]:
        chosen = driver.random.sample(opened, driver.random.randint(1, len(opened)))
        size = driver.random.randint(1, 40)
        driver.run(*chosen, parts=[live.chunk(size) if live.in_prompt else live.decode() for live in chosen])
    check(real, lives, "in chunks")


def test_a_request_that_is_moved_and_one_that_is_recomputed(real: Real, tmp_path: Path) -> None:
    """One goes to the pool and back twice; the other, preempted, takes what it has said as a part of its prompt."""
    driver = Driver(real.shared, 1)
    arena = Arena.create(
        tmp_path / "arena",
        pages=16,
        payload_bytes=driver.engine.config.kv_bytes(16, "float32"),
        page_size=16,
        incarnation=1,
    )
    moved, first = (driver.start(name, prompt, 30) for name, prompt in zip("ab", real.short, strict=False))
    for live in (moved, first):
        driver.prefill(live, [20])
        driver.generate(live, 5)
    for until in (9, TOKENS):
        move(moved, driver, driver, arena, [5, 0, 3, 7, 1, 2, 9, 8, 4])
        driver.generate(moved, until)
    again = driver.start("b again", (*first.prompt, *first.output), 30)
    driver.prefill(again, [7])
    first.output += driver.generate(again, TOKENS - 5)
    check(real, [moved, first], "moved or recomputed")
    arena.close()


@rare  # tests/engine/test_ranks.py has three ranks of a tiny model
def test_three_ranks(real: Real) -> None:
    """The model has nine heads, and three of K and V."""
    few = real.short
    with ThreadPoolExecutor(3) as pool:
        ranks: Any = Both(real.folder, pool, block_size=16, num_ranks=3, num_blocks=room(few) // 16)
        driver: Any = Driver(ranks, 2)
        lives = [driver.start_either_way(f"prompt {at}", prompt, TOKENS) for at, prompt in enumerate(few)]
        finish(driver, lives)
    check(real, lives, "three ranks")


@pytest.mark.parametrize("name", [rarely("reference"), *sets_for_whole_models()[:-1]])  # the others have the last one
def test_every_instruction_set(name: str, real: Real) -> None:
    """In fp32 no number is rounded on the way, of quantised weights neither."""
    few, tokens = (real.short, TOKENS) if SOAK else (real.short[:2], 3)
    driver = Driver(real.engine(room(few), kernels=kernels_of(name)), 0)
    lives = [driver.start(f"prompt {number}", prompt, TOKENS) for number, prompt in enumerate(few)]
    finish(driver, lives, tokens)
    check(real, lives, name, tokens)


@rare  # test_divergence.py has this KV in each run, and tests/engine/test_int8_kv.py tokens of a tiny model
def test_kv_in_int8(real: Real) -> None:
    """Against transformers whose K and V are rounded as ours are."""
    few, tally = real.short[:: 1 if SOAK else 3], Tally()
    driver = Driver(real.engine(room(few), kv_dtype=KvDtype.INT8), 5)
    lives = [driver.start_either_way(f"prompt {number}", prompt, TOKENS) for number, prompt in enumerate(few)]
    finish(driver, lives)
    for live in lives:
        compare(Rounding(real.reference), live.prompt, live.output, tally, f"KV in int8, {live.name}", A_LEVEL)


@rare  # tests/engine and tests/end_to_end ask PEFT for smaller models
def test_an_adapter_beside_the_model(real: Real, tmp_path: Path) -> None:
    """Half of the requests have an adapter that PEFT has written; it says something else than the model."""
    from peft import PeftModel

    folder = make_adapter(real.plain, tmp_path / "adapter", seed=1, scale=0.03)
    adapted = PeftModel.from_pretrained(load(real.plain), folder).eval()
    adapter, few, tally = named("adapter", folder, real.folder), real.short[::3], Tally()
    driver = Driver(real.engine(2 * room(few)), 6)
    lives: list[Live] = []
    for prompt in few:
        of_model, own = (driver.start(f"{len(lives)}, {number}", prompt, TOKENS) for number in range(2))
        own.adapter = adapter
        lives += [of_model, own]
    finish(driver, lives)
    check(real, lives[::2], "beside an adapter")
    for live in lives[1::2]:
        compare(adapted, live.prompt, live.output, tally, "adapter")
    assert [live.output for live in lives[::2]] != [live.output for live in lives[1::2]]


def long_prompt(real: Real, length: int) -> tuple[int, ...]:
    """Return licences and documentation."""
    read = "\n".join((ROOT / name).read_text(encoding="utf-8") for name in TEXTS)
    return tuple(real.text.prompt_ids(read))[:length]


@rare
@pytest.mark.parametrize("length", LENGTHS)
def test_a_long_context(length: int, real: Real) -> None:
    """Licences and documentation in chunks, as a worker computes them."""
    prompt = long_prompt(real, length)
    assert len(prompt) == length
    driver = Driver(real.engine(length + 64) if SOAK else real.shared, 4)
    live = driver.start_either_way("long", prompt, TOKENS)
    driver.prefill(live, [300, 1, *[512] * 20])
    driver.generate(live, TOKENS)
    real.check(prompt, live.output, f"{length} tokens")


# --- The cores of a deployment, with real engines and a real arena

PLAIN = Policy(room=Room.GROWING)
SHARED = Policy(room=Room.GROWING, memory="two_ended:0.05")
BLOCKS = 32  # for about two requests: the others wait, and are preempted
CASES = [
    ("colocated", SHARED, False, {"preemption", "restored"}),
    ("1+1", PLAIN, False, {"preemption"}),
    ("1+1", PLAIN, True, {"preemption"}),
]


@rare  # tests/engine/test_pressure.py has a tiny model, and more policies
@pytest.mark.parametrize(("topology", "policy", "direct", "wanted"), CASES)
def test_a_deployment_that_is_short_of_memory(
    topology: str, policy: Policy, direct: bool, wanted: set[str], real: Real, tmp_path: Path
) -> None:
    """Requests with the same first words share KV, leave for the pool, and come back."""
    sizes: dict[str, Any] = {"blocks": BLOCKS, "prefill_blocks": BLOCKS, "pages": 80}
    with deployed(real.folder, topology, policy, tmp_path, None, direct, **sizes) as deployment:
        asked = []
        for number, prompt in enumerate(real.short[:8]):
            service = ServiceClass.RT if number % 3 == 2 else ServiceClass.BE
            plain = request(f"prompt {number}", max_tokens=TOKENS)
            asked.append(replace(plain, prompt=prompt, stop_tokens=(), service=service, arrival_at=deployment.now))
            deployment.asks(asked[-1])
            deployment.works(4)
        deployment.works(2000)
        assert deployment.is_idle
        for sent in asked:
            assert len(deployment.outputs[sent.id]) == TOKENS
            real.check(sent.prompt, deployment.outputs[sent.id], f"{topology}, {sent.id}")
        assert wanted - happened(deployment) == set()
