"""Determines which nodes Slurm itself can't reach, from sinfo's states (pure).

For the supervisor, which asks when workers elsewhere lost their connections. A drained node is reachable,
and so is one that Slurm has not heard of since slurmctld was started (unknown).
"""

from __future__ import annotations

import re

# Of sinfo's marks (man sinfo, NODE STATE CODES): * doesn't respond, ^ reboots, % is powered down
_UNREACHABLE = re.compile(
    r"[*^%]$|^down|not.responding|node_fail|\breboot(?:ing|_issued)?$|power(?:ed|ing)_down",
    re.IGNORECASE,
)


def node_states_argv(nodes: str) -> list[str]:
    """Returns the command that prints what ``unreachable_nodes`` reads, of a hostlist of nodes."""
    return ["sinfo", "--noheader", "--Node", f"--nodes={nodes}", "--format=%N|%T|%E"]


def is_unreachable(state: str) -> bool:
    """Returns whether a node in this state (``down*``, ``mixed*``, ``reboot^``) can't be reached."""
    return _UNREACHABLE.search(state.strip()) is not None


def unreachable_nodes(output: str) -> dict[str, str]:
    """Returns node → ``down*: Not responding`` of the nodes that Slurm can't reach."""
    found: dict[str, str] = {}
    for line in output.splitlines():
        name, state, reason = (line.split("|") + [""] * 2)[:3]
        if name.strip() and is_unreachable(state):
            why = "" if reason.strip() in ("", "none") else f": {reason.strip()}"
            found[name.strip()] = state.strip() + why
    return found
