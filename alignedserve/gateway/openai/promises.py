"""Choose a request's service class and deadlines from its body, its headers and its tier.

    slo.ttft_ms or slo.tbt_ms   real-time; a deadline that is not set has its usual value
    slo.jct_ms alone            best-effort, with that completion window
    none of them                the tier decides: auto and default are real-time with the usual deadlines, priority is
                                real-time with tighter deadlines, flex is best-effort with a short window

An explicit field wins over the tier, the body over a header, and our own header over the names of other systems. The
answer names the tier that was used. A key may have bounds of what it asks for: a field beyond them is refused, and a
tier promises no more than they allow.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from alignedserve.core import ServiceClass, Slo
from alignedserve.gateway.access.keys import Limits
from alignedserve.gateway.openai.errors import invalid
from alignedserve.gateway.openai.types import PromisedRequest, SloFields

HEADERS = {
    "ttft_ms": ("x-slo-ttft-ms", "x-llm-d-slo-ttft-ms"),
    "tbt_ms": ("x-slo-tbt-ms", "x-llm-d-slo-tpot-ms"),
    "jct_ms": ("x-slo-jct-ms",),
}
RETRIES = "x-stainless-retry-count"
_NO_LIMITS = Limits()
_PRIORITY = 0.5  # times the usual ttft and tbt: what service_tier priority promises


@dataclass(frozen=True)
class UsualPromise:
    """What requests are promised that ask for nothing."""

    ttft_ms: float
    tbt_ms: float
    flex_jct_s: float
    is_asked: bool  # by the operator; else it is what the machine can keep

    @property
    def slo(self) -> Slo:
        return Slo(self.ttft_ms / 1e3, self.tbt_ms / 1e3, is_asked=self.is_asked)

    @property
    def told(self) -> dict[str, float | str]:
        """Return the promise as answers tell it."""
        return {"ttft_ms": self.ttft_ms, "tbt_ms": self.tbt_ms, "by": "operator" if self.is_asked else "machine"}


@dataclass(frozen=True)
class ServicePromise:
    service: ServiceClass
    slo: Slo
    tier: str


def make_promise(
    body: PromisedRequest, headers: Mapping[str, str], usual: UsualPromise, limits: Limits = _NO_LIMITS
) -> ServicePromise:
    deadlines = {name: value for name in HEADERS if (value := _deadline_ms(name, body.slo, headers)) is not None}
    for field, value, least in (
        ("slo.ttft_ms", deadlines.get("ttft_ms"), limits.least_ttft_ms),
        ("slo.tbt_ms", deadlines.get("tbt_ms"), limits.least_tbt_ms),
        ("priority", body.priority, limits.least_priority),
    ):
        if least is not None and value is not None and value < least:
            message = f"{field}: {value:g} is less than {least}, the least that this API key may ask for"
            raise invalid(message, field, "beyond_key_limit")
    tier = body.service_tier or "auto"
    is_best_effort = "jct_ms" in deadlines or (tier == "flex" and not deadlines)
    if is_best_effort and body.slo is not None and body.slo.strict:
        raise invalid("slo.strict is about ttft_ms, which best-effort requests do not have", "slo.strict")
    if is_best_effort and len(deadlines) > 1:
        raise invalid("slo.jct_ms is for best-effort requests, ttft_ms and tbt_ms for chat: set one kind only", "slo")
    if is_best_effort:
        jct_s = deadlines["jct_ms"] / 1000 if deadlines else usual.flex_jct_s
        return ServicePromise(ServiceClass.BE, Slo(jct_s=jct_s), "flex")
    factor = _PRIORITY if tier == "priority" else 1.0
    ttft_ms = deadlines.get("ttft_ms", max(usual.ttft_ms * factor, limits.least_ttft_ms or 0))
    tbt_ms = deadlines.get("tbt_ms", max(usual.tbt_ms * factor, limits.least_tbt_ms or 0))
    is_strict = body.slo is not None and bool(body.slo.strict)
    used = "priority" if tier == "priority" and len(deadlines) < 2 else "default"
    is_asked = bool(deadlines) or is_strict or tier == "priority" or usual.is_asked
    return ServicePromise(
        ServiceClass.RT, Slo(ttft_ms / 1000, tbt_ms / 1000, strict=is_strict, is_asked=is_asked), used
    )


def retries(headers: Mapping[str, str]) -> int:
    """Return how often the client was refused before it came again, as OpenAI's and Anthropic's clients say it."""
    said = headers.get(RETRIES, "")
    return int(said) if said.isascii() and said.isdigit() and len(said) < 3 else 0


def _deadline_ms(name: str, fields: SloFields | None, headers: Mapping[str, str]) -> float | None:
    value: float | None = getattr(fields, name, None)
    header = next((header for header in HEADERS[name] if header in headers), None)
    if value is not None or header is None:
        return value
    try:
        value = float(text := headers[header])
    except ValueError:
        value = math.nan
    if not 0 < value <= SloFields.MOST_MS:
        raise invalid(f"the header {header} must be milliseconds above 0 and at most 30 days, not {text!r:.40}", header)
    return value
