"""Two users and one file root: what one of them can do to the other's trials, by really trying it.

Needs root, which becomes two ordinary users. They may read everything here (CAP_DAC_READ_SEARCH: the
interpreter may lie in root's home), so nothing is shown of reading but the modes; writing, removing and
renaming are refused to them as to anybody.
"""

from __future__ import annotations

import os
import pickle
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from real_trials import small_ppo

from realsys.trial.folders import OWN_PREFIX

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="needs root, to be two users")

VICTIM, OTHER, TEAM = 64001, 64002, 64010
HERE = Path(__file__).parent


@dataclass
class Shared:
    """A file root, and what users do there."""

    folder: Path

    @property
    def root(self) -> Path:
        return self.folder / "root"

    @property
    def own(self) -> Path:
        """The victim's own folder in it."""
        return self.root / f"{OWN_PREFIX}uid{VICTIM}"

    def make(self, mode: int, *, owner: int = 0, group: int = 0) -> None:
        self.root.mkdir()
        os.chown(self.root, owner, group)
        self.root.chmod(mode)

    def does(
        self, uid: int, *argv: str, umask: int = 0o022, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command as a user of the group TEAM."""
        home = self.folder / f"home-{uid}"
        if not home.exists():
            home.mkdir()
            os.chown(home, uid, uid)
        capability = "+dac_read_search"
        return subprocess.run(
            ["setpriv", f"--reuid={uid}", f"--regid={uid}", f"--groups={TEAM}",
             f"--inh-caps={capability}", f"--ambient-caps={capability}", *argv],
            env={"PATH": os.environ["PATH"], "HOME": str(home), "PYTHONPATH": str(HERE),
                 "COLUMNS": "200", **variables},
            umask=umask, cwd=home, capture_output=True, text=True, timeout=240, check=False,
        )  # fmt: skip

    def calls(self, uid: int, verb: str, where: Path, trial: str = "run1", **more: Any) -> Any:
        """A verb of as_user.py."""
        program = str(HERE / "as_user.py")
        return self.does(uid, sys.executable, program, verb, str(where), trial, **more)

    def launches(self, uid: int = VICTIM, **more: Any) -> Path:
        done = self.calls(uid, "launch", self.root, **more)
        assert done.returncode == 0, done.stderr
        trial = Path(done.stdout)
        self.runs(trial)
        return trial

    def runs(self, trial: Path, time_: int = 0) -> None:
        deadline_s = time.monotonic() + 240
        while not (trial / f"ran{time_}").exists():
            assert time.monotonic() < deadline_s, said_by(trial)
            time.sleep(0.02)

    def is_refused(self, verb: str, where: Path, trial: str = "run1") -> str:
        """What the victim is told; nothing was written."""
        before = everything_under(self.folder / "root")
        done = self.calls(VICTIM, verb, where, trial)
        assert done.returncode == 3, done.stdout + done.stderr
        assert everything_under(self.folder / "root") == before
        return str(done.stderr)

    def tries(self, code: str) -> str:
        """Python that the other one runs; the error that it gets."""
        done = self.does(OTHER, sys.executable, "-c", code)
        return done.stderr.splitlines()[-1] if done.returncode else ""

    def starts(self, trial: Path, plan_hash: str) -> subprocess.CompletedProcess[str]:
        """The first process of a job of the victim's, as a batch script starts it later on."""
        entry = ("-P", "-m", "realsys.supervisor.job_entry")
        return self.does(VICTIM, sys.executable, *entry, "as_user:supervise", str(trial), plan_hash)


@pytest.fixture
def shared() -> Iterator[Shared]:
    folder = Path(tempfile.mkdtemp(dir="/tmp"))  # pytest's own is closed to other users
    folder.chmod(0o755)
    yield Shared(folder)
    shutil.rmtree(folder)


def everything_under(folder: Path) -> list[tuple[str, int]]:
    return sorted((str(p), p.lstat().st_mtime_ns) for p in folder.rglob("*"))


def said_by(trial: Path) -> str:
    return "\n".join(p.read_text() for p in trial.glob("submitit/*_log.err"))


def hash_of(trial: Path) -> str:
    from realsys.api.plan import plan_hash

    return plan_hash((trial / "plan.json").read_text())


def test_two_users_run_in_one_sticky_root(shared: Shared, tiny_policy: Path) -> None:
    """With real supervisors and workers, beside each other, to the end; nobody's folder in the way, and
    nothing that the other one could write."""
    shared.make(0o1777)
    policy = shutil.copytree(tiny_policy, shared.folder / "policy")
    words = (
        "--trial=run1",
        "--detach",
        f"actor.path={policy}",
        *small_ppo("task.train_size=16"),
    )
    cli = (sys.executable, "-m", "launcher.cli.entry")
    for uid in (VICTIM, OTHER):
        done = shared.does(
            uid, *cli, "launch", "ppo-math", *words, umask=0, REALSYS_FILE_ROOT=str(shared.root)
        )
        assert done.returncode == 0, done.stderr
    for uid in (VICTIM, OTHER):
        argv = (*cli, "wait", "ppo-math/run1", "--timeout=200")
        done = shared.does(uid, *argv, REALSYS_FILE_ROOT=str(shared.root))
        assert done.returncode == 0, done.stdout + done.stderr
        own = shared.root / f"{OWN_PREFIX}uid{uid}"
        trial = own / "runs" / f"uid{uid}" / "ppo-math" / "run1"
        assert (trial / "report.html").stat().st_uid == uid
        assert list(trial.glob("recover/*/*.pt"))
        closed_to_others(own, uid)
    assert sorted(p.name for p in shared.root.iterdir()) == [
        f"{OWN_PREFIX}uid{uid}" for uid in (VICTIM, OTHER)
    ]


def closed_to_others(own: Path, uid: int) -> None:
    for path in (own, *own.rglob("*")):
        found = path.lstat()
        if not stat.S_ISLNK(found.st_mode):
            assert not found.st_mode & 0o022, f"{path} {found.st_mode:o}"
        if path.suffix == ".pt" or path.name in ("submitit", "secrets", "history", "recover"):
            assert not found.st_mode & 0o077, f"{path} {found.st_mode:o}"
        assert found.st_uid == uid, path


@pytest.mark.parametrize("umask", [0o000, 0o077, 0o777])
def test_whatever_the_umask_nobody_else_can_write_into_a_trial(shared: Shared, umask: int) -> None:
    shared.make(0o1777)
    trial = shared.launches(umask=umask)
    closed_to_others(shared.own, VICTIM)
    for code in (
        f"import os; os.rename({str(trial / 'submitit')!r}, {str(trial / 'old')!r})",
        f"import os; os.mkdir({str(trial / 'submitit' / 'x')!r})",
        f"import os; os.rename({str(trial)!r}, {str(trial) + 'x'!r})",
        f"import os; os.rename({str(shared.own)!r}, {str(shared.root / 'x')!r})",
        f"open({str(trial / 'plan.json')!r}, 'r+')",
        f"import os; os.symlink('/tmp', {str(trial / 'attempts')!r})",
    ):
        assert "not permitted" in (told := shared.tries(code)) or "denied" in told, code


@pytest.mark.parametrize(
    ("mode", "group", "by"), [(0o777, 0, "anybody"), (0o2770, TEAM, f"group {TEAM}")]
)
def test_a_root_in_which_others_can_exchange_folders_is_refused(
    shared: Shared, mode: int, group: int, by: str
) -> None:
    shared.make(mode, group=group)
    told = shared.is_refused("launch", shared.root)
    assert f"can be written by {by}, who could replace your files in it" in told
    assert f"chmod +t {shared.root}" in told
    shared.root.chmod(mode | stat.S_ISVTX)  # as it says
    shared.launches()
    shared.launches(OTHER)


def test_a_root_of_another_user_is_refused(shared: Shared) -> None:
    shared.make(0o1777, owner=OTHER)
    told = shared.is_refused("launch", shared.root)
    assert f"{shared.root} belongs to uid {OTHER}, who could replace" in told
    assert "REALSYS_FILE_ROOT" in told


PREMADE: dict[str, Callable[[Shared], str]] = {
    "a folder": lambda s: f"os.mkdir({str(s.own)!r}); os.chmod({str(s.own)!r}, 0o777)",
    "a link to a folder of his": lambda s: (
        f"os.mkdir({str(s.root / 'x')!r}); os.symlink({str(s.root / 'x')!r}, {str(s.own)!r})"
    ),
    "a link to a folder of the victim": lambda s: (
        f"os.symlink({str(s.folder / f'home-{VICTIM}')!r}, {str(s.own)!r})"
    ),
    "a file": lambda s: f"open({str(s.own)!r}, 'w')",
}


@pytest.mark.parametrize("what", PREMADE)
def test_what_another_user_made_in_advance_is_refused(shared: Shared, what: str) -> None:
    shared.make(0o1777)
    shared.does(VICTIM, "true")  # has a home
    assert shared.tries(f"import os; {PREMADE[what](shared)}") == ""
    told = shared.is_refused("launch", shared.root)
    assert str(shared.own) in told
    assert f"belongs to uid {OTHER}" in told or (what == "a file" and "a folder" in told)


def test_a_folder_that_its_user_opened_to_others_is_refused_until_it_is_closed(
    shared: Shared,
) -> None:
    """There the other one could put a trial's folder, or a link, in place of ours."""
    shared.make(0o1777)
    trial = shared.launches()
    for loose in (shared.own, *trial.parents[:3]):
        loose.chmod(0o777)
        told = f"{loose} can be written by anybody"
        started = shared.starts(trial, hash_of(trial))
        assert (started.returncode, told in started.stderr) == (1, True), started.stderr
        loose.chmod(0o755)
    loose = trial.parent
    loose.chmod(0o777)
    told = f"{loose} can be written by anybody"
    assert told in shared.is_refused("resume", trial)
    refused = shared.is_refused("launch", shared.root, "run2")
    assert told in refused
    assert f"chmod go-w {loose}" in refused
    loose.chmod(0o755)
    done = shared.calls(VICTIM, "resume", trial)
    assert done.returncode == 0, done.stderr
    shared.runs(trial, 1)


class Evil:
    """What unpickling it runs."""

    def __init__(self, note: Path) -> None:
        self.note = str(note)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.note,)


def opened_up(shared: Shared) -> Path:
    """A trial that was open to everybody for a while, as under umask 000 before."""
    shared.make(0o1777)
    trial = shared.launches()
    for folder in (trial, trial / "submitit", trial / "secrets", trial / "attempts"):
        folder.mkdir(exist_ok=True)
        os.chown(folder, VICTIM, VICTIM)
        folder.chmod(0o777)
    return trial


def closed_again(trial: Path) -> None:
    for folder in (trial, *trial.iterdir()):
        if folder.is_dir() and not folder.is_symlink() and folder.stat().st_uid == VICTIM:
            folder.chmod(0o700)


@pytest.mark.parametrize(
    ("part", "by"),
    [("submitit", "a folder"), ("submitit", "a link"), ("secrets", "a link"), ("code", "a folder"),
     ("attempts", "a link")],
)  # fmt: skip
def test_an_exchanged_part_of_a_trial_is_refused(shared: Shared, part: str, by: str) -> None:
    trial = opened_up(shared)
    evil, his = trial / "evil", str(shared.root / "his")
    made = (
        f"import os, pickle; p = {str(trial / part)!r}; os.path.exists(p) and os.rename(p, p + '0')"
    )
    made += "; os.mkdir(p)" if by == "a folder" else f"; os.mkdir({his!r}); os.symlink({his!r}, p)"
    assert shared.tries(made) == ""
    data = pickle.dumps(Evil(evil))
    for job in ("1_0", "1", "77"):  # he can't know the number, so he has all
        (trial / part / f"{job}_submitted.pkl").write_bytes(data)
        os.chown(trial / part / f"{job}_submitted.pkl", OTHER, OTHER)
    closed_again(trial)
    for said in (shared.starts(trial, hash_of(trial)).stderr, shared.is_refused("resume", trial)):
        assert f"belongs to uid {OTHER}" in said
    assert not evil.exists()
    assert not (trial / "ran1").exists()


def test_an_exchanged_plan_is_refused(shared: Shared) -> None:
    trial = opened_up(shared)
    plan_hash = hash_of(trial)
    plan = str(trial / "plan.json")
    assert shared.tries(
        f"import os, shutil; p = {plan!r}; t = open(p).read(); os.remove(p); "
        "open(p, 'w').write(t.replace('ppo-math', 'evil'))"
    ) == ""  # fmt: skip
    closed_again(trial)
    for said in (shared.starts(trial, plan_hash).stderr, shared.is_refused("resume", trial)):
        assert f"plan.json is not a file of yours (it is uid {OTHER}'s)" in said
    # One that the victim owns all the same, as by a copy of the whole folder: the hash tells.
    copy = trial.with_name("run2")
    shutil.copytree(trial, copy, symlinks=True)
    for path in (copy, *copy.rglob("*")):
        os.chown(path, VICTIM, VICTIM, follow_symlinks=False)
    assert "changed after launch" in shared.starts(copy, plan_hash).stderr
    assert "changed after launch" in shared.is_refused("resume", copy)
    assert not (trial / "ran1").exists()
    assert not (copy / "ran1").exists()


def test_the_trial_of_another_user_is_not_resumed(shared: Shared) -> None:
    """His plan names code to import."""
    shared.make(0o1777)
    his = shared.launches(OTHER)
    assert f"belongs to uid {OTHER}" in shared.is_refused("resume", his)


def test_a_trial_that_another_user_put_there_in_our_name_is_not_listed(shared: Shared) -> None:
    """In a root that was used before each user had a folder of his own in it."""
    shared.make(0o1777)
    fake = shared.root / "runs" / f"uid{VICTIM}" / "ppo-math" / "fake"
    plan = str(fake / "plan.json")
    assert shared.tries(f"import os; os.makedirs({str(fake)!r}); open({plan!r}, 'w')") == ""
    trial = shared.launches()
    argv = (sys.executable, "-m", "launcher.cli.entry", "ls")
    listed = shared.does(VICTIM, *argv, REALSYS_FILE_ROOT=str(shared.root)).stdout
    assert trial.name in listed
    assert "fake" not in listed


def test_the_store_of_another_users_trial_is_not_entered(shared: Shared) -> None:
    """His plan names a server, and the file with the password that is sent there."""
    shared.make(0o1777)
    his = shared.launches(OTHER)
    code = (
        "import sys; from pathlib import Path; from realsys.api.plan import read_plan; "
        "from realsys.trial.records import AttemptFiles; "
        "from realsys.name_resolve.trial_store import open_trial_store; trial = Path(sys.argv[1]); "
        "open_trial_store(read_plan(trial / 'plan.json'), AttemptFiles(trial / 'attempts' / '0001'))"
    )
    done = shared.does(VICTIM, sys.executable, "-c", code, str(his))
    assert f"the trial belongs to uid {OTHER}: its store is not opened" in done.stderr
    assert shared.does(OTHER, sys.executable, "-c", code, str(his)).returncode == 0


def test_a_pickle_in_the_way_decides_nothing(shared: Shared) -> None:
    """Even one that the victim owns: nothing is unpickled any more."""
    shared.make(0o1777)
    trial = shared.launches()
    evil = trial / "evil"
    for number in range(400):  # whatever the next process's number is
        pid = int(Path("/proc/loadavg").read_text().split()[-1]) + number
        path = trial / "submitit" / f"{pid}_submitted.pkl"
        path.write_bytes(pickle.dumps(Evil(evil)))
        os.chown(path, VICTIM, VICTIM)
    done = shared.calls(VICTIM, "resume", trial)
    assert done.returncode == 0, done.stderr
    shared.runs(trial, 1)
    assert not evil.exists()
