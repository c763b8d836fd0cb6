"""What requests are charged with: workers' time and energy, and their price where the deployment has prices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from alignedserve.config.config import Config
from alignedserve.core import NOTHING_SPENT, Spent


class Charged(NamedTuple):
    """What a request is charged with so far."""

    spent: Spent = NOTHING_SPENT
    price: float = 0.0  # by the prices at the time of use; 0: there are none


NOTHING_CHARGED = Charged()


@dataclass
class Prices:
    """The prices of a deployment; 0: there is none. `reload` changes them, and others read them when they need them."""

    second: float = 0.0  # of a worker
    joule: float = 0.0

    @classmethod
    def from_config(cls, config: Config) -> Prices:
        prices = cls()
        prices.reload(config)
        return prices

    def reload(self, config: Config) -> None:
        self.second = (config.price.device_hour or 0.0) * config.engine.tensor_parallel_size / 3600
        self.joule = (config.price.kwh or 0.0) / 3.6e6

    def of(self, seconds: float, joules: float) -> float:
        return seconds * self.second + joules * self.joule


def price_field(price: float) -> dict[str, float]:
    """Return a price as a field of `usage.cost`; nothing where the deployment has no prices."""
    return {"price": round(price, 9)} if price else {}
