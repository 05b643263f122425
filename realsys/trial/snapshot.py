"""Copies the code into the trial's folder, so that editing the checkout can't change a queued
trial.

Copied are the files that git tracks or would add (for an installed package without git: its
sources) and the user's ``--import`` files. The revision, and the diff against it, are stored beside
the copy. A trial on this machine starts at once and runs the code as it is.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import importlib.util
import os
import stat
import struct
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Thread

from realsys.api.plan import LaunchPlan
from realsys.trial.records import TrialFiles, TrialRecord, read_record, write_record

PACKAGES = ("realsys", "launcher", "experiments", "cluster_specs")
RUN_PACKAGES = ("realsys", "experiments")  # the packages that determine what a run computes
SOURCE_ENDINGS = (".py", ".yaml", ".yml", ".typed")
MAX_FILE_BYTES = 10 << 20  # leaves out checkpoints in the checkout
GIT_TIMEOUT_S = 30.0


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """Which code a checkout holds, according to git."""

    revision: str = ""  # empty outside git, or where git refuses
    changed: bool | None = None  # it differs from the revision; None: unknown
    problem: str = ""  # why git could not identify the code; empty outside git


@dataclass(frozen=True, kw_only=True)
class CodeSnapshot(Provenance):
    """``snapshot.json``: origin of the copied code. If it was changed: see dirty.diff."""

    root: str
    files: int
    taken_at: float
    left_out: tuple[str, ...] = ()  # larger than MAX_FILE_BYTES


def code_root() -> Path:
    """Returns the folder that holds realsys' packages: a checkout, or site-packages."""
    return Path(__file__).resolve().parents[2]


def provenance(root: Path | None = None) -> Provenance:
    """Identifies the code of the checkout; git refuses for one that belongs to another user."""
    root = root or code_root()
    if not (root / ".git").exists():
        return Provenance()
    name, why = _git(root, "rev-parse", "--short=12", "HEAD")
    if name is None:
        return Provenance(problem=why)
    status, why = _git(root, "status", "--porcelain")
    changed = None if status is None else bool(status.strip())
    return Provenance(revision=name.strip(), changed=changed, problem=why)


def revision(root: Path | None = None) -> str:
    """Returns ``9fceb02d0ae5``, with ``+`` if the checkout has changes and ``?`` if that is
    unknown; empty outside git, or if git refuses."""
    found = provenance(root)
    return found.revision + {True: "+", False: "", None: "?" * bool(found.revision)}[found.changed]


def revision_meanwhile() -> Callable[[], str]:
    """Has git look for the revision on a thread, since it reads the whole checkout; returns what waits
    for it, as long as git may take."""
    found = list[str]()
    thread = Thread(target=lambda: found.append(revision()), name="revision", daemon=True)
    thread.start()

    def wait() -> str:
        thread.join()
        return found[0]

    return wait


def code_that_made(record: TrialRecord, plan_revision: str) -> tuple[str, str]:
    """Names the code that launched a trial, and says how to get it (pure).

    Args:
        plan_revision: as in the plan; empty if the launch was outside git, or by a realsys that did not
            record it.
    """
    made_by = f"realsys {record.realsys_version or '(version unknown)'}"
    if plan_revision:
        commit = plan_revision.rstrip("+?")
        if plan_revision.endswith("+"):
            made_by += f", revision {commit} with uncommitted changes"
            return made_by, f"git checkout {commit}, with the same changes"
        return f"{made_by}, revision {commit}", f"git checkout {commit}"
    day = time.strftime("%Y-%m-%d %H:%M", time.localtime(record.created_at))
    install = f"pip install realsys=={record.realsys_version or 'VERSION'}"
    return (
        f"{made_by} on {day} (revision not recorded)",
        f"{install}, or in a checkout: git checkout $(git rev-list -1 --before='{day}' HEAD)",
    )


def code_digest(imports: tuple[str, ...] = (), root: Path | None = None) -> str:
    """Returns 16 hex digits that identify the code that workers run: sources, as this process first
    saw them, and ``--import`` files, as they are now."""
    digest = sources_digest(RUN_PACKAGES, root or code_root())
    for name in imports:
        if name.endswith(".py"):
            with suppress(OSError):  # a missing file is reported by its import
                digest.update(_digest_of(Path(name).name, Path(name)))
    return digest.hexdigest()[:16]


def sources_digest(folders: tuple[str, ...], root: Path | None = None) -> hashlib._Hash:
    """Returns a SHA-256, to go on with, of our sources in folders of the code's root."""
    return _sources_digest(folders, root or code_root()).copy()


@functools.cache
def _sources_digest(folders: tuple[str, ...], root: Path) -> hashlib._Hash:
    digest, names = hashlib.sha256(), list[str]()
    for folder in folders:
        for inner, _, files in os.walk(root / folder):
            below = os.path.relpath(inner, root)
            names += (f"{below}/{file}" for file in files if file.endswith(".py"))
    for name in sorted(names, key=lambda name: name.split("/")):
        with suppress(OSError):
            digest.update(_digest_of(name, root / name))
    return digest


def _digest_of(name: str, path: Path) -> bytes:
    with open(path, "rb", buffering=0) as file:
        return f"{name}\0".encode() + hashlib.sha256(file.readall()).digest()


def changed_code_warning(files: TrialFiles, plan: LaunchPlan) -> str:
    """Returns a warning if a resume would run other code than the launch did; empty if it runs a
    copy, or the same."""
    record = read_record(TrialRecord, files.record)
    if plan.snapshot or record is None or not record.code:
        return ""
    if code_digest(plan.imports) == record.code:
        return ""
    made_by, _ = code_that_made(record, plan.revision)
    return (
        f"the code has changed since the trial was launched ({made_by}): its results may differ from here "
        "on, and the change is not recorded. To compare runs, launch a new trial"
    )


def provenance_warning(files: TrialFiles) -> str:
    """Returns a warning if git could not identify the copied code; else empty."""
    taken = read_record(CodeSnapshot, files.snapshot)
    if taken is None or not taken.problem:
        return ""
    return (
        f"git could not tell the revision of the copied code, or whether it was changed: {taken.problem} "
        f"(recorded in {files.snapshot})"
    )


def resolved_imports(names: Iterable[str]) -> list[str]:
    """Returns the ``--import`` entries, each once: files by their real path, modules by their name."""
    found = (str(Path(n).expanduser().resolve()) if n.endswith(".py") else n for n in names)
    return list(dict.fromkeys(found))


def snapshot_imports(imports: Sequence[str], trial_dir: Path) -> tuple[str, ...]:
    """Returns the ``--import`` entries as the workers of a trial with a snapshot import them.

    Of several files of one base name the second is in a folder ``2``, and so on.
    """
    folder, count = TrialFiles(trial_dir).code / "imports", Counter[str]()
    places = []
    for name in imports:
        if not name.endswith(".py"):
            places.append(name)
            continue
        base = Path(name).name
        count[base] += 1
        places.append(str(folder / (str(count[base]) if count[base] > 1 else "") / base))
    return tuple(places)


def take_snapshot(
    files: TrialFiles, imports: Iterable[str], *, root: Path | None = None
) -> CodeSnapshot:
    """Copies the code into ``files.code``, replacing an earlier copy.

    Args:
        imports: files imported by the launch, at their present paths.
    Raises:
        OSError: the copy can't be written.
    """
    import compileall  # `plan` names a snapshot and takes none

    root = root or code_root()
    copied, left_out, not_compiled = 0, [], []
    import shutil  # slow to import for those that make no copy

    shutil.rmtree(files.code, ignore_errors=True)
    files.code.mkdir(mode=0o700)  # it may contain private files of the checkout
    there, here = str(root), str(files.code)  # Path objects would take half of the time
    folders = {here}
    for name in _listed(root):
        source, target = f"{there}/{name}", f"{here}/{name}"
        size = _size_of_file(source)
        if size is None:
            continue  # deleted, and not committed yet
        if size > MAX_FILE_BYTES:
            left_out.append(name)
            continue
        if (folder := os.path.dirname(target)) not in folders:
            os.makedirs(folder, exist_ok=True)
            folders.add(folder)
        status = _copy_file(source, target)
        copied += 1
        ours = name.startswith("realsys/") and name.endswith(".py")
        if ours and not _copy_compiled(source, target, status):
            not_compiled.append(target)
    # Compiled once here, otherwise every task would do it on a shared file system.
    for target in not_compiled:
        compileall.compile_file(target, quiet=2, force=True)
    given = resolved_imports(imports)
    for path, copy in zip(given, snapshot_imports(given, files.root), strict=True):
        if path.endswith(".py"):
            Path(copy).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, copy)
    found = provenance(root)
    if found.changed:
        diff, why = _git(root, "diff", "HEAD")
        found = replace(found, problem=found.problem or why)
        if diff is not None:
            (files.root / "dirty.diff").write_text(diff, encoding="utf-8", errors="surrogateescape")
    taken = CodeSnapshot(
        root=str(root),
        files=copied,
        taken_at=time.time(),
        left_out=tuple(left_out),
        **vars(found),
    )
    write_record(files.snapshot, taken)
    return taken


def _size_of_file(path: str) -> int | None:
    """Returns a regular file's bytes; None if there is none."""
    try:
        status = os.stat(path)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            return None
        raise
    return status.st_size if stat.S_ISREG(status.st_mode) else None


def _copy_file(source: str, target: str) -> os.stat_result:
    """Copies content, permissions and times of a file; returns the source's status.

    As ``shutil.copy2``, which takes three times as many system calls for a small file.
    """
    with open(source, "rb", buffering=0) as file:
        content = file.readall()
        status = os.fstat(file.fileno())  # after its content: a change meanwhile makes it newer
    with open(target, "wb") as file:
        file.write(content)
    os.utime(target, ns=(status.st_atime_ns, status.st_mtime_ns))
    os.chmod(target, stat.S_IMODE(status.st_mode))
    return status


def _copy_compiled(source: str, target: str, status: os.stat_result) -> bool:
    """Copies a source's compiled file if that stores the age and size in ``status``, which the copy of
    the source shares; returns whether it did."""
    age, size = int(status.st_mtime) & 0xFFFF_FFFF, status.st_size & 0xFFFF_FFFF
    head = importlib.util.MAGIC_NUMBER + struct.pack("<III", 0, age, size)
    try:
        with open(importlib.util.cache_from_source(source), "rb", buffering=0) as file:
            content = file.readall()
    except OSError:
        return False
    if not content.startswith(head):
        return False
    copy = importlib.util.cache_from_source(target)
    os.makedirs(os.path.dirname(copy), exist_ok=True)
    with open(copy, "wb") as file:
        file.write(content)
    return True


def _listed(root: Path) -> Iterator[str]:
    """Yields the files to copy, relative to ``root``."""
    if (root / ".git").exists():
        listing, _ = _git(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
        if listing:
            yield from filter(None, listing.split("\0"))
            return
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*")):
            if path.suffix in SOURCE_ENDINGS:
                yield str(path.relative_to(root))


def _git(root: Path, *words: str) -> tuple[str | None, str]:
    """Runs git; returns (output, ""), or (None, why it failed)."""
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *words],
            capture_output=True,
            text=True,
            errors="surrogateescape",
            timeout=GIT_TIMEOUT_S,
            check=False,
        )
    except FileNotFoundError:
        return None, "there is no program git"
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, f"git {words[0]} fails: {error}"
    if done.returncode == 0:
        return done.stdout, ""
    message = next((line for line in done.stderr.splitlines() if line.strip()), "")
    return None, f"git {words[0]}: {message.strip()[:300] or f'exit {done.returncode}'}"
