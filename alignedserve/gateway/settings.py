"""The settings of a gateway's HTTP application."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from alignedserve.config.choices import MetricsPrefix
from alignedserve.config.config import Config
from alignedserve.config.prices import Prices
from alignedserve.config.sections import SloConfig
from alignedserve.core import Slo
from alignedserve.gateway.access.keys import MOST_OPEN, KeyRing
from alignedserve.gateway.openai.promises import UsualPromise


@dataclass
class GatewaySettings:
    """What `reload` changes, all others read when they need it."""

    served_model_names: tuple[str, ...]  # the first is the model's own; one with a * stands for many
    max_model_len: int  # tokens of prompt and output together
    keys: KeyRing = field(default_factory=lambda: KeyRing(()))
    body_limit_bytes: int = 4 << 20
    body_limit_s: float = 30.0
    is_exposed: bool = False  # other machines reach it: without keys clients have the scopes of a usual key alone
    cors_origins: tuple[str, ...] | None = None  # pages of these may use the API; None: those of this machine
    names: tuple[str, ...] = ()  # names of this server, besides localhost and its addresses
    stalled_client_s: float = 60.0  # an answer is given up if the client reads nothing for this time
    metrics_prefix: MetricsPrefix = MetricsPrefix.ALIGNEDSERVE
    slo: SloConfig = field(default_factory=SloConfig)
    machine: Slo | None = None  # what all workers can promise chats that ask for nothing; None until one has told
    prices: Prices = field(default_factory=Prices)
    at_once: int = MOST_OPEN // 2  # requests of a body that run at once: the others of a worker's seats are for others
    scale: Mapping[str, str] = field(default_factory=dict)  # role -> how many workers there may be, by load

    @property
    def listed_names(self) -> tuple[str, ...]:
        return tuple(name for name in self.served_model_names if "*" not in name)

    @property
    def usual(self) -> UsualPromise:
        """Return what requests are promised that ask for nothing: what the operator says, else what the machine can."""
        slo, machine = self.slo, self.machine or Slo()
        return UsualPromise(
            ttft_ms=1e3 * machine.ttft_s if slo.ttft_ms is None else slo.ttft_ms,
            tbt_ms=1e3 * machine.tbt_s if slo.tbt_ms is None else slo.tbt_ms,
            flex_jct_s=slo.flex_jct_s,
            is_asked=slo.ttft_ms is not None or slo.tbt_ms is not None,
        )

    def reload(self, config: Config) -> None:
        self.slo, self.body_limit_bytes = config.slo, body_limit_bytes(config)
        self.prices.reload(config)


def body_limit_bytes(config: Config) -> int:
    return config.server.body_limit_mb << 20
