"""Tests of the network interfaces that NCCL may use."""

from __future__ import annotations

import pytest

from alignedserve.executor import building
from alignedserve.executor.building import interface_of, keep_nccl_at


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    variables: dict[str, str] = {}
    monkeypatch.setattr(building.os, "environ", variables)
    return variables


@pytest.mark.parametrize("chosen", [{}, {"NCCL_SOCKET_IFNAME": "eth1"}, {"NCCL_RAS_ENABLE": "1"}])
def test_nccl_stays_at_the_interface_of_the_deployment_unless_the_user_has_chosen(
    environment: dict[str, str], chosen: dict[str, str]
) -> None:
    environment |= chosen
    keep_nccl_at("127.0.0.1")
    wanted = {"NCCL_SOCKET_IFNAME": "=lo", "NCCL_RAS_ENABLE": "0"} | chosen
    assert environment.items() >= wanted.items()


def test_an_address_of_another_machine_has_no_interface(environment: dict[str, str]) -> None:
    assert interface_of("192.0.2.254") is None
    keep_nccl_at("192.0.2.254")
    assert "NCCL_SOCKET_IFNAME" not in environment
