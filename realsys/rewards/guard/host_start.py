"""What both hosts of reward rules do first: read what they are to run, make it once, give up privileges."""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from realsys.api import registry
from realsys.api.basics.rule_permissions import RulePermissions
from realsys.api.errors import RealsysError
from realsys.api.users_code.users_frames import shown_error
from realsys.rewards.guard import frames, inside, rule_walls
from realsys.rewards.guard.frames import BROKEN, HELLO, START, Frame
from realsys.rewards.sandbox import kernel_calls as kernel
from realsys.runtime.child_processes.parent_death import adopt_orphans

REQUESTS, REPLIES = 0, 1
START_S = 300  # allows for a busy machine and a large library
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, kw_only=True)
class HostedRule:
    """What a host calls: the function, its walls, and where replies go."""

    call: Callable[..., Any]
    permissions: RulePermissions
    walls: rule_walls.RuleWalls
    replies: int
    received: bytearray


def hosted_rule() -> HostedRule | None:
    """Reads the first frame and makes the function that it names; None: it failed, which the caller knows.

    A function that takes its time is killed by SIGALRM: nobody waits for it any longer.
    """
    replies = os.dup(REPLIES)
    devnull = os.open(os.devnull, os.O_RDWR)
    os.dup2(devnull, REPLIES)  # a library's prints must not be taken for a reply
    for death in (signal.SIGINT, signal.SIGTERM, signal.SIGPROF, signal.SIGALRM):
        signal.signal(death, signal.SIG_DFL)
    signal.alarm(START_S)
    received = bytearray()
    first = next_frame(received)
    if first is None or first.kind != START:
        return None
    try:
        start = json.loads(first.body)
        permissions = RulePermissions.of_plain(start["permissions"])
        inside.watch()
        call = _made(start)
        adopt_orphans()
        walls = rule_walls.RuleWalls(
            permissions, own_file=start.get("own_file"), used_bytes=_address_bytes()
        )
        kernel.drop_capabilities()
        walls.raise_common()
    except (Exception, SystemExit) as error:  # user code may raise anything; the other end tells it
        frames.send(replies, Frame(0, BROKEN, json.dumps(_broken(error)).encode()))
        return None
    gc.collect()
    gc.freeze()  # a collection in a fork would copy the pages of all that is here
    hello = {"lacking": rule_walls.lacking(), "threads": threading.active_count()}
    frames.send(replies, Frame(0, HELLO, json.dumps(hello).encode()))
    signal.alarm(0)
    return HostedRule(
        call=call, permissions=permissions, walls=walls, replies=replies, received=received
    )


def next_frame(received: bytearray) -> Frame | None:
    """Returns the next frame of a caller; None: it has ended. Blocks."""
    while (frame := frames.parse(received)) is None:
        if not (more := os.read(REQUESTS, 1 << 16)):
            return None
        received += more
    return frame


def _made(start: dict[str, Any]) -> Callable[..., Any]:
    if start["imports"] is not None:
        registry.load_plugins(start["imports"])
    module, _, name = start["target"].partition(":")
    target = getattr(importlib.import_module(module), name)
    made: Callable[..., Any] = target(start["setup"]) if start["setup"] is not None else target
    own = sys.modules[module] if start["setup"] is None else made
    if (prepare := getattr(own, "prepare", None)) is not None:
        prepare()
    return made


def _broken(error: BaseException) -> dict[str, str]:
    if isinstance(error, RealsysError):
        return {
            "kind": type(error).__name__,
            "what": error.what,
            "where": error.where,
            "fix": error.fix,
        }
    return {"kind": "", "what": shown_error(error), "where": "", "fix": ""}


def _address_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * _PAGE_BYTES
