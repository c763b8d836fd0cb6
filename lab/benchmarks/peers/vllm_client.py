"""vLLM's client of load tests (`vllm bench serve`), to hold ours against: run with another Python, which has it."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from alignedserve.architectures.model_source import DEMO_FOLDER
from alignedserve.lab.benchmarks.gateway import MODEL

# Not its command line: that looks for the metadata of an installed package, which a build in place lacks.
_RUN = """
import asyncio
from vllm.benchmarks.serve import add_cli_args, main_async
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
asyncio.run(main_async(parser.parse_args()))
"""


def measured(python: str, url: str, rate: float, requests: int, lengths: tuple[int, int], seed: int, out: Path) -> Any:
    """Return its figures of so many requests of the demo model, at random times, with prompts and outputs so long."""
    prompt, output = map(str, lengths)
    flags = ["--backend", "openai", "--base-url", url, "--endpoint", "/v1/completions", "--model", MODEL]
    flags += ["--tokenizer", str(DEMO_FOLDER), "--dataset-name", "random", "--random-input-len", prompt]
    flags += ["--random-output-len", output, "--num-prompts", str(requests), "--request-rate", str(rate)]
    flags += ["--ignore-eos", "--temperature", "0", "--disable-tqdm", "--seed", str(seed)]
    flags += ["--percentile-metrics", "ttft,tpot,e2el", "--metric-percentiles", "50,99"]
    flags += ["--save-result", "--result-dir", str(out), "--result-filename", "peer.json"]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"HF_HUB_OFFLINE": "1"}
    subprocess.run([python, "-c", _RUN, *flags], env=env, check=True, capture_output=True)
    return json.loads((out / "peer.json").read_text(encoding="utf-8"))
