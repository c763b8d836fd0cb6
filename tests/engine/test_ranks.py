"""Tests of a model that two ranks share: its tokens are those of one rank. Threads here, processes in
tests/end_to_end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from datetime import timedelta
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from alignedserve.architectures.families.model_config import read_config
from alignedserve.config.choices import DeviceKind, Graphs
from alignedserve.config.config import Config
from alignedserve.config.sections import EngineConfig
from alignedserve.core import Chunk, Decode, KvForm, Sampling, Scoring, StepPlan, StepResult
from alignedserve.engine.device import ranks
from alignedserve.engine.device.rank_link import TeamLinks
from alignedserve.engine.device.ranks import ALONE, Team
from alignedserve.engine.engine import Engine
from alignedserve.engine.graphs import Step
from alignedserve.engine.sampling.reading import Begun
from alignedserve.errors import ConfigError, RankLost
from alignedserve.executor import loading
from tests.engine.driver import PLENTY, Drawing, Driver, Replays, prompt_of
from tests.models import VOCAB, llama
from tests.rare import rarely
from tests.reference import Tally, compare
from tests.teams import links_of, teams

SHARED = ("mha-tied", "wide-heads", "sharded", "llama-biases", "qwen2", "qwen3", "opt", "opt-350m")
FUSED = ("llama4", "llama4-one-head-of-k")
DENSE = ("gemma2", "gemma3", "gemma3-capped", "phi3", "phi3-partial", "glm", "glm4")
LATENT = ("deepseek-v2", "deepseek-v3", "youtu")
MIXTURES = ("mixtral", "gpt-oss", "qwen2-moe", "olmoe", "dots1")
FAMILIES = SHARED + FUSED + DENSE + LATENT + MIXTURES
# In each run one for each way to cut layers.
USUAL = ("wide-heads", "opt", "llama4", "phi3", "deepseek-v3", "gpt-oss")
SAMPLED = ("wide-heads", "gemma2", "deepseek-v2", "mixtral")  # whatever the model, rank 0 has all logits and draws
PROMPTS = ((0, 21), (1, 5), (2, 40))
TOKENS = 5


class Both:
    """Two ranks, or more, as one engine: every step runs on all of them."""

    def __init__(
        self,
        folder: Path,
        pool: ThreadPoolExecutor,
        block_size: int = 8,
        num_ranks: int = 2,
        num_blocks: int = 40,
        **options: Any,
    ) -> None:
        self._pool = pool

        def made(ranks: Team) -> Engine:
            return Engine(folder, num_blocks=num_blocks, block_size=block_size, dtype="float32", ranks=ranks, **options)

        self.engines = [*pool.map(made, teams(num_ranks))]
        self.block_size, self.config = block_size, self.engines[0].config
        self.cache, self.num_blocks = self.engines[0].cache, self.engines[0].num_blocks
        for engine in self.engines[1:]:
            engine.cache.fill_(float("nan"))

    def step(self, plan: StepPlan) -> StepResult:
        steps = [self._pool.submit(engine.step, plan) for engine in self.engines]
        # The first that fails says why: the others only say that it does not answer.
        for step in as_completed(steps):
            step.result()
        first, *others = (step.result() for step in steps)
        assert not any(other.tokens for other in others), "rank 0 alone samples"
        return first

    def begin(self, plan: StepPlan) -> Begun:
        begun: Iterator[Begun] = self._pool.map(lambda engine: engine.begin(plan), self.engines)
        first, *_ = begun
        return first

    def fold(self, folds: Sequence[Sequence[int]]) -> None:
        for engine in self.engines:
            engine.fold(folds)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


def said(engine: Any, sampling: Sampling) -> list[list[int]]:
    """Return the outputs of prompts in chunks, filled from either end, some beside the tokens of other requests."""
    driver = Driver(engine, 7)
    lives = [driver.start_either_way(f"r{seed}", prompt_of(seed, length), TOKENS) for seed, length in PROMPTS]
    for live in lives:
        while live.in_prompt:
            decodes = [live.decode(sampling) for live in lives if live.output and len(live.output) < TOKENS]
            driver.run(*lives, parts=[live.chunk(9, sampling), *decodes])
    while going := [live for live in lives if len(live.output) < TOKENS]:
        driver.run(*going, parts=[live.decode(sampling) for live in going])
    return [live.output for live in lives]


@pytest.mark.parametrize("name", [name if name in USUAL else rarely(name) for name in FAMILIES])
def test_two_ranks_say_what_a_single_rank_says(
    folder_of: Callable[[str], Path], pool: ThreadPoolExecutor, name: str
) -> None:
    folder = folder_of(name)
    both, alone = Both(folder, pool), Engine(folder, num_blocks=40, block_size=8, dtype="float32")
    drawn = [Sampling(temperature=0.8, top_p=0.9, seed=3)] if name in SAMPLED else []
    for sampling in (Sampling(), *drawn):
        assert said(both, sampling) == said(alone, sampling)


class Captured(Both):
    """Two ranks whose steps are captured, as plain calls."""

    def __init__(self, folder: Path, pool: ThreadPoolExecutor, **options: Any) -> None:
        super().__init__(folder, pool, has_graphs=True, **options)
        self.replays = [Replays() for _ in self.engines]

    def capture(self, *free: int, least: int = 0, most: int = 4, most_tokens: int = 0) -> list[list[int]]:
        """Capture on both ranks, each with its `free` bytes of memory; return the sizes that each has captured."""

        def captured(engine: Engine, replays: Replays, free: int) -> list[int]:
            engine.capture(most, replays, lambda: free, least, most_tokens=most_tokens)
            return [size.rows for size in engine._graphs.captured] if engine._graphs is not None else []

        return [*self._pool.map(captured, self.engines, self.replays, free or (PLENTY, PLENTY))]


@pytest.mark.parametrize("name", ["wide-heads", rarely("olmoe"), rarely("gpt-oss")])
@pytest.mark.parametrize("is_ahead", [False, True], ids=["", "a step ahead"])
def test_captured_ranks_say_what_transformers_says(
    folder_of: Callable[[str], Path],
    reference_of: Callable[[Path], Any],
    tally: Tally,
    pool: ThreadPoolExecutor,
    name: str,
    is_ahead: bool,
) -> None:
    """A step of three has a row of padding, and one with a prompt has more."""
    folder = folder_of(name)
    both = Captured(folder, pool, kernels=Drawing())
    assert both.capture(most_tokens=16) == [[1, 2, 4, 16]] * 2
    as_one: Any = both
    driver = Driver(as_one, 7)
    for engine in both.engines:
        engine.reads_later = is_ahead
    lives = [driver.start_either_way(f"r{seed}", prompt_of(seed, length), 2 * TOKENS) for seed, length in PROMPTS]
    for live in lives:
        driver.prefill(live, [9])
    chunks = len(both.replays[0].sizes)
    assert chunks, "chunks of up to 16 tokens run in captured steps"
    for chosen in (lives, lives[:2], lives[1:], lives[2:]):
        driver.run(*chosen, parts=[live.decode() for live in chosen])
    assert [replays.sizes[chunks:] for replays in both.replays] == [[4, 2, 2, 1]] * 2
    if is_ahead:
        ahead = [
            both.begin(
                StepPlan(90, (), tuple(live.decode_ahead(None if at else live.output[-1], at) for live in lives))
            )
            for at in range(4)
        ]
        for step in ahead:
            for request, token in step.result().tokens:
                next(live for live in lives if live.name == request).output.append(token)
    other = driver.start("other", prompt_of(9, 6), 3)
    driver.run(*lives, other, parts=[other.chunk(9), *(live.decode() for live in lives)])
    driver.run(*lives, other, parts=[live.decode() for live in (*lives, other)])
    assert [len(replays.sizes) - chunks for replays in both.replays] == [10 if is_ahead else 6] * 2
    for live in (*lives, other):
        compare(reference_of(folder), live.prompt, live.output, tally, f"{name} {live.name}")
    tally.check()


def test_ranks_capture_the_same_sizes_whatever_memory_each_has(
    folder_of: Callable[[str], Path], pool: ThreadPoolExecutor
) -> None:
    """A captured step sums its padding too: a rank that ran it otherwise would sum other numbers."""
    both = Captured(folder_of("mha-tied"), pool)
    assert both.capture(PLENTY, 5, least=6) == [[], []]

    class Full(Replays):
        num = 0

        def __call__(self, step: Step) -> Step:
            replay, self.num = super().__call__(step), self.num + 1
            if self.num == 3:  # a size is captured apart, and then together
                raise torch.OutOfMemoryError("CUDA out of memory")
            return replay

    both.replays[1] = Full()
    assert both.capture() == [[1, 4], [1, 4]]


@pytest.mark.parametrize("apart", [True, False], ids=["apart", "together"])
def test_no_rank_waits_for_one_whose_memory_ends_in_the_middle_of_a_capture(
    folder_of: Callable[[str], Path], pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch, apart: bool
) -> None:
    total, num = Team.total, count(1)

    def fuller(team: Team, x: torch.Tensor) -> None:
        if team.rank == 1 and len(x) == 2 and team.is_apart is apart and next(num) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        total(team, x)

    monkeypatch.setattr(Team, "total", fuller)
    both = Captured(folder_of("mha-tied"), pool)
    if apart:
        began = time.monotonic()
        assert both.capture() == [[1, 4], [1, 4]]
        assert time.monotonic() - began < ranks._STEP.total_seconds() / 2
    else:
        monkeypatch.setattr(ranks, "_STEP", timedelta(seconds=1))  # its launcher ends the other rank earlier
        first, second = (
            pool.submit(engine.capture, 4, replays, lambda: PLENTY, 0)
            for engine, replays in zip(both.engines, both.replays, strict=True)
        )
        assert "too little memory to capture decode steps of 2 requests" in str(second.exception(60))
        assert isinstance(second.exception(60), RankLost)
        assert isinstance(first.exception(60), RankLost)


def test_a_rank_that_cannot_capture_lets_no_other_wait(
    folder_of: Callable[[str], Path], pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first rank captures as plain calls; the second says, or finds as it captures, that it cannot."""
    both = Captured(folder_of("mha-tied"), pool)
    first, second = both.engines
    asked_for = Config(engine=EngineConfig(device=DeviceKind.CUDA, cuda_graphs=Graphs.ON))

    def refusals() -> list[str]:
        work = [pool.submit(loading.capture_steps, engine, asked_for) for engine in both.engines]
        return [str(one.exception(timeout=60)).split(": ", 1)[1] for one in work]

    found = {first: None, second: "it has no graphs"}
    monkeypatch.setattr(Engine, "why_no_graphs", property(found.get))
    monkeypatch.setattr(loading, "CudaCapture", lambda _: Replays())
    assert refusals() == [f"{ranks.OTHER_RANK}: set it to auto", "it has no graphs: set it to auto"]
    found[second] = None
    monkeypatch.setattr(second, "capture", partial(_fail, "capturing is not permitted"))
    assert refusals() == [
        f"{ranks.OTHER_RANK}: set it to auto",
        "RuntimeError: capturing is not permitted: set it to auto",
    ]
    assert first._graphs is None


def test_three_ranks_share_nine_heads_of_which_three_are_of_k(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {
        "hidden_size": 72,
        "intermediate_size": 57,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
    }
    folder = llama(tmp_path / "model", **sizes)
    with ThreadPoolExecutor(3) as pool:
        three, alone = Both(folder, pool, num_ranks=3), Engine(folder, num_blocks=40, block_size=8, dtype="float32")
        assert said(three, Sampling()) == said(alone, Sampling())


def test_ranks_read_folded_blocks_as_a_single_rank_reads_them_unfolded(
    folder_of: Callable[[str], Path], pool: ThreadPoolExecutor
) -> None:
    folder, prompt, outputs = folder_of("llama4"), prompt_of(5, 60), list[list[int]]()
    for engine in (Both(folder, pool), Engine(folder, num_blocks=40, block_size=8, dtype="float32")):
        blocks, dropped = tuple(range(9)), 0
        output = [engine.step(StepPlan(1, (Chunk("r", prompt, 0, KvForm(blocks), Sampling()),))).tokens[0][1]]
        if isinstance(engine, Both):
            engine.fold([(10, 0, 1, 2, 3)])
            blocks, dropped = (10, *blocks[4:]), 24
        for at in range(TOKENS):
            decode = Decode("r", output[-1], len(prompt) + at, KvForm(blocks, dropped), Sampling(), at + 1)
            output.append(engine.step(StepPlan(at + 2, decodes=(decode,))).tokens[0][1])
        outputs.append(output)
    assert outputs[0] == outputs[1]


def test_log_probabilities_are_of_the_whole_vocabulary(
    folder_of: Callable[[str], Path], pool: ThreadPoolExecutor
) -> None:
    """Prompt and output have them; the vocabulary is odd, so the last rank has fewer words than the first."""
    folder, prompt = folder_of("gqa-untied"), prompt_of(5, 12)
    assert VOCAB % 2
    chunk = Chunk("r", prompt, 0, KvForm((3, 1)), Sampling(logprobs=4), scoring=Scoring(prompt[1:], 3))
    results = [
        engine.step(StepPlan(1, (chunk,)))
        for engine in (Both(folder, pool), Engine(folder, num_blocks=40, block_size=8, dtype="float32"))
    ]
    (shared,), (alone,) = ([logprob for _, logprob in result.logprobs] for result in results)
    assert [token for token, _ in shared.top] == [token for token, _ in alone.top]
    (_, shared_prompt), (_, alone_prompt) = (result.prompt_logprobs[0] for result in results)
    for got, expected in zip((shared, *shared_prompt), (alone, *alone_prompt), strict=True):
        assert got.value == pytest.approx(expected.value, abs=1e-4)


def test_each_rank_has_its_share_of_weights_and_cache(
    folder_of: Callable[[str], Path], pool: ThreadPoolExecutor
) -> None:
    both, whole = Both(folder_of("gqa-untied"), pool), read_config(folder_of("gqa-untied"))
    for engine in both.engines:
        assert (engine.config.num_heads, engine.cache.shape[-1]) == (whole.num_heads // 2, whole.kv_dim // 2)


@pytest.mark.parametrize(("ranks", "kv_heads"), [(2, 1), (4, 1)])
def test_ranks_beyond_the_heads_of_k_have_copies(folder_of: Callable[[str], Path], ranks: int, kv_heads: int) -> None:
    share = read_config(folder_of("gqa-untied")).share(ranks)
    assert (share.num_heads, share.num_kv_heads) == (4 // ranks, kv_heads)


def test_each_rank_keeps_whole_compressed_vectors(folder_of: Callable[[str], Path], pool: ThreadPoolExecutor) -> None:
    for engine in Both(folder_of("deepseek-v3"), pool).engines:
        assert (engine.config.num_heads, 2 * engine.cache.shape[-1]) == (2, 14 + 6)


@pytest.mark.parametrize(
    ("name", "ranks", "complaint"),
    [
        ("mha-tied", 3, "engine.tensor_parallel_size 3 does not divide the model's num_heads 4"),
    ],
)
def test_a_model_that_does_not_divide_is_refused(
    folder_of: Callable[[str], Path], name: str, ranks: int, complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        read_config(folder_of(name)).share(ranks)


def test_what_rank_0_says_the_others_hear_whatever_its_length(pool: ThreadPoolExecutor) -> None:
    frames, (first, *others) = [b"", b"x", bytes(range(256)) * 16, b"y" * 1_000_000], teams(3)
    heard = [pool.submit(lambda other=other: [other.hear(1_000_000) for _ in frames]) for other in others]
    for frame in frames:
        first.say(frame)
    assert [each.result() for each in heard] == [frames, frames]


def test_more_than_the_limit_is_not_read(pool: ThreadPoolExecutor) -> None:
    first, second = teams(2)
    heard = pool.submit(second.hear, 100)
    first.say(bytes(101))
    with pytest.raises(RankLost, match="101 bytes at once, the limit is 100"):
        heard.result()


def test_they_agree_only_where_all_do(pool: ThreadPoolExecutor) -> None:
    both = teams(2)
    for answers in ((True, True), (True, False), (False, True), (False, False)):
        assert {*pool.map(Team.agree, both, answers)} == {all(answers)}


def test_the_least_of_what_all_say_counts(pool: ThreadPoolExecutor) -> None:
    assert {*pool.map(Team.least, teams(2), (7 << 40, 5 << 40))} == {5 << 40}
    assert ALONE.least(7) == 7


@pytest.mark.parametrize(
    "wait", [lambda team: team.hear(100), lambda team: team.agree(True), lambda team: team.total(torch.zeros(1 << 20))]
)
def test_a_rank_that_is_gone_ends_the_wait_for_it(pool: ThreadPoolExecutor, wait: Callable[[Team], object]) -> None:
    both = teams(2)
    waiting = pool.submit(wait, both.pop())
    both.clear()  # rank 0 ends with its team
    with pytest.raises(RankLost, match="has gone or does not answer"):
        waiting.result(timeout=60)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_ranks_have_the_same_bits(size: int, dtype: torch.dtype) -> None:
    """Parts are empty, small, and far larger than a socket holds."""
    generator, ranks = torch.Generator().manual_seed(3), teams(size)
    with ThreadPoolExecutor(size) as pool:
        for shape in ((0, 3), (1, 3), (300, 5000)):
            own = [torch.randn(shape, generator=generator).to(dtype) for _ in ranks]
            wanted, joined = sum(own[1:], own[0]), torch.cat(own, dim=1)
            assert all(torch.equal(got, joined) for got in pool.map(Team.side_by_side, ranks, own))
            list(pool.map(Team.total, ranks, own))
            assert all(torch.equal(got, wanted) for got in own)
            own = [torch.full(shape, rank, dtype=dtype) for rank in range(size)]
            list(pool.map(Team.hand_on, ranks, own))
            assert not any(map(torch.any, own))


def test_a_rank_that_does_not_answer_in_a_step_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "_STEP", timedelta(seconds=0.1))
    first, _second = teams(2)
    with pytest.raises(RankLost, match=r"no answer within 0\.1 s"):
        first.total(torch.zeros(4))


def test_too_little_memory_on_a_rank_ends_the_worker(
    folder_of: Callable[[str], Path], pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other rank waits in the middle of the step, so the worker cannot go on."""
    both = Both(folder_of("mha-tied"), pool)
    second = both.engines[1]
    monkeypatch.setattr(second._model, "forward", partial(_fail, "not enough memory: you tried to allocate"))
    with pytest.raises(RankLost, match="too little memory for step 1 on rank 1"):
        second.step(StepPlan(1, decodes=(Decode("r", 1, 0, KvForm((0,)), Sampling(), 0),)))


def _fail(why: str, *_: object, **__: object) -> None:
    raise RuntimeError(why)


class Nccl:
    """A group of NCCL: what it queues in the stream of the caller returns no work, as torch's does from 2.8 on."""

    def __init__(self) -> None:
        self.beside: list[bool] = []  # whether each was to run in a stream of NCCL's own
        self.has_failed = False

    def allreduce(self, _tensors: Any, options: Any) -> None:
        if self.has_failed:
            raise RuntimeError("NCCL communicator was aborted")
        self.beside.append(options.asyncOp)

    def broadcast(self, _tensors: Any, options: Any) -> None:
        assert options.rootRank == 0
        self.allreduce(_tensors, options)

    def _allgather_base(self, parts: torch.Tensor, x: torch.Tensor, options: Any) -> None:
        parts[0], parts[1] = x, x + 1
        self.allreduce(x, options)


def test_on_gpus_nobody_waits_in_the_middle_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Queue NCCL's work in the stream of the step: the CPU waits for nothing."""
    nccl = Nccl()
    monkeypatch.setattr(ranks, "_nccl", lambda *_: (nccl, None))
    team = Team(0, 2, TeamLinks(*(links_of(2)[0] for _ in range(3))), torch.device("cuda", 0))
    assert team.captures
    team.total(torch.zeros(2, 2))
    own = torch.tensor([[1, 2], [3, 4]])
    assert team.side_by_side(own).tolist() == [[1, 2, 2, 3], [3, 4, 4, 5]]
    team.hand_on(torch.zeros(2))
    assert nccl.beside == [False] * 3

    nccl.has_failed = True
    with pytest.raises(RankLost, match="NCCL communicator was aborted"):
        team.total(torch.zeros(2, 2))
