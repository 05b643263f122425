"""Finds out since when no episode of a run has ended, and which are under way, for ``realsys explain``.

From the lines that rollout workers write (realsys/trial/episode_records.py): those of single episodes where
the agent is behind the endpoint, else those of questions with all their episodes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.trials.trial_view import TrialView
from realsys.api.basics.bounded_files import open_regular
from realsys.trial.episode_records import AGENT_EPISODES, EpisodeMark, EpisodeState
from realsys.trial.records import TrialFiles

IDLE_S = 180.0  # without the end of an episode, before it is reported
_MOST_BYTES = 256 << 20  # of a file
_STARTED = (EpisodeMark.STARTED.value, EpisodeState.STARTED.value)
_BEGAN = (EpisodeMark.BEGAN.value, EpisodeState.GRANTED.value)


@dataclass(frozen=True, kw_only=True)
class IdleEpisodes:
    """Episodes that are under way while none ends.

    Attributes:
        idle_s: since the last one ended; if none has, since the first began.
        running: (id, rollout worker, seconds under way), the oldest first.
        log: of the oldest one's worker; a folder.
        are_groups: ids are those of questions, whose episodes are noted together.
    """

    idle_s: float
    running: tuple[tuple[str, str, float], ...]
    log: str
    are_groups: bool = False


def idle_episodes(files: TrialFiles, view: TrialView, *, now_s: float) -> IdleEpisodes | None:
    """Reads the lines of the newest attempt; None: an episode has ended lately, or none is under way.

    Args:
        now_s: as ``time.time``.
    """
    rows = TrialFiles.phase(files.root).rows_of(view.attempt)
    single = sorted((rows.root / "agents").glob(f"*/{AGENT_EPISODES}"))
    single = [path for path in single if path.parent.name.isdigit()]  # not the evaluator's
    paths = {path: path.parent.name for path in single} or {
        path: path.stem for path in sorted(rows.episodes.glob("*.jsonl"))
    }
    began: list[tuple[float, str, str]] = []
    last_s = 0.0
    for path, index in paths.items():
        running, ended_s = under_way(_rows(path))
        began += [(at, id_, f"rollout_worker/{index}") for id_, at in running.items()]
        last_s = max(last_s, ended_s)
    if not began:
        return None
    began.sort()
    idle_s = now_s - max(last_s, began[0][0])
    if idle_s < IDLE_S:
        return None
    return IdleEpisodes(
        idle_s=idle_s,
        running=tuple((id_, worker, now_s - at) for at, id_, worker in began),
        log=str(rows.root / "agents" / began[0][2].partition("/")[2]),
        are_groups=not single,
    )


def under_way(rows: Iterable[dict[str, Any]]) -> tuple[dict[str, float], float]:
    """Returns when each episode began that has not ended, and when the last one ended, or 0 (pure).

    Times are those of the lines; a process that starts anew has lost what its predecessor was at.
    """
    running: dict[str, float] = {}
    last_s = 0.0
    for row in rows:
        state, at = row.get("state"), float(row.get("at", 0.0))
        if state in _STARTED:
            running.clear()
        elif state in _BEGAN:
            running[str(row.get("id"))] = at
        else:
            running.pop(str(row.get("id")), None)
            last_s = max(last_s, at)
    return running, last_s


def _rows(path: Path) -> Iterable[dict[str, Any]]:
    with suppress(OSError), open_regular(path) as file:
        for line in file.read(_MOST_BYTES).splitlines():
            with suppress(ValueError):  # the last one may be half written
                row = json.loads(line)
                if isinstance(row, dict):
                    yield row
