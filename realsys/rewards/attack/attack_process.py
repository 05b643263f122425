"""Worker process of attack_scoring.py: makes a rule and scores one answer after the other.

`python -P -m realsys.rewards.attack.attack_process SETTINGS`, with ``SETTINGS`` as JSON: ``rule``,
``args``, ``imports``, ``forks``, ``cpu_s``, ``memory_bytes``. Requests and replies are frames of JSON,
as guarded.py has.

With ``forks`` exploits are scored in forks with limits, for rules that nothing guards: what an
answer does to its process is gone with it. Honest answers are scored here, so that what a rule makes
for a record is made once.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import select
import signal
import sys
import time
from contextlib import suppress
from typing import Any

from realsys.api import registry
from realsys.api.basics import plugin_table
from realsys.api.basics.reward import RAISED, Completion, Score, reward_terms
from realsys.api.errors import RewardError
from realsys.rewards.guard.frames import parse_json, send_json
from realsys.rewards.rule import RewardRule, rule_of
from realsys.runtime.child_processes.parent_death import die_with_parent

REQUESTS, REPLIES = 0, 1
_WALL = 5.0  # times its computing time, a fork may take


def main() -> int:
    settings = json.loads(sys.argv[1])
    die_with_parent(settings["parent"])
    replies = os.dup(REPLIES)
    os.dup2(os.open(os.devnull, os.O_WRONLY), REPLIES)  # a print must not be taken for a reply
    logging.disable(logging.CRITICAL)
    try:
        registry.load_plugins(settings["imports"])
        rule = rule_of(settings["rule"], settings["args"])
        if settings["forks"] is None:
            settings["forks"] = any(map(_is_bare, reward_terms(settings["rule"])))
    except Exception as error:  # a plug-in may raise anything; the other end reports it
        send_json(replies, {"broken": f"{type(error).__name__}: {error}"})
        return 1
    send_json(replies, {"ready": True})
    received = bytearray()
    while True:
        while (request := parse_json(received)) is None:
            if not (more := os.read(REQUESTS, 1 << 16)):
                return 0
            received += more
        if settings["forks"] and request["hostile"]:
            reply = _forked(rule, request["answers"], settings)
        else:
            reply = {"scores": _scored(rule, request["answers"])}
        send_json(replies, reply)


def _is_bare(term: tuple[str, float]) -> bool:
    """Whether a rule is trusted by a user: no guard is around it."""
    name, _ = term
    return (
        name not in plugin_table.BUILTIN["reward"]
        and registry.reward_permissions(name, registry.find_reward(name)).runs_here
    )


def _forked(
    rule: RewardRule, answers: list[dict[str, Any]], settings: dict[str, Any]
) -> dict[str, Any]:
    """Scores answers in a fork: ``scores``, or ``problem`` and ``hung`` if it ended without."""
    reader, writer = os.pipe()
    here = os.getpid()
    if (child := os.fork()) == 0:
        try:
            die_with_parent(here)
            os.setpgid(0, 0)
            os.close(reader)
            os.close(REQUESTS)
            limit = max(1, int(settings["cpu_s"]))
            resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 1))
            resource.setrlimit(resource.RLIMIT_AS, (settings["memory_bytes"],) * 2)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            send_json(writer, {"scores": _scored(rule, answers)})
        finally:
            os._exit(0)
    os.close(writer)
    reply, is_late = _reply(reader, _WALL * settings["cpu_s"])
    os.close(reader)
    for end in (os.kill, os.killpg):  # it, and what the answer has started
        with suppress(ProcessLookupError):
            end(child, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if reply is not None:
        return reply
    is_hung = is_late or -code == signal.SIGXCPU
    return {"hung": is_hung, "problem": f"its process ended with {code}"}


def _reply(reader: int, timeout_s: float) -> tuple[dict[str, Any] | None, bool]:
    """Returns what the fork sent, and whether it was still silent when its time was over."""
    received, deadline_s = bytearray(), time.monotonic() + timeout_s
    poll = select.poll()
    poll.register(reader, select.POLLIN)
    while (reply := parse_json(received)) is None:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0 or not poll.poll(left_s * 1000):
            return None, True
        if not (more := os.read(reader, 1 << 16)):
            return None, False
        received += more
    return reply, False


def _scored(rule: RewardRule, given: list[dict[str, Any]]) -> list[dict[str, Any]]:
    answers = [
        Completion(**answer, token_ids=tuple(range(max(1, len(answer["response"]) // 4))))
        for answer in given
    ]
    try:
        return [_as_reply(result) for result in rule.score_twice(answers)]
    except Exception as error:  # what ends a run, such as a sandbox that the node can't make
        return [{"problem": f"{type(error).__name__}: {error}"[:500]}] * len(answers)


def _as_reply(result: Score | RewardError) -> dict[str, Any]:
    if isinstance(result, Score):
        raised = any(part.rpartition("/")[2] == RAISED for part in result.parts)
        return {"value": result.value, "correct": result.correct, "raised": raised}
    return {"problem": result.what[:500]}


if __name__ == "__main__":
    sys.exit(main())
