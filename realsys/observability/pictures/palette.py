"""Colours of pictures: one per role, the same in the graph, the Gantt chart and the tables."""

from __future__ import annotations

from collections.abc import Mapping

INK = "#1f2733"
MUTED = "#8a94a3"
GRID = "#e6e9ee"
WAITING = "#c3c9d2"

KNOWN = {
    "actor": "#3b76d1",
    "critic": "#e08a2c",
    "ref": "#4a9d77",
    "reward": "#b65aa4",
    "model": "#3b76d1",
}
OTHERS = ("#5aa9c4", "#c9564e", "#8a77cf", "#a08a2a", "#6b8e3d", "#c2709a")


class RoleColours:
    """Assigns each role a fixed colour: predefined for known roles, others in order of first use.

    ``roles`` maps calls to roles; a missing call's role is its name up to the first underscore.
    """

    def __init__(self, roles: Mapping[str, str] | None = None) -> None:
        self._roles = roles or {}
        self._given: dict[str, str] = {}

    def of_role(self, role: str) -> str:
        """Returns the role's colour as ``#rrggbb``."""
        if role in KNOWN:
            return KNOWN[role]
        return self._given.setdefault(role, OTHERS[len(self._given) % len(OTHERS)])

    def of_call(self, mfc: str) -> str:
        """Returns the colour of a call's role."""
        short = mfc.partition("_")[0]
        return self.of_role(self._roles.get(mfc) or {"rew": "reward"}.get(short, short))
