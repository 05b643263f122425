"""What a failed try of an episode means, and what the policy left without an answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import golden
import pytest
from test_episode_failures import Letters, Nothing, Records
from virtual_time import run_virtually

from realsys.api.agent import Answer, DoubtfulEnd, Environment, Episode, EpisodeAgent, EpisodeTask
from realsys.api.errors import (
    DataError,
    RemoteError,
    RewardError,
    RolloutError,
    StoreUnavailable,
    WaitTimeout,
    WorkerLost,
)
from realsys.generation.engine.sampling import row_seed
from realsys.rollout.agents.transcript import Transcript
from realsys.rollout.conversation.answer_forms import ANSWER_FORMS
from realsys.rollout.conversation.answer_tree import AnswerTree
from realsys.rollout.conversation.chat_messages import ChatMessage, ChatRequest
from realsys.rollout.conversation.chat_rendering import RenderedChat
from realsys.rollout.conversation.episode_session import EpisodeSession
from realsys.rollout.conversation.session_settings import SessionSettings
from realsys.rollout.runners.command_agent import read_reward
from realsys.rollout.runners.endpoint_agent import AskPolicy
from realsys.rollout.runners.episode_outcome import (
    AgentOutcome,
    EpisodeAddress,
    EpisodeSeat,
    finished_episode,
)
from realsys.rollout.runners.hosted_agent import returned_outcome
from realsys.rollout.worker.episode_tries import WAITS_S, EpisodeTries, fault_of
from realsys.rollout.worker.group import GroupRunner, episode_id
from realsys.rollout.worker.policy_client import RequestStats, seed_id
from realsys.rollout.worker.watched_ask import PolicyPulse, WatchedAsk
from realsys.transport.rollout_messages import EpisodeTry, Ticket, TryFault

SAYS = {"where": "here", "fix": "nothing"}
TICKET = Ticket(id="0-4", index=4, tries=0, min_version=0)


# ---- the policy of tries ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "trouble", "fault"),
    [
        (RolloutError("429", **SAYS), "", TryFault.FAILED),
        (WorkerLost("the host has ended", **SAYS), "", TryFault.FAILED),
        (DataError("a template refuses it", **SAYS), "", TryFault.FAILED),
        (KeyError("x"), "", TryFault.FAILED),
        (ConnectionRefusedError("mcp"), "", TryFault.AWAY),
        (TimeoutError("docker"), "", TryFault.AWAY),
        (WaitTimeout("step took long", **SAYS), "", TryFault.AWAY),
        (RemoteError("full", **SAYS), "", TryFault.AWAY),
        (StoreUnavailable("away", **SAYS), "", TryFault.AWAY),
        (DoubtfulEnd("SIGKILL", **SAYS), "", TryFault.DOUBTFUL),
        (RewardError("nan", **SAYS), "", TryFault.UNSCORED),
        (RolloutError("the agent said 502", **SAYS), "no server is well", TryFault.SERVERS),
        (DoubtfulEnd("SIGKILL", **SAYS), "no server is well", TryFault.SERVERS),
    ],
)
def test_an_error_tells_what_a_try_failed_for(
    error: Exception, trouble: str, fault: TryFault
) -> None:
    assert fault_of(error, servers_trouble=trouble) is fault


def test_an_episode_is_played_five_times_with_growing_waits() -> None:
    chances = EpisodeTries().episode()
    waits = [chances.wait_s(TryFault.FAILED) for _ in range(5)]
    assert waits == [1, 4, 16, 64, None]
    assert chances.failures == 5


@pytest.mark.parametrize("fault", [TryFault.DOUBTFUL, TryFault.UNSCORED])
def test_what_may_be_the_policys_doing_is_played_twice(fault: TryFault) -> None:
    chances = EpisodeTries().episode()
    assert [chances.wait_s(fault) for _ in range(2)] == [1, None]
    assert chances.is_doubtful is (fault is TryFault.DOUBTFUL)


def test_tries_while_nothing_succeeds_do_not_count() -> None:
    chances = EpisodeTries().episode()
    first = [chances.wait_s(TryFault.SERVERS) for _ in range(2)]
    during = [chances.wait_s(TryFault.SERVERS, nothing_succeeds=True) for _ in range(20)]
    after = [chances.wait_s(TryFault.FAILED) for _ in range(5)]
    assert first + during[:2] == [1, 4, 16, 64]
    assert set(during[2:]) == {64}
    assert after == [1, 4, 16, 64, None], "an outage leaves an episode all its tries"


def test_one_try_is_all_where_there_are_no_waits() -> None:
    chances = EpisodeTries(waits_s=()).episode()
    assert chances.wait_s(TryFault.AWAY, nothing_succeeds=True) is None


def test_in_an_evaluation_too_what_ends_in_doubt_twice_is_scored_as_failed() -> None:
    def killed(index: int, number: int, task: EpisodeTask) -> Exception | str | None:
        if index != 2:
            return None
        return "killed" if task.is_doubtful else DoubtfulEnd("killed", **SAYS)

    agent = Told(killed)
    group = run_virtually(groups_of(agent, retries=EpisodeTries(waits_s=())).run(TICKET))
    assert [e.was_doubtful for e in group.episodes] == [False, False, True, False]
    assert [t.id for t in agent.tasks[4:]] == ["0-4-2-try1"]
    always = Told(lambda *_: DoubtfulEnd("killed", **SAYS))
    with pytest.raises(DoubtfulEnd):
        run_virtually(groups_of(always, retries=EpisodeTries(waits_s=())).run(TICKET))
    assert len(always.tasks) == 4 * 2


def test_the_report_says_how_long_ago_and_says_it_once() -> None:
    tries = EpisodeTries()
    tries.succeeded("0-1", began_s=10)
    tries.failed("0-2", first_s=30, failures=2, fault=TryFault.AWAY, why="\ud800" * 1000)
    good, bad = tries.report(now_s=40)
    assert good == EpisodeTry(id="0-1", ago_s=30)
    assert (bad.ago_s, bad.failures, bad.fault, len(bad.why)) == (10, 2, TryFault.AWAY, 300)
    assert tries.report(now_s=41) == ()


def test_the_first_try_has_the_seed_of_always_and_the_others_their_own() -> None:
    assert seed_id("0-4", 0) == "0-4"
    seeds = {row_seed(1, seed_id("0-4", number), 2, 0) for number in range(6)}
    assert row_seed(1, "0-4", 2, 0) in seeds
    assert len(seeds) == 6
    assert episode_id(TICKET, 3, 0) == "0-4-3"
    assert episode_id(TICKET, 3, 2) == "0-4-3-try2"


# ---- what the policy left without an answer --------------------------------------------------------


@dataclass
class Asked:
    """An ``Ask`` that does what it is told, one after another."""

    does: list[Any]
    well: bool = True
    request_stats: RequestStats = field(default_factory=RequestStats)

    async def __call__(
        self,
        tokens: Sequence[int],
        limit: int | None = None,
        /,
        *,
        on_tokens: Callable[[Sequence[int]], None] | None = None,
    ) -> Answer:
        does = self.does.pop(0)
        if isinstance(does, list):  # times between pieces of an answer; below 0: without a token
            length = 0
            for pause_s in does:
                await asyncio.sleep(abs(pause_s))
                self.request_stats.broken += pause_s < 0
                length += pause_s > 0
                assert on_tokens is not None
                on_tokens([20] * length)
        elif isinstance(does, float):
            await asyncio.sleep(does)
        elif isinstance(does, Exception):
            raise does
        return Answer(tokens=(20,), logprobs=(-0.5,), versions=(0,), stopped=True)

    async def trouble(self) -> str:
        return "" if self.well else "generation_server/0 fails a health check"


async def use(watched: WatchedAsk, *prompts: int, limit_s: float = 5.0) -> None:
    """Asks for each of the prompts, and leaves when the time is over."""
    for prompt in prompts:
        try:
            async with asyncio.timeout(limit_s):
                await watched([prompt])
        except (WaitTimeout, DataError, TimeoutError):
            pass


@pytest.mark.parametrize(
    ("does", "prompts", "well", "with_problem", "without"),
    [
        ([1.0], [1], True, "", ""),
        ([WaitTimeout("none is well", **SAYS)], [1], True, "none is well", "none is well"),
        # The client tries the same request again, and gets its answer; another's is none to this one.
        ([WaitTimeout("none is well", **SAYS), 1.0], [1, 1], True, "", ""),
        ([WaitTimeout("none is well", **SAYS), 1.0], [1, 2], True, "none is well", "none is well"),
        ([DataError("the context is full", **SAYS)], [1], True, "", ""),
        # The agent's own time is over: the answer is long, or the server is away.
        ([1.0, 9.0], [1, 2], True, "", ""),
        ([1.0, 9.0], [1, 2], False, "generation_server/0 fails a health check", ""),
        ([9.0, 1.0], [1, 2], False, "", ""),
    ],
)
def test_what_the_policy_did_not_answer_is_known(
    does: list[Any], prompts: list[int], well: bool, with_problem: str, without: str
) -> None:
    async def story() -> tuple[str, str]:
        watched = WatchedAsk(Asked(list(does), well=well), PolicyPulse())
        await use(watched, *prompts)
        return await watched.trouble(ended_well=False), await watched.trouble(ended_well=True)

    assert run_virtually(story()) == (with_problem, without)


@pytest.mark.parametrize(
    ("does", "others_get_answers", "silent_s"),
    [
        (1000.0, True, None),
        # A well server writes 32k tokens; the agent's own limit is 45 s.
        (1000.0, False, None),
        # It was lost, and waits at another server: nobody has got a token.
        ([-5.0, 1000.0], False, 45),
        ([-5.0, 1000.0], True, None),
        ([-5.0, 15.0, 1000.0], False, None),  # a piece came at 20 s
        ([10.0, -1.0, -1.0, 1000.0], False, 35),
    ],
)
def test_silence_is_the_servers_fault_if_a_request_was_lost_though_they_are_back_by_then(
    does: Any, others_get_answers: bool, silent_s: int | None
) -> None:
    async def story() -> str:
        pulse = PolicyPulse()
        watched = WatchedAsk(Asked([does]), pulse)
        other = WatchedAsk(Asked([1.0] * 50), pulse)
        beside = use(other, *range(50)) if others_get_answers else asyncio.sleep(0)
        await asyncio.gather(use(watched, 1, limit_s=45.0), beside)
        return await watched.trouble(ended_well=False)

    found = run_virtually(story())
    if silent_s is None:
        assert found == ""
    else:
        assert f"for {silent_s} s" in found


# ---- groups ----------------------------------------------------------------------------------------


@dataclass(eq=False)
class Told(EpisodeAgent):
    """Does with each try what a function says: by the episode's index and its number of tries before."""

    does: Callable[[int, int, EpisodeTask], Exception | str | None]
    tasks: list[EpisodeTask] = field(default_factory=list)
    asks: list[str] = field(default_factory=list)

    async def run_episode(self, task: EpisodeTask) -> Episode:
        self.tasks.append(task)
        _, _, rest = task.id.partition("-")
        _, index, *again = rest.split("-")
        number = int(again[0].removeprefix("try")) if again else 0
        transcript = Transcript(task.prompt)
        transcript.answered(await task.ask(transcript.tokens))
        done = self.does(int(index), number, task)
        if isinstance(done, Exception):
            raise done
        trajectory = transcript.trajectory(reward=1.0, truncated=False)
        return Episode(
            sequences=(trajectory,), reward=1.0, problem=done or "", was_doubtful=bool(done)
        )


@dataclass
class Asks:
    numbers: list[tuple[int, int]] = field(default_factory=list)

    def ask_for(
        self, ticket: Ticket, index: int, *, own_prompt: bool = False, number: int = 0
    ) -> Any:
        self.numbers.append((index, number))
        return Asked([1.0])


def groups_of(agent: EpisodeAgent, **changes: Any) -> GroupRunner:
    fields: dict[str, Any] = {
        "dataset": Records(),
        "tokenizer": Letters(),
        "agent": agent,
        "make_environment": Nothing,
        "caller": Asks(),
        "group_size": 4,
        "retries": EpisodeTries(),
    }
    return GroupRunner(**{**fields, **changes})


def test_a_failed_episode_is_played_again_alone() -> None:
    agent = Told(
        lambda index, number, _: RolloutError("429", **SAYS) if index == 2 and number < 3 else None
    )
    groups = groups_of(agent)
    group = run_virtually(groups.run(TICKET))
    assert group.rewards == (1.0,) * 4
    assert [t.id for t in agent.tasks[4:]] == ["0-4-2-try1", "0-4-2-try2", "0-4-2-try3"]
    assert groups.caller.numbers[4:] == [(2, 1), (2, 2), (2, 3)]  # type: ignore[attr-defined]
    told = groups.retries.report(now_s=100)
    assert sorted(t.failures for t in told) == [0, 0, 0, 0, 1, 2, 3]


def test_when_its_tries_are_used_up_the_others_have_been_played_to_their_ends() -> None:
    agent = Told(lambda index, number, _: RolloutError("429", **SAYS) if index == 1 else None)

    async def story() -> float:
        with golden.raises(RolloutError):
            await groups_of(agent).run(TICKET)
        return asyncio.get_running_loop().time()

    assert run_virtually(story()) == pytest.approx(sum(WAITS_S) + 5)
    assert len(agent.tasks) == 3 + 5


def test_the_next_grant_of_a_failed_question_has_other_seeds() -> None:
    groups = groups_of(Told(lambda *_: None), group_size=1)
    again = Ticket(id="0-4", index=4, tries=3, min_version=0, failures=1)
    run_virtually(groups.run(again))
    ((_, number),) = groups.caller.numbers  # type: ignore[attr-defined]
    assert number > 100


def test_a_doubtful_end_is_scored_at_the_second_time_and_counts_as_a_failure() -> None:
    def does(index: int, number: int, task: EpisodeTask) -> Exception | str | None:
        if index == 0:
            assert task.is_doubtful is (number > 0)
            return "SIGKILL" if task.is_doubtful else DoubtfulEnd("SIGKILL", **SAYS)
        return None

    groups = groups_of(Told(does))
    group = run_virtually(groups.run(TICKET))
    assert [e.problem for e in group.episodes] == ["SIGKILL", "", "", ""]
    faults = [t.fault for t in groups.retries.report(now_s=9) if t.failures]
    assert faults == [TryFault.DOUBTFUL, TryFault.DOUBTFUL]


def test_an_environment_that_can_not_be_closed_costs_no_episode() -> None:
    class Sticky(Nothing):
        async def close(self) -> None:
            raise TimeoutError("docker rm took too long")

    agent = Told(lambda *_: None)
    group = run_virtually(groups_of(agent, make_environment=Sticky).run(TICKET))
    assert len(group.episodes) == len(agent.tasks) == 4


def test_an_environment_that_can_not_begin_costs_a_try() -> None:
    class Shy(Environment):
        made = 0

        def __init__(self) -> None:
            Shy.made += 1
            self.number = Shy.made

        async def reset(self, record: Any) -> None:
            if self.number == 1:
                raise ConnectionRefusedError("the provider restarts")

        step = Nothing.step

    group = run_virtually(groups_of(Told(lambda *_: None), make_environment=Shy).run(TICKET))
    assert (len(group.episodes), Shy.made) == (4, 5)


# ---- how agents end --------------------------------------------------------------------------------


def seat(*answers: object) -> Any:
    node = SimpleNamespace(delivered=True)
    sequence = Transcript([5, 6])
    sequence.answered(Answer(tokens=(20,), logprobs=(-0.5,), versions=(0,), stopped=True))
    session = SimpleNamespace(
        last_node=lambda: node if answers else None,
        reward=None,
        sequences=lambda *, reward: [sequence.trajectory(reward=reward, truncated=False)],
        figures=lambda: {"calls": 1.0, "unread_answers": 0.0},
        num_calls=lambda: len(answers),
        num_left=lambda: 0,
        tree=AnswerTree(),
    )
    return SimpleNamespace(role="", session=session)


def task_of(*, is_doubtful: bool) -> Any:
    return SimpleNamespace(id="0-4-0", is_doubtful=is_doubtful)


def test_a_killed_agent_gets_the_failed_reward_the_second_time() -> None:
    outcome = AgentOutcome(doubt=DoubtfulEnd("killed by SIGKILL", **SAYS), reward=1.0)

    async def finished(*answers: object, is_doubtful: bool) -> Episode:
        return await finished_episode(
            task_of(is_doubtful=is_doubtful), [seat(*answers)], outcome, failed_reward=-1.0
        )

    with pytest.raises(DoubtfulEnd):
        asyncio.run(finished("one", is_doubtful=False))
    with golden.raises(RolloutError) as unasked:
        asyncio.run(finished(is_doubtful=True))
    assert not isinstance(unasked.value, DoubtfulEnd), "there is nothing to train on"
    episode = asyncio.run(finished("one", is_doubtful=True))
    assert (episode.was_doubtful, episode.problem) == (True, "killed by SIGKILL")


@pytest.mark.parametrize("written", ["nan", "[1]", "1 2"])
def test_a_malformed_reward_is_a_doubtful_end(written: str, tmp_path: Any) -> None:
    path = tmp_path / "reward"
    path.write_text(written)
    with pytest.raises(DoubtfulEnd):
        read_reward(path, problem="")


@pytest.mark.parametrize(
    ("returned", "raised"),
    [
        (float("nan"), DoubtfulEnd),
        ({"reward": float("-inf")}, DoubtfulEnd),
        ({"reward": 1.0, "turns": float("nan")}, DoubtfulEnd),
        ({"rewards": {"a": float("nan")}}, DoubtfulEnd),
        ({"turns": 3}, RolloutError),
        ({"reward": "1.0"}, RolloutError),
        ([1.0], RolloutError),
        ({"rewards": [1.0]}, RolloutError),
    ],
)
def test_a_returned_nan_is_a_doubtful_end_and_a_wrong_type_the_functions_mistake(
    returned: Any, raised: type[Exception]
) -> None:
    with pytest.raises(RolloutError) as caught:
        returned_outcome(returned)
    assert type(caught.value) is raised


# ---- what an outsider expects ----------------------------------------------------------------------

# Rows by somebody who had not read the code; ``reaches`` (ours) says how a case comes to it; nothing: it
# does not come to this code.
FAILURES = [
    json.loads(line)
    for line in Path(__file__).with_name("episode_failures.jsonl").read_text().splitlines()
]
# Where we judge otherwise: what → our class. After an answer we can't tell whose fault an agent's error is,
# and an agent that is nothing but wrong must not be played for ever.
OTHERWISE = {
    "sandbox's provider answers 429 to an exec call": "failed_reward",
    "sandbox's provider answers 503": "failed_reward",
    "agent's own time limit passes while the sandbox's provider does not answer exec": "failed_reward",
    "agent's own time limit passes while its request waited in the queue of full servers, not one "
    "token came": "failed_reward",  # at a well server; not if no server took it
    # Once again, and failed_reward the second time: the policy may be the cause.
    "agent killed by the node's OOM killer because of another job's memory; cgroup of the agent counts "
    "no oom_kill": "failed_reward",
    "agent ends by SIGTERM because the worker's node is being drained": "failed_reward",
    "agent returns NaN": "failed_reward",
    "agent returns a tuple of an answer and tensors": "failed_reward",
    "NeMo Gym's server answers 500, overloaded": "failed_reward",  # 429 and 503 are played again
    "agent returns None after the policy's answers": "failed_reward",  # documented: the rule scores
    "environment.close() raises TimeoutError: docker rm took too long, reward was given": "failed_reward",
    # Played again, then unscored: an environment's error has no score, as a rule's.
    "environment's step raises ValueError: illegal move (policy's move)": "play_again",
    "the judge is one of the run's own generation servers, all are away": "play_again",
}


def our_class(reaches: str) -> str:
    """What becomes of an episode; one that is judged as it is counts as ``failed_reward`` in the rows."""
    how, _, error = reaches.partition(" ")
    made = {
        "RolloutError": RolloutError("it failed", **SAYS),
        "RewardError": RewardError("no number", **SAYS),
        "WaitTimeout": WaitTimeout("the judge is away", **SAYS),
        "WorkerLost": WorkerLost("the host has ended", **SAYS),
        "ConnectionError": ConnectionError("reset"),
        "OSError": OSError("no space left"),
    }.get(error)
    if how == "always":
        assert made is not None
        chances, fault = EpisodeTries().episode(), fault_of(made)
        while chances.wait_s(fault) is not None:
            pass
        return "set_aside_record"  # by the dispatcher, at the second grant
    if how == "raised":
        assert made is not None
        fault = fault_of(made)
    elif how == "servers,":
        fault = fault_of(RolloutError("502", **SAYS), servers_trouble="no server is well")
    elif how == "as":
        return "failed_reward"
    else:
        doubt = DoubtfulEnd("killed", **SAYS) if error == "doubtful" else None
        outcome = AgentOutcome(problem="it failed", doubt=doubt)
        seats = [seat("an answer") if how == "answered," else seat()]
        is_doubtful = doubt is not None
        try:
            episode = asyncio.run(
                finished_episode(
                    task_of(is_doubtful=is_doubtful), seats, outcome, failed_reward=-1.0
                )
            )
        except RolloutError as error_:
            fault = fault_of(error_)
        else:
            assert episode.reward == -1.0
            return "failed_reward"
    assert EpisodeTries().episode().wait_s(fault) == WAITS_S[0]
    return "outage" if fault is TryFault.SERVERS else "play_again"


REACHED = [row for row in FAILURES if row["reaches"] is not None]


@pytest.mark.parametrize("row", REACHED, ids=lambda row: row["what"][:60])
def test_failures_are_what_an_outsider_takes_them_for(row: dict[str, str]) -> None:
    assert our_class(row["reaches"]) == OTHERWISE.get(row["what"], row["class"])


# ---- an outage between two answers -----------------------------------------------------------------


class Rendered:
    """Messages as one token each."""

    template = ""
    own_args: Mapping[str, Any] = {}

    def whole(self, messages: Sequence[Any], tools: Any, **_: Any) -> RenderedChat:
        return RenderedChat(tokens=(5, 6, *range(7, 6 + len(messages))))

    def behind(self, messages: Sequence[Any], answered: int, tools: Any, **_: Any) -> RenderedChat:
        return RenderedChat(tokens=(7,) * (len(messages) - answered))


class TwoTurns(EpisodeAgent):
    """Behind the endpoint: what its program says of a status 502 is the problem of its episode."""

    own_prompt = True

    async def run_episode(self, task: EpisodeTask) -> Episode:
        settings = SessionSettings(
            renderer=Rendered(),  # type: ignore[arg-type]
            form=ANSWER_FORMS["plain"],
            decode=lambda tokens: " ".join(map(str, tokens)),
            end_ids=frozenset({20}),
        )
        session = EpisodeSession(id=task.id, policy=AskPolicy(task.ask), settings=settings)
        messages, problem = [ChatMessage(role="user", content="q")], ""
        for text in ("go on", "the end"):
            try:
                async with session.call(ChatRequest(messages=tuple(messages))) as live:
                    result = await live.result()
                    live.read()
            except WaitTimeout:
                problem = "openai.InternalServerError: 502"
                break
            messages += [result.replies[0].message, ChatMessage(role="user", content=text)]
        await session.close()
        seats = [
            EpisodeSeat(
                role="",
                session=session,
                address=EpisodeAddress(base_url="", session_url="", key=""),
            )
        ]
        outcome = AgentOutcome(problem=problem, reward=None if problem else 1.0)
        return await finished_episode(task, seats, outcome, failed_reward=0.0)


def test_an_outage_between_two_answers_is_no_lesson() -> None:
    """It was trained on as a failure: reward 0 for the first answer."""

    class Shaky(Asks):
        def ask_for(self, ticket: Ticket, index: int, *, number: int = 0, **_: Any) -> Any:
            self.numbers.append((index, number))
            is_away = index == 0 and number == 0
            return FullAsk([1.0, WaitTimeout("none is well", **SAYS) if is_away else 1.0])

    class FullAsk(Asked):
        async def __call__(self, tokens: Sequence[int], limit: Any = None, /, **_: Any) -> Answer:
            return await super().__call__(tokens, limit)

    groups = groups_of(TwoTurns(), caller=Shaky(), group_size=2)
    group = run_virtually(groups.run(TICKET))
    assert group.rewards == (1.0, 1.0)
    assert groups.caller.numbers == [(0, 0), (1, 0), (0, 1)]  # type: ignore[attr-defined]
    told = groups.retries.report(now_s=100)
    assert [t.fault for t in told if t.failures] == [TryFault.SERVERS]
