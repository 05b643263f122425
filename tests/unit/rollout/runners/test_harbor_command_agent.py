"""``agent=harbor_command``, with doubles of boxes: its places, variables and logs, and boxes that fail."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import pytest
from harbor_tasks import write_task

from realsys.api import registry
from realsys.api.agent import AgentHost, EpisodeTask
from realsys.api.errors import SandboxFailure
from realsys.data.harbor.task_directory import read_task
from realsys.rewards.harbor.verifier_rewards import TaskVerdict
from realsys.rewards.sandbox.box_limits import BoxOutcome
from realsys.rollout.runners.episode_outcome import AgentOutcome, EpisodeDropped
from realsys.rollout.runners.harbor_command_agent import HarborCommandAgent
from realsys.rollout.runners.kept_logs import KeptLogs

EXITED = BoxOutcome(
    ended="exit", exit_code=1, signal=None, stdout=b"out", stderr=b"", wall_s=1.0, cpu_s=1.0
)


class Box:
    """Notes what is run in it, one list for all boxes."""

    def __init__(self, ran: list[str], run_agent: Callable[[], BoxOutcome]) -> None:
        self.ran, self._run_agent = ran, run_agent

    def run_agent(self, text: str, **_: Any) -> BoxOutcome:
        self.ran.append("agent")
        return self._run_agent()

    def verify(self) -> TaskVerdict:
        self.ran.append("tests")
        return TaskVerdict(rewards={"reward": 1.0})


def play(
    folder: Path, ran: list[str], run_agent: Callable[[], BoxOutcome], *, episodes: int = 1
) -> list[AgentOutcome]:
    """Plays episodes at the same time, in boxes of which there is one at a time."""
    path = write_task(folder / "task")
    agent = cast("HarborCommandAgent", registry.make_agent("harbor_command", command="x"))
    agent.host = AgentHost(name="w", tokenizer=None, end_ids=frozenset(), folder=folder / "logs")
    agent._tests = registry.make_reward("harbor", boxes_at_once=1)  # type: ignore[assignment]
    agent._tests.open_box = lambda task: Box(ran, run_agent)  # type: ignore[method-assign, assignment, return-value]
    agent._kept_logs = KeptLogs(folder / "logs")
    agent._environment = lambda seats, directory: {}  # type: ignore[method-assign]
    record = {"task_directory": str(path)}

    async def main() -> list[AgentOutcome]:
        agent._open_places()
        tasks = [
            EpisodeTask(
                id=f"e{i}", prompt=[], ask=None, environment=None, tokenizer=None, record=record  # type: ignore[arg-type]
            )
            for i in range(episodes)
        ]  # fmt: skip
        try:
            return await asyncio.gather(*(agent.play(task, []) for task in tasks))
        finally:
            agent._threads.shutdown()

    return asyncio.run(main())


def test_tests_do_not_wait_for_the_agents_of_other_episodes(tmp_path: Path) -> None:
    ran: list[str] = []
    play(tmp_path, ran, lambda: EXITED, episodes=3)
    assert ran == ["agent", "tests"] * 3


def test_a_box_that_failed_begins_the_episode_anew(tmp_path: Path) -> None:
    """With new seats: what the policy said in the first box must not be trained on."""

    def fails() -> BoxOutcome:
        raise SandboxFailure("out of memory", where="n", fix="again")

    with pytest.raises(EpisodeDropped):
        play(tmp_path, [], fails)


@pytest.mark.parametrize("is_refused", [False, True])
def test_a_log_that_can_not_be_written_fails_no_episode(is_refused: bool, tmp_path: Path) -> None:
    if is_refused:
        (tmp_path / "logs").write_text("no folder")
    (outcome,) = play(tmp_path, [], lambda: EXITED)
    assert (outcome.reward, bool(outcome.problem)) == (1.0, True)
    assert is_refused or (tmp_path / "logs/e0.log").read_bytes() == b"out"


@pytest.mark.parametrize(("text", "fits"), [("é" * 50_000, True), ("é" * 50_001, False)])
def test_an_instruction_is_a_variable_as_far_as_linux_has_it(
    text: str, fits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its bytes count, not its characters."""
    directory = read_task(write_task(tmp_path / "task", **{"instruction.md": text}))
    monkeypatch.setattr(
        "realsys.rollout.runners.harbor_command_agent.agent_environment", lambda *_: {}
    )
    agent = cast("HarborCommandAgent", registry.make_agent("harbor_command", command="x"))
    found: Mapping[str, str] = agent._environment([], directory)
    assert found.get("REALSYS_INSTRUCTION") == (text if fits else None)
