"""Which episodes are under way while none ends, read from the rollout workers' lines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import golden
import pytest

from launcher.trials.explain import MAX_NAMES, explain
from launcher.trials.idle_episodes import IDLE_S, IdleEpisodes, idle_episodes, under_way
from launcher.trials.trial_view import TrialView
from realsys.rollout.runners.episode_marks import EpisodeMarks
from realsys.trial.episode_records import AGENT_EPISODES, EpisodeState
from realsys.trial.records import TrialFiles
from realsys.trial.trial_state import State

VIEW = TrialView(trial="t/1", state=State.RUNNING, folder="/x", attempt=2)
Row = dict[str, Any]


def row(state: str, at: float, id_: str = "") -> Row:
    return {"state": state, "at": at, "id": id_}


def files_with(root: Path, **rows: list[Row]) -> TrialFiles:
    """A trial with these lines, by path: ``agents_0`` of agents, ``episodes_0`` of questions."""
    for name, lines in rows.items():
        kind, _, index = name.partition("_")
        path = root / "rows/0002" / kind
        path = path / index / AGENT_EPISODES if kind == "agents" else path / f"{index}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(one) + "\n" for one in lines))
    return TrialFiles(root)


def test_single_episodes_are_named_with_their_workers_the_oldest_first(tmp_path: Path) -> None:
    files = files_with(
        tmp_path,
        agents_0=[
            row("began", 100, "0-1-0"),
            row("began", 90, "0-1-1"),
            row("ended", 400, "0-1-0"),
        ],
        agents_1=[row("began", 200, "0-2-3")],
        agents_evaluator=[row("began", 1, "e")],
        episodes_0=[row("granted", 50, "0-9")],
    )
    found = idle_episodes(files, VIEW, now_s=400 + IDLE_S)
    assert found == IdleEpisodes(
        idle_s=IDLE_S,
        running=(
            ("0-1-1", "rollout_worker/0", 310 + IDLE_S),
            ("0-2-3", "rollout_worker/1", 200 + IDLE_S),
        ),
        log=str(tmp_path / "rows/0002/agents/0"),
    )
    assert idle_episodes(files, VIEW, now_s=399 + IDLE_S) is None  # one has ended lately


def test_of_agents_without_an_endpoint_questions_are_named(tmp_path: Path) -> None:
    lines = [row("granted", 10, "0-1"), row("granted", 20, "0-2"), row("failed", 30, "0-1")]
    found = idle_episodes(files_with(tmp_path, episodes_0=lines), VIEW, now_s=1000)
    assert found is not None
    assert found.running == (("0-2", "rollout_worker/0", 980.0),)
    assert (found.idle_s, found.are_groups) == (970.0, True)


def test_nothing_is_told_where_nothing_is_under_way(tmp_path: Path) -> None:
    assert idle_episodes(TrialFiles(tmp_path), VIEW, now_s=1e9) is None
    lines = [row("began", 10, "a"), row("ended", 20, "a")]
    assert idle_episodes(files_with(tmp_path, agents_0=lines), VIEW, now_s=1e9) is None


def test_a_process_that_starts_anew_has_lost_what_its_predecessor_was_at() -> None:
    rows = [row("began", 1, "a"), row("started", 2), row("began", 3, "b")]
    assert under_way(rows) == ({"b": 3.0}, 0.0)


@pytest.mark.parametrize("state", [s for s in EpisodeState if s not in ("started", "granted")])
def test_every_end_of_a_question_counts(state: EpisodeState) -> None:
    assert under_way([row("granted", 1, "a"), row(state.value, 5, "a")]) == ({}, 5.0)


def test_what_an_agent_writes_is_what_is_read(tmp_path: Path) -> None:
    marks = EpisodeMarks(tmp_path / "rows/0002/agents/0")
    for id_ in ("a", "b"):
        marks.began(id_)
    marks.ended("a")
    marks.close()
    path = tmp_path / "rows/0002/agents/0" / AGENT_EPISODES
    with path.open("a") as file:
        file.write('{"state": "ended", "id"')  # a process that was killed
    found = idle_episodes(TrialFiles(tmp_path), VIEW, now_s=4e9)
    assert found is not None
    assert [id_ for id_, _, _ in found.running] == ["b"]


def test_it_is_explained_and_says_where_to_look() -> None:
    running = tuple((f"0-{i}-0", "rollout_worker/0", 500.0 - i) for i in range(MAX_NAMES + 1))
    idle = IdleEpisodes(idle_s=432.0, running=running, log="/x/agents/0")
    told = list(explain(VIEW, idle))
    at = next(i for i, line in enumerate(told) if "7 min 12 s" in line)
    assert str(MAX_NAMES + 1) in told[at]
    golden.check(told[at + 1])
    assert "1 more" in told[at + 1]
    assert "/x/agents/0" in told[-1]
    assert not any("7 min" in line for line in explain(VIEW))
