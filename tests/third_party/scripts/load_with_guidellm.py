"""Asks one question many times with guidellm, and reports as JSON what guidellm wrote."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

from load import QUESTIONS, ask_with, count, model, tokenizer, url

WRITTEN = Path("benchmarks.json")

greedy = {"body": {"temperature": 0}}
options = {
    "--backend": json.dumps({"kind": "openai_http", "target": url, "model": model, "extras": greedy}),
    "--profile": "kind=concurrent,streams=3",
    "--constraint": f"kind=max_requests,count={count}",
    "--tokenizer": f"kind=hf_auto,model={tokenizer}",
    "--data": f"kind=json_file,path={QUESTIONS}",
    "--output": f"kind=json,path={WRITTEN}",
}
exit_code = ask_with(
    "-m", "guidellm", "run", "--disable-console-interactive", *(word for pair in options.items() for word in pair)
)


def as_seen(request: Any) -> dict[str, Any]:
    """Return a request as guidellm saw it, with times in milliseconds."""
    return {
        "text": request["output"],
        "tokens": [request["input_metrics"]["total_tokens"], request["output_metrics"]["total_tokens"]],
        "ttft": request["time_to_first_token_ms"],
        "itl": request["inter_token_latency_ms"],
        "latency": 1_000 * request["request_latency"],
    }


(benchmark,) = json.loads(WRITTEN.read_text(encoding="utf-8"))["benchmarks"] if WRITTEN.exists() else [None]
requests = benchmark["requests"] if benchmark else {"successful": [], "errored": []}
print(
    json.dumps(
        {
            "version": version("guidellm"),
            "exit_code": exit_code,
            "requests": [as_seen(request) for request in requests["successful"]],
            "errors": [request["info"]["error"] for request in requests["errored"]],
        }
    )
)
