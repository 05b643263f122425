"""An agent that asks the policy three times with pauses, for runs in which everything is killed at random.

It retries as the official clients do, with the standard library alone, and rewards itself.
"""

from __future__ import annotations

import json
import os
import random
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

URL = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
KEY = os.environ["OPENAI_API_KEY"]
PAUSE_S = float(os.environ.get("PAUSE_S", "0.2"))
TRIES = 4


def ask(messages: list[dict[str, Any]]) -> str:
    """The policy's answer to a conversation."""
    body = json.dumps({"model": "policy", "messages": messages, "max_tokens": 8}).encode()
    for number in range(TRIES):
        headers = {
            "Authorization": f"Bearer {KEY}",
            "Content-Type": "application/json",
            "x-stainless-retry-count": str(number),
        }
        try:
            request = urllib.request.Request(URL, body, headers)
            with urllib.request.urlopen(request, timeout=60) as response:
                content = json.load(response)["choices"][0]["message"]["content"]
            return str(content or "")
        except (urllib.error.URLError, OSError):
            if number + 1 == TRIES:
                raise
            time.sleep(0.2 * 2**number)
    raise AssertionError


def main() -> None:
    """One episode; sometimes it goes back and takes another way, which is a branch."""
    task = json.loads(Path(os.environ["REALSYS_TASK_FILE"]).read_text())
    rng = random.Random(task["id"])
    messages: list[dict[str, Any]] = [{"role": "user", "content": str(task["prompt"])}]
    for turn in range(3):
        answer = ask(messages)
        time.sleep(rng.uniform(0, 2 * PAUSE_S))
        if rng.random() < 0.2:
            messages = [*messages[:1], {"role": "user", "content": f"again {turn}"}]
        else:
            messages += [
                {"role": "assistant", "content": answer},
                {"role": "user", "content": f"and {turn}?"},
            ]
    Path(os.environ["REALSYS_REWARD_FILE"]).write_text(str(rng.random()))


main()
