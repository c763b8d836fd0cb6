"""Measure the engine on a quantised model against llama.cpp or vLLM on the same file: on one CPU, in turns.

    python -m lab.benchmarks.quantised_files --llama-cpp FOLDER MODEL-Q8_0.gguf llama1b-Q8_0 llama1b-Q4_0
    python -m lab.benchmarks.quantised_files --peer-python PATH MODEL_FOLDER

FOLDER has llama.cpp's programs, PATH is a Python that has vLLM's CPU build; llama1b-Q8_0 is a file of random weights.
A speed is the median of some rounds. Of a GGUF file that exists, the divergence of ours and of llama.cpp's next tokens
from transformers' in fp32 with the same weights is measured too, on the same real text. The exit status is 1 if a goal
is missed.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from alignedserve.architectures.model_source import resolve
from alignedserve.engine.engine import Engine
from alignedserve.executor.loading import use_threads
from alignedserve.lab.benchmarks.common.divergence import PROSE, decode_logits, divergence, prompt_logits
from alignedserve.lab.benchmarks.common.models import KINDS, random_gguf
from alignedserve.lab.benchmarks.common.report import command, report, several, status
from alignedserve.lab.benchmarks.engine import BLOCK, Case, Ours, Peer, VLlm
from alignedserve.lab.benchmarks.peers.llama_cpp import PROGRAMS, LlamaCpp
from alignedserve.text.text_model import TextModel

CASES = [Case(f"decode {batch} x 64", (64,) * batch, 64) for batch in (1, 8, 32)] + [Case("prefill 512", (512,), 1)]
LLAMA_CPP_RATIOS = {"decode 1 x 64": 1.0, "decode 8 x 64": 1.5, "decode 32 x 64": 1.5}
VLLM_RATIO = 1.3
SPEED, DIVERGENCE = FIGURES = ("speed", "divergence")
TEXT_TOKENS, NUM_TEXTS = 128, 8
MOST_MEAN, LEAST_SAME = 0.004, 0.97  # of the next tokens
GGUF = ".gguf"


def compare_speed(model: Path, ours: Ours, peer: Peer, peer_name: str, rounds: int) -> None:
    for case in CASES:
        engines: list[Peer] = [ours, peer]
        for engine in engines:
            engine.run(case.warming)
        runs: dict[Peer, list[float]] = {engine: [] for engine in engines}
        for turn in range(rounds):
            for engine in engines if turn % 2 == 0 else engines[::-1]:
                runs[engine].append(engine.run(case).figure_s)
        _report(
            f"{model.name}, {case.name}, against {peer_name}", case, median(runs[ours]), median(runs[peer]), peer_name
        )


def _report(name: str, case: Case, ours_s: float, peer_s: float, peer: str) -> None:
    tokens = sum(case.prompts) if case.is_prefill else len(case.prompts)
    ratio = LLAMA_CPP_RATIOS.get(case.name) if peer == "llama.cpp" else VLLM_RATIO
    goal = None if ratio is None else ratio * tokens / peer_s
    report(name, tokens / ours_s, "tokens/s", baseline=tokens / peer_s, goal=goal, at_least=True)


def compare_divergence(model: Path, text: TextModel, engine: Engine, peer: LlamaCpp) -> None:
    """Report how far next tokens are from those of transformers, in the second halves of texts of 128 tokens."""
    scored = peer.score(PROSE, TEXT_TOKENS, NUM_TEXTS)
    first = text.prompt_ids("")[:1]  # the token that begins texts, if any does
    texts, half = [first + tokens[len(first) :] for tokens in scored.texts], TEXT_TOKENS // 2
    network = _expanded(model)
    with torch.inference_mode():
        expected = _scored([network(torch.tensor([tokens])).logits[0, half:] for tokens in texts])
    at_once = decode_logits(engine, texts, half).split(half)
    alone = [decode_logits(engine, [tokens], half) for tokens in texts]
    theirs = divergence(expected, scored.log_probabilities)
    forms = {
        "prompts": [prompt_logits(engine, tokens)[half:] for tokens in texts],
        "decode 8": at_once,
        "decode 1": alone,
    }
    for form, logits in forms.items():
        found, name = divergence(expected, _scored(logits)), f"{model.name}, {form}, from fp32, beside llama.cpp"
        report(f"{name}: mean divergence", found.mean, "nats", baseline=theirs.mean, goal=MOST_MEAN)
        report(f"{name}: most", found.most, "nats", baseline=theirs.most)
        report(f"{name}: same best", found.same, "1", baseline=theirs.same, goal=LEAST_SAME, at_least=True)


def _scored(texts: Sequence[Tensor]) -> Tensor:
    """Return the logits that llama.cpp scores too: not those after the last token of a text."""
    return torch.cat([logits[:-1] for logits in texts])


def _expanded(model: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model.parent, gguf_file=model.name, dtype=torch.float32).eval()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command(__doc__)
    random = [f"llama1b-{kind}" for kind in KINDS]
    parser.add_argument(
        "models", nargs="+", type=Path, help=f"GGUF files or {' or '.join(random)} for llama.cpp, folders for vLLM"
    )
    parser.add_argument("--llama-cpp", type=Path, metavar="FOLDER", help=f"where {' and '.join(PROGRAMS)} are")
    parser.add_argument("--peer-python", help="a Python that has vLLM's CPU build")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each case on each engine (default: 3)")
    parser.add_argument("--figures", type=several(str, FIGURES), default=list(FIGURES), help="what is measured")
    args = parser.parse_args(arguments)
    threads = len(os.sched_getaffinity(0))
    for model in args.models:
        is_gguf = model.suffix == GGUF or str(model) in random
        if not model.exists() and str(model) not in random:
            parser.error(f"{model} is not there")
        if is_gguf and not (args.llama_cpp and all(shutil.which(args.llama_cpp / program) for program in PROGRAMS)):
            parser.error(f"{model} is for llama.cpp: --llama-cpp names the folder of {' and '.join(PROGRAMS)}")
        if not is_gguf and (args.peer_python is None or shutil.which(args.peer_python) is None):
            parser.error(f"{model} is for vLLM: --peer-python names a Python that has its CPU build")
    use_threads(threads, workers=1)
    num_pairs = max(sum(-(-(n + case.output) // BLOCK) for n in case.prompts) for case in CASES)
    for model in args.models:
        with ExitStack() as closing:
            scratch = Path(closing.enter_context(TemporaryDirectory()))
            is_random = str(model) in random
            path = random_gguf(scratch / f"{model}{GGUF}", str(model).rpartition("-")[2]) if is_random else model
            folder = resolve(str(path), str(scratch))
            ours = Ours(folder, num_pairs)
            if path.suffix != GGUF:
                vllm = VLlm(args.peer_python, path, max(case.longest for case in CASES) + 1)
                closing.callback(vllm.close)
                compare_speed(path, ours, vllm, "vLLM", args.rounds)
                continue
            llama_cpp = LlamaCpp(args.llama_cpp, path, threads)
            if SPEED in args.figures:
                compare_speed(path, ours, llama_cpp, "llama.cpp", args.rounds)
            if DIVERGENCE in args.figures and not is_random:  # random weights have no outliers
                compare_divergence(path, TextModel.load(folder), ours.engine, llama_cpp)
    sys.exit(status())


if __name__ == "__main__":
    main()
