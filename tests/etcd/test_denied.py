"""An etcd that answers and lets us in no more: a password was changed, a role revoked. And certificates.

What happens to a run then must be what happens while etcd is away: nothing, until it is mended.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from etcd_server import ADDRESS, EtcdCluster
from history_check import check_history, read_history
from paced import Pace
from real_trials import Trials, explain, small_ppo, trained_ids
from runs_without_store import steps_of

from realsys.api.cluster import EtcdSpec
from realsys.api.errors import StoreDenied, StoreUnavailable
from realsys.name_resolve.etcd.access import EtcdAccess
from realsys.name_resolve.etcd.expiry import endings
from realsys.name_resolve.open import open_store
from realsys.name_resolve.retry import retry_while_unavailable
from realsys.runtime.certificates import LIFE, Authority
from realsys.trial.records import TrialFiles
from realsys.trial.trial_state import State

Site = tuple[EtcdCluster, EtcdSpec]
KEY = "realsys/v1/lab/anna/e/t/x"


@pytest.fixture
def site(start_etcd: Callable[..., EtcdCluster], tmp_path: Path) -> Iterator[Site]:
    """An etcd by TLS with a user anna, and the files with which she enters."""
    with start_etcd(tls=True) as etcd:
        etcd.add_users(anna="first")
        assert etcd.tls is not None
        spec = EtcdSpec(
            user="anna",
            password_file=str(tmp_path / "password"),
            ca_file=str(etcd.tls.folder / "ca.pem"),
            cert_file=str(etcd.tls.folder / "client.pem"),
            key_file=str(etcd.tls.folder / "client.key"),
        )
        write_password(spec, "first")
        yield etcd, spec


def write_password(spec: EtcdSpec, password: str) -> None:
    assert spec.password_file is not None
    path = Path(spec.password_file)
    path.touch(mode=0o600)
    path.write_text(password + "\n")


def change_password(etcd: EtcdCluster, password: str) -> None:
    etcd.etcdctl("user", "delete", "anna")
    etcd.etcdctl("user", "add", f"anna:{password}")
    etcd.etcdctl("user", "grant-role", "anna", "anna")


def test_a_new_password_is_read_from_its_file_by_who_is_connected(
    site: Site,
) -> None:
    etcd, spec = site
    access = EtcdAccess.from_spec(etcd.endpoints, spec)
    with closing(open_store(etcd.url, access=access)) as store:
        watch = store.watch(KEY)
        store.add(KEY, b"1")
        change_password(etcd, "second")
        with pytest.raises(StoreDenied, match="'anna'"):
            store.add(KEY, b"2", replace=True)
        write_password(spec, "second")
        retry_while_unavailable(
            lambda: store.add(KEY, b"3", replace=True), timeout_s=60, what="the test"
        )
        values: list[bytes] = []
        deadline = time.monotonic() + 240
        while b"3" not in values:
            assert time.monotonic() < deadline, values
            values += [event.value for event in watch.poll(1.0)]


def test_who_is_not_let_in_at_the_start_is_told_at_once(
    site: Site,
) -> None:
    etcd, spec = site
    write_password(spec, "wrong")
    access = EtcdAccess.from_spec(etcd.endpoints, spec)
    tries = []

    def open_it() -> None:
        tries.append(1)
        open_store(etcd.url, access=access)

    with pytest.raises(StoreUnavailable, match="'anna'"):
        retry_while_unavailable(open_it, timeout_s=600, what="opening it", when_denied=False)
    assert len(tries) == 1


def test_a_run_goes_on_while_its_role_is_revoked_and_its_password_is_another(
    trials: Trials, tiny_policy: Path, site: Site
) -> None:
    etcd, spec = site
    cluster = trials.file_root.parent / "site.yaml"
    section = "".join(
        f"  {name}: {getattr(spec, name)}\n"
        for name in ("user", "password_file", "ca_file", "cert_file", "key_file")
    )
    cluster.write_text(
        f"name: lab\nscheduler: local\nfile_root: {trials.file_root}\n"
        f"name_resolve: {etcd.url}\netcd:\n{section}"
    )
    pace = Pace(trials.file_root.parent, 0.8)
    ppo = small_ppo("exp_ctrl.total_train_epochs=3", "task.train_size=96")
    words = [f"actor.path={tiny_policy}", *pace.words, *ppo]
    files = trials.launch("ppo-math", "denied", "--cluster", str(cluster), *words)
    trials.wait_for_step(files, 3)
    etcd.etcdctl("user", "revoke-role", "anna", "anna")
    goes_on(files)
    etcd.etcdctl("user", "grant-role", "anna", "anna")
    change_password(etcd, "second")
    goes_on(files)
    write_password(spec, "second")
    pace.set(0.0)
    view = trials.wait(files, timeout_s=200)
    assert view.state is State.COMPLETED, explain(files, view)
    assert [a.number for a in files.all_attempts()] == [1]
    assert len(trained_ids(files)) == 36 * 8
    assert check_history(read_history(files.root)) == []
    log = files.attempt(1).log("master_worker/0").read_text()
    assert "publishing suspended" in log
    assert "let the user 'anna'" in log
    assert "the user 'anna' with" in log


def goes_on(files: TrialFiles, *, num_steps: int = 6) -> None:
    """Until so many more steps are done; fails when they do not come."""
    before, deadline = len(steps_of(files)), time.monotonic() + 240
    while len(steps_of(files)) < before + num_steps:
        assert time.monotonic() < deadline, steps_of(files)
        time.sleep(0.1)


def test_a_server_is_asked_for_the_end_of_its_certificate(
    start_etcd: Callable[..., EtcdCluster],
) -> None:
    etcd = start_etcd(tls=True)
    assert etcd.tls is not None
    life = datetime.timedelta(days=3)
    server = Authority("another", life=life).server("short", (ADDRESS,))
    (etcd.tls.folder / "server.pem").write_text(server.cert_pem)
    (etcd.tls.folder / "server.key").write_text(server.key_pem)
    etcd.members[0].start()
    try:
        deadline, found = time.monotonic() + 240, {}
        while len(found) < 3:  # its port is not open yet
            assert time.monotonic() < deadline
            found = {e.what: e.at for e in endings(etcd.access())}
    finally:
        etcd.__exit__(None, None, None)
    now = datetime.datetime.now(datetime.UTC)
    of_server = found[f"the certificate of etcd's member {etcd.endpoints[0]}"]
    assert abs(of_server - now - life) < datetime.timedelta(hours=1)
    others = [at for what, at in found.items() if "member" not in what]
    assert all(abs(at - now - LIFE) < datetime.timedelta(hours=1) for at in others)
