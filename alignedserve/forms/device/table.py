"""The forms other than KV in which an engine can keep requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from alignedserve.architectures.families.model_config import ModelConfig
from alignedserve.architectures.kv_dtype import KvDtype
from alignedserve.core import FormOrder
from alignedserve.engine.models.model import Attention, Model
from alignedserve.engine.models.runs import Run
from alignedserve.forms.device.hidden import HiddenVectors
from alignedserve.kernels.dispatch.dispatcher import Kernels


class DeviceForm(Protocol):
    @property
    def why_not(self) -> str | None:
        """Return why no request can have this form here; None where nothing hinders."""

    def problem(self, run: Run) -> str | None:
        """Return why a request cannot run in its present form; None where nothing hinders."""

    def attention(self, for_kv: Attention | None, rows: int, runs: Sequence[Run], cache: Tensor) -> Attention:
        """Return the attention of a step: the first `rows` rows are those of `for_kv`, then come `runs`, kept in this
        form."""

    def perform(self, order: FormOrder, cache: Tensor) -> None:
        """Do on the device cache what the order says."""

    def remake(self, blocks: Sequence[int], tokens: int, cache: Tensor) -> None:
        """Make K and V of tokens that these blocks hold in this form, in the same place: what each step with such
        tokens costs."""


def form_of(config: ModelConfig, kv_dtype: KvDtype, kernels: Kernels, model: Model) -> DeviceForm:
    """Return the only form that there is so far."""
    return HiddenVectors(config, kv_dtype, kernels, model)
