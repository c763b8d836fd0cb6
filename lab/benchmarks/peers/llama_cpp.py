"""llama.cpp's programs on a GGUF file: a process for each run, which reads the file anew."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from torch import Tensor

from alignedserve.lab.benchmarks.engine import Case, Times

BENCH, PERPLEXITY = PROGRAMS = ("llama-batched-bench", "llama-perplexity")
_KV = {"-ctk": "bf16", "-ctv": "bf16"}  # as ours is


@dataclass(frozen=True)
class Scored:
    """Texts of one length, and the log-probabilities that follow each token of their second halves but the last."""

    texts: list[list[int]]
    log_probabilities: Tensor  # [tokens, vocabulary], text by text


class LlamaCpp:
    """llama.cpp with one token a step for each request, and prompts of one length."""

    def __init__(self, folder: Path, model: Path, threads: int) -> None:
        self._folder, self._shared = folder, {"-m": model, "-t": threads, "-tb": threads, **_KV}

    def run(self, case: Case) -> Times:
        """Return the times of a run: its decode steps are timed together."""
        (prompt,), requests, steps = set(case.prompts), len(case.prompts), max(1, case.output - 1)
        lengths = {"-npp": prompt, "-ntg": steps, "-npl": requests, "-c": requests * (prompt + steps + 1)}
        # a step takes as many tokens as ours may
        output = self._output(BENCH, {**lengths, "-b": 4096, "-ub": 4096, "--output-format": "jsonl"})
        said = json.loads(next(line for line in output.splitlines() if line.startswith("{")))
        return Times(said["t_pp"], [] if case.is_prefill else [said["t_tg"] / steps] * steps)

    def score(self, text: Path, length: int, num_texts: int) -> Scored:
        """Cut a text into some of `length` tokens, and score each as a prompt of its own.

        Where the model begins texts with a token of its own, that takes the place of the first; `texts` do not say so.
        """
        with TemporaryDirectory() as scratch:
            file = Path(scratch) / "logits"
            lengths = {"-c": length, "-b": length, "-ub": length, "--chunks": num_texts}
            output = self._output(PERPLEXITY, {**lengths, "-f": text, "--save-all-logits": file})
            if not file.exists() or file.stat().st_size <= 8 + 4:
                raise ValueError(f"{PERPLEXITY} scored nothing of {text}: {output[-500:]}")
            return _read(file)

    def _output(self, program: str, flags: Mapping[str, object]) -> str:
        arguments = [str(word) for flag in {**self._shared, **flags}.items() for word in flag]
        return subprocess.run([self._folder / program, *arguments], capture_output=True, text=True, check=True).stdout


def _read(file: Path) -> Scored:
    """Read a file of log-probabilities in 16 bits, from 16 below the most likely token on (tools/perplexity)."""
    data = np.fromfile(file, np.uint16, offset=8)
    length, words, num_texts = (int(number) for number in data[:6].view(np.int32))
    end = 6 + 2 * num_texts * length
    texts: list[list[int]] = data[6:end].view(np.int32).reshape(num_texts, length).tolist()
    rows = data[end:].reshape(-1, 4 + words + words % 2)
    scale, least = np.ascontiguousarray(rows[:, :4]).view(np.float32).T[..., None]
    return Scored(texts, torch.from_numpy(rows[:, 4 : 4 + words] * scale + least))
