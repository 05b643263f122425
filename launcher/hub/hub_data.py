"""Data sets of a hub under a site's file root, which nodes and containers see: asks, fetches, keeps.

    <file root>/cache/hf/OWNER/NAME/
      COMMIT/…              files under their names in the data set, each whole
      revisions/REVISION    the commit and the list of files that the hub last gave for it
      fetching-…/           files on their way

A commit's files never change: the hub is asked again only where a branch or tag may have moved.
"""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

from launcher.hub.hub_answers import is_unreachable, listing_of, refusal
from launcher.hub.hub_names import HubListing, HubName, amount
from realsys.api.errors import ClusterError, ConfigError, RealsysError
from realsys.config.extras import missing_packages
from realsys.planner.memory.memory_messages import size
from realsys.runtime.child_processes.parent_death import tied
from realsys.trial.records import read_record, write_record

ANSWER_S = 20.0  # of a request
SILENCE_S = 60.0  # without a byte, or an answer
REPORT_S = 5.0  # between two lines of progress
POLL_S = 0.2
CLIENT = Path(__file__).with_name("hub_client.py")
# Downloads through Xet have time-outs of their own.
_CLIENT_ENVIRONMENT = dict.fromkeys(
    ("HF_HUB_DISABLE_XET", "HF_HUB_DISABLE_PROGRESS_BARS", "HF_HUB_DISABLE_TELEMETRY"), "1"
)


class DataHub:
    """The data sets that settings name.

    Args:
        folder: where they are kept.
        report: gets lines about what is being fetched; None: nothing may be.
    """

    def __init__(self, folder: Path, report: Callable[[str], None] | None) -> None:
        self._folder, self.report = folder, report
        self._listings: dict[tuple[str, str], HubListing | ConfigError] = {}
        self.warnings: list[str] = []

    def folder(self, name: HubName) -> Path:
        """Returns where the files of a name with a commit are kept."""
        return self._folder / name.repo / name.revision

    def listing(self, name: HubName, *, where: str) -> HubListing:
        """Returns the commit of a name's revision and its files; if the hub can't be asked, as it gave them
        last.

        Raises:
            ConfigError: the hub refuses, or can't be asked and never was.
        """
        key = (name.repo, name.revision)
        if key not in self._listings:
            try:
                self._listings[key] = self._asked(name, where)
            except ConfigError as error:
                self._listings[key] = error
        found = self._listings[key]
        if isinstance(found, ConfigError):
            raise found
        return found

    def missing(self, name: HubName, files: Sequence[str]) -> list[str]:
        """Lists those files of a name with a commit that are not kept."""
        folder = self.folder(name)
        return [file for file in files if not (folder / file).exists()]

    def fetch(
        self, name: HubName, missing: Sequence[str], listing: HubListing, *, where: str
    ) -> None:
        """Fetches files of a name with a commit.

        Raises:
            ConfigError: the hub refuses, can't be reached, or sends nothing for SILENCE_S.
            ClusterError: nothing can be written there.
        """
        folder = self.folder(name)
        self._say(f"fetching {name}: {amount(missing, listing)}, into {folder}")
        with _staging(folder.parent) as staging:
            request = {"files": list(missing), "staging": str(staging), "to": str(folder)}
            answer = self._ask(name, request, (staging, folder), where)
        if "failed" in answer:
            raise refusal(answer, name, where=where)

    def _say(self, line: str) -> None:
        if self.report is not None:
            self.report(line)

    def _asked(self, name: HubName, where: str) -> HubListing:
        kept, known = self._folder / name.repo / "revisions", None
        with suppress(RealsysError, OSError):
            known = read_record(HubListing, kept / quote(name.revision, safe=""))
        if known is not None and name.has_commit:
            return known
        answer = self._ask(name, {}, (), where)
        if known is not None and is_unreachable(answer):
            self.warnings.append(
                f"the hub can't be asked for {name} ({answer['failed']}): its files are those of commit "
                f"{known.commit}, the last one known here"
            )
            return known
        if "failed" in answer:
            raise refusal(answer, name, where=where)
        listing = listing_of(answer, name, where=where)
        with suppress(OSError):  # then the next launch asks again
            for revision in (name.revision, listing.commit):
                write_record(kept / quote(revision, safe=""), listing)
        return listing

    def _ask(
        self, name: HubName, request: dict[str, Any], folders: Sequence[Path], where: str
    ) -> dict[str, Any]:
        """Runs the client for a request; what it fetches appears in ``folders``."""
        import tempfile  # slow to import for plans without such data

        for problem in missing_packages(["huggingface_hub"], where=where):
            raise problem
        asked = {**request, "repo": name.repo, "revision": name.revision, "answer_s": ANSWER_S}
        with tempfile.TemporaryFile() as said, tempfile.TemporaryFile() as given:
            given.write(json.dumps(asked).encode())
            given.seek(0)
            child = subprocess.Popen(
                tied([sys.executable, "-P", str(CLIENT)]),
                env={**os.environ, **_CLIENT_ENVIRONMENT},
                stdin=given,
                stdout=said,
                stderr=subprocess.STDOUT,
            )
            try:
                in_time = self._watch(child, folders)
            finally:
                child.kill()
                child.wait()
            said.seek(0)
            last = (said.read().decode(errors="replace").splitlines() or [""])[-1]
        text = f"the client ended with status {child.returncode}: {last}"
        with suppress(ValueError):
            if in_time and isinstance(answer := json.loads(last), dict):
                return answer
        text = text if in_time else f"nothing came for {SILENCE_S:g} s"
        return {"failed": text, "status": 0, "code": "", "errno": 0}

    def _watch(self, child: subprocess.Popen[bytes], folders: Sequence[Path]) -> bool:
        """Waits for the client, and reports what it has fetched; False if nothing came for SILENCE_S."""
        num_bytes, grown_at = 0, time.monotonic()
        reported_at, before = grown_at, _bytes_in(folders)
        while True:
            with suppress(subprocess.TimeoutExpired):
                child.wait(POLL_S)
                return True
            now, num_now = time.monotonic(), _bytes_in(folders) - before
            if num_now != num_bytes:
                num_bytes, grown_at = num_now, now
            if now - grown_at > SILENCE_S:
                return False
            if folders and now - reported_at > REPORT_S:
                self._say(f"  {size(num_bytes)} fetched")
                reported_at = now


def _bytes_in(folders: Sequence[Path]) -> int:
    """Counts the bytes of all files, while some come and go."""
    total = 0
    for folder in folders:
        for path in folder.rglob("*"):
            with suppress(OSError):
                found = path.lstat()
                total += found.st_size if stat.S_ISREG(found.st_mode) else 0
    return total


@contextmanager
def _staging(parent: Path) -> Iterator[Path]:
    """Makes a folder for files that are not whole yet; removes it, whatever is left in it."""
    import tempfile

    try:
        parent.mkdir(parents=True, exist_ok=True)
        made = tempfile.TemporaryDirectory(
            prefix="fetching-", dir=parent, ignore_cleanup_errors=True
        )
    except OSError as error:
        raise ClusterError(
            f"data can't be kept: {error.strerror}",
            where=str(parent),
            fix="free space, or set REALSYS_FILE_ROOT to a folder of yours on another disk",
        ) from error
    with made as folder:
        yield Path(folder)
