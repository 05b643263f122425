"""Checks one server: does it respond, does it generate, does it have the newest weights?

For manager.py, which calls it whenever a server is due by quarantine.py.
"""

from __future__ import annotations

import asyncio
import logging

from realsys.generation.manager.fleet import Fleet, Member, told
from realsys.generation.manager.updates import Updates

logger = logging.getLogger(__name__)

INFO_S = 5.0
HEALTH_S = 15.0  # includes a token, behind those that are being decoded
GRACE_S = 5.0  # over the client's own deadlines
NEVER_CAME_S = 120.0  # from being given a server to reaching it


async def check(member: Member, fleet: Fleet, updates: Updates) -> None:
    """Checks a server; afterwards it is well, with the newest weights, or sick with a reason."""
    began_s, num_updates = fleet.now_s(), member.num_updates
    try:
        why = await _look(member, fleet, began_s=began_s)
    except Exception as error:  # whatever a client raises, it is looked at again
        why = told(error)
    if not fleet.is_current(member):
        return
    if why and (member.num_updates > num_updates or member.lock.locked()):
        # It stands still while it takes weights: that has a deadline of its own.
        fleet.quarantine.look_at(member.index, fleet.now_s() + fleet.quarantine.rules.check_every_s)
    elif why:
        fleet.sick(member, why)
    elif updates.has_turn(member) or await updates.bring_up(member):
        fleet.well(member)


async def _look(member: Member, fleet: Fleet, *, began_s: float) -> str:
    """Returns what is wrong with the server; empty if nothing."""
    num_updates = member.num_updates
    async with asyncio.timeout(INFO_S + GRACE_S):
        info = await member.client.info(timeout_s=INFO_S)
    if not fleet.is_current(member):
        return ""
    if member.num_updates == num_updates and not member.lock.locked():
        fleet.seen(member, info)  # else what it said may be older than what we know
    if info.num_running + info.num_waiting == 0:
        gone = fleet.router.forget_idle(member.index, before_s=began_s - NEVER_CAME_S)
        if gone:
            logger.warning("requests never came server=%d requests=%d", member.index, gone)
            fleet.on_change()
    async with asyncio.timeout(HEALTH_S + GRACE_S):
        is_healthy = await member.client.healthy(timeout_s=HEALTH_S)
    return "" if is_healthy else f"made no token in {HEALTH_S:g} s"
