"""Certificates that are about to end: said a week before, a day before, and when it has come."""

from __future__ import annotations

import datetime
import logging
from pathlib import Path

import pytest

from realsys.api.cluster import EtcdSpec
from realsys.name_resolve.etcd.access import EtcdAccess
from realsys.name_resolve.etcd.expiry import Ending, endings, warning_of
from realsys.runtime.certificates import Authority, KeyPair
from realsys.supervisor.job_etcd.job_store import CertificateWatch

NOW = datetime.datetime(2026, 11, 23, 12, 0, tzinfo=datetime.UTC)


def hours(number: float) -> datetime.timedelta:
    return datetime.timedelta(hours=number)


@pytest.mark.parametrize(
    ("left", "urgency", "said"),
    [
        (hours(24 * 7 + 1), 0, ""),
        (
            hours(24 * 7),
            1,
            "ours expires in 7 days, at 2026-11-30 12:00 UTC; connections to etcd fail after",
        ),
        (hours(25), 1, "ours expires in 1 days"),
        (hours(24), 2, "ours expires in 24 h, at 2026-11-24 12:00 UTC"),
        (hours(0.1), 2, "ours expires in 0 h"),
        (hours(0), 3, "ours expired at 2026-11-23 12:00 UTC: connections to etcd fail"),
        (hours(-1000), 3, "ours expired at"),
    ],
)
def test_what_is_said_of_a_certificate_that_ends(left, urgency, said):
    assert warning_of(Ending("ours", NOW + left), NOW)[0] == urgency
    assert warning_of(Ending("ours", NOW + left), NOW)[1].startswith(said)
    assert not said or "renew it" in warning_of(Ending("ours", NOW + left), NOW)[1]


@pytest.fixture
def spec(tmp_path: Path) -> EtcdSpec:
    """Files of a client whose certificate and authority end in ten days."""
    renew(tmp_path, days=10)
    return EtcdSpec(
        ca_file=str(tmp_path / "ca.pem"),
        cert_file=str(tmp_path / "client.pem"),
        key_file=str(tmp_path / "client.key"),
    )


def renew(folder: Path, *, days: float) -> KeyPair:
    authority = Authority("site", life=datetime.timedelta(days=days))
    client = authority.client("anna")
    for name in ("ca.pem", "client.pem", "client.key"):
        (folder / name).unlink(missing_ok=True)
    (folder / "ca.pem").write_text(authority.ca_pem)
    client.to_files(folder / "client.pem", folder / "client.key")
    return client


def access_of(spec: EtcdSpec) -> EtcdAccess:
    return EtcdAccess.from_spec(("127.0.0.1:1",), spec)  # nobody is there: its own is not known


def test_a_run_warns_once_a_week_before_once_a_day_before_and_when_it_has_ended(
    spec: EtcdSpec, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    watch = CertificateWatch(access_of(spec))
    began = datetime.datetime.now(datetime.UTC)
    told = []
    for days in (0, 2, 3.5, 4, 9.5, 9.6, 11, 12):
        caplog.clear()
        watch.check(began + datetime.timedelta(days=days))
        told.append(
            [r.levelno for r in caplog.records if "our certificate (etcd.cert_file)" in r.message]
        )
    warned, alarmed = [logging.WARNING], [logging.ERROR]
    assert told == [[], [], warned, [], alarmed, [], alarmed, []]
    caplog.clear()
    renew(tmp_path, days=400)  # under the same names, while the run lives
    watch.check(began + datetime.timedelta(days=12))
    assert caplog.messages == []
    watch.check(began + datetime.timedelta(days=395))
    assert [r.levelno for r in caplog.records] == [
        logging.WARNING,
        logging.WARNING,
    ]  # authority's too


def test_a_password_and_certificates_are_read_anew_from_their_files(tmp_path: Path, spec: EtcdSpec):
    access = access_of(spec)
    assert access.reread() is access
    new = renew(tmp_path, days=20)
    assert access.reread().cert_pem == new.cert_pem
    assert access.reread() != access
    (tmp_path / "client.key").unlink()  # just being replaced
    assert access.reread() is access
    told = EtcdAccess(endpoints=("h:1",))  # not from files
    assert told.reread() is told


def test_what_is_no_certificate_is_left_to_those_who_connect(spec: EtcdSpec, tmp_path: Path):
    (tmp_path / "ca.pem").write_text("nonsense")
    assert [e.what for e in endings(access_of(spec))] == ["our certificate (etcd.cert_file)"]
    assert endings(EtcdAccess(endpoints=("127.0.0.1:1",))) == []
