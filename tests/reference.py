"""The test of tests: greedy output equals that of transformers, token for token, in fp32.

The reference is one request alone, unpadded, in fp32, in one forward pass over prompt and output
(teacher forcing): at each index its best token, given the tokens that were served before it, must
be the one that was served. So a first difference does not end the comparison.

Two sums of the same numbers in another order differ in their last bits. So another token is excused
where the reference itself hardly tells the two apart: where it is one of its two best, and their
logits lie within 1e-4 of its largest absolute logit. More than one excused in 5,000 is a fault all the same.

    tally = Tally()
    compare(model, prompt_ids, output_ids, tally, "a chunked prompt")
    tally.check()
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

CLOSE = 1e-4  # of the largest absolute logit
TOKENS_PER_EXCUSE = 5_000


@dataclass
class Tally:
    """Count what all comparisons of a test run found."""

    compared: int = 0
    excused: list[str] = field(default_factory=list)

    def check(self) -> None:
        allowed = max(1, self.compared // TOKENS_PER_EXCUSE)
        listed = "\n".join(self.excused)
        assert len(self.excused) <= allowed, (
            f"{len(self.excused)} of {self.compared} tokens excused, {allowed} may be:\n{listed}"
        )


def load(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **attention_of(folder)).eval()


def attention_of(folder: Path) -> dict[str, str]:
    """Return how a reference is told to attend: up to 5.17 transformers chooses sdpa for Gemma 2, which has no cap."""
    from transformers import AutoConfig

    is_capped = getattr(AutoConfig.from_pretrained(folder), "attn_logit_softcapping", None) is not None
    return {"attn_implementation": "eager"} if is_capped else {}


def compare(
    model: Any,
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
    tally: Tally,
    label: str = "",
    close: float = CLOSE,
) -> None:
    """Compare every token of a greedy output with the reference; raise AssertionError at a wrong token."""
    if not output_ids:
        return
    rows = _logits(model, prompt_ids, output_ids)
    for index, (row, served) in enumerate(zip(rows, output_ids, strict=True)):
        tally.compared += 1
        if int(row.argmax()) != served:
            where = f"{label or 'output'}: token {index} after {len(prompt_ids)} of prompt"
            tally.excused.append(_excuse(row, served, where, close))
            print(f"excused: {tally.excused[-1]}")


def _logits(model: Any, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> torch.Tensor:
    """Return the logits, [len(output), vocabulary], from which each output token was to be chosen."""
    assert prompt_ids, "a prompt has at least one token"
    with torch.inference_mode():
        read = torch.tensor([[*prompt_ids, *output_ids[:-1]]])
        logits: torch.Tensor = model(input_ids=read, use_cache=False).logits[0, len(prompt_ids) - 1 :]
    assert logits.dtype == torch.float32, "the reference computes in fp32"
    assert logits.isfinite().all(), "the reference's logits are finite"
    return logits


def _excuse(row: torch.Tensor, served: int, where: str, close: float) -> str:
    """Return why the token may differ, or raise AssertionError where it may not."""
    logits, tokens = row.topk(2)
    gap, largest = float(logits[0] - logits[1]), float(row.abs().max())
    best, second = tokens.tolist()
    # topk names only one of several tokens that are equally second best; the served token is accepted as well.
    is_of_two_best = 0 <= served < len(row) and float(logits[0] - row[served]) <= gap
    excused = is_of_two_best and gap <= close * largest
    assert excused, (
        f"{where} is {served}, the reference has {best}; its two best are {best} and {second},"
        f" {gap:.3g} apart, the largest logit is {largest:.3g}"
    )
    return f"{where} is {served}, the reference has {best}, {gap:.3g} better; the largest logit is {largest:.3g}"
