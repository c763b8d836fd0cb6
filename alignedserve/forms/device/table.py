"""The form other than KV in which an engine can keep requests: the only one that there is so far."""

from __future__ import annotations

from typing import TypeAlias

from alignedserve.forms.device.hidden import HiddenVectors

DeviceForm: TypeAlias = HiddenVectors
