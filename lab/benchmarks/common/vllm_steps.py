"""Steps vLLM's engine in this process and times each step: run by lab/benchmarks/engine.py with a Python that has vLLM.

    python vllm_steps.py MODEL_FOLDER LONGEST

Reads a case a line, {"prompts": [[token, ...], ...], "output": n}, and answers each with the seconds of its steps.
"""

from __future__ import annotations

import json
import os
import sys
from time import perf_counter
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "3")


def main(folder: str, longest: int) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what vLLM prints is no answer
    from vllm import LLM, SamplingParams

    engine = LLM(
        model=folder,
        dtype="bfloat16",
        max_model_len=longest,
        max_num_seqs=64,
        max_num_batched_tokens=4096,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        disable_log_stats=True,
    ).llm_engine
    number = 0
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        case: dict[str, Any] = json.loads(line)
        sampling = SamplingParams(temperature=0, max_tokens=case["output"], ignore_eos=True, detokenize=False)
        for prompt in case["prompts"]:
            number += 1
            engine.add_request(str(number), {"prompt_token_ids": prompt}, sampling)
        print(json.dumps(run(engine, len(case["prompts"]))), file=answers, flush=True)


def run(engine: Any, requests: int) -> dict[str, Any]:
    """Seconds until all have their first token, and of the steps after that in which all ran."""
    seen: dict[str, int] = {}
    began, prompts_s, steps = perf_counter(), 0.0, []
    while engine.has_unfinished_requests():
        all_run = len(seen) == requests
        start = perf_counter()
        outputs = engine.step()
        end = perf_counter()
        seen |= {output.request_id: len(output.outputs[0].token_ids) for output in outputs}
        if all_run and len(outputs) == requests:
            steps.append(end - start)
        if not prompts_s and len(seen) == requests:
            prompts_s = end - began
    return {"prompts_s": prompts_s, "steps_s": steps}


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
