"""A test that all nodes of a cluster get the model at the commit that the launcher has found."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import MagicMock

import pytest

from alignedserve.config.config import Config, load
from alignedserve.launch import cluster


class JoinedError(Exception):
    pass


@pytest.mark.parametrize(
    ("model", "given", "name"),
    [("org/name", "org/name@0a1b2c", "org/name"), ("org/name@main", "org/name@0a1b2c", "org/name")],
)
def test_the_config_of_all_parts_names_the_commit_and_clients_do_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model: str, given: str, name: str
) -> None:
    joined = list[Config]()

    def wait(config: Config, *_: object) -> None:
        joined.append(config)
        raise JoinedError

    folder, ray = tmp_path / "0a1b2c", MagicMock()
    ray.util.get_node_ip_address.return_value = "127.0.0.1"
    fakes = {"import_ray": lambda: ray, "LINES": {}, "_join": MagicMock(), "model_folder": lambda _: folder}
    fakes |= {"_wait_for_nodes": wait, "BoundedEnd": MagicMock()}
    for part, fake in fakes.items():
        monkeypatch.setattr(cluster, part, fake)
    config = load({"launcher": "ray", "ray.address": "auto", "model": model, "jobs.directory": str(tmp_path)}, {}, None)
    with pytest.raises(JoinedError):
        cluster.serve_on_cluster(config, MagicMock())
    assert [(each.model, each.model_names) for each in joined] == [(given, (name,))]
