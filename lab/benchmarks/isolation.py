"""Measure chats beside saturating best-effort documents, on a colocated deployment of a random 160 M Llama.

    python -m lab.benchmarks.isolation [--seconds 30] [--rate 2] [--be 32] [--model FOLDER] [-- SERVE FLAGS]
    python -m lab.benchmarks.isolation --url http://127.0.0.1:8000 [--priority 1]
    python -m lab.benchmarks.isolation --batch [--seconds 30] [--rate 2] [--model FOLDER] [-- SERVE FLAGS]
    python -m lab.benchmarks.isolation --backend simulated [--seconds 40] [--machine zen4] [--speed 1] [--off 0.04,0.12]
        [--hog] [--against bros,sarathi,vllm-chunked]

The load and the backends are in common/chats.py. First chats and documents run alone, then together, with
three promises to the chats. The tight promise is also measured without documents: they do not cause every miss there.

    own        TTFT: 1.10 times the p95 of chats alone, and a median step more; TBT: 1.20 times the p95 of chats alone
    tight      0.3 s and 60 ms
    default    1 s and 187.5 ms

`--seconds` is the length of each of six runs. BE tokens count over a whole run, as other servers' clients count them:
including the documents' head start and the work after the last chat.

With `--hog` another tenant takes half of the memory bandwidth (common/hog.py). With `--against` the tight and the
default promise are simulated with other presets too.

With `--batch` the documents are lines of a file that has more than the run can finish, and the job runner opens as many
as it sees room for.

`--url` asks any server with OpenAI's API instead of starting ours. The peer is vLLM's server, on the same random model,
which `python -m lab.benchmarks.common.models llama160m FOLDER` writes:

    python -m vllm.entrypoints.openai.api_server --model FOLDER --served-model-name measured --dtype bfloat16
        --max-num-seqs 64 --no-enable-prefix-caching
    the same, tuned by hand: --scheduling-policy priority --max-num-batched-tokens 64; here --priority 1
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from alignedserve.lab.benchmarks.common.chats import (
    DEFAULT,
    Backend,
    ChatLoad,
    ChatPromise,
    ChatRun,
    Simulated,
    add_backend,
    backend,
)
from alignedserve.lab.benchmarks.common.machines import MACHINES
from alignedserve.lab.benchmarks.common.report import command, report, several, status
from alignedserve.loads.records.distribution import percentile

TIGHT = ChatPromise("tight", 0.3, 0.06, 95.0, 132.0)
KEPT, OF_BEST = 99.0, 1.1


def own(alone: ChatRun) -> ChatPromise:
    """Return the promise of the times that chats get alone, and a little more."""
    step_s = median(alone.gaps)
    return ChatPromise("own", 1.10 * percentile(alone.ttfts, 95) + step_s, 1.20 * percentile(alone.gaps, 95))


def tell(label: str, run: ChatRun, promise: ChatPromise, documents_alone: ChatRun | None) -> None:
    """Report a run. Only runs beside documents have goals."""
    is_beside = documents_alone is not None
    report(f"{label}: chats", len(run.chats), "1")
    for name, values, promised in (("TTFT", run.ttfts, promise.ttft_s), ("TBT", run.gaps, promise.tbt_s)):
        for percent in (50, 95, 99):
            report(f"{label}: {name} p{percent}", 1e3 * percentile(values, percent), "ms", baseline=1e3 * promised)
        in_time = 100 * sum(value <= promised for value in values) / max(1, len(values))
        goal = 95.0 if is_beside and promise.name == "own" else None
        report(f"{label}: {name} in time", in_time, "%", goal=goal, at_least=True)
    goal = promise.least_attained if is_beside else None
    report(f"{label}: chats attained", run.attained(promise), "%", goal=goal, at_least=True)
    if documents_alone is None:
        return
    for name, answers in (("chats refused or failed", run.chats), ("BE failed", run.documents)):
        report(f"{label}: {name}", sum(not answer.is_whole for answer in answers), "1", goal=0)
    alone_s, goal = documents_alone.tokens_s, promise.least_tokens_s
    report(f"{label}: BE", run.tokens_s, "tokens/s", baseline=alone_s, goal=goal, at_least=True)
    alone_s = documents_alone.meanwhile_tokens_s
    report(f"{label}: BE while chats come", run.meanwhile_tokens_s, "tokens/s", baseline=alone_s)


def measure(measured: Backend, load: ChatLoad, *, has_goals: bool = True) -> None:
    """Report all six runs. Without `has_goals`, tokens per second have no goal."""
    just_chats = replace(load, documents=0)
    alone = measured.run(just_chats, DEFAULT)
    tell("chats alone", alone, DEFAULT, None)
    documents = measured.run(load, None)
    report("BE alone", documents.tokens_s, "tokens/s")
    for promise in (own(alone), TIGHT, DEFAULT):
        promise = promise if has_goals else replace(promise, least_tokens_s=None)
        report(f"{promise.name}: promised TTFT", 1e3 * promise.ttft_s, "ms")
        report(f"{promise.name}: promised TBT", 1e3 * promise.tbt_s, "ms")
        if promise.name == "tight":
            tell("tight, alone", measured.run(just_chats, promise), promise, None)
        tell(promise.name, measured.run(load, promise), promise, documents)


def compare(measured: Simulated, load: ChatLoad, presets: Sequence[str]) -> None:
    """Report documents' tokens against the best preset that keeps the promises of 99 of 100 chats."""
    for promise in (TIGHT, DEFAULT):
        runs = {preset: measured.of_preset(preset).run(load, promise) for preset in ("aligned", *presets)}
        for preset, run in runs.items():
            goal = KEPT if preset == "aligned" else None
            report(f"{promise.name}, {preset}: chats attained", run.attained(promise), "%", goal=goal, at_least=True)
            report(f"{promise.name}, {preset}: BE while chats come", run.meanwhile_tokens_s, "tokens/s")
        ours = runs.pop("aligned").meanwhile_tokens_s
        best = max((run.meanwhile_tokens_s for run in runs.values() if run.attained(promise) >= KEPT), default=0.0)
        label = f"{promise.name}: BE while chats come, against the best preset that keeps {KEPT:g} %"
        report(label, ours, "tokens/s", baseline=best, goal=OF_BEST * best or None, at_least=True)


def main() -> None:
    parser = command(__doc__)
    parser.add_argument("--seconds", type=float, default=30.0, help="seconds of arrivals in each run")
    parser.add_argument("--rate", type=float, default=2.0, help="chats per second")
    documents = parser.add_mutually_exclusive_group()
    documents.add_argument("--be", type=int, default=32, help="documents at once")
    documents.add_argument("--batch", action="store_true", help="documents are lines of a batch")
    parser.add_argument("--against", type=several(str), default=[], help="simulated: presets to compare with")
    add_backend(parser)
    args = parser.parse_args()
    if args.against and args.backend == "real":
        parser.error("--against is of simulated deployments: run a real one with -- --preset NAME")
    if args.batch and args.backend == "simulated":
        parser.error("--batch is of a real deployment: a simulated one has documents alone")
    load = ChatLoad(args.rate, args.seconds, 1 if args.batch else args.be)
    with backend(args, is_batch=args.batch) as measured:
        if args.against and isinstance(measured, Simulated):
            compare(measured, load, args.against)
        else:
            measure(measured, load, has_goals=_has_goals(args))
    sys.exit(status())


def _has_goals(args: argparse.Namespace) -> bool:
    return args.backend == "real" or (MACHINES[args.machine].has_goals and args.speed == 1)


if __name__ == "__main__":
    main()
