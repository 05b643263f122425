"""Program that asks a Hugging Face hub for a data set's files, or fetches some of them, for hub_data.py.

It is a process of its own because a deadline must end it whatever huggingface_hub waits for, and nothing
else in the launcher should load that. Reads a request from stdin, and prints its answer as the last line:

    {"repo", "revision", "answer_s"}                → {"commit", "sizes": {file: bytes}}
    and with "files" and folders "staging", "to"    → {}, and the files are in ``to``
    whatever failed                                 → {"failed": text, "status", "code", "errno"}

Files are data: none is imported or run. The token is that of HF_TOKEN, or what `hf auth login` keeps.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

MAX_TEXT = 300  # characters of a failure


def main() -> None:
    """Answers one request."""
    try:
        answer = _answer(json.load(sys.stdin))
    except Exception as error:
        answer = _failure(error)
    sys.stdout.write(f"\n{json.dumps(answer)}\n")


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    from huggingface_hub import HfApi, hf_hub_download

    repo, revision, answer_s = request["repo"], request["revision"], request["answer_s"]
    if "files" not in request:
        found = HfApi().dataset_info(repo, revision=revision, timeout=answer_s, files_metadata=True)
        return {"commit": found.sha, "sizes": {s.rfilename: s.size for s in found.siblings or ()}}
    for file in request["files"]:
        fetched = hf_hub_download(
            repo,
            file,
            repo_type="dataset",
            revision=revision,
            local_dir=request["staging"],
            etag_timeout=answer_s,
        )
        to = Path(request["to"], file)
        to.parent.mkdir(parents=True, exist_ok=True)
        os.replace(fetched, to)
    return {}


def _failure(error: BaseException) -> dict[str, Any]:
    """Describes what failed: the hub's answer if there is one among the causes, else the first cause."""
    while getattr(error, "response", None) is None and error.__cause__ is not None:
        error = error.__cause__
    response = getattr(error, "response", None)
    return {
        "failed": (" ".join(str(error).split()) or type(error).__name__)[:MAX_TEXT],
        "status": getattr(response, "status_code", 0),
        "code": getattr(response, "headers", {}).get("X-Error-Code", ""),
        "errno": getattr(error, "errno", None) or 0,
    }


if __name__ == "__main__":
    main()
