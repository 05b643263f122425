"""What `realsys etcd roles` prints. That etcd understands it: tests/etcd/test_etcd_roles.py."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import golden
import pytest

from launcher.cli.command_line import run
from launcher.sites.etcd_roles import roles
from realsys.api.cluster import ClusterSpec, EtcdSpec
from realsys.api.errors import ConfigError

SITE = ClusterSpec(
    name="lab",
    name_resolve="etcd://etcd1,etcd2:2380",
    etcd=EtcdSpec(user="me", password_file="~/pw", ca_file="/etc/etcd/ca.pem"),
)


def test_the_commands_of_a_user() -> None:
    etcdctl = "etcdctl --endpoints=https://etcd1:2379,https://etcd2:2380"
    assert roles(SITE, "anna").commands == (
        f"{etcdctl} role add realsys-lab-anna",
        f"{etcdctl} role grant-permission --prefix=true realsys-lab-anna readwrite "
        "/realsys/v1/lab/anna/",
        f"{etcdctl} user add anna",
        f"{etcdctl} user grant-role anna realsys-lab-anna",
    )


def test_who_logs_in_may_be_called_otherwise() -> None:
    found = roles(SITE, "anna", etcd_user="a")
    assert (found.user, found.role, found.prefix) == (
        "a",
        "realsys-lab-anna",
        "/realsys/v1/lab/anna/",
    )


def test_who_enters_by_certificate_has_no_password() -> None:
    etcd = EtcdSpec(ca_file="/ca.pem", cert_file="/c.pem", key_file="/k.pem")
    assert (
        roles(replace(SITE, etcd=etcd), "anna").commands[2].endswith("user add anna --no-password")
    )


def test_a_network_without_tls() -> None:
    assert "--endpoints=http://etcd1:2379" in roles(replace(SITE, etcd=EtcdSpec()), "x").commands[0]


def test_a_name_is_one_word_of_the_shell() -> None:
    assert roles(SITE, "a b;c").commands[0].endswith("'realsys-lab-a b;c'")
    with golden.raises(ConfigError):
        roles(SITE, "a/b")


@pytest.mark.parametrize("url", ["file:///f", "etcd+job://"])
def test_a_site_whose_store_has_no_users(url: str) -> None:
    with golden.raises(ConfigError):
        roles(replace(SITE, name_resolve=url), "anna")


def test_the_verb_takes_the_site_files_user_for_ones_own_and_no_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    site = tmp_path / "lab.yaml"
    site.write_text(
        "name_resolve: etcd://h\netcd: {user: login, password_file: /pw, ca_file: /ca.pem}\n"
    )
    assert run(["etcd", "roles", "--cluster", str(site)]) == 0
    assert "user add login\n" in capsys.readouterr().out
    assert run(["etcd", "roles", "--cluster", str(site), "--user", "anna"]) == 0
    assert "user add anna\n" in capsys.readouterr().out
    assert run(["etcd", "grants", "--cluster", str(site)]) == 2
