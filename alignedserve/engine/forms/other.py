"""Another form than KV in which an engine can keep a request. The papers' hidden vectors are one."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from alignedserve.architectures.families.model_config import ModelConfig
from alignedserve.architectures.kv_dtype import KvDtype
from alignedserve.core import FormOrder
from alignedserve.engine.models.model import Attention, Model
from alignedserve.engine.models.runs import Run
from alignedserve.kernels.dispatch.dispatcher import Kernels
from alignedserve.scheduling.offered import of_papers


class OtherForm:
    """What an engine does with requests that are kept in another form; here there is none.

    `problem` refuses such a request before a step, so nothing calls what comes behind it."""

    why_not: str | None = "no package that is installed keeps requests in another form than KV"

    def problem(self, run: Run) -> str | None:
        """Return why a request cannot run in its present form; None where nothing hinders."""
        return f"is kept in the form {run.kv.form!r}, which this engine does not know"

    def attention(self, for_kv: Attention | None, rows: int, runs: Sequence[Run], cache: Tensor) -> Attention:
        """Return the attention of a step: the first `rows` rows are those of `for_kv`, then come these runs."""
        raise NotImplementedError

    def perform(self, order: FormOrder, cache: Tensor) -> None:
        """Turn a request of this form into one of KV. The blocks of both may be the same."""
        raise NotImplementedError

    def remake(self, blocks: Sequence[int], tokens: int, cache: Tensor) -> None:
        """Make K and V of these tokens in place, as each step with such tokens does: what that costs is measured."""
        raise NotImplementedError


def other_form(config: ModelConfig, kv_dtype: KvDtype, kernels: Kernels, model: Model | None) -> OtherForm:
    """Return the other form of an engine. Without `model`, of an encoder, nothing could make K and V again."""
    papers = of_papers("memory.hidden")
    if papers is None:
        return OtherForm()
    found: OtherForm = papers.HiddenVectors(config, kv_dtype, kernels, model)
    return found
