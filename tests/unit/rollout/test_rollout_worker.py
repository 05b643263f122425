"""Groups of episodes, their layout, and the loop that delivers them."""

from __future__ import annotations

import asyncio
import errno
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import golden
import numpy as np
import pytest
import torch
from torch.testing import assert_close
from virtual_time import run_virtually

from realsys.api.agent import Agent, Answer, Environment, Episode, Observation, Trajectory
from realsys.api.basics.reward import PARTS
from realsys.api.data import SequenceMeta
from realsys.api.errors import (
    ClusterError,
    ConfigError,
    DataError,
    KeyNotFound,
    RemoteError,
    RewardError,
    WaitTimeout,
    WorkerLost,
)
from realsys.api.worker_configs import RolloutWorker
from realsys.data.answers_layout import answer_row, answers_sample
from realsys.data.sequence_sample import SequenceSample
from realsys.interfaces.answers import answer_lengths, answer_mask
from realsys.observability.jsonl import read_jsonl
from realsys.observability.optional_rows import OptionalRows
from realsys.rollout.agents.math_single_step import MathSingleStep
from realsys.rollout.agents.transcript import Transcript
from realsys.rollout.worker.episode_log import EpisodeLog, TicketEnd
from realsys.rollout.worker.group import EpisodeGroup, GroupRunner
from realsys.rollout.worker.peers import Peer
from realsys.rollout.worker.policy_client import RequestStats
from realsys.rollout.worker.rollout_log import RolloutLog
from realsys.rollout.worker.rollout_worker import RolloutLimits, RolloutLoop
from realsys.rollout.worker.trajectories import episodes_sample, trajectory_fault
from realsys.transport.rollout_messages import (
    AskPlaces,
    Deliver,
    GaveUp,
    GiveUp,
    Places,
    TakeWork,
    Ticket,
    Verdict,
    Work,
)
from realsys.trial.episode_records import EpisodeState

torch.set_num_threads(1)
GOOD = Trajectory(
    tokens=(5, 6, 10, 11, 7, 12),
    from_policy=(False, False, True, True, False, True),
    logprobs=(0.0, 0.0, -1.0, -2.0, 0.0, -3.0),
    versions=(-1, -1, 2, 3, -1, 3),
    reward=1.0,
    truncated=False,
    stats={"turns": 2.0},
)
SHORT = Trajectory(
    tokens=(5, 6, 20),
    from_policy=(False, False, True),
    logprobs=(0.0, 0.0, -0.5),
    versions=(-1, -1, 4),
    reward=0.0,
    truncated=True,
)


def alone(*trajectories):
    """Episodes of one sequence each."""
    return [Episode(sequences=(t,), reward=t.reward, stats=t.stats) for t in trajectories]


# ---- the layout -----------------------------------------------------------------------------------


def test_parts_of_rewards_travel_as_in_a_synchronous_run():
    scored = replace(GOOD, stats={"turns": 2.0, "reward/short": 0.5, "reward/right": 1.0})
    sample = episodes_sample("0-1", alone(scored, SHORT), metadata={"answer": "42"})
    (text,) = sample.meta.metadata[PARTS]
    assert json.loads(text) == [{"short": 0.5, "right": 1.0}, {}]


def test_a_group_is_packed_by_hand():
    sample = episodes_sample("0-1", alone(GOOD, SHORT), metadata={"answer": "42"})
    assert sample.meta == SequenceMeta(
        ids=("0-1",),
        seqlens={
            **dict.fromkeys(
                ("packed_input_ids", "prompt_mask", "packed_logprobs", "packed_versions"), ((6, 3),)
            ),
            **dict.fromkeys(("seq_no_eos_mask", "rewards"), ((1, 1),)),
        },
        dtypes={
            "packed_input_ids": "int64",
            "prompt_mask": "bool",
            "packed_logprobs": "float32",
            "packed_versions": "int64",
            "seq_no_eos_mask": "bool",
            "rewards": "float32",
        },
        trailing_shapes=dict.fromkeys(sample.keys, ()),
        metadata={"answer": ("42",)},
    )
    x = {key: tensor.tolist() for key, tensor in sample.data.items()}
    assert x["packed_input_ids"] == [5, 6, 10, 11, 7, 12, 5, 6, 20]
    assert x["prompt_mask"] == [True, True, False, False, True, False, True, True, False]
    assert x["packed_logprobs"] == [0, 0, -1, -2, 0, -3, 0, 0, -0.5]
    assert x["packed_versions"] == [-1, -1, 2, 3, -1, 3, -1, -1, 4]
    assert x["seq_no_eos_mask"] == [False, True]
    assert x["rewards"] == [1, 0]
    # What the losses see: observations in the middle have none.
    assert answer_mask(sample).tolist() == [not m for m in x["prompt_mask"]]
    assert answer_lengths(sample) == [3, 1]


def test_kept_sets_are_packed_beside_their_tokens():
    narrow, wide = (np.array(ids, dtype="<i4").tobytes() for ids in ([3, 10], [~4]))
    first = replace(GOOD, kept=(b"", b"", narrow, b"", b"", wide))
    second = replace(SHORT, kept=(b"", b"", narrow))
    sample = episodes_sample("0-1", alone(first, second), metadata={})
    assert sample.data["packed_kept_counts"].tolist() == [0, 0, 2, 0, 0, 1, 0, 0, 2]
    assert sample.data["packed_kept_ids"].tolist() == [3, 10, ~4, 3, 10]
    assert sample.meta.seqlens["packed_kept_counts"] == ((6, 3),)
    assert sample.meta.seqlens["packed_kept_ids"] == ((3, 2),)
    assert {sample.meta.dtypes[k] for k in ("packed_kept_counts", "packed_kept_ids")} == {"int32"}
    assert sample.meta.tokens_per_id() == (9,)


def test_a_trajectory_that_lost_its_kept_sets_is_refused():
    assert not trajectory_fault(GOOD, (5, 6))
    fault = trajectory_fault(GOOD, (5, 6), has_kept=True)
    assert fault == "it has 6 tokens and 0 entries in kept"
    assert not trajectory_fault(replace(GOOD, kept=(b"",) * 6), (5, 6), has_kept=True)


def test_a_transcript_keeps_the_sets_of_answers_in_place():
    transcript = Transcript([5, 6])
    answer = Answer(
        tokens=(7, 8, 9),
        logprobs=(-1.0,) * 3,
        versions=(0,) * 3,
        stopped=False,
        kept=(b"a" * 4, b"", b"b" * 4),
    )
    transcript.answered(answer, keep=2)
    transcript.observed([1])
    transcript.answered(answer)
    made = transcript.trajectory(reward=0.0, truncated=False)
    assert made.kept == (b"", b"", b"a" * 4, b"", b"", *answer.kept)


def test_one_turn_is_packed_as_an_engine_packs_it():
    prompt, answer, logprobs = torch.tensor([5, 6]), torch.tensor([20]), torch.tensor([-0.5])
    rows = [[answer_row(prompt, answer, logprobs)]]
    engines = answers_sample(["0-1"], rows, torch.tensor([True]), metadata={"answer": ["42"]})
    ours = episodes_sample("0-1", alone(SHORT), metadata={"answer": "42"}).select(engines.keys)
    assert ours.meta == engines.meta
    for key, x in engines.data.items():
        assert_close(ours.data[key], x, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({}, ""),
        ({"versions": (-1, -1, 4, 4)}, "3 tokens and 4 entries in versions"),
        ({"tokens": (5, 7, 20)}, "does not begin with the prompt"),
        ({"from_policy": (False, True, True)}, "the policy wrote the prompt"),
        ({"from_policy": (False,) * 3}, "the policy wrote nothing"),
        ({"reward": float("nan")}, "its reward is nan"),
        ({"versions": (-1, -1, -1)}, "token 2 is the policy's, with version -1"),
        ({"logprobs": (0.0, 0.0, float("-inf"))}, "log-prob -inf"),
        ({"logprobs": (0.0, -1.0, -1.0)}, "token 1 is not the policy's"),
        ({"versions": (-1, 2, 4)}, "token 1 is not the policy's"),
    ],
)
def test_an_agents_trajectory_is_checked(changes, fault):
    found = trajectory_fault(replace(SHORT, **changes), (5, 6))
    assert fault in found
    assert bool(fault) == bool(found)


# ---- groups ---------------------------------------------------------------------------------------


class Records:
    """A data set without a ``record``: the environment then sees the metadata."""

    def __len__(self) -> int:
        return 10

    def batch(self, indices: Sequence[int], ids: Sequence[str]) -> SequenceSample:
        data = {"packed_prompts": torch.tensor([5, 6])}
        return SequenceSample.from_tensors(
            ids, {"packed_prompts": [[2]]}, data, metadata={"answer": [str(indices[0])]}
        )


class Ask:
    def __init__(self, index: int) -> None:
        self.index = index
        self.request_stats = RequestStats(requests=index + 1, broken=index, servers={index})

    async def __call__(self, tokens: Sequence[int], limit: int | None) -> Answer:
        return Answer(tokens=(20,), logprobs=(-0.5,), versions=(self.index,), stopped=True)


class Caller:
    def ask_for(
        self, ticket: Ticket, index: int, *, own_prompt: bool = False, number: int = 0
    ) -> Any:
        return Ask(index)


class Judge(Environment):
    """Scores by the episode's number; remembers what it was given."""

    made: list[Judge]
    failing: BaseException | None = None
    step_s = 0.0

    def __init__(self) -> None:
        self.closed = 0
        self.made.append(self)
        self.reward = float(len(self.made))

    async def reset(self, record: Mapping[str, Any]) -> None:
        self.record = record

    async def step(self, action: str) -> Observation:
        await asyncio.sleep(self.step_s)
        if self.failing is not None:
            raise self.failing
        return Observation(reward=self.reward)

    async def close(self) -> None:
        self.closed += 1


class Letters:
    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return "".join(chr(97 + i) for i in ids)


def make_groups(**changes: Any) -> GroupRunner:
    class Fresh(Judge):
        made: list[Judge] = []  # noqa: RUF012

    fields: dict[str, Any] = {
        "dataset": Records(),
        "tokenizer": Letters(),
        "agent": MathSingleStep(),
        "make_environment": Fresh,
        "caller": Caller(),
        "group_size": 3,
        "agent_name": "one",
        "environment_name": "judge",
        "environment_s": 60.0,
    }
    return GroupRunner(**{**fields, **changes})


def ticket(number: int = 4, **changes: Any) -> Ticket:
    return Ticket(**{"id": f"0-{number}", "index": number, "tries": 0, "min_version": 0, **changes})


def test_a_group_is_the_episodes_of_one_prompt():
    groups = make_groups()
    group = asyncio.run(groups.run(ticket(tries=2)))
    made = groups.make_environment.made  # type: ignore[attr-defined]
    assert group.sample.ids == ("0-4.2",)  # each try has an id of its own
    assert group.rewards == (1.0, 2.0, 3.0)
    assert (group.oldest, group.newest) == (0, 2)
    assert (
        group.request_stats.requests,
        group.request_stats.broken,
        group.request_stats.servers,
    ) == (6, 3, {0, 1, 2})
    assert group.answer_lengths == (1, 1, 1)
    assert [(e.record, e.closed) for e in made] == [({"answer": "4"}, 1)] * 3
    assert group.sample.meta.metadata == {"answer": ("4",)}


def test_a_failing_episode_ends_the_group_and_closes_its_environments():
    groups = make_groups()
    groups.make_environment.failing = ValueError("no")  # type: ignore[attr-defined]
    with golden.raises(RewardError):
        asyncio.run(groups.run(ticket()))
    assert [e.closed for e in groups.make_environment.made] == [1, 1, 1]  # type: ignore[attr-defined]


def test_a_slow_environment_is_named():
    groups = make_groups(environment_s=0.01)
    groups.make_environment.step_s = 5.0  # type: ignore[attr-defined]
    with golden.raises(WaitTimeout):
        run_virtually(groups.run(ticket()))


def test_an_environments_own_timeout_stays_its_own():
    groups = make_groups()
    groups.make_environment.failing = TimeoutError("mine")  # type: ignore[attr-defined]
    with golden.raises(TimeoutError):
        asyncio.run(groups.run(ticket()))


def test_agents_and_records_that_are_wrong_are_named():
    class Forgetful(Agent):
        async def run(self, prompt: Any, **_: Any) -> Trajectory:
            return replace(SHORT, versions=())

    with golden.raises(DataError) as error:
        asyncio.run(make_groups(agent=Forgetful(), agent_name="mine").run(ticket()))
    assert error.value.where == "agent 'mine'"
    with golden.raises(DataError):
        asyncio.run(make_groups().run(ticket(10)))


@pytest.mark.parametrize(
    ("bounds", "rewards", "why"),
    [
        ((None, None), (0.0, 0.0), ""),
        ((0.01, 0.99), (0.0, 1.0), ""),
        ((0.01, 0.99), (0.0, 0.0), "its mean reward 0 is below 0.01"),
        ((0.01, 0.99), (1.0, 1.0), "its mean reward 1 is above 0.99"),
        ((0.5, None), (0.0, 1.0), ""),
        ((None, -1.0), (-2.0, -1.5), ""),
    ],
)
def test_groups_that_teach_nothing_are_filtered(bounds, rewards, why):
    limits = RolloutLimits(success_rate_lb=bounds[0], success_rate_ub=bounds[1])
    assert limits.why_filtered(rewards) == why


# ---- the loop -------------------------------------------------------------------------------------


class Master:
    """Gives out tickets, at most as many as asked for, and remembers what it hears."""

    name = "master_worker/0"

    def __init__(self, *tickets: Ticket, verdict: Verdict | None = None) -> None:
        self.left, self.heard = list(tickets), []
        self.verdict = verdict or Verdict(kept=True)
        self.out, self.most_out = 0, 0
        self.places = Places(holders=(1, 3), endpoints=("a", "b", "c", "d"))

    async def call(self, body: Any, *, what: str, timeout_s: float) -> Any:
        await asyncio.sleep(0)
        self.heard.append(body)
        if isinstance(body, AskPlaces):
            return self.places
        if isinstance(body, TakeWork):
            given, self.left = self.left[: body.room], self.left[body.room :]
            self.out += len(given)
            self.most_out = max(self.most_out, self.out)
            return Work(tickets=tuple(given), over=not given and not self.out)
        self.out -= 1
        if isinstance(body, GiveUp):
            return GaveUp(closed=body.filtered, version=7)
        return self.verdict

    def told(self, kind: type) -> list[Any]:
        return [body for body in self.heard if isinstance(body, kind)]


def run_loop(
    master: Master, groups: GroupRunner, path: Path, **changes: Any
) -> tuple[list[tuple[int, SequenceSample]], list[dict[str, Any]]]:
    """What was put where, and the log's lines."""
    put: list[tuple[int, SequenceSample]] = []

    def connect(endpoints: tuple[str, ...]) -> Any:
        assert endpoints == master.places.endpoints

        async def give(holder: int, sample: SequenceSample) -> None:
            put.append((holder, sample))

        return give

    log = RolloutLog(path, tokenizer=Letters(), texts=1)
    episodes = EpisodeLog(path.with_suffix(".episodes"))
    loop = RolloutLoop(
        name="rollout_worker/5",
        master=master,
        groups=groups,
        connect=connect,
        log=log,
        episodes=episodes,
        limits=RolloutLimits(**changes),
    )
    asyncio.run(loop.run())
    log.close()
    episodes.close()
    return put, [json.loads(line) for line in path.read_text().splitlines()]


def test_tickets_are_answered_put_delivered_and_noted(tmp_path):
    master = Master(*(ticket(n, target=n % 2) for n in range(5)))
    put, lines = run_loop(master, make_groups(group_size=1), tmp_path / "r" / "5.jsonl")
    assert master.heard[0] == AskPlaces(worker="rollout_worker/5", dataset_size=10)
    assert sorted((holder, sample.ids[0]) for holder, sample in put) == [
        *((1, "0-0"), (1, "0-2"), (1, "0-4"), (3, "0-1"), (3, "0-3"))
    ]
    delivered = {d.id: d for d in master.told(Deliver)}
    assert set(delivered) == {f"0-{n}" for n in range(5)}
    first = delivered["0-1"]
    assert (first.holder, first.oldest, first.newest, first.tries) == (3, 0, 0, 0)
    assert first.meta == next(s.meta for _, s in put if s.ids == ("0-1",))
    assert first.stats["answer_length"] == 1.0
    by_id = {line["id"]: line for line in lines}
    assert by_id["0-3"]["outcome"] == "kept"
    assert by_id["0-3"]["servers"] == [0]
    texts = [line["texts"] for line in lines if "texts" in line]
    said = {"reward": texts[0]["episodes"][0]["reward"], "pieces": [{"by": "policy", "text": "u"}]}
    assert len(texts) == 1  # of one group a version
    assert texts[0]["prompt"] == "fg"
    assert [episode["sequences"] for episode in texts[0]["episodes"]] == [[said]]


def episode_rows(path: Path) -> list[dict[str, Any]]:
    """The lines about tickets, without times and the process."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [{k: v for k, v in row.items() if k not in ("at", "pid")} for row in rows]


def test_a_ticket_has_a_line_when_it_is_granted_and_one_when_it_has_ended(tmp_path):
    master = Master(ticket(1, tries=2), verdict=Verdict(kept=True, version=6))
    run_loop(master, make_groups(group_size=2), tmp_path / "5.jsonl")
    name = {"id": "0-1", "tries": 2}
    assert episode_rows(tmp_path / "5.episodes") == [
        {"state": "started"},
        {"state": "granted", **name, "index": 1, "min_version": 0},
        {
            "state": "delivered",
            **name,
            "version": 6,
            "oldest": 0,
            "newest": 1,
            "tokens": 2,
            "sequences": [[1], [1]],
        },
    ]


def test_a_full_disk_costs_lines_and_no_tickets(tmp_path, monkeypatch, caplog):
    write = os.write

    def refusing(handle: int, data: bytes) -> int:
        if os.readlink(f"/proc/self/fd/{handle}").startswith(str(tmp_path)):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(handle, data)

    monkeypatch.setattr(os, "write", refusing)
    master = Master(*(ticket(n) for n in range(5)))
    put, lines = run_loop(master, make_groups(group_size=1), tmp_path / "5.jsonl")
    assert (len(put), len(master.told(Deliver)), lines) == (5, 5, [])
    told = [record.args[0].name for record in caplog.records if record.module == "optional_rows"]
    assert sorted(told) == ["5.episodes", "5.jsonl"]  # once each


def test_lines_go_on_when_there_is_space_again(tmp_path, monkeypatch, caplog):
    rows, write = OptionalRows(tmp_path / "rows.jsonl"), os.write
    rows.append({"number": float("nan")})  # no JSON, as little as on a full disk
    for number, is_full in enumerate((False, True, True, False, True)):
        with monkeypatch.context() as disk:
            if is_full:
                disk.setattr(os, "write", lambda handle, data: write(handle, data[:3]))
            rows.append({"number": number})
    rows.close()
    assert [row["number"] for row in read_jsonl(tmp_path / "rows.jsonl")] == [0, 3]
    assert len([r for r in caplog.records if r.module == "optional_rows"]) == 3


def test_an_episodes_branches_are_counted_apart(tmp_path):
    """GOOD has 3 tokens of the policy, SHORT has 1."""
    episode = Episode(sequences=(GOOD, SHORT), reward=1.0)
    group = EpisodeGroup(
        sample=episodes_sample("0-1", alone(GOOD, SHORT), metadata={}),
        episodes=(episode, Episode(sequences=(SHORT,), reward=0.0)),
        prompt_length=2,
        oldest=2,
        newest=4,
        request_stats=RequestStats(),
    )
    log = EpisodeLog(tmp_path / "0.jsonl")
    log.ended(ticket(1), TicketEnd(state=EpisodeState.DELIVERED, version=4), group=group)
    log.close()
    row = episode_rows(tmp_path / "0.jsonl")[-1]
    assert (row["tokens"], row["sequences"]) == (5, [[3, 1], [1]])


def test_the_line_of_a_ticket_that_is_not_trained_on_says_why(tmp_path):
    run_loop(
        Master(ticket(1)), make_groups(group_size=1), tmp_path / "f.jsonl", success_rate_ub=0.5
    )
    end = episode_rows(tmp_path / "f.episodes")[-1]
    assert (end["state"], end["closed"], end["version"]) == ("filtered", True, 7)
    golden.check(end["why"])
    groups = make_groups()
    groups.make_environment.failing = WorkerLost("it broke", where="here", fix="nothing")  # type: ignore[attr-defined]
    run_loop(Master(ticket(1)), groups, tmp_path / "x.jsonl")
    assert episode_rows(tmp_path / "x.episodes")[-1] == {
        "state": "failed",
        "id": "0-1",
        "tries": 0,
        "version": 7,
        "why": "it broke",
    }


def test_no_more_is_taken_than_may_run_at_a_time(tmp_path):
    master = Master(*map(ticket, range(9)))
    run_loop(master, make_groups(), tmp_path / "x.jsonl", max_concurrent_rollouts=2)
    assert master.most_out == 2
    assert len(master.told(Deliver)) == 9


def test_filtered_groups_are_given_up_as_such(tmp_path):
    master = Master(ticket(1))
    put, lines = run_loop(
        master, make_groups(group_size=1), tmp_path / "x.jsonl", success_rate_ub=0.5
    )
    assert put == []
    (given_up,) = master.told(GiveUp)
    assert given_up.filtered
    assert given_up.stats["reward"] == 1.0
    assert lines[0]["outcome"] == "filtered"


def test_a_failed_episode_is_given_up_with_its_reason_and_the_rest_goes_on(tmp_path):
    class Sometimes(MathSingleStep):
        async def run(self, prompt: Any, *, ask: Any, **others: Any) -> Trajectory:
            if (number := next(numbers)) % 2:
                raise WorkerLost(f"episode {number} broke", where="here", fix="nothing")
            return await super().run(prompt, ask=ask, **others)

    numbers = iter(range(100))
    master = Master(*map(ticket, range(4)))
    groups = make_groups(agent=Sometimes(), group_size=1)
    _, lines = run_loop(master, groups, tmp_path / "x.jsonl")
    assert [g.why for g in master.told(GiveUp)] == ["episode 1 broke", "episode 3 broke"]
    assert not any(g.filtered for g in master.told(GiveUp))
    assert len(master.told(Deliver)) == 2
    assert sorted(line["outcome"] for line in lines) == ["failed", "failed", "kept", "kept"]


def test_what_the_master_does_not_want_is_forgotten(tmp_path):
    master = Master(ticket(1), verdict=Verdict(kept=False, why="given out again"))
    _, lines = run_loop(master, make_groups(), tmp_path / "x.jsonl")
    assert (lines[0]["outcome"], lines[0]["why"]) == ("refused", "given out again")
    assert master.told(GiveUp) == []


def test_when_the_run_is_over_what_is_in_the_making_is_dropped(tmp_path):
    class Over(Master):
        async def call(self, body: Any, *, what: str, timeout_s: float) -> Any:
            work = await super().call(body, what=what, timeout_s=timeout_s)
            return Work(tickets=work.tickets, over=not work.tickets) if "work" in what else work

    groups = make_groups(environment_s=60.0)
    groups.make_environment.step_s = 60.0  # type: ignore[attr-defined]
    master = Over(ticket(1), ticket(2))
    put, lines = run_loop(master, groups, tmp_path / "x.jsonl")
    assert (put, lines, master.told(GiveUp)) == ([], [], [])
    assert all(e.closed for e in groups.make_environment.made)  # type: ignore[attr-defined]


def test_a_master_that_does_not_answer_ends_the_worker_with_its_own_error(tmp_path):
    class Silent(Master):
        async def call(self, body: Any, *, what: str, timeout_s: float) -> Any:
            if isinstance(body, Deliver):
                raise WaitTimeout(f"no answer to {what}", where="here", fix="nothing")
            return await super().call(body, what=what, timeout_s=timeout_s)

    with golden.raises(WaitTimeout):
        run_loop(Silent(ticket(1)), make_groups(), tmp_path / "x.jsonl")
    nowhere = Master(ticket(1))
    nowhere.places = Places(holders=(), endpoints=("a",))
    with golden.raises(ClusterError):
        run_loop(nowhere, make_groups(), tmp_path / "y.jsonl")


# ---- peers ----------------------------------------------------------------------------------------


class Line:
    """A client that answers, is silent, or is cut."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint, self.is_open, self.calls = endpoint, False, 0

    def open(self) -> Line:
        self.is_open = True
        return self

    async def close(self) -> None:
        self.is_open = False

    async def call(self, body: Any, *, timeout_s: float, what: str) -> str:
        self.calls += 1
        await asyncio.sleep(0)
        if "silent" in self.endpoint:
            await asyncio.sleep(min(timeout_s, 0.01))
            raise WaitTimeout("no reply", where=self.endpoint, fix="nothing")
        if "cut" in self.endpoint:
            raise WorkerLost("cut", where=self.endpoint, fix="nothing")
        if "fails" in self.endpoint:
            error = WaitTimeout("its own", where=self.endpoint, fix="nothing")
            error.from_worker = "manager"
            raise error
        return f"{body} by {self.endpoint}"


def call_peer(
    *endpoints: str, times: int = 1, timeout_s: float = 240.0
) -> tuple[list[str], list[Line]]:
    """Replies of as many calls at once; name resolution tells ``endpoints``, then the last for ever."""
    lines: list[Line] = []
    left = list(endpoints)

    def look_up() -> str:
        endpoint = left.pop(0) if len(left) > 1 else left[0]
        if not endpoint:
            raise KeyNotFound("manager is not registered", where="here", fix="wait")
        return endpoint

    def connect(endpoint: str) -> Any:
        lines.append(Line(endpoint))
        return lines[-1]

    async def main() -> list[str]:
        peer = Peer("manager", look_up=look_up, connect=connect)
        try:
            call = [
                peer.call(n, what="a question", timeout_s=timeout_s, try_s=0.02)
                for n in range(times)
            ]
            return await asyncio.gather(*call)
        finally:
            await peer.close()

    return asyncio.run(main()), lines


def test_many_calls_share_a_connection():
    replies, lines = call_peer("a", times=3)
    assert replies == ["0 by a", "1 by a", "2 by a"]
    assert [(line.calls, line.is_open) for line in lines] == [(3, False)]


@pytest.mark.parametrize("former", ["silent", "cut"])
def test_a_peer_that_moved_is_found(former, monkeypatch):
    monkeypatch.setattr("realsys.rollout.worker.peers._LOOKUP_RETRY_S", 0.001)
    replies, lines = call_peer(former, former, "", "b", times=3)
    assert replies == ["0 by b", "1 by b", "2 by b"]
    assert not any(line.is_open for line in lines)


def test_a_peer_that_is_only_slow_keeps_its_connection():
    with golden.raises(WaitTimeout):
        call_peer("silent", timeout_s=0.05)


def test_what_the_peer_raises_is_passed_on():
    with golden.raises(WaitTimeout):
        call_peer("fails")


def test_a_peer_that_is_not_there_is_named():
    with golden.raises(WaitTimeout):
        call_peer("", timeout_s=0.05)


# ---- configuration --------------------------------------------------------------------------------


def test_options_out_of_range_are_named():
    with golden.raises(ConfigError):
        RolloutWorker(group_size=0)
    with golden.raises(ConfigError):
        RolloutWorker(rollout_request_timeout=0.0)


def test_errors_of_a_group_are_raised_bare():
    """Not as groups of exceptions: their first line is what the master is told."""

    class Two(Agent):
        async def run(self, prompt: Any, **_: Any) -> Trajectory:
            raise RemoteError("refused", where="x", fix="nothing")

    with golden.raises(RemoteError):
        asyncio.run(make_groups(agent=Two()).run(ticket()))


@pytest.mark.parametrize("reward", [float("inf"), float("nan"), None, "1"])
def test_a_reward_that_is_no_number_is_told_with_the_record(tmp_path, reward):
    class Odd(Judge):
        made: list[Judge] = []  # noqa: RUF012

        async def step(self, action: str) -> Observation:
            return Observation(reward=reward)

    master = Master(ticket(4))
    put, lines = run_loop(master, make_groups(make_environment=Odd), tmp_path / "x.jsonl")
    assert put == []
    (given_up,) = master.told(GiveUp)
    assert given_up.unscored
    assert not given_up.filtered
    for word in ("environment 'judge' returned", repr(reward), "record 0-4: 'fg'"):
        assert word in given_up.why
    assert (lines[0]["outcome"], lines[0]["why"]) == ("unscored", given_up.why)
