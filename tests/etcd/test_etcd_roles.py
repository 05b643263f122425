"""`realsys etcd roles`: what it prints, run as it stands, lets each user into their own part only."""

from __future__ import annotations

import os
import pty
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from etcd_server import ROOT_PASSWORD, EtcdCluster

from launcher.cli.command_line import run
from realsys.api.cluster import ClusterSpec, EtcdSpec
from realsys.api.errors import StoreError
from realsys.name_resolve.etcd.access import EtcdAccess
from realsys.name_resolve.key_table import TrialKeys
from realsys.name_resolve.open import open_store
from realsys.name_resolve.store import Compare, EventKind, NameResolve, Put

USERS = {"anna": "anna's password", "anna2": "another"}


@pytest.fixture(scope="module")
def site(start_etcd: Callable[..., EtcdCluster]) -> Iterator[EtcdCluster]:
    """An etcd with TLS in which an administrator has run what the verb prints."""
    with start_etcd(tls=True) as etcd:
        etcd.add_users()
        yield etcd


@pytest.fixture(scope="module")
def spec(site: EtcdCluster, tmp_path_factory: pytest.TempPathFactory) -> ClusterSpec:
    assert site.tls is not None
    folder = tmp_path_factory.mktemp("site")
    files = {name: str(site.tls.folder / name) for name in ("ca.pem", "client.pem", "client.key")}
    text = (
        f"name: lab\nfile_root: {folder}\nname_resolve: {site.url}\netcd:\n"
        f"  ca_file: {files['ca.pem']}\n  cert_file: {files['client.pem']}\n"
        f"  key_file: {files['client.key']}\n  user: anna\n  password_file: {folder}/password\n"
    )
    (folder / "site.yaml").write_text(text)
    (folder / "password").write_text("anna's password\n")
    (folder / "password").chmod(stat.S_IRUSR | stat.S_IWUSR)
    etcd = EtcdSpec(
        user="anna",
        password_file=str(folder / "password"),
        ca_file=files["ca.pem"],
        cert_file=files["client.pem"],
        key_file=files["client.key"],
    )
    return ClusterSpec(name="lab", file_root=str(folder), name_resolve=site.url, etcd=etcd)


@pytest.fixture(scope="module")
def users(site: EtcdCluster, spec: ClusterSpec) -> dict[str, str]:
    """They exist, by the verb's own words."""
    for name, password in USERS.items():
        for command in printed(spec, name):
            as_administrator(site, command, answers=[password, password])
    return USERS


def printed(spec: ClusterSpec, name: str) -> list[str]:
    done = subprocess.run(
        ["realsys", "etcd", "roles", "--cluster", f"{spec.file_root}/site.yaml", "--user", name],
        executable=shutil.which("realsys", path=f"{Path(sys.executable).parent}:{os.defpath}"),
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return done.stdout.splitlines()


def as_administrator(site: EtcdCluster, command: str, *, answers: Sequence[str]) -> None:
    """The line in a shell at a terminal, where etcdctl asks for the new user's password."""
    assert site.tls is not None
    files = {"CACERT": "ca.pem", "CERT": "client.pem", "KEY": "client.key"}
    options = {f"ETCDCTL_{option}": str(site.tls.folder / n) for option, n in files.items()}
    ours, theirs = pty.openpty()
    try:
        os.write(ours, "".join(f"{answer}\n" for answer in answers).encode())
        done = subprocess.run(
            ["bash", "-c", command],
            env={**os.environ, **options, "ETCDCTL_USER": f"root:{ROOT_PASSWORD}"},
            stdin=theirs,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    finally:
        os.close(ours)
        os.close(theirs)
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"


@pytest.fixture
def stores(site: EtcdCluster, users: dict[str, str]) -> Iterator[dict[str, NameResolve]]:
    opened = {
        name: open_store(site.url, access=site.access(name, password))
        for name, password in users.items()
    }
    yield opened
    for store in opened.values():
        store.close()


def keys(user: str, cluster: str = "lab") -> TrialKeys:
    return TrialKeys(cluster=cluster, user=user, experiment="e", trial="t")


def test_a_user_does_all_that_a_trial_does(stores: dict[str, NameResolve]) -> None:
    anna, root = stores["anna"], keys("anna").root
    with anna.watch(root) as watch:
        lease = anna.grant(600)
        anna.add(f"{root}/a", b"1", lease=lease)
        lease.keep_alive()
        assert anna.transaction([Compare.absent(f"{root}/b")], puts=[Put(f"{root}/b", b"2")])
        assert anna.find_subtree(root) == [f"{root}/a", f"{root}/b"]
        assert anna.wait([f"{root}/a"], timeout_s=60) == {f"{root}/a": b"1"}
        assert anna.revision() > 0
        lease.revoke()
        anna.clear_subtree(root)
        kinds: list[EventKind] = []
        deadline = time.monotonic() + 240
        while len(kinds) < 4 and time.monotonic() < deadline:
            kinds += [event.kind for event in watch.poll(1.0)]
    assert kinds == [EventKind.PUT, EventKind.PUT, EventKind.DELETE, EventKind.DELETE]


@pytest.mark.parametrize(("who", "whose"), [("anna", "anna2"), ("anna2", "anna")])
def test_a_user_cant_touch_anothers_keys(
    stores: dict[str, NameResolve], who: str, whose: str
) -> None:
    """Neither of two whose names begin alike."""
    owner, stranger, root = stores[whose], stores[who], keys(whose).root
    owner.add(f"{root}/key", b"value", replace=True)
    lease = stranger.grant(10)
    attempts: tuple[Callable[[], object], ...] = (
        lambda: stranger.get(f"{root}/key"),
        lambda: stranger.get_subtree(root),
        lambda: stranger.find_subtree("realsys/v1/lab"),
        lambda: stranger.add(f"{root}/new", b"x"),
        lambda: stranger.add(f"{root}/key", b"x", replace=True),
        lambda: stranger.add(f"{root}/new", b"x", lease=lease),
        lambda: stranger.delete(f"{root}/key"),
        lambda: stranger.clear_subtree(root),
        lambda: stranger.transaction([Compare.holds(f"{root}/key", b"value")], puts=[]),
        lambda: stranger.transaction([], deletes=[f"{root}/key"]),
        lambda: stranger.add(keys(who, cluster="lab2").root, b"x"),
    )
    for attempt in attempts:
        with pytest.raises(StoreError, match=f"'{who}'"):
            attempt()
    assert owner.get(f"{root}/key").value == b"value"


def test_the_site_files_own_user_enters(
    site: EtcdCluster, spec: ClusterSpec, users: object
) -> None:
    access = EtcdAccess.from_spec(site.endpoints, spec.etcd)
    store = open_store(site.url, access=access)
    try:
        root = keys("anna").root
        assert all(key.startswith(root) for key in store.find_subtree(root))
    finally:
        store.close()
    wrong = replace(access, password="guess", source=None)  # else it is read from the file
    with pytest.raises(StoreError, match="password"):
        open_store(site.url, access=wrong).get_subtree(keys("anna").root)


def test_the_words_as_a_document(
    spec: ClusterSpec, users: object, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["etcd", "roles", "--cluster", f"{spec.file_root}/site.yaml", "--json"]) == 0
    assert '"user": "anna"' in capsys.readouterr().out
