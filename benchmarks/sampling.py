"""What choosing a batch's next tokens takes, by what the requests ask for.

    python -m benchmarks.sampling                 # half a minute on a core that does nothing else
    python -m benchmarks.sampling --batch 8 --vocabulary 128256

Each figure is the least of some runs, which take turns with those of the baseline: one row after the other, each
sorted whole, as it was done at first. Logits are drawn: "usual" ones fall as those of language models do (a top-p of
0.95 keeps some two hundred tokens), "flat" ones hardly (it keeps thousands).
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from alignedserve.core import History, Sampling
from alignedserve.engine.sampling.sampling import NextToken, Sampler, uniform
from benchmarks.report import report

NUM_RUNS = 7
TOKENS = 1_000  # of prompt and of output, where they count
INDEX = TOKENS

WARM = Sampling(temperature=0.8)
NUCLEUS = replace(WARM, top_p=0.95)
PENALTIES = Sampling(repetition_penalty=1.1, presence_penalty=0.5, frequency_penalty=0.2)
KINDS = {
    "greedy": Sampling(),
    "temperature": WARM,
    "top-p 0.95": NUCLEUS,
    "top-k 50": replace(WARM, top_k=50),
    "min-p 0.05": replace(WARM, min_p=0.05),
    "all penalties": PENALTIES,
    "all penalties, top-p 0.95": replace(PENALTIES, temperature=0.8, top_p=0.95),
    "greedy, 5 logprobs": Sampling(logprobs=5),
}


def usual_logits(batch: int, vocabulary: int) -> torch.Tensor:
    """Probabilities that fall with the rank to the power of 1.5, the ranks in an order of each row's own."""
    generator = torch.Generator().manual_seed(1)
    falling = -1.5 * torch.arange(1, vocabulary + 1).log()
    return torch.stack([falling[torch.randperm(vocabulary, generator=generator)] for _ in range(batch)])


def flat_logits(batch: int, vocabulary: int) -> torch.Tensor:
    return 3 * torch.randn(batch, vocabulary, generator=torch.Generator().manual_seed(1))


def row_by_row(logits: torch.Tensor, sampling: Sampling, seeds: Sequence[int]) -> list[int]:
    """As it was done at first; penalties it did not know."""
    chosen: list[int] = logits.argmax(dim=-1).tolist()
    if sampling.temperature > 0:
        for row, seed in enumerate(seeds):
            below_best = logits[row].double() - logits[row].max()
            ordered, tokens = torch.sort(below_best / sampling.temperature, descending=True, stable=True)
            reached = ordered[: sampling.top_k or None].softmax(0).cumsum(0)
            if sampling.top_p < 1:
                reached = reached[: int((reached < sampling.top_p).sum()) + 1]
            place = torch.searchsorted(reached, uniform(seed, INDEX) * reached[-1], right=True)
            chosen[row] = int(tokens[min(int(place), len(reached) - 1)])
    return chosen


def histories(batch: int, vocabulary: int) -> list[History]:
    draw = random.Random(1)
    words = [tuple(draw.choices(range(vocabulary), k=TOKENS)) for _ in range(2 * batch)]
    return [History(prompt, output, (2,)) for prompt, output in zip(words[::2], words[1::2], strict=True)]


def batched(sampling: Sampling, batch: int, vocabulary: int) -> Callable[[torch.Tensor], object]:
    """A step in the middle of a batch's life: its histories are known up to the newest token."""
    sampler = Sampler(vocabulary)
    told = histories(batch, vocabulary) if sampling.edits_logits else [None] * batch
    wanted = [NextToken(replace(sampling, seed=row), INDEX, str(row), told[row]) for row in range(batch)]
    return lambda logits: sampler.sample(logits, wanted)


def least_ms(runs: Sequence[Callable[[], object]], clock: Callable[[], float]) -> list[float]:
    """Of each, taking turns."""
    least = [float("inf")] * len(runs)
    for turn in range(NUM_RUNS + 1):
        for number, run in enumerate(runs):
            began = clock()
            run()
            if turn:  # the first one warms up
                least[number] = min(least[number], 1000 * (clock() - began))
    return least


@torch.inference_mode()
def compared(name: str, sampling: Sampling, logits: torch.Tensor, clock: Callable[[], float]) -> None:
    batch, vocabulary = logits.shape
    ours, own = batched(sampling, batch, vocabulary), logits.clone()  # edits would add up in the one that is shared
    before = replace(sampling, repetition_penalty=1, presence_penalty=0, frequency_penalty=0, min_p=0)
    runs = [
        lambda: ours(own.copy_(logits)),
        lambda: own.copy_(logits),
        lambda: row_by_row(logits, before, range(batch)),
    ]
    with_copy, copy, baseline = least_ms(runs, clock)
    report(f"sampling {name}", with_copy - copy, "ms", baseline=baseline)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--vocabulary", type=int, default=32_000)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--cpu-clock", action="store_true", help="processor time of one thread, on a busy machine")
    asked = parser.parse_args()
    clock = time.thread_time if asked.cpu_clock else time.perf_counter
    torch.set_num_threads(asked.threads)
    usual = usual_logits(asked.batch, asked.vocabulary)
    for name, sampling in KINDS.items():
        compared(f"{asked.batch} x {asked.vocabulary}, {name}", sampling, usual, clock)
    flat = flat_logits(asked.batch, asked.vocabulary)
    compared(f"{asked.batch} x {asked.vocabulary}, flat, top-p 0.95", NUCLEUS, flat, clock)


if __name__ == "__main__":
    main()
