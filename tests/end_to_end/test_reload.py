"""Tests of `alignedserve reload` and SIGHUP on a deployment that serves meanwhile: no stream breaks."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from alignedserve.cli import main as cli
from alignedserve.gateway.access.keys import Limits, Scope, make_key
from tests.end_to_end.client import Wanted, check_greedy, mixed, tokens_of
from tests.end_to_end.deployment import ANSWER_S, BACK_S, Deployment, deployed, held, wait_until
from tests.gateway.test_certificate import PEMS, of

STREAMS, TOKENS = 2, 1500  # they outlast what the test does meanwhile, most of it while the decode worker stands
SMALL = Wanted((5, 6), 1, stream=False).body
LARGE = b" " * (2 << 20) + json.dumps(SMALL).encode()


class Reloadable:
    """A deployment by HTTPS with one key and a file of settings."""

    def __init__(self, folder: Path) -> None:
        self.settings, self.keys, self.pem = folder / "serve.yaml", folder / "keys.yaml", folder / "cert.pem"
        self.set(server={"body_limit_mb": 4})
        self.ann = make_key(self.keys, "ann", Scope, Limits())
        self.with_ann = self.keys.read_text()
        self.eve = make_key(self.keys, "eve", Scope, Limits())
        shutil.copy(PEMS / "first.pem", self.pem)
        self.flags = ("--config", str(self.settings), "--keys-file", str(self.keys), "--tls-cert", str(self.pem))

    def set(self, **sections: dict[str, object]) -> None:
        self.settings.write_text(yaml.safe_dump(sections))


def status(deployment: Deployment, key: str, body: bytes | None = None) -> int:
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    sent = json.dumps(SMALL).encode() if body is None else body
    url = f"{deployment.url}/v1/completions"
    return httpx.post(url, content=sent, headers=headers, timeout=ANSWER_S, verify=False).status_code


def shown(deployment: Deployment) -> bytes:
    return ssl.PEM_cert_to_DER_cert(ssl.get_server_certificate(("127.0.0.1", deployment.port)))


def beside_streams(deployment: Deployment, key: str, act: Callable[[], None]) -> None:
    """Check that streams that were under way before this and are after it end whole."""
    wanted = [Wanted(request.prompt, TOKENS, stream=True, ignore_eos=True) for request in mixed(STREAMS, 7)]

    async def serve() -> list[list[int]]:
        headers = {"Authorization": f"Bearer {key}"}
        limits = httpx.Limits(max_connections=None)
        options: dict[str, Any] = {"headers": headers, "timeout": ANSWER_S, "limits": limits, "trust_env": False}
        async with httpx.AsyncClient(base_url=deployment.url, verify=False, **options) as http:
            streams = [asyncio.create_task(tokens_of(http, request)) for request in wanted]
            while await asyncio.to_thread(deployment.metric, "generation_tokens_total", key) < 3 * STREAMS:
                await asyncio.sleep(0.02)
            await asyncio.to_thread(act)
            assert not any(stream.done() for stream in streams)
            return await asyncio.gather(*streams)

    check_greedy(wanted, asyncio.run(serve()))


def test_keys_certificate_and_settings_change_beside_streams(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = Reloadable(tmp_path)
    with deployed(*asked.flags) as deployment:
        reload = ["reload", "--port", str(deployment.port)]
        new = tmp_path / "new.yaml"
        new.write_text(asked.with_ann)
        bob = make_key(new, "bob", Scope, Limits())

        def change() -> None:
            shutil.copy(new, asked.keys)
            shutil.copy(PEMS / "second.pem", asked.pem)
            asked.set(server={"body_limit_mb": 1}, price={"kwh": 0.3}, log={"level": "debug"})
            assert cli.main(reload) == 0
            assert capsys.readouterr().out.splitlines() == [
                "server.body_limit_mb: 1",
                "price.kwh: 0.3",
                "log.level: debug",
                f"keys: as {asked.keys} has them now",
                f"certificate: as {asked.pem} has them now",
            ]
            with held(deployment.pid("decode-0")):
                wait_until(lambda: shown(deployment) == of("second"), BACK_S, deployment.log)
                wait_until(lambda: status(deployment, bob, LARGE) == 413, BACK_S, deployment.log)
                assert status(deployment, asked.eve) == 401
            assert status(deployment, bob) == 200
            wait_until(lambda: deployment.metric("request_price_total", asked.ann) > 0, BACK_S, deployment.log)
            wait_until(lambda: " DEBUG decode-0: " in deployment.whole_log(), BACK_S, deployment.log)

        beside_streams(deployment, asked.ann, change)

        asked.set(server={"body_limit_mb": 4, "gateways": 2, "max_open": 9})
        assert cli.main(reload) == 2
        assert "this needs a restart: server.max_open, server.gateways" in capsys.readouterr().err
        whole = asked.keys.read_text()
        asked.set(server={"body_limit_mb": 4})
        asked.keys.write_text("keys: none\n")
        assert cli.main(reload) == 2
        assert f"{asked.keys} must hold a list named keys" in capsys.readouterr().err
        assert [status(deployment, bob), status(deployment, bob, LARGE)] == [200, 413], "nothing has changed"

        asked.keys.write_text(whole)
        deployment.send(signal.SIGHUP)
        wait_until(lambda: status(deployment, bob, LARGE) == 200, BACK_S, deployment.log)
        assert "alignedserve: reload: server.body_limit_mb: 4" in deployment.whole_log()

        deployment.wound("gateway-0")  # its next life has the settings of now
        wait_until(lambda: deployment.is_ready and status(deployment, bob, LARGE) == 200, BACK_S, deployment.log)
