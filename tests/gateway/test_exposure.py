"""Tests that the gateway opens nothing to other machines by oversight."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from alignedserve.config.config import Config
from alignedserve.config.sections import ServerConfig
from alignedserve.errors import ConfigError
from alignedserve.gateway.access.exposure import check_exposure, is_loopback, warnings
from alignedserve.gateway.access.keys import hash_key


def config(**server: Any) -> Config:
    return Config(server=ServerConfig(**server))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_loopback_needs_nothing(host: str) -> None:
    assert check_exposure(config(host=host)) == config(host=host)
    assert warnings(ServerConfig(host=host)) == []


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.7", "example.org"])
def test_an_address_for_others_needs_keys_or_a_plain_word(host: str) -> None:
    assert not is_loopback(host)
    with pytest.raises(ConfigError, match=f"server.host {host} can be reached by others.*--allow-anonymous"):
        check_exposure(config(host=host))
    allowed = check_exposure(config(host=host, allow_anonymous=True))
    assert [told.rpartition(":")[2] for told in warnings(allowed.server)] == [" there are no keys", " there is no TLS"]
    keyed = check_exposure(config(host=host, api_key="hush"))
    assert [told.rpartition(":")[2] for told in warnings(keyed.server)] == [" there is no TLS"]


def test_pages_of_all_origins_without_a_key_are_warned_of() -> None:
    opened = ServerConfig(cors_origins="*")
    (told,) = warnings(opened)
    assert told.startswith("every page that a browser here opens may use it")
    assert warnings(replace(opened, api_key="hush")) == warnings(ServerConfig(cors_origins="https://a.example")) == []


def test_a_key_leaves_the_launcher_as_its_hash() -> None:
    assert check_exposure(config(api_key="hush")).server.api_key == hash_key("hush")


def test_paths_are_the_launchers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("keys.yaml").write_text(f"keys: [{{name: a, hash: '{hash_key('key')}'}}]")
    assert check_exposure(config(keys_file="keys.yaml")).server.keys_file == str(tmp_path / "keys.yaml")
    with pytest.raises(ConfigError, match=r"none\.yaml cannot be read"):
        check_exposure(config(keys_file="none.yaml"))


def test_tls_that_cannot_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"server\.tls_key needs server\.tls_cert"):
        check_exposure(config(tls_key="k.pem"))
    with pytest.raises(ConfigError, match=r"TLS cannot be used with .*none\.pem"):
        check_exposure(config(tls_cert="none.pem"))
    (tmp_path / "odd.pem").write_text("odd")
    with pytest.raises(ConfigError, match=r"TLS cannot be used with .*odd\.pem"):
        check_exposure(config(tls_cert=str(tmp_path / "odd.pem")))
