"""Trials that an older revision made: unpacks them, and reads what was said of them then.

For tests/unit/house/test_old_trials.py, tests/process/test_old_trials_resume.py and make.py. Uses the files
of a trial's folder and of the store, nothing of ours: the trials outlive the modules that wrote them.
"""

from __future__ import annotations

import hashlib
import json
import os
import pwd
import shutil
import socket
import tarfile
from pathlib import Path
from typing import Any

import msgspec

HERE = Path(__file__).parent
MANIFEST = HERE / "manifest.json"
USER_FOLDER = "USER"  # runs/USER/<experiment>/<trial> in an archive
ROOT, CODE, HOST, USER = "@FILE_ROOT@", "@CODE@", "@HOST@", "@USER@"


def manifest() -> dict[str, dict[str, Any]]:
    """By the name of its archive: how a trial was made, and what status, logs and the others said of it."""
    if not MANIFEST.exists():
        return {}
    said: dict[str, dict[str, Any]] = json.loads(MANIFEST.read_text())
    return said


def unpack(name: str, file_root: Path) -> list[Path]:
    """Puts an archive's trials under a file root, as if this user had made them there on this host.

    Returns the trials' folders.
    """
    file_root.mkdir(parents=True, exist_ok=True)
    with tarfile.open(HERE / f"{name}.tar.xz") as archive:
        archive.extractall(file_root, filter="data")
    mine = file_root / "runs" / user()
    mine.mkdir(parents=True, exist_ok=True)
    values = {
        ROOT: str(file_root),
        CODE: "/nowhere/realsys",
        HOST: socket.gethostname(),
        USER: user(),
    }
    trials = []
    for file in files_in(file_root / "name_resolve"):
        replace_in(file, values)
    for packed in sorted((file_root / "runs" / USER_FOLDER).glob("*/*")):
        fill_in(packed, values)
        trial = mine / packed.parent.name / packed.name
        trial.parent.mkdir(exist_ok=True)
        trials.append(packed.rename(trial))
    shutil.rmtree(file_root / "runs" / USER_FOLDER)
    return trials


def fill_in(trial: Path, values: dict[str, str]) -> None:
    """Puts values in the place of the placeholders; the plan's hash is then another one."""
    for file in files_in(trial):
        replace_in(file, values)
    record = json.loads((trial / "trial.json").read_text())
    record["plan_hash"] = hashlib.sha256((trial / "plan.json").read_bytes()).hexdigest()
    (trial / "trial.json").write_text(json.dumps(record, indent=1))


def replace_in(file: Path, values: dict[str, str]) -> None:
    """In a text or a revision of the store; other files are left alone."""
    before = file.read_bytes()
    try:
        if before and file.parent.name in ("log", "snapshots"):
            content: Any = msgspec.msgpack.decode(before)
            after = msgspec.msgpack.encode(_replaced(content, values))
        else:
            after = _replaced(before.decode(), values).encode()
    except UnicodeDecodeError:
        return
    if after != before:
        file.write_bytes(after)


def _replaced(content: Any, values: dict[str, str]) -> Any:
    """In all keys and texts, those among bytes included. A text as a whole counts as quoted, as in JSON."""
    if isinstance(content, dict):
        return {_replaced(k, values): _replaced(v, values) for k, v in content.items()}
    if isinstance(content, list):
        return [_replaced(x, values) for x in content]
    if isinstance(content, str):
        if (quoted := f'"{content}"') in values:
            return values[quoted].strip('"')
        for old, new in values.items():
            content = content.replace(old, new)
    if isinstance(content, bytes):
        for old, new in values.items():
            content = content.replace(old.encode(), new.encode())
    return content


def files_in(folder: Path) -> list[Path]:
    """All but links."""
    return [f for f in sorted(folder.rglob("*")) if f.is_file() and not f.is_symlink()]


def user() -> str:
    """As realsys calls the user in runs/<user>."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return f"uid{os.getuid()}"
