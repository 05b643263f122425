"""Exceptions of a user's proxy in the environments of agents' programs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from realsys.rollout.runners.command_agent import agent_environment
from realsys.rollout.runners.episode_outcome import EpisodeAddress
from realsys.rollout.runners.hosted_agent import PythonAgent
from realsys.rollout.runners.proxy_exceptions import proxy_exceptions


@pytest.mark.parametrize(
    ("environment", "hosts", "excepted"),
    [
        ({}, (), "127.0.0.1,localhost"),
        ({"NO_PROXY": "corp.net"}, (), "corp.net,127.0.0.1,localhost"),
        ({"no_proxy": "corp.net"}, (), "corp.net,127.0.0.1,localhost"),
        ({"NO_PROXY": "a, b,", "no_proxy": "b,c"}, ("n7",), "a,b,c,127.0.0.1,localhost,n7"),
        ({"NO_PROXY": "localhost,a"}, ("127.0.0.1",), "localhost,a,127.0.0.1"),
        ({"NO_PROXY": "*"}, (), "*"),
        ({"NO_PROXY": "a,*"}, ("n7",), "*"),
        ({"HTTPS_PROXY": "http://p:1"}, (), "127.0.0.1,localhost"),
    ],
)
def test_the_users_exceptions_are_kept(
    environment: dict[str, str], hosts: tuple[str, ...], excepted: str
) -> None:
    made = proxy_exceptions(environment, *hosts)
    assert made == {"NO_PROXY": excepted, "no_proxy": excepted}


def test_a_program_finds_them_with_the_address_of_its_endpoint() -> None:
    address = EpisodeAddress(
        base_url="https://10.0.0.7:999/v1",
        session_url="https://10.0.0.7:999/sessions/k/v1",
        key="k",
        model="m",
        certificate=None,
    )
    seat: Any = SimpleNamespace(role="", address=address, session=None)
    made = agent_environment([seat], {"no_proxy": "corp.net"})
    assert made["NO_PROXY"] == made["no_proxy"] == "corp.net,127.0.0.1,localhost,10.0.0.7"


def test_a_process_of_functions_finds_them_unless_the_run_sets_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.setenv("no_proxy", "corp.net")
    agent = PythonAgent(function="a.py:f")
    agent.url = "https://10.0.0.7:999"
    made = agent.process_environment()
    assert made["NO_PROXY"] == made["no_proxy"] == "corp.net,127.0.0.1,localhost,10.0.0.7"
    agent = PythonAgent(function="a.py:f", env={"no_proxy": "other.net"})
    assert agent.process_environment()["no_proxy"] == "other.net"
