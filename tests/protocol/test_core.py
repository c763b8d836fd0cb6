"""What the types that all parts share refuse, and what they say of a request's KV."""

from __future__ import annotations

from math import inf, nan
from typing import Any

import pytest

from alignedserve.core import Choice, KvForm, Reasoning, Sampling, units_for


@pytest.mark.parametrize(
    "wrong",
    [
        *({"temperature": -0.1}, {"temperature": inf}, {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.1}),
        *({"min_p": -0.1}, {"min_p": 1.1}, {"repetition_penalty": 0.0}, {"repetition_penalty": inf}),
        *({"presence_penalty": nan}, {"frequency_penalty": inf}, {"min_tokens": -1}, {"logprobs": -1}),
        *({"prompt_logprobs": -1}, {"logit_bias": ((-1, 0.5),)}, {"logit_bias": ((3, inf),)}),
        {"grammar": Choice(((1,),)), "syntax": "root ::= [a]"},
    ],
)
def test_a_sampling_that_cannot_be_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"must|not both"):
        Sampling(**wrong)


def test_a_sampling_may_have_the_ends_of_its_ranges() -> None:
    Sampling(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, min_tokens=0, logprobs=0, logit_bias=((0, -9.0),))
    assert Sampling(min_p=1.0, logprobs=None).logprobs is None


@pytest.mark.parametrize("outputs", [(), ((1,), ())])
def test_a_choice_has_outputs_of_a_token_or_more(outputs: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(ValueError, match="a choice must have outputs"):
        Choice(outputs)


def test_a_reasoning_has_tokens_that_end_it() -> None:
    with pytest.raises(ValueError, match="must have tokens that end it"):
        Reasoning("qwen3", inside=True, opening=(), closing=())


def test_kv_of_one_form_moves_and_is_stored_and_others_do_not() -> None:
    plain, folded, hidden = KvForm((1, 2)), KvForm((1, 2), folded=4), KvForm((1, 2), form="hidden")
    assert [kv.can_move for kv in (plain, folded, hidden)] == [True, False, False]
    assert [kv.can_be_stored_from(4) for kv in (plain, folded, hidden)] == [True, True, False]
    assert [kv.can_be_stored_from(3) for kv in (plain, folded, hidden)] == [True, False, False]


def test_the_last_unit_may_be_filled_in_part() -> None:
    assert [units_for(tokens, 4) for tokens in range(10)] == [0, 1, 1, 1, 1, 2, 2, 2, 2, 3]
