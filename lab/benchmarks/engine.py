"""Measure the engine on this CPU against transformers and vLLM: the same random weights, lengths and cores, in one run.

    python -m lab.benchmarks.engine                              # a quick subset, about a minute
    python -m lab.benchmarks.engine --full                       # every case of every model
    python -m lab.benchmarks.engine --peer-python PATH [--full]  # a Python that has vLLM's CPU build, as a peer
    python -m lab.benchmarks.engine --models opt125m --only "decode 8 x 64"  # a single case of one model, as in --full
    python -m lab.benchmarks.engine --quantization int8,int4 --only "decode 1 x 64,decode 8 x 64,decode 64 x 64,prefill"
    python -m lab.benchmarks.engine --kv-dtype int8 --only "decode 32 x 512,prefill 2048"  # KV in int8 against bf16
    python -m lab.benchmarks.engine --peer-python PATH --peers vLLM --rounds 1 --only "4 x 3000"  # a single peer

Each case runs on every engine in turn, for several rounds, and its figure is the median: slow phases of the machine
affect all engines alike. `--where` adds a table of the parts of a step's time. The exit status is 1 if a goal is
missed.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Protocol, TypeVar

import torch

from alignedserve.architectures.families.model_config import read_config
from alignedserve.architectures.kv_dtype import KvDtype
from alignedserve.architectures.quantization import Quantization
from alignedserve.config.config import Config, Dtype, EngineConfig
from alignedserve.core import Chunk, Decode, Sampling, StepPlan
from alignedserve.engine.device import large_pages
from alignedserve.engine.engine import Engine
from alignedserve.executor.loading import use_threads
from alignedserve.lab.benchmarks.common.engine_parts import print_parts
from alignedserve.lab.benchmarks.common.models import MAKERS, POSITIONS, VOCAB
from alignedserve.lab.benchmarks.common.report import command, report, several, status
from alignedserve.lab.benchmarks.common.timing import least_us
from alignedserve.machine.capacity import capacity

BLOCK = 16
MOST_STEP_TOKENS = 4096
WARM_TOKENS = 256
PEERS = ("transformers", "vLLM")
BANDWIDTH_SHARE, DECODE_RATIO, PREFILL_RATIO = 0.85, 1.3, 1.0
QUANTIZED_SHARE = 0.8
QUANTIZED_RATIOS = {  # of bf16's speed
    Quantization.INT8: {"decode 1 x 64": 1.7, "decode 8 x 64": 1.5, "decode 64 x 64": 1.3, "prefill 512": 1.3},
    Quantization.INT4: {"decode 1 x 64": 2.5, "decode 8 x 64": 1.5, "decode 64 x 64": 0.95, "prefill 512": 0.95},
}
FITTING, FITTING_MB, FITTING_RATIO = 512, 512, 1.9
_GREEDY = Sampling()
_BF16 = 2  # bytes of a number


@dataclass(frozen=True)
class Case:
    name: str
    prompts: tuple[int, ...]  # lengths of the prompts
    output: int

    @property
    def is_prefill(self) -> bool:
        return self.output == 1

    @property
    def warming(self) -> Case:
        """Return the same case, but shorter: a padded batch of long prompts would take a minute."""
        if self.is_prefill:
            return self
        return Case(self.name, tuple(min(n, WARM_TOKENS) for n in self.prompts), min(3, self.output))

    @property
    def longest(self) -> int:
        return max(self.prompts) + self.output

    def within(self, positions: int) -> Case:
        """Return the case, with prompts cut to the longest that fit, and a name that says so."""
        if self.longest <= positions:
            return self
        most = positions - self.output
        return Case(f"{self.name} cut to {most}", tuple(min(n, most) for n in self.prompts), self.output)

    def tokens(self) -> list[list[int]]:
        draw = random.Random(self.name)
        return [draw.choices(range(10, VOCAB), k=length) for length in self.prompts]


def cases(full: bool) -> list[Case]:
    output = 128 if full else 32
    quick = [Case(f"decode {batch} x 64", (64,) * batch, output) for batch in (1, 8, 32)]
    quick.append(Case("prefill 512", (512,), 1))
    if not full:
        return quick
    return [
        *quick,
        Case("decode 64 x 64", (64,) * 64, output),
        Case("decode 32 x 512", (512,) * 32, 32),
        Case("decode 28 x 64 + 4 x 3000", (64,) * 28 + (3000,) * 4, 32),
        Case("prefill 2048", (2048,), 1),
    ]


@dataclass(frozen=True)
class Times:
    prompts_s: float  # until every request has its first token
    steps_s: list[float]  # seconds of each step after that

    @property
    def figure_s(self) -> float:
        return median(self.steps_s) if self.steps_s else self.prompts_s


class Peer(Protocol):
    def run(self, case: Case) -> Times: ...


class Ours:
    def __init__(
        self,
        folder: Path,
        largest: int,
        quantization: Quantization = Quantization.NONE,
        kv_dtype: KvDtype = KvDtype.AUTO,
        dtype: Dtype = Dtype.BFLOAT16,
    ) -> None:
        self.engine = Engine(
            folder,
            num_pairs=largest,
            block_size=BLOCK,
            dtype=dtype.value,
            kv_dtype=kv_dtype,
            quantization=quantization,
            tune_s=0.4,
        )
        self._number = 0

    def step(self, chunks: Sequence[Chunk] = (), decodes: Sequence[Decode] = ()) -> float:
        self._number += 1
        began = perf_counter()
        self.engine.step(StepPlan(self._number, tuple(chunks), tuple(decodes)))
        return perf_counter() - began

    def run(self, case: Case) -> Times:
        pairs = iter(range(self.engine.cache.shape[1] // 2))
        pairs_of = [tuple(next(pairs) for _ in range(-(-(n + case.output) // BLOCK))) for n in case.prompts]
        prompts_s = sum(self.step(chunks) for chunks in self._chunks(case, pairs_of))
        steps = []
        for index in range(1, case.output):
            requests = enumerate(zip(case.prompts, pairs_of, strict=True))
            decodes = [Decode(str(i), None, n + index - 1, pairs, _GREEDY, index) for i, (n, pairs) in requests]
            steps.append(self.step(decodes=decodes))
        return Times(prompts_s, steps)

    def _chunks(self, case: Case, pairs_of: Sequence[tuple[int, ...]]) -> Iterator[list[Chunk]]:
        """Yield the chunks of steps with whole prompts, as many in a step as vLLM may take.

        The last step samples for all prompts; decodes continue from there. A single prompt is one chunk that samples.
        """
        step: list[Chunk] = []
        prompts = list(enumerate(case.tokens()))
        if len(prompts) == 1:
            yield [Chunk("0", tuple(prompts[0][1]), 0, pairs_of[0], _GREEDY)]
            return
        for number, tokens in prompts:
            if sum(len(chunk.tokens) for chunk in step) + len(tokens) > MOST_STEP_TOKENS:
                yield step
                step = []
            step.append(Chunk(str(number), tuple(tokens[:-1]), 0, pairs_of[number], None))
        yield [chunk for chunk in step if chunk.tokens]
        yield [Chunk(str(i), (tokens[-1],), len(tokens) - 1, pairs_of[i], _GREEDY) for i, tokens in prompts]


class Transformers:
    """transformers, with prompts padded on the left to one length, as its users build batches."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()

    @torch.inference_mode()
    def run(self, case: Case) -> Times:
        longest = max(case.prompts)
        ids = torch.tensor([[0] * (longest - len(tokens)) + tokens for tokens in case.tokens()])
        mask = torch.tensor([[0] * (longest - n) + [1] * n for n in case.prompts])
        began = perf_counter()
        out = self._model(input_ids=ids, attention_mask=mask, logits_to_keep=1)
        prompts_s, steps = perf_counter() - began, []
        for _ in range(1, case.output):
            began = perf_counter()
            token = out.logits[:, -1].argmax(-1, keepdim=True)
            mask = torch.cat((mask, torch.ones(len(ids), 1, dtype=mask.dtype)), 1)
            out = self._model(input_ids=token, attention_mask=mask, past_key_values=out.past_key_values)
            steps.append(perf_counter() - began)
        return Times(prompts_s, steps)


class VLlm:
    """vLLM in a separate process, which waits while other engines run."""

    def __init__(self, python: str, folder: Path, longest: int) -> None:
        script = Path(__file__).parent / "peers" / "vllm_steps.py"
        cores = sorted(os.sched_getaffinity(0))
        environment = os.environ | {"VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores))}
        environment.pop("GOMP_SPINCOUNT", None)  # as vLLM is shipped
        self._log = TemporaryDirectory()
        errors = open(Path(self._log.name) / "log", "w+")  # noqa: SIM115  (lives as long as the process)
        command = [python, str(script), str(folder), str(longest)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment
        )
        if self._answer() != "ready":
            errors.seek(0)
            sys.exit(f"vLLM did not start: {errors.read()[-2000:]}")

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def run(self, case: Case) -> Times:
        assert self._process.stdin is not None
        print(json.dumps({"prompts": case.tokens(), "output": case.output}), file=self._process.stdin, flush=True)
        return Times(**json.loads(self._answer()))

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()
        self._log.cleanup()


def read_bandwidth() -> float:
    """Return the bytes per second that all cores read from memory, the best of five runs."""
    numbers = large_pages.zeros((1 << 27,), torch.float32).fill_(1)
    return 1e6 * numbers.nbytes / least_us(lambda: numbers.sum(), 1)


def weight_bytes(folder: Path, quantization: Quantization = Quantization.NONE) -> int:
    """Return the bytes that a decode step reads: all weights except an embedding that is not also the head."""
    from safetensors import safe_open

    with safe_open(folder / "model.safetensors", "pt") as file:
        numbers = {name: file.get_tensor(name).numel() for name in file.keys()}  # noqa: SIM118  (it is no dict)
    table = sum(n for name, n in numbers.items() if "embed_tokens" in name)
    head = sum(n for name, n in numbers.items() if "lm_head" in name or "embed_out" in name)
    return quantization.num_bytes(sum(numbers.values()) - table - head, 0, head or table, _BF16)


def compare_quantised(model: str, wanted: Sequence[Case], rounds: int, quantized: Sequence[Quantization]) -> None:
    """Compare our engine with quantised weights with itself in bf16, in turns."""
    with TemporaryDirectory() as scratch:
        folder = MAKERS[model](Path(scratch) / model)
        largest = max(sum(-(-(n + case.output) // BLOCK) for n in case.prompts) for case in wanted)
        engines = {kind: Ours(folder, largest, kind) for kind in (Quantization.NONE, *quantized)}
        for case in wanted:
            bandwidth = [read_bandwidth() for _ in range(rounds)]
            took = in_turns(engines, case, rounds)
            tokens = sum(case.prompts) if case.is_prefill else len(case.prompts)
            bf16 = tokens / took[Quantization.NONE]
            for kind in quantized:
                goal = QUANTIZED_RATIOS[kind].get(case.name)
                name = f"{model}, {case.name}, {kind.value} against bf16"
                wanted_rate = None if goal is None else goal * bf16
                report(name, tokens / took[kind], "tokens/s", baseline=bf16, goal=wanted_rate, at_least=True)
                if case.prompts == (64,):
                    name, read = f"{model}, {case.name}, {kind.value}", weight_bytes(folder, kind)
                    _report_share(name, read / took[kind], max(bandwidth), QUANTIZED_SHARE)


Kind = TypeVar("Kind")


def in_turns(engines: dict[Kind, Ours], case: Case, rounds: int) -> dict[Kind, float]:
    """Return the median time of a case on each engine."""
    for engine in engines.values():
        engine.run(case.warming)
    runs: dict[Kind, list[float]] = {kind: [] for kind in engines}
    for turn in range(rounds):
        for kind in list(engines) if turn % 2 == 0 else list(engines)[::-1]:
            runs[kind].append(engines[kind].run(case).figure_s)
    return {kind: median(times) for kind, times in runs.items()}


def compare_kv(model: str, wanted: Sequence[Case], rounds: int, kept: KvDtype) -> None:
    """Compare our engine with KV kept in another way with itself in bf16: how many requests fit, and speed."""
    with TemporaryDirectory() as scratch:
        folder = MAKERS[model](Path(scratch) / model)
        num_fitting = {kind: requests_that_fit(folder, kind) for kind in (KvDtype.AUTO, kept)}
        name, bf16 = (
            f"{model}, requests of {FITTING} tokens in {FITTING_MB} MB, {kept.value}",
            num_fitting[KvDtype.AUTO],
        )
        report(name, num_fitting[kept], "requests", baseline=bf16, goal=FITTING_RATIO * bf16, at_least=True)
        largest = max(sum(-(-(n + case.output) // BLOCK) for n in case.prompts) for case in wanted)
        engines = {kind: Ours(folder, largest, kv_dtype=kind) for kind in num_fitting}
        for case in wanted:
            took = in_turns(engines, case, rounds)
            tokens = sum(case.prompts) if case.is_prefill else len(case.prompts)
            rate = tokens / took[KvDtype.AUTO]
            goal = rate if case.name == "decode 32 x 512" else None
            name = f"{model}, {case.name}, KV in {kept.value} against bf16"
            report(name, tokens / took[kept], "tokens/s", baseline=rate, goal=goal, at_least=True)


def requests_that_fit(folder: Path, kept: KvDtype) -> int:
    """Return how many requests the device cache of a worker holds, as workers plan it."""
    config = Config(engine=EngineConfig(dtype=Dtype.BFLOAT16, kv_dtype=kept, kv_memory_mb=FITTING_MB))
    return capacity(config, read_config(folder)).limits.num_pairs // (FITTING // BLOCK)


def compare(
    model: str, wanted: Sequence[Case], rounds: int, others: Sequence[str], peer_python: str | None, where: bool
) -> None:
    with TemporaryDirectory() as scratch, ExitStack() as closing:
        folder = MAKERS[model](Path(scratch) / model)
        largest = max(sum(-(-(n + case.output) // BLOCK) for n in case.prompts) for case in wanted)
        ours = Ours(folder, largest)
        peers: dict[str, Peer] = {"ours": ours}
        if "transformers" in others:
            peers["transformers"] = Transformers(folder)
        if peer_python is not None and "vLLM" in others:
            vllm = VLlm(peer_python, folder, min(POSITIONS[model], max(case.longest for case in wanted) + 1))
            closing.callback(vllm.close)
            peers["vLLM"] = vllm
        for case in wanted:
            _compare(model, case, rounds, peers, weight_bytes(folder))
        if where:
            print_parts(ours.engine, [(case.name, partial(ours.run, case)) for case in wanted])


def _compare(model: str, case: Case, rounds: int, peers: dict[str, Peer], weights: int) -> None:
    for peer in peers.values():
        peer.run(case.warming)  # warms caches, autotuning and pages
    runs: dict[str, list[float]] = {name: [] for name in peers}
    bandwidth = []
    for turn in range(rounds):
        bandwidth.append(read_bandwidth())
        for name in list(peers) if turn % 2 == 0 else list(peers)[::-1]:
            runs[name].append(peers[name].run(case).figure_s)
    took = {name: median(times) for name, times in runs.items()}
    for name in list(peers)[1:]:
        _report(model, case, took[name], took["ours"], name)
    if case.prompts == (64,):
        _report_share(f"{model}, {case.name}", weights / took["ours"], max(bandwidth), BANDWIDTH_SHARE)


def _report_share(name: str, rate: float, bandwidth: float, goal: float) -> None:
    """Report the share of the memory's bandwidth at which weights are read."""
    report(f"{name}, read bandwidth", bandwidth / 1e9, "GB/s")
    report(f"{name}, of it", rate / bandwidth, "1", goal=goal, at_least=True)


def _report(model: str, case: Case, peer_s: float, ours_s: float, peer: str) -> None:
    """Report the speed of our engine against the peer's; a ratio above 1 means that ours is faster."""
    tokens = sum(case.prompts) if case.is_prefill else len(case.prompts)
    goal = (PREFILL_RATIO if case.is_prefill else DECODE_RATIO) * tokens / peer_s
    name = f"{model}, {case.name}, against {peer}"
    report(name, tokens / ours_s, "tokens/s", baseline=tokens / peer_s, goal=goal, at_least=True)


def main() -> None:
    parser = command(__doc__)
    parser.add_argument("--full", action="store_true", help="every case of every model")
    parser.add_argument("--models", type=several(str, MAKERS), help="default: llama160m, or all with --full")
    parser.add_argument(
        "--only", default="", help="run cases whose name contains one of these texts (separated by commas)"
    )
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each case on each engine (default: 3)")
    cores = len(os.sched_getaffinity(0))
    parser.add_argument(
        "--threads", type=int, default=cores, help="threads of each engine (default: the cores, %(default)s)"
    )
    parser.add_argument("--peer-python", help="a Python that has vLLM's CPU build")
    parser.add_argument("--peers", type=several(str, PEERS), default=list(PEERS), help="engines to compare with")
    parser.add_argument(
        "--quantization",
        type=several(Quantization, QUANTIZED_RATIOS),
        help="compare these with bf16, in place of peers",
    )
    parser.add_argument(
        "--kv-dtype", type=KvDtype, choices=[KvDtype.INT8], help="compare KV kept so with bf16, in place of peers"
    )
    parser.add_argument("--where", action="store_true", help="print the parts of a step's time")
    args = parser.parse_args()
    models = args.models or (list(MAKERS) if args.full else ["llama160m"])
    for name in ("rounds", "threads"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be 1 or more")
    if args.peer_python is not None and shutil.which(args.peer_python) is None:
        parser.error(f"--peer-python {args.peer_python} is no program: name a Python that has vLLM's CPU build")
    every, names = cases(args.full or bool(args.only)), args.only.split(",")
    wanted = [case for case in every if any(name in case.name for name in names)]
    if not wanted:
        parser.error(f"--only {args.only} leaves no case of {', '.join(case.name for case in every)}")
    use_threads(args.threads, workers=1)
    for model in models:
        fitting = [case.within(POSITIONS[model]) for case in wanted]
        for case, asked in zip(fitting, wanted, strict=True):
            if case is not asked:
                print(f"{model} has {POSITIONS[model]} positions: {asked.name} is {case.name}", file=sys.stderr)
        if args.quantization:
            compare_quantised(model, fitting, args.rounds, args.quantization)
            continue
        if args.kv_dtype:
            compare_kv(model, fitting, args.rounds, args.kv_dtype)
            continue
        compare(model, fitting, args.rounds, args.peers, args.peer_python, args.where)
    sys.exit(status())


if __name__ == "__main__":
    main()
