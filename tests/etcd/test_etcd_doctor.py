"""`realsys doctor` on a site with an etcd: says what is wrong with each way in, and writes nothing."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from claimed_ports import free_ports
from etcd_server import EtcdCluster

from launcher.sites import places
from launcher.sites.etcd_roles import roles
from launcher.slurm.doctor.store_checks import local_store_finding
from realsys.api.cluster import ClusterSpec, EtcdSpec
from realsys.runtime.certificates import Authority


@pytest.fixture(scope="module")
def site(start_etcd: Callable[..., EtcdCluster]) -> Iterator[EtcdCluster]:
    with start_etcd(tls=True) as etcd:
        etcd.add_users()
        yield etcd


@pytest.fixture(scope="module")
def spec(site: EtcdCluster, tmp_path_factory: pytest.TempPathFactory) -> ClusterSpec:
    """Of the launching user, who is there with the role that `realsys etcd roles` gives."""
    assert site.tls is not None
    folder, tls = tmp_path_factory.mktemp("site"), site.tls.folder
    secret(folder / "password", "right\n")
    etcd = EtcdSpec(
        user="launcher",
        password_file=f"{folder}/password",
        ca_file=f"{tls}/ca.pem",
        cert_file=f"{tls}/client.pem",
        key_file=f"{tls}/client.key",
    )
    made = ClusterSpec(name="lab", file_root=str(folder), name_resolve=site.url, etcd=etcd)
    for command in roles(made, places.user_name(), etcd_user="launcher").commands:
        words = shlex.split(command)[2:]  # without etcdctl and its --endpoints
        site.etcdctl(*(f"{word}:right" if words[:2] == ["user", "add"] and word == words[2] else word
                       for word in words))  # fmt: skip
    return made


def secret(path: Path, text: str) -> str:
    path.write_text(text)
    path.chmod(0o600)
    return str(path)


def test_a_right_way_in(site: EtcdCluster, spec: ClusterSpec) -> None:
    before = site.etcdctl("get", "/", "--prefix", "--keys-only")
    finding = local_store_finding(spec)
    assert finding.ok, finding
    assert "launcher, and permits" in finding.what
    assert site.etcdctl("get", "/", "--prefix", "--keys-only") == before


def test_each_wrong_way_in_is_told_apart(
    site: EtcdCluster, spec: ClusterSpec, tmp_path: Path
) -> None:
    right = spec.etcd
    stranger = Authority("another").client("stranger")
    (tmp_path / "ca.pem").write_text(Authority("another").ca_pem)
    stranger.to_files(tmp_path / "cert.pem", tmp_path / "key.pem")
    open_file = tmp_path / "open"
    open_file.write_text("right")
    open_file.chmod(0o644)
    wrong_password = secret(tmp_path / "password", "wrong")
    cases = {
        "does not know the user": replace(right, password_file=wrong_password),
        "others can read it": replace(right, password_file=str(open_file)),
        "can't be read: No such file": replace(right, password_file=str(tmp_path / "none")),
        "did not answer": replace(right, ca_file=str(tmp_path / "ca.pem")),
        "did not answer in": replace(
            right, cert_file=str(tmp_path / "cert.pem"), key_file=str(tmp_path / "key.pem")
        ),
    }
    for what, etcd in cases.items():
        finding = local_store_finding(replace(spec, etcd=etcd))
        assert not finding.ok
        assert what in finding.what, finding
        assert finding.fix


def test_a_user_without_permission_for_the_site_is_told(spec: ClusterSpec) -> None:
    finding = local_store_finding(replace(spec, name="another_site"))
    assert (finding.ok, "the user 'launcher'" in finding.what) == (False, True)
    assert "realsys etcd roles" in finding.fix


def test_nobody_there(spec: ClusterSpec) -> None:
    port = free_ports(1)
    finding = local_store_finding(replace(spec, name_resolve=f"etcd://127.0.0.1:{port}"))
    assert (finding.ok, "did not answer" in finding.what) == (False, True)


def test_an_etcd_for_everybody_is_said_to_be_one(etcd: EtcdCluster) -> None:
    finding = local_store_finding(ClusterSpec(name="lab", name_resolve=etcd.url))
    assert finding.ok
    assert "without TLS, without" in finding.what
