"""The connection to Redis: to one server, to the master that Sentinels name, or to the one that a Redis Cluster names.

    redis://HOST:6379/0                                          also rediss:// and unix://
    redis+sentinel://:PASSWORD@HOST,HOST:26379,HOST/SERVICE/0    also rediss+sentinel://: TLS to servers and Sentinels
                                                                 ?sentinel_password=PASSWORD (and sentinel_username)
    redis+cluster://:PASSWORD@HOST,HOST:6379,HOST/NAME           also rediss+cluster://

All take the options of rediss://, such as ?ssl_ca_certs=FILE. The password before the hosts is that of the servers, as
elsewhere. Sentinels have their own, if any.

Behind Sentinels and in a cluster a write is acknowledged when replicas have it too: a master that dies takes nothing
with it, and one that is cut off from its replicas acknowledges nothing.

All keys of a deployment lie in one slot of a cluster, so that the store speaks to one server there as elsewhere: the
master of this slot. Whatever says that it is another server now (MOVED), or that none takes this slot now (ASK,
TRYAGAIN, CLUSTERDOWN), ends the connection; the next one asks the cluster for the master again. ASK is never followed:
on the server that a slot is moving to, a script would find the keys gone that have not moved yet, and begin new ones.
"""

from __future__ import annotations

import random
import weakref
from collections.abc import Awaitable, Callable
from typing import Any, cast
from urllib.parse import SplitResult, urlsplit

from redis.asyncio import Redis
from redis.asyncio.connection import Connection, ConnectionPool, SSLConnection, parse_url
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel, SentinelManagedConnection
from redis.backoff import ExponentialBackoff, NoBackoff
from redis.crc import key_slot
from redis.exceptions import (
    AskError,
    AuthenticationError,
    ClusterDownError,
    ConnectionError,
    RedisError,
    ResponseError,
    TimeoutError,
    TryAgainError,
)

from alignedserve.errors import ConfigError, StoreUnfit
from alignedserve.store.address import without_password

ANSWER_S = 5.0  # of a command
TRIES, FAILOVER_TRIES = 6, 15  # the pauses between all tries take about 6 s, and 24 s, in which a new master is chosen
REPLICA_MS = 2000  # until a replica has a write
SENTINELS, SENTINEL_PORT = ("redis+sentinel", "rediss+sentinel"), 26379
CLUSTERS, PORT = ("redis+cluster", "rediss+cluster"), 6379

Address = tuple[str, int]


class LoginRefused(RedisError):
    """The server refuses the user or password."""


class SentinelsRefuse(LoginRefused):
    """The Sentinels refuse the user or password for them."""


class Tries(Retry):
    """Tries again what failed, but no login that was refused, which redis-py takes for a connection that was lost."""

    async def call_with_retry(self, do: Callable[[], Awaitable[Any]], fail: Any, *more: Any, **options: Any) -> Any:
        async def end_refused(error: Exception, *number: int) -> None:
            await fail(error, *number)
            if isinstance(error, AuthenticationError) or isinstance(error.__cause__, AuthenticationError):
                raise LoginRefused(str(error)) from error

        return await super().call_with_retry(do, end_refused, *more, **options)


ONCE: dict[str, Any] = {"socket_timeout": 1.0, "socket_connect_timeout": 1.0, "retry": Tries(NoBackoff(), 0)}


class Sentinels(Sentinel):
    async def discover_master(self, service_name: str) -> Address:
        """Return the address of the master that a Sentinel names.

        One that is away, or refuses us since it has a new password already, leaves the answer to the others."""
        why, refused, have_answered = list[str](), list[LoginRefused](), False
        for sentinel in list(self.sentinels):
            try:
                state = cast("dict[str, Any]", await sentinel.sentinel_masters()).get(service_name)
            except LoginRefused as error:
                refused.append(error)
            except (ConnectionError, TimeoutError) as error:
                why.append(str(error))
            else:
                have_answered = True
                if state and self.check_master_state(state, service_name):
                    self.sentinels.remove(sentinel)
                    self.sentinels.insert(0, sentinel)  # it is asked first from now on
                    return state["ip"], state["port"]
        if refused and not have_answered:
            raise SentinelsRefuse(str(refused[0]))
        raise ConnectionError("; ".join((f"no Sentinel names a master of {service_name}", *why)))


class MasterConnection(SentinelManagedConnection):
    async def connect_check_health(self, check_health: bool = True, retry_socket_connect: bool = True) -> None:
        """Connect to the server that is the master now.

        A command that is tried again would else connect to the address that it had, whoever is the master."""
        if not self.is_connected:
            self.host, self.port = await self.connection_pool.get_master_address()
            await super().connect_check_health(check_health, retry_socket_connect=False)

    async def read_response(self, *args: Any, **options: Any) -> Any:
        """Return an answer; raise ConnectionError, after which a command is tried again, if this is no master now."""
        try:
            return await super().read_response(*args, **options)
        except ResponseError as error:
            # A master that becomes a replica ends a WAIT with UNBLOCKED.
            if isinstance(error, (AskError, TryAgainError, ClusterDownError)) or str(error).startswith("UNBLOCKED"):
                await self.disconnect()
                raise ConnectionError(f"{self.host}:{self.port} is not the master now ({error})") from error
            raise


class MasterTlsConnection(MasterConnection, SSLConnection):
    pass


class ClusterPool(ConnectionPool):
    """Connections to the master of a slot, for which any server of the cluster is asked."""

    is_master, check_connection = True, False  # as SentinelManagedConnection asks

    def __init__(self, servers: list[Address], slot: int, is_tls: bool, **options: Any) -> None:
        super().__init__(connection_class=MasterTlsConnection if is_tls else MasterConnection, **options)
        self._asking: dict[str, Any] = {**options, **ONCE, "connection_class": SSLConnection if is_tls else Connection}
        self.connection_kwargs["connection_pool"] = weakref.proxy(self)
        self._named, self._known, self._slot = servers, list[Address](), slot

    async def get_master_address(self) -> Address:
        why, asked = "", [*self._named, *self._known]
        random.shuffle(asked)  # any may be cut off from the others, and not know better
        for host, port in asked:
            try:
                ranges = await self._ranges(host, port)
            except (ConnectionError, TimeoutError, ClusterDownError) as error:
                why = str(error)
                continue
            why, found = f"{host}:{port} knows no master of slot {self._slot}", list[Address]()
            master: Address | None = None
            for first, last, *servers in ranges:
                # A server that does not know its own name says none, or "?".
                names = [(host if name in (None, "", "?") else name, own) for name, own, *_ in servers]
                found += names
                if first <= self._slot <= last:
                    master = names[0]
            if master is not None:
                self._known = found
                return master
        raise ConnectionError(why)

    async def _ranges(self, host: str, port: int) -> list[Any]:
        """Return what a server says of slots: first, last, and the master and replicas that have them."""
        async with Redis.from_pool(ConnectionPool(host=host, port=port, **self._asking)) as redis:
            try:
                return cast("list[Any]", await redis.execute_command("CLUSTER", "SLOTS"))
            except ResponseError as error:
                if "cluster support disabled" not in str(error):
                    raise
                raise StoreUnfit(f"{host}:{port} is in no Redis Cluster: name it redis:// with --jobs-store") from error


def is_replicated(url: str) -> bool:
    """Return whether another server takes over from a master that dies."""
    return urlsplit(url).scheme in SENTINELS + CLUSTERS


def key_prefix(url: str, prefix: str) -> str:
    """Return what all keys begin with. A cluster has no databases, so that NAME keeps deployments apart.

    The braces make Redis Cluster choose a slot by what they enclose."""
    split = urlsplit(url)
    name = split.path.strip("/") if split.scheme in CLUSTERS else ""
    return f"{{{prefix}}}" if name in ("", "0") else f"{{{prefix}/{name}}}"


def connect(url: str, prefix: str) -> Redis:
    """Return a client of the server; raise ConfigError, TypeError or ValueError if the address is none."""
    options: dict[str, Any] = {
        "decode_responses": True,
        "socket_timeout": ANSWER_S,
        "socket_connect_timeout": ANSWER_S,
        "retry": Tries(ExponentialBackoff(cap=2.0, base=0.05), FAILOVER_TRIES if is_replicated(url) else TRIES),
        "retry_on_error": [ConnectionError, TimeoutError],
    }
    split = urlsplit(url)
    if split.scheme in SENTINELS:
        redis = _named_by_sentinels(split, options)
    elif split.scheme in CLUSTERS:
        redis = _named_by_cluster(split, key_slot(prefix.encode()), options)
    else:
        redis = Redis.from_url(url, **options)
    redis.connection_pool.make_connection()  # raises TypeError at an option that it does not know
    return redis


def _named_by_sentinels(split: SplitResult, options: dict[str, Any]) -> Redis:
    """Return a client that asks the Sentinels for the master each time that it connects."""
    service, _, database = split.path.strip("/").partition("/")
    if not service or not (database or "0").isdigit():
        where = without_password(split.geturl())
        raise ConfigError(f"{where} must end with the name of the service: /SERVICE or /SERVICE/0")
    sentinels, is_tls, given = _parsed(split, SENTINEL_PORT)
    asking = {name: value for name, value in given.items() if name.startswith("ssl_")}
    for name in ("username", "password"):
        asking[name] = given.pop(f"sentinel_{name}", None)
    sentinel = cast(Any, Sentinels)(sentinels, sentinel_kwargs={**ONCE, **asking, "ssl": is_tls}, **options)
    connection = MasterTlsConnection if is_tls else MasterConnection
    master = sentinel.master_for(service, connection_class=connection, **given, db=int(database or 0))
    return cast(Redis, master)


def _named_by_cluster(split: SplitResult, slot: int, options: dict[str, Any]) -> Redis:
    """Return a client that asks the cluster for the master of the slot each time that it connects."""
    servers, is_tls, given = _parsed(split, PORT)
    return Redis.from_pool(ClusterPool(servers, slot, is_tls, **options, **given))


def _parsed(split: SplitResult, port: int) -> tuple[list[Address], bool, dict[str, Any]]:
    """Return the addresses that a URL names, whether they speak TLS, and the login and options of the connection."""
    login, at, hosts = split.netloc.rpartition("@")
    given: dict[str, Any] = dict(parse_url(f"redis://{login}{at}host?{split.query}"))
    del given["host"]
    parts = [each.partition(":") for each in hosts.split(",")]
    return [(host, int(own or port)) for host, _, own in parts], split.scheme.startswith("rediss"), given
