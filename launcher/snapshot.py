"""A copy of the code in the trial's folder, so that editing the checkout can't change a queued trial.

Copied are the files that git knows or would add (for an installed package without git: its sources)
and the user's ``--import`` files. The revision, and the difference to it, are kept beside. A trial on
this machine starts at once and runs the code as it is.
"""

from __future__ import annotations

import compileall
import shutil
import subprocess
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from realsys.api.trial import TrialFiles, write_record

PACKAGES = ("realsys", "launcher", "experiments", "cluster_specs")
SOURCE_ENDINGS = (".py", ".yaml", ".yml", ".typed")
MAX_FILE_BYTES = 10 << 20  # no checkpoint that somebody left in the checkout
GIT_TIMEOUT_S = 30.0


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """``snapshot.json``."""

    root: str
    revision: str  # empty outside git
    changed: bool  # the copy differs from the revision: see dirty.diff
    files: int
    taken_at: float
    left_out: tuple[str, ...] = ()  # larger than MAX_FILE_BYTES


def code_root() -> Path:
    """The folder that holds our packages: a checkout, or site-packages."""
    return Path(__file__).resolve().parent.parent


def revision(root: Path | None = None) -> str:
    """``9fceb02d0ae5``, with ``+`` where the checkout has changes; empty outside git."""
    root = root or code_root()
    if not (root / ".git").exists():
        return ""
    name = _git(root, "rev-parse", "--short=12", "HEAD").strip()
    return name + ("+" if name and _git(root, "status", "--porcelain").strip() else "")


def snapshot_imports(imports: Sequence[str], trial_dir: Path) -> tuple[str, ...]:
    """``--import`` entries as the workers of a trial with a snapshot will import them."""
    code = TrialFiles(trial_dir).code
    return tuple(str(code / "imports" / Path(n).name) if n.endswith(".py") else n for n in imports)


def take_snapshot(
    files: TrialFiles, imports: Iterable[str], *, root: Path | None = None
) -> Snapshot:
    """Copies the code into ``files.code``, replacing an earlier copy.

    Args:
        imports: files that were imported by the launch, where they are now.
    Raises:
        OSError: the copy can't be written.
    """
    root = root or code_root()
    copied, left_out = 0, []
    shutil.rmtree(files.code, ignore_errors=True)
    files.code.mkdir(mode=0o700)  # it may hold what lay about in the checkout
    for name in _listed(root):
        source = root / name
        if not source.is_file():
            continue  # deleted, and not committed yet
        if source.stat().st_size > MAX_FILE_BYTES:
            left_out.append(name)
            continue
        target = files.code / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, target)
        copied += 1
    # Compiled once, here: else every task does it, on a file system that they share.
    compileall.compile_dir(files.code / "realsys", quiet=2)
    for path in imports:
        if path.endswith(".py"):
            (files.code / "imports").mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, files.code / "imports" / Path(path).name)
    name = revision(root)
    if name.endswith("+"):
        (files.root / "dirty.diff").write_text(_git(root, "diff", "HEAD"), encoding="utf-8")
    taken = Snapshot(
        root=str(root),
        revision=name.rstrip("+"),
        changed=name.endswith("+"),
        files=copied,
        taken_at=time.time(),
        left_out=tuple(left_out),
    )
    write_record(files.snapshot, taken)
    return taken


def _listed(root: Path) -> Iterator[str]:
    """Files to copy, relative to ``root``."""
    if (root / ".git").exists():
        listing = _git(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
        if listing:
            yield from filter(None, listing.split("\0"))
            return
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*")):
            if path.suffix in SOURCE_ENDINGS:
                yield str(path.relative_to(root))


def _git(root: Path, *words: str) -> str:
    """git's answer; empty when there is no git, or none of ours."""
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *words],
            capture_output=True,
            text=True,
            errors="surrogateescape",
            timeout=GIT_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
