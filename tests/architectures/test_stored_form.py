"""A config.json says in which form a folder keeps weights that somebody has quantised already."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from alignedserve.architectures.given import Given
from alignedserve.architectures.stored_form import StoredForm, StoredMethod, ZeroForm, stored_form


@pytest.mark.parametrize(("written", "group"), [(128, 128), (-1, None), (None, None)])
def test_inputs_that_share_a_scale(written: int | None, group: int | None, tmp_path: Path) -> None:
    quantized = {"quant_method": "gptq", "bits": 4, "group_size": written}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": quantized}))
    form = StoredForm(method=StoredMethod.GPTQ, bits=(4,), group=group, zeros=ZeroForm.LESS_ONE)
    assert stored_form(Given(tmp_path / "config.json")) == form
