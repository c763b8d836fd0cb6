"""Measure the engine on this CPU against transformers and vLLM: the same random weights, lengths and cores, in one run.

    python -m lab.benchmarks.engine                              # a quick subset, about a minute
    python -m lab.benchmarks.engine --full                       # every case of every model
    python -m lab.benchmarks.engine --peer-python PATH [--full]  # a Python that has vLLM's CPU build, as a peer
    python -m lab.benchmarks.engine --models opt125m --only "decode 8 x 64"  # a single case of one model, as in --full
    python -m lab.benchmarks.engine --quantization int8,int4 --only "decode 1 x 64,decode 8 x 64,decode 64 x 64,prefill"
    python -m lab.benchmarks.engine --peer-python PATH --peers vLLM --rounds 1 --only "4 x 3000"  # a single peer
    python -m lab.benchmarks.engine --model FILE.gguf --llama-cpp FOLDER     # a quantised file against llama.cpp
    python -m lab.benchmarks.engine --model FOLDER --peer-python PATH        # a quantised folder against vLLM

Each case runs on every engine in turn, for several rounds, and its figure is the median: slow phases of the machine
affect all engines alike. With `--full` steps of decodes and a chunk are compared with both alone (`--only beside`). The
exit status is 1 if a goal is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from timeit import repeat
from typing import Protocol

import torch

from alignedserve.architectures.model_source import resolve
from alignedserve.architectures.quantization import Quantization
from alignedserve.config.choices import Dtype
from alignedserve.core import Chunk, Decode, KvForm, Sampling, StepPlan
from alignedserve.engine.device import large_pages
from alignedserve.engine.engine import Engine
from alignedserve.executor.loading import use_threads
from alignedserve.lab.benchmarks.common.models import MAKERS, POSITIONS, VOCAB
from alignedserve.lab.benchmarks.common.report import command, report, several, status

BLOCK = 16
MOST_STEP_TOKENS = 4096
WARM_TOKENS = 256
PEERS = ("transformers", "vLLM")
BANDWIDTH_SHARE, DECODE_RATIO, PREFILL_RATIO = 0.85, 1.3, 1.0
LLAMA_CPP_RATIOS = {"decode 1 x 64": 1.0, "decode 8 x 64": 1.5, "decode 32 x 64": 1.5}
BENCH = "llama-batched-bench"
MIXED_SHARE, MIXED_TIMES = 0.8, 10  # of the time of decodes and of a chunk alone; how often each step runs
QUANTIZED_SHARE = 0.8
QUANTIZED_RATIOS = {  # of bf16's speed
    Quantization.INT8: {"decode 1 x 64": 1.7, "decode 8 x 64": 1.5, "decode 64 x 64": 1.3, "prefill 512": 1.3},
    Quantization.INT4: {"decode 1 x 64": 2.5, "decode 8 x 64": 1.5, "decode 64 x 64": 0.95, "prefill 512": 0.95},
}
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
class Mixed:
    """A step of decodes and a chunk of a prompt."""

    decodes: int
    kept: int  # tokens before each decode
    chunk: int
    before: int  # tokens of the prompt that lie before the chunk

    @property
    def name(self) -> str:
        return f"{self.decodes} x {self.kept} beside {self.chunk} of a prompt behind {self.before}"

    def parts(self) -> tuple[list[Chunk], list[Decode]]:
        per_decode = -(-(self.kept + 1) // BLOCK)
        of_prompt = range(
            per_decode * self.decodes, per_decode * self.decodes + -(-(self.before + self.chunk) // BLOCK)
        )
        tokens = random.Random(self.name).choices(range(10, VOCAB), k=self.chunk)
        blocks = [tuple(range(per_decode * i, per_decode * (i + 1))) for i in range(self.decodes)]
        decodes = [Decode(str(i), 10, self.kept, KvForm(each), _GREEDY, 1) for i, each in enumerate(blocks)]
        return [Chunk("chunk", tuple(tokens), self.before, KvForm(tuple(of_prompt)), _GREEDY)], decodes

    @property
    def num_blocks(self) -> int:
        (chunk,), decodes = self.parts()
        return sum(len(run.kv.blocks) for run in (chunk, *decodes))


MIXED = (
    Mixed(19, 600, 146, 0),
    Mixed(32, 800, 128, 0),
    Mixed(8, 1200, 128, 0),
    Mixed(48, 600, 64, 0),
    Mixed(12, 800, 256, 256),
    Mixed(28, 64, 128, 0),
)


@dataclass(frozen=True)
class Times:
    prompts_s: float  # until every request has a first token
    steps_s: list[float]  # seconds of each step after that

    @property
    def figure_s(self) -> float:
        return median(self.steps_s) if self.steps_s else self.prompts_s


class Peer(Protocol):
    def run(self, case: Case) -> Times: ...


class Ours:
    def __init__(
        self, folder: Path, largest: int, quantization: Quantization = Quantization.NONE, dtype: Dtype = Dtype.BFLOAT16
    ) -> None:
        self.engine = Engine(
            folder, num_blocks=largest, block_size=BLOCK, dtype=dtype.value, quantization=quantization, tune_s=0.4
        )
        self._number = 0

    def step(self, chunks: Sequence[Chunk] = (), decodes: Sequence[Decode] = ()) -> float:
        self._number += 1
        began = perf_counter()
        self.engine.step(StepPlan(self._number, tuple(chunks), tuple(decodes)))
        return perf_counter() - began

    def run(self, case: Case) -> Times:
        free = iter(range(self.engine.cache.shape[1] // 2))
        blocks_of = [tuple(next(free) for _ in range(-(-(n + case.output) // BLOCK))) for n in case.prompts]
        prompts_s = sum(self.step(chunks) for chunks in self._chunks(case, blocks_of))
        steps = []
        for index in range(1, case.output):
            requests = enumerate(zip(case.prompts, blocks_of, strict=True))
            decodes = [
                Decode(str(i), None, n + index - 1, KvForm(blocks), _GREEDY, index) for i, (n, blocks) in requests
            ]
            steps.append(self.step(decodes=decodes))
        return Times(prompts_s, steps)

    def _chunks(self, case: Case, blocks_of: Sequence[tuple[int, ...]]) -> Iterator[list[Chunk]]:
        """Yield the chunks of steps with whole prompts, as many in a step as vLLM may take.

        The last step samples for all prompts; decodes continue from there. A single prompt is one chunk that samples.
        """
        step: list[Chunk] = []
        prompts = list(enumerate(case.tokens()))
        if len(prompts) == 1:
            yield [Chunk("0", tuple(prompts[0][1]), 0, KvForm(blocks_of[0]), _GREEDY)]
            return
        for number, tokens in prompts:
            if sum(len(chunk.tokens) for chunk in step) + len(tokens) > MOST_STEP_TOKENS:
                yield step
                step = []
            step.append(Chunk(str(number), tuple(tokens[:-1]), 0, KvForm(blocks_of[number]), None))
        yield [chunk for chunk in step if chunk.tokens]
        yield [Chunk(str(i), (tokens[-1],), len(tokens) - 1, KvForm(blocks_of[i]), _GREEDY) for i, tokens in prompts]


class Transformers:
    """transformers, with prompts padded on the left to one length, as users build batches."""

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
        script = Path(__file__).parent / "common" / "vllm_steps.py"
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


class LlamaCpp:
    """llama.cpp on a GGUF file: a process for each run, one token a step for each request, prompts of one length."""

    def __init__(self, folder: Path, model: Path, threads: int) -> None:
        flags = {"-m": model, "-t": threads, "-tb": threads, "-ctk": "bf16", "-ctv": "bf16"}  # KV as ours is
        self._program, self._flags = folder / BENCH, flags

    def run(self, case: Case) -> Times:
        """Return the times of a run: decode steps are timed together."""
        (prompt,), requests, steps = set(case.prompts), len(case.prompts), max(1, case.output - 1)
        lengths = {"-npp": prompt, "-ntg": steps, "-npl": requests, "-c": requests * (prompt + steps + 1)}
        # a step takes as many tokens as ours may
        flags = {**self._flags, **lengths, "-b": MOST_STEP_TOKENS, "-ub": MOST_STEP_TOKENS, "--output-format": "jsonl"}
        command = [str(self._program), *(str(word) for flag in flags.items() for word in flag)]
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        said = json.loads(next(line for line in output.splitlines() if line.startswith("{")))
        return Times(said["t_pp"], [] if case.is_prefill else [said["t_tg"] / steps] * steps)


def read_bandwidth() -> float:
    """Return the bytes per second that all cores read from memory, the best of five runs."""
    numbers = large_pages.zeros((1 << 27,), torch.float32).fill_(1)
    return numbers.nbytes / min(repeat(lambda: numbers.sum(), number=1, repeat=5))


def weight_bytes(folder: Path, quantization: Quantization = Quantization.NONE) -> int:
    """Return the bytes that a decode step reads: all weights except an embedding that is not also the head."""
    from safetensors import safe_open

    with safe_open(folder / "model.safetensors", "pt") as file:
        numbers = {name: file.get_tensor(name).numel() for name in file.keys()}  # noqa: SIM118  (it is no dict)
    table = sum(n for name, n in numbers.items() if "embed_tokens" in name)
    head = sum(n for name, n in numbers.items() if "lm_head" in name or "embed_out" in name)
    return quantization.num_bytes(sum(numbers.values()) - table - head, 0, head or table, _BF16)


def in_turns(engines: Mapping[str, Peer], case: Case, rounds: int) -> dict[str, float]:
    """Return the median time of a case on each engine; all have run it before."""
    for engine in engines.values():
        engine.run(case.warming)
    runs: dict[str, list[float]] = {name: [] for name in engines}
    for turn in range(rounds):
        for name in list(engines) if turn % 2 == 0 else list(engines)[::-1]:
            runs[name].append(engines[name].run(case).figure_s)
    return {name: median(times) for name, times in runs.items()}


@dataclass(frozen=True)
class Versus:
    """Two engines to compare, and how many times as fast as the second the first is to be in each case."""

    label: str
    first: str
    second: str
    ratio: Callable[[Case], float | None]


def compare(
    model: str, wanted: Sequence[Case], rounds: int, engines: Mapping[str, Peer], pairs: Sequence[Versus]
) -> Iterator[tuple[Case, dict[str, float]]]:
    """Report the speed of each pair in each case, and yield the case with the seconds of every engine."""
    for case in wanted:
        took = in_turns(engines, case, rounds)
        tokens = sum(case.prompts) if case.is_prefill else len(case.prompts)
        for pair in pairs:
            baseline, ratio = tokens / took[pair.second], pair.ratio(case)
            name, goal = f"{model}, {case.name}, {pair.label}", None if ratio is None else ratio * baseline
            report(name, tokens / took[pair.first], "tokens/s", baseline=baseline, goal=goal, at_least=True)
        yield case, took


def report_share(name: str, case: Case, read: int, seconds: float, goal: float) -> None:
    """Report the share of the memory's bandwidth at which a single request's weights are read."""
    if case.prompts == (64,):
        bandwidth = read_bandwidth()
        report(f"{name}, {case.name}, read bandwidth", bandwidth / 1e9, "GB/s")
        report(f"{name}, {case.name}, of it", read / seconds / bandwidth, "1", goal=goal, at_least=True)


def num_blocks_for(wanted: Sequence[Case]) -> int:
    return max(sum(-(-(n + case.output) // BLOCK) for n in case.prompts) for case in wanted)


def against_peers(model: str, folder: Path, wanted: Sequence[Case], args: argparse.Namespace) -> None:
    """Compare our engine with others on the same weights: random ones of a usual shape, or those of a folder."""
    with ExitStack() as closing:
        engines: dict[str, Peer] = {"ours": Ours(folder, num_blocks_for(wanted))}
        if "transformers" in args.peers and args.model is None:
            engines["transformers"] = Transformers(folder)
        if "vLLM" in args.peers and args.peer_python is not None:
            longest = max(case.longest for case in wanted) + 1
            engines["vLLM"] = vllm = VLlm(args.peer_python, folder, min(POSITIONS.get(model, longest), longest))
            closing.callback(vllm.close)
        if args.llama_cpp is not None:
            engines["llama.cpp"] = LlamaCpp(args.llama_cpp, args.model, args.threads)
        pairs = [Versus(f"against {peer}", "ours", peer, partial(ratio_to, peer)) for peer in list(engines)[1:]]
        for case, took in compare(model, wanted, args.rounds, engines, pairs):
            if args.model is None:
                report_share(model, case, weight_bytes(folder), took["ours"], BANDWIDTH_SHARE)


def ratio_to(peer: str, case: Case) -> float | None:
    if peer == "llama.cpp":
        return LLAMA_CPP_RATIOS.get(case.name)
    return PREFILL_RATIO if case.is_prefill else DECODE_RATIO


def measure_mixed(model: str, folder: Path, wanted: Sequence[Mixed]) -> None:
    """Report the time of steps with decodes and a chunk, against both alone, in turns."""
    ours = Ours(folder, max(case.num_blocks for case in wanted))
    for case in wanted:
        chunks, decodes = case.parts()
        turns = [(ours.step(chunks, decodes), ours.step(chunks), ours.step((), decodes)) for _ in range(MIXED_TIMES)]
        both, chunk, decode = (median(times[1:]) * 1e3 for times in zip(*turns, strict=True))  # the first warms up
        name = f"{model}, {case.name}, in one step"
        report(name, both, "ms", baseline=chunk + decode, goal=MIXED_SHARE * (chunk + decode), at_least=False)


def against_bf16(model: str, folder: Path, wanted: Sequence[Case], args: argparse.Namespace) -> None:
    """Compare our engine with quantised weights with itself in bf16."""
    kinds: list[Quantization] = args.quantization
    engines = {kind.value: Ours(folder, num_blocks_for(wanted), kind) for kind in (Quantization.NONE, *kinds)}
    pairs = [
        Versus(f"{kind.value} against bf16", kind.value, Quantization.NONE.value, partial(quantized_ratio, kind))
        for kind in kinds
    ]
    for case, took in compare(model, wanted, args.rounds, engines, pairs):
        for kind in kinds:
            name = f"{model}, {kind.value}"
            report_share(name, case, weight_bytes(folder, kind), took[kind.value], QUANTIZED_SHARE)


def quantized_ratio(kind: Quantization, case: Case) -> float | None:
    return QUANTIZED_RATIOS[kind].get(case.name)


def parser_of_engine() -> argparse.ArgumentParser:
    parser = command(__doc__)
    parser.add_argument("--full", action="store_true", help="every case of every model")
    parser.add_argument("--models", type=several(str, MAKERS), help="random ones (default: llama160m; all with --full)")
    parser.add_argument("--model", type=Path, help="a folder, or a GGUF file, in place of random weights")
    parser.add_argument("--only", default="", help="cases whose name contains one of these texts (with commas)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each case on each engine")
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--threads", type=int, default=cores, help="threads of each engine")
    parser.add_argument("--peer-python", help="a Python that has vLLM's CPU build")
    parser.add_argument("--llama-cpp", type=Path, metavar="FOLDER", help=f"where {BENCH} is, for a GGUF file")
    parser.add_argument("--peers", type=several(str, PEERS), default=list(PEERS), help="engines to compare with")
    kinds = QUANTIZED_RATIOS
    parser.add_argument("--quantization", type=several(Quantization, kinds), help="these against bf16, without peers")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of_engine()
    args = parser.parse_args(arguments)
    for name in ("rounds", "threads"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be 1 or more")
    if args.peer_python is not None and shutil.which(args.peer_python) is None:
        parser.error(f"--peer-python {args.peer_python} is no program: name a Python that has vLLM's CPU build")
    if args.model is not None and not args.model.exists():
        parser.error(f"--model {args.model} is not there")
    is_gguf = args.model is not None and args.model.suffix == ".gguf"
    if is_gguf != (args.llama_cpp is not None) or (is_gguf and not shutil.which(args.llama_cpp / BENCH)):
        parser.error(f"--model FILE.gguf and --llama-cpp go together: a folder that has {BENCH}")
    every, names = cases(args.full or bool(args.only)), args.only.split(",")
    wanted = [case for case in every if any(name in case.name for name in names)]
    has_mixed = (args.full or args.only) and args.model is None and not args.quantization
    mixed = [case for case in (MIXED if has_mixed else ()) if any(name in case.name for name in names)]
    if not wanted and not mixed:
        all_names = ", ".join(case.name for case in (*every, *(MIXED if has_mixed else ())))
        parser.error(f"--only {args.only} leaves no case of {all_names}")
    use_threads(args.threads, workers=1)
    with TemporaryDirectory() as scratch:
        run(args, wanted, mixed, Path(scratch))
    sys.exit(status())


def run(args: argparse.Namespace, wanted: Sequence[Case], mixed: Sequence[Mixed], scratch: Path) -> None:
    if args.model is not None:
        against_peers(args.model.name, resolve(str(args.model), str(scratch)), wanted, args)
        return
    measure = against_bf16 if args.quantization else against_peers
    for model in args.models or (list(MAKERS) if args.full else ["llama160m"]):
        fitting = [case.within(POSITIONS[model]) for case in wanted]
        for case, asked in zip(fitting, wanted, strict=True):
            if case is not asked:
                print(f"{model} has {POSITIONS[model]} positions: {asked.name} is {case.name}", file=sys.stderr)
        folder = MAKERS[model](scratch / model)
        if fitting:
            measure(model, folder, fitting, args)
        if mixed:
            measure_mixed(model, folder, mixed)


if __name__ == "__main__":
    main()
