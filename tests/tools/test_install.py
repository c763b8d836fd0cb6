"""uv is given the places that pip is configured with."""

from __future__ import annotations

import pytest

from install import pip_lists, pip_settings, uv_arguments

LISTED = """\
:env:.find-links='/wheels'
global.cert='/etc/certificates.crt'
global.extra-index-url='file:///first https://second/simple'
global.find-links='/elsewhere'
install.no-index='true'
"""


def test_what_pip_is_configured_with_goes_to_uv() -> None:
    settings = pip_settings(LISTED)
    assert settings["cert"] == "/etc/certificates.crt"
    assert settings["find-links"] == "/wheels", "variables overrule files"
    assert list(uv_arguments(settings))[2:] == [
        *("--index", "file:///first", "--index", "https://second/simple"),
        *("--find-links", "/wheels", "--no-index"),
    ]
    assert list(uv_arguments({})) == ["--index-strategy", "unsafe-best-match"]


def test_pip_is_asked_what_it_is_configured_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", "/wheels")
    assert pip_settings(pip_lists())["find-links"] == "/wheels"
