"""Tests that SmolLM2 in 16 bits and in every quantised form stays near transformers in fp32, over real text.

The forms and their goals are those of `python -m lab.benchmarks.accuracy`, which measures them over more text.
"""

from __future__ import annotations

import pytest

from alignedserve.lab.benchmarks.accuracy import FORMS, OF_ORIGINAL, PUBLISHED_FILE, ModelForm
from alignedserve.lab.benchmarks.common.divergence import divergence
from tests.conftest import SOAK
from tests.kernels.every import kernels_of, sets_for_whole_models
from tests.real_models.conftest import TOKENS_OF_TEXT, Forms

# Of the few tokens of the short form, those near the beginning are a large share, and they look at few others, so that
# rounding shows most:
FEW_MORE = 3  # may have another best token
FAR_OFF = 0.0 if SOAK else 2 * 0.05  # nats: two of them may be as far off as the farthest that any CPU showed
ALL = ["reference", *sets_for_whole_models()]
# The short form has one instruction set: test_answers.py and tests/kernels have all. Of the other forms, tests/engine
# compares the logits with those of their expanded weights; fp32 is in test_answers.py.
FEW = {PUBLISHED_FILE, "bf16", "KV int8", "int4"}
CASES = [(form, isa) for form in FORMS for isa in ALL if SOAK or (form in FEW and isa == ALL[-1])]


@pytest.mark.parametrize(("name", "isa"), CASES)
def test_a_form_stays_near_what_it_stands_for(name: str, isa: str, forms: Forms) -> None:
    form: ModelForm = forms.of(name)
    logits = form.logits(kernels_of(isa), forms.model.tokens)
    found = divergence(form.expanded, logits)
    if form.goal is not None:
        assert found.mean <= form.goal + FAR_OFF / TOKENS_OF_TEXT, found
        assert found.same >= forms.model.least_same - FEW_MORE / TOKENS_OF_TEXT, found
    if form.original is not None:
        # int8 in bf16 misses its goal by half in the benchmark (docs/how/kernels.md); few tokens say less.
        assert divergence(form.original, logits).mean <= 2 * OF_ORIGINAL[form.quantization]
