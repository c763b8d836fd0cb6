"""Asks one question many times with AIPerf, the load generator, and reports as JSON what AIPerf wrote."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

url, model, question, tokenizer, count = sys.argv[1:]
ARTIFACTS = Path("artifacts")
QUESTIONS = Path("questions.jsonl")


def lines_of(name: str) -> list[Any]:
    return [json.loads(line) for line in (ARTIFACTS / name).read_text(encoding="utf-8").splitlines()]


def written(name: str, otherwise: Any) -> Any:
    file = ARTIFACTS / name
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else otherwise


def value(record: Any, metric: str) -> Any:
    return record["metrics"].get(metric, {}).get("value")


def as_seen(record: Any) -> dict[str, Any]:
    """Return a request as AIPerf saw it."""
    counted = ["usage_prompt_tokens", "usage_completion_tokens", "usage_total_tokens", "output_sequence_length"]
    numbers = {metric: value(record, metric) for metric in counted}
    return {**numbers, "time_to_first_token": value(record, "time_to_first_token"), "error": record.get("error")}


QUESTIONS.write_text("".join(json.dumps({"text": question}) + "\n" for _ in range(int(count))), encoding="utf-8")
options = {
    "--url": url,
    "--model": model,
    "--endpoint-type": "chat",
    "--tokenizer": tokenizer,
    "--input-file": str(QUESTIONS),
    "--custom-dataset-type": "single_turn",
    "--extra-inputs": "temperature:0",
    "--request-count": count,
    "--concurrency": "3",
    "--workers-max": "1",
    "--record-processors": "1",
    "--ui": "none",
    "--artifact-dir": str(ARTIFACTS),
}
flags = ["--streaming", "--export-outputs-json", "--no-gpu-telemetry"]
command = [sys.executable, "-m", "aiperf", "profile", *flags, *(word for pair in options.items() for word in pair)]
# AIPerf 0.13 accepts a folder for its tokenizer only if it may ask a hub. This address has no hub.
env = {**os.environ, "HF_HUB_OFFLINE": "", "HF_ENDPOINT": "http://127.0.0.1:9"}
exit_code = subprocess.run(command, stdout=sys.stderr, env=env).returncode
report = {
    "version": version("aiperf"),
    "exit_code": exit_code,
    "requests": [as_seen(record) for record in lines_of("profile_export.jsonl")],
    "texts": [output["response_text"] for output in written("outputs.json", {"data": []})["data"]],
    "scraped": sorted(written("server_metrics_export.json", {"metrics": {}})["metrics"]),
}
print(json.dumps(report))
