"""What people type who know vLLM, llama.cpp, Ollama or LM Studio, and what says the same here."""

from __future__ import annotations

_KEPT = "fetched models lie below ~/.cache/huggingface/hub and ~/.cache/alignedserve/models"
_SAID_OF_COMMANDS = {
    "`alignedserve serve MODEL` serves it, and `alignedserve chat` chats with it from another terminal": "run",
    "`alignedserve serve MODEL`": "server start",
    "`alignedserve serve MODEL` fetches it too, where it is a hub id such as org/name": "pull get download",
    "`alignedserve status` shows what is served": "ps",
    f"`alignedserve status` names what is served; {_KEPT}": "list ls show",
    f"{_KEPT}: remove a folder there": "rm",
    "`alignedserve chat`": "complete",
    "`alignedserve batch submit FILE --wait`": "run-batch",
}
COMMANDS = {command: said for said, commands in _SAID_OF_COMMANDS.items() for command in commands.split()}

_SAID_OF_FLAGS = {
    "--max-model-len": "-c --ctx-size --n-ctx --num-ctx --context-length --max-seq-len",
    "--max-batch": "-np --parallel --num-parallel --max-running-requests",
    "--max-step-tokens": "-b -ub --batch-size --ubatch-size --chunked-prefill-size",
    "--tensor-parallel-size": "-tp --tp --tp-size",
    "--kv-dtype": "-ctk -ctv --cache-type-k --cache-type-v",
    "--kv-memory-mb for what KV takes, --gpu-reserve-mb for what stays free": "--gpu-memory-utilization",
    "--pool-memory-mb": "--swap-space",
    "--threads": "-t",
    "--served-model-name": "-a --alias",
    "--tls-cert": "--ssl-certfile --ssl-cert-file",
    "--tls-key": "--ssl-keyfile --ssl-key-file",
    "--keys-file": "--api-key-file",
    "--cors-origins": "--allowed-origins",
    "--lora": "--enable-lora --lora-modules",
    "--topology 2xcolocated has two workers, each with all of the model": "-dp --data-parallel-size",
    "--tensor-parallel-size shares a model between GPUs": "-pp --pipeline-parallel-size",
    "--cuda-graphs off": "--enforce-eager",
    "all layers run on a GPU where there is one: --device says where": "-ngl --gpu-layers --n-gpu-layers",
    "name the model behind serve: alignedserve serve MODEL": "-m -hf --hf-repo --model-path",
    "put it into the model's folder as chat_template.jinja": "--chat-template --chat-template-file",
    "it is always so: leave it out": "--enable-prefix-caching --enable-chunked-prefill --jinja",
    "tools may always be called: leave it out": "--enable-auto-tool-choice",
    "code of a model is never run: leave it out": "--trust-remote-code",
}
FLAGS = {flag: said for said, flags in _SAID_OF_FLAGS.items() for flag in flags.split()}


def meant_by(flag: str) -> str:
    """Return what a peer's flag is here, to be written behind an error; nothing where it is nobody's."""
    said = FLAGS.get(flag.replace("_", "-"), "")  # vLLM takes both
    return f": did you mean {said}?" if said.startswith("--") and " " not in said else said and f": {said}"
