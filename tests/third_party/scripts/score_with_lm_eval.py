"""Runs lm-evaluation-harness: a task over a local file, on a server and on transformers with the same weights."""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

url, model, tokenizer, weights = sys.argv[1:]
ITEMS = [
    ("Two and three are", ["five", "a house", "seven green"]),
    ("What is the capital of France? It is", ["Paris", "seven", "Monday"]),
    ("After Monday comes", ["Tuesday", "France", "eleven of them"]),
    ("Count from 3 to 7: 3, 4, 5, 6,", ["7", "blue", "9"]),
    ("Hello, how are", ["you", "seven", "the"]),
    ("One, two, three,", ["four", "water", "nine"]),
]
here = Path.cwd()
rows = [{"question": question, "choices": choices, "answer": 0} for question, choices in ITEMS]
(here / "items.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
task = {
    "task": "local_items",
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"test": str(here / "items.jsonl")}},
    "test_split": "test",
    "output_type": "multiple_choice",
    "doc_to_text": "{{question}}",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "{{answer}}",
    "metric_list": [{"metric": name, "aggregation": "mean", "higher_is_better": True} for name in ("acc", "acc_norm")],
}
(here / "local_items.yaml").write_text(yaml.safe_dump(task), encoding="utf-8")

import lm_eval  # noqa: E402  (it reads what has been written)
from lm_eval.tasks import TaskManager  # noqa: E402


def told(kind: str, arguments: str) -> dict[str, Any]:
    tasks = TaskManager(include_path=str(here), include_defaults=False)
    results = lm_eval.simple_evaluate(kind, arguments, ["local_items"], task_manager=tasks, batch_size=4)
    scores = {name: value for name, value in results["results"]["local_items"].items() if name.startswith("acc")}
    samples = sorted(results["samples"]["local_items"], key=lambda sample: sample["doc_id"])
    return {
        "scores": scores,
        "logprobs": [[response[0] for response in sample["filtered_resps"]] for sample in samples],
    }


# No add_bos_token=True, which has `hf` put a token before each text that this model's tokenizer does not put there.
served = f"model={model},base_url={url}/v1/completions,tokenizer={tokenizer},tokenized_requests=True,num_concurrent=2"
reports = {
    "version": version("lm-eval"),
    "served": told("local-completions", served),
    "transformers": told("hf", f"pretrained={weights},tokenizer={tokenizer},dtype=float32,device=cpu"),
}
print(json.dumps(reports))
