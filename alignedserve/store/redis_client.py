"""The connection to Redis: to one server, or to the master that Sentinels name.

    redis://HOST:6379/0                                    also rediss:// and unix://
    redis+sentinel://:PASSWORD@HOST,HOST:26379,HOST/SERVICE/0

Behind Sentinels a write is acknowledged when replicas have it too: a master that dies takes nothing with it, and one
that is cut off from its replicas acknowledges nothing.
"""

from __future__ import annotations

from typing import Any, cast
from urllib.parse import unquote, urlsplit

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel, SentinelManagedConnection
from redis.backoff import ExponentialBackoff, NoBackoff
from redis.exceptions import ConnectionError, TimeoutError

from alignedserve.errors import StoreError

ANSWER_S = 5.0  # of a command
TRIES, FAILOVER_TRIES = 6, 15  # the pauses between all tries take about 6 s, and 24 s, in which Sentinels choose
REPLICA_MS = 2000  # until a replica has a write
SENTINEL, SENTINEL_PORT = "redis+sentinel", 26379


class MasterConnection(SentinelManagedConnection):
    async def connect_check_health(self, check_health: bool = True, retry_socket_connect: bool = True) -> None:
        """Connect to the server that is the master now.

        A command that is tried again would else connect to the address that it had, whatever the Sentinels say."""
        if not self.is_connected:
            self.host, self.port = await self.connection_pool.get_master_address()
            await super().connect_check_health(check_health, retry_socket_connect=False)


def is_by_sentinels(url: str) -> bool:
    return url.startswith(f"{SENTINEL}://")


def connect(url: str) -> Redis:
    by_sentinels = is_by_sentinels(url)
    options: dict[str, Any] = {
        "decode_responses": True,
        "socket_timeout": ANSWER_S,
        "socket_connect_timeout": ANSWER_S,
        "retry": Retry(ExponentialBackoff(cap=2.0, base=0.05), FAILOVER_TRIES if by_sentinels else TRIES),
        "retry_on_error": [ConnectionError, TimeoutError],
    }
    return _master(url, options) if by_sentinels else Redis.from_url(url, **options)


def _master(url: str, options: dict[str, Any]) -> Redis:
    """Return a client that asks the Sentinels for the master each time that it connects."""
    split = urlsplit(url)
    login, _, hosts = split.netloc.rpartition("@")
    user, _, password = map(unquote, login.partition(":"))
    service, _, database = split.path.strip("/").partition("/")
    if not service or not (database or "0").isdigit():
        where = f"{SENTINEL}://{hosts}{split.path}"
        raise StoreError(f"{where} must end with the name of the service: /SERVICE or /SERVICE/0")
    parts = [each.partition(":") for each in hosts.split(",")]
    addresses = [(host, int(port or SENTINEL_PORT)) for host, _, port in parts]
    given: dict[str, Any] = {name: value for name, value in (("username", user), ("password", password)) if value}
    once = {"socket_timeout": 1.0, "socket_connect_timeout": 1.0, "retry": Retry(NoBackoff(), 0)}  # then the next one
    sentinel = cast(Any, Sentinel)(addresses, sentinel_kwargs=once, **options)
    master = sentinel.master_for(service, db=int(database or 0), connection_class=MasterConnection, **given)
    return cast(Redis, master)
