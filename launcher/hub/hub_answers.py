"""What a hub's answers mean: a list of files, or why there is none, in words for the user (pure).

Answers are those of hub_client.py. Without a token a hub answers 401 for a private data set, and for one
that does not exist.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Mapping
from typing import Any

from launcher.hub.hub_names import HubListing, HubName
from realsys.api.errors import ConfigError

_COMMIT = re.compile(r"[0-9a-f]{40}")
_BUSY = 429
_OF_DISKS = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS, errno.ENAMETOOLONG)


def listing_of(answer: Mapping[str, Any], name: HubName, *, where: str) -> HubListing:
    """Reads an answer with a commit and sizes of files. Raises ConfigError if it is another one."""
    commit, sizes = answer.get("commit"), answer.get("sizes")
    if not isinstance(commit, str) or not _COMMIT.fullmatch(commit) or not isinstance(sizes, dict):
        raise ConfigError(
            f"what answers for {name} is no hub: it gives no commit",
            where=where,
            fix="correct HF_ENDPOINT, or leave it out",
        )
    return HubListing(commit, {str(file): int(num or 0) for file, num in sizes.items()})


def is_unreachable(answer: Mapping[str, Any]) -> bool:
    """Whether the hub did not answer, or can't for the moment."""
    status = answer.get("status", 0)
    return "failed" in answer and (status == 0 or status == _BUSY or status >= 500)


def refusal(answer: Mapping[str, Any], name: HubName, *, where: str) -> ConfigError:
    """Makes the error for an answer that failed."""
    status, repo = answer["status"], name.repo
    page = f"the page of {repo} on the hub"
    if answer["errno"] in _OF_DISKS:
        what = f"files of {name} can't be kept: {answer['failed']}"
        fix = "free space, or set REALSYS_FILE_ROOT to a folder of yours on another disk"
    elif answer["code"] == "GatedRepo":
        what = f"{repo} is gated, and this account was not let in ({status})"
        fix = f"ask for access on {page}, then export HF_TOKEN=<a token of that account>"
    elif answer["code"] == "RevisionNotFound":
        what = f"{repo} has no revision {name.revision!r}"
        fix = f"use a branch, tag or commit that {page} shows; without one it is main"
    elif answer["code"] == "EntryNotFound":
        what = f"the hub lists files of {name} that it does not have"
        fix = "launch again; the data set may just have changed"
    elif status in (401, 404):
        what = f"the hub has no data set {repo} for this account ({status})"
        fix = "correct the name; if the data set is private: export HF_TOKEN=<a token that may read it>"
    elif status == 403:
        what = f"the hub refuses {repo} to this account (403)"
        fix = "export HF_TOKEN=<a token that may read it>"
    elif is_unreachable(answer):
        what = f"the hub can't be asked for {name}: {answer['failed']}"
        fix = (
            "try where there is a network, or later (files that came whole are kept); see to proxies, "
            "HF_ENDPOINT and HF_HUB_OFFLINE; or give the path of files of your own"
        )
    else:
        what = f"the hub's answer for {name}: {answer['failed']}"
        fix = f"see {page}"
    return ConfigError(what, where=where, fix=fix)
