"""The Python API, as scripts and notebooks use it: real deployments, which leave nothing behind."""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import alignedserve
from alignedserve import LLM, SamplingParams, Slo
from alignedserve.api.llm import Prompt
from alignedserve.errors import AskError, DeploymentError
from tests.end_to_end.client import check_greedy, mixed
from tests.end_to_end.deployment import BACK_S, MARK, Deployment, marked, wait_until
from tests.rare import thinned

ROOT = Path(__file__).resolve().parents[2]
GREEDY = SamplingParams(temperature=0, max_tokens=6)
QUESTION = [{"role": "user", "content": "Say hello."}]


@pytest.fixture
def llm(shared: Deployment) -> Iterator[LLM]:
    """Yield a client of a server that runs; the guide's snippets start their own."""
    with LLM(url=shared.url) as asking:
        yield asking


def test_outputs_equal_transformers_in_the_order_of_the_prompts(llm: LLM) -> None:
    wanted = mixed(12, seed=70, prompts=(3, 100), outputs=(1, 30))
    params = [SamplingParams(temperature=0, max_tokens=each.max_tokens, ignore_eos=each.ignore_eos) for each in wanted]
    outputs = llm.generate([each.prompt for each in wanted], params)
    check_greedy(wanted, [output.outputs[0].token_ids for output in outputs])
    assert [output.prompt_token_ids for output in outputs] == [list(each.prompt) for each in wanted]


def test_a_prompt_is_a_text_token_ids_or_a_mapping(llm: LLM) -> None:
    ids = llm.tokenize("Ada was born in")
    prompts: list[Prompt] = ["Ada was born in", ids, {"prompt": "Ada was born in"}, {"prompt_token_ids": ids}]
    alone = [llm.generate(prompt, GREEDY)[0] for prompt in prompts]
    together = llm.generate(prompts, GREEDY)
    assert len({output.outputs[0].text for output in [*alone, *together]}) == 1
    assert [output.prompt for output in together] == ["Ada was born in", None, "Ada was born in", None]
    assert llm.detokenize(ids).endswith("Ada was born in")


def test_several_outputs_with_log_probabilities(llm: LLM) -> None:
    [output] = llm.generate("Ada", SamplingParams(n=3, seed=1, max_tokens=5, logprobs=2))
    assert [each.index for each in output.outputs] == [0, 1, 2]
    for each in output.outputs:
        assert each.logprobs is not None
        assert all(token in of and len(of) in (2, 3) for token, of in zip(each.token_ids, each.logprobs, strict=True))
        assert each.cumulative_logprob is not None
        assert each.cumulative_logprob < 0


def test_a_conversation_or_several(llm: LLM) -> None:
    [alone] = llm.chat(QUESTION, GREEDY)
    both = llm.chat([QUESTION, QUESTION], SamplingParams(temperature=0, max_tokens=6, logprobs=1))
    assert [each.outputs[0].text for each in both] == [alone.outputs[0].text] * 2
    assert both[0].outputs[0].logprobs is not None


def test_pieces_of_a_stream_are_the_whole_output(llm: LLM) -> None:
    [whole] = llm.chat(QUESTION, GREEDY)
    pieces = list(llm.stream(QUESTION, GREEDY, slo=Slo(ttft_ms=5000)))
    assert "".join(piece.text for piece in pieces) == whole.outputs[0].text
    assert [token for piece in pieces for token in piece.token_ids] == whole.outputs[0].token_ids
    assert pieces[-1].finish_reason == whole.outputs[0].finish_reason


def test_in_an_event_loop_that_runs_as_in_a_notebook(llm: LLM) -> None:
    [wanted] = llm.generate("Ada was born in", GREEDY)

    async def cell() -> None:
        [blocking] = llm.generate("Ada was born in", GREEDY)
        [awaited] = await llm.agenerate("Ada was born in", GREEDY)
        streamed = [piece async for piece in llm.astream("Ada was born in", GREEDY)]
        texts = {blocking.outputs[0].text, awaited.outputs[0].text, "".join(piece.text for piece in streamed)}
        assert texts == {wanted.outputs[0].text}

    asyncio.run(cell())


def test_what_is_wrong_is_said_and_harms_no_later_call(llm: LLM) -> None:
    with pytest.raises(AskError, match="400: temperature"):
        llm.generate(["a", "b"], SamplingParams(temperature=-1))
    with pytest.raises(AskError, match="2 values for 1 prompts"):
        llm.generate("a", [GREEDY, GREEDY])
    with pytest.raises(AskError, match="400"):
        next(iter(llm.stream("a", SamplingParams(top_p=3))))
    with pytest.raises(AskError, match="does not answer"):
        LLM(url="http://127.0.0.1:9")
    with pytest.raises(AskError, match="max_model_len is for a deployment that is started"):
        LLM(url="http://127.0.0.1:9", max_model_len=64)
    assert llm.generate("a", GREEDY)[0].outputs[0].token_ids


def test_a_server_that_was_there_before_stays(shared: Deployment) -> None:
    with LLM(url=shared.url) as asking:
        assert asking.generate("a", GREEDY)
    assert shared.is_ready


@pytest.mark.parametrize(
    ("model", "flags", "said"),
    [("/nowhere", {}, "neither a folder nor a hub id"), ("demo", {"nonsense": 1}, "--nonsense is not understood")],
)
def test_a_deployment_that_cannot_start_says_why(model: str, flags: dict[str, Any], said: str) -> None:
    with pytest.raises(DeploymentError, match=said):
        alignedserve.Deployment(model, **flags)


def environment_in(home: Path) -> dict[str, str]:
    """Return the environment of a script whose home is empty. Workers do not measure steps first, which takes long."""
    settings = {"ALIGNEDSERVE_ENGINE_PROFILE_S": "0", "ALIGNEDSERVE_ENGINE_THREADS": "1"}
    return {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HOME": str(home), **settings}


@pytest.mark.parametrize(("count", "end"), thinned([(2, "SIGKILL"), (3, "SIGINT"), (3, "")], usual=1))
def test_the_snippets_of_the_guide_run_and_leave_nothing(count: int, end: str, tmp_path: Path) -> None:
    """A deployment that they do not close ends with its process, also where that is killed."""
    guide = (ROOT / "docs" / "reference" / "python.md").read_text(encoding="utf-8")
    snippets = re.findall(r"^```python\n(.*?)^```", guide, re.M | re.S)
    assert len(snippets) == "".join(snippets).count('("smollm2"') + 1 == 3
    code = "\n".join(snippets[:count])  # the last starts a deployment of its own
    code = code.replace('("smollm2"', '("demo", settings={"engine.tune_s": 0}')  # starts in a fraction of the time
    assert "\nllm.close()\n" in code
    code = code.replace("\nllm.close()\n", "\n")
    if end:
        code += f"\nimport os, signal, sys\nsys.stdout.flush()\nos.kill(os.getpid(), signal.{end})\n"
    environment = environment_in(tmp_path) | {MARK: (mark := f"python-api-{end}")}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == (-signal.Signals[end] if end else 0), done.stderr
    assert len(done.stdout.splitlines()) >= 3, "two answers and a stream"
    assert count == 2 or re.search(r"http://127\.0\.0\.1:\d+$", done.stdout, re.M)
    wait_until(lambda: not marked(mark), BACK_S, lambda: str(marked(mark)))
