"""Are rewards, groups and filters as somebody has them who has not read our code? By hand; seconds.

    python tests/by_hand/agents/outsider_scores.py [--only TEXT]  writes results/outsider_scores.json

Plays outsider/scores.jsonl (OUTSIDER_CALLS.md): conversations of real sessions, scored as an agent's
episode, packed as a worker's group, filtered as a worker filters, compared as the trainer compares.
"""

from __future__ import annotations

import asyncio
import json
import math
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[2]), str(HERE.parents[1] / "support"), str(HERE)]

from estimators_named import estimator  # noqa: E402
from outsider_tables import (  # noqa: E402
    Outcome,
    failed,
    main_of,
    not_played,
    passed,
)

from realsys.api.agent import Answer, DoubtfulEnd, Episode, EpisodeTask, Trajectory  # noqa: E402
from realsys.api.errors import RealsysError  # noqa: E402
from realsys.api.model import GenerationHyperparameters  # noqa: E402
from realsys.backends.hf.data_parallel import DataParallel  # noqa: E402
from realsys.evaluator.answer_statistics import QuestionResult, figures_of  # noqa: E402
from realsys.interfaces.interface_arguments import PPOSettings  # noqa: E402
from realsys.interfaces.ppo.ppo_experience import prepare_experience  # noqa: E402
from realsys.rollout.conversation.answer_forms import ANSWER_FORMS  # noqa: E402
from realsys.rollout.conversation.chat_messages import ChatMessage, ChatRequest  # noqa: E402
from realsys.rollout.conversation.chat_rendering import RenderedChat  # noqa: E402
from realsys.rollout.conversation.episode_session import EpisodeSession  # noqa: E402
from realsys.rollout.conversation.session_settings import SessionSettings  # noqa: E402
from realsys.rollout.environments.math_question import MathVerify  # noqa: E402
from realsys.rollout.runners.command_agent import read_reward  # noqa: E402
from realsys.rollout.runners.episode_outcome import (  # noqa: E402
    AgentOutcome,
    EpisodeAddress,
    EpisodeSeat,
    finished_episode,
)
from realsys.rollout.runners.hosted_agent import returned_outcome  # noqa: E402
from realsys.rollout.worker.group import EpisodeGroup  # noqa: E402
from realsys.rollout.worker.policy_client import RequestStats  # noqa: E402
from realsys.rollout.worker.rollout_worker import RolloutLimits, stats_of  # noqa: E402
from realsys.rollout.worker.trajectories import episodes_sample  # noqa: E402

LIMIT_S = 60.0  # of a case
NO_DIFFERENCES = (1e-6, 1 - 1e-6)  # success_range that leaves out all wrong and all right
FIRST, END = 1000, 6  # token of the first answer, and of an answer's end
QUESTION = ChatMessage(role="user", content="q")
A_RUN = "needs a run with a trainer"


# ---- conversations -------------------------------------------------------------------------------


class Renderer:
    """A token a message, and as many more as ``told`` for each that is put behind an answer."""

    template, own_args, can_continue = "", {}, False

    def __init__(self, told: int = 0) -> None:
        self._told = told

    def reads(self, name: str) -> bool:
        """Returns that a request gives no arguments."""
        del name
        return False

    def whole(self, messages: Sequence[ChatMessage], tools: Any, **_: Any) -> RenderedChat:
        """Renders a conversation."""
        del tools
        return RenderedChat(tokens=tuple(range(10, 10 + len(messages))))

    def behind(
        self, messages: Sequence[ChatMessage], answered: int, tools: Any, **_: Any
    ) -> RenderedChat:
        """Renders what stands behind an answer."""
        del tools
        return RenderedChat(tokens=(7,) * (len(messages) - answered + self._told))


class Policy:
    """Gives answers as they stand in the table: of ``tokens``, and the number of the answer in them."""

    def __init__(self, answers: Sequence[tuple[int, Mapping[str, Any]]]) -> None:
        self._answers = iter(answers)

    async def sample(self, tokens: Sequence[int], **_: Any) -> Answer:
        """Samples the next answer."""
        del tokens
        number, answer = next(self._answers)
        count, cut = answer.get("tokens", 2), answer.get("cut", False)
        made = (FIRST + number,) * (count if cut else count - 1) + (() if cut else (END,))
        return Answer(tokens=made, logprobs=(-1.0,) * count, versions=(0,) * count, stopped=not cut)


async def talk(session: EpisodeSession, answers: Sequence[Mapping[str, Any]]) -> None:
    """Asks for each answer, goes on behind it, and gives it its own reward."""
    messages = [QUESTION]
    for answer in answers:
        async with session.call(ChatRequest(messages=tuple(messages))) as live:
            reply = await live.result()
            if not answer.get("unread"):
                live.read()
        if (own := answer.get("reward")) is not None:
            session.set_reward(float(own), call_id=reply.id)
        messages += [reply.replies[0].message, QUESTION]
    await session.close()


async def ended(
    answers: Sequence[Mapping[str, Any]],
    outcome: AgentOutcome,
    *,
    rule: str = "",
    told: int = 0,
    silent: Sequence[str] = (),
) -> Episode:
    """Returns the episode of a table's answers, each by its role's conversation, and of silent roles."""
    roles = list(dict.fromkeys([*(a.get("role") or "" for a in answers), *silent]))
    seats = []
    for role in roles:
        own = [(i, a) for i, a in enumerate(answers) if (a.get("role") or "") == role]
        settings = SessionSettings(
            renderer=Renderer(told),
            form=ANSWER_FORMS["plain"],
            decode=lambda tokens: "42",
            end_ids=frozenset({END}),
        )
        session = EpisodeSession(id=f"e{role}", policy=Policy(own), settings=settings)
        await talk(session, [answer for _, answer in own])
        address = EpisodeAddress(base_url="", session_url="", key="")
        seats.append(EpisodeSeat(role=role, session=session, address=address))
    environment = MathVerify(reward=rule)
    await environment.reset({"prompt": "q", "answer": "42"})
    task = EpisodeTask(
        id="e",
        prompt=(1,),
        record={},
        ask=None,  # type: ignore[arg-type]
        environment=environment,
        tokenizer=None,
    )
    return await finished_episode(task, seats, outcome, failed_reward=0.0)


def episode(case: Mapping[str, Any], number: int) -> Episode:
    """Plays an episode of the table."""
    told = case["episodes"][number]
    unread = (case["setting"].get("unread_answers") or [[]] * (number + 1))[number]
    answers = [{**a, "unread": i in unread} for i, a in enumerate(told["answers"])]
    outcome = AgentOutcome(
        reward=None if told.get("failed") else told["reward"],
        rewards=told.get("role_rewards", {}),
        problem="it fell" if told.get("failed") else "",
    )
    ending = ended(
        answers,
        outcome,
        rule="math_verify",
        told=told.get("tool_result_tokens", 0),
        silent=list(outcome.rewards),
    )
    return asyncio.run(asyncio.wait_for(ending, LIMIT_S))


def numbers(sequence: Trajectory) -> list[int]:
    """Returns which of the table's answers a sequence trains."""
    marked = zip(sequence.tokens, sequence.from_policy, strict=True)
    return sorted({t - FIRST for t, from_policy in marked if from_policy and t >= FIRST})


# ---- groups --------------------------------------------------------------------------------------


def group_of(episodes: Sequence[Episode]) -> EpisodeGroup:
    """Packs episodes as a worker does."""
    return EpisodeGroup(
        sample=episodes_sample("a", episodes, metadata={}, may_branch=True),
        episodes=tuple(episodes),
        prompt_length=1,
        oldest=0,
        newest=0,
        request_stats=RequestStats(),
    )


def is_filtered(group: EpisodeGroup, lowest: float, highest: float) -> bool:
    """Tells whether a worker with this success_range leaves the group out."""
    limits: Any = RolloutLimits(success_rate_lb=lowest, success_rate_ub=highest)
    by_role = getattr(group, "rewards_of_roles", None)
    given = (group.rewards,) if by_role is None else (group.rewards, by_role)
    return bool(limits.why_filtered(*given))


def advantages(episodes: Sequence[Episode], name: str, **settings: Any) -> list[list[float]]:
    """Returns the advantage of each token of each sequence, as the trainer has it."""
    sample = episodes_sample("a", episodes, metadata={}, may_branch=True)
    ppo = PPOSettings(advantage=estimator(name), adv_norm="none", **settings)
    made = prepare_experience(sample, ppo, kl_coef=0.0, ranks=DataParallel())
    lengths = [len(s.tokens) for e in episodes for s in e.sequences]
    return [part.tolist() for part in torch.split(made.batch.data["advantages"], lengths)]


def play_group(case: dict[str, Any]) -> Outcome:
    """Plays a group, and compares its sequences, means, filter and advantages."""
    expect, kind = case["expect"], case["id"].split("/")[0]
    episodes = [episode(case, i) for i in range(len(case["episodes"]))]
    group, got = group_of(episodes), {}
    found = [[_shown(s) for s in e.sequences] for e in episodes]
    if [sorted(map(str, e)) for e in found] != [
        sorted(str(_wanted(s)) for s in e) for e in expect["sequences"]
    ]:
        got["sequences"] = found
    stats = stats_of(group, seconds=1.0)
    for role, mean in expect["mean_reward_by_role"].items():
        name = "reward" if role == "all" else f"agent/reward_{role}"
        if not _near(stats.get(name, math.nan), mean):
            got[f"mean of {role}"] = stats.get(name)
    lowest, highest = case["setting"].get("success_range", NO_DIFFERENCES)
    if lowest == 0.0 and case["setting"].get("bounds") == "exclusive":
        lowest, highest = NO_DIFFERENCES
    if is_filtered(group, lowest, highest) != (expect["filter"] == "drops"):
        got["filter"] = "keeps" if expect["filter"] == "drops" else "drops"
    if (signs := _signs(episodes, case)) != expect["advantage_signs"]:
        got["advantage_signs"] = signs
    if not got:
        return passed(case, group=kind)
    return failed(case, got, expected={_name(k): expect[_name(k)] for k in got}, group=kind)


def _name(key: str) -> str:
    return "mean_reward_by_role" if key.startswith("mean") else key


def _shown(sequence: Trajectory) -> tuple[Any, ...]:
    return numbers(sequence), sequence.role or None, round(float(sequence.reward), 12)


def _wanted(sequence: Mapping[str, Any]) -> tuple[Any, ...]:
    return sequence["answers"], sequence["role"], round(float(sequence["reward"]), 12)


def _near(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=1e-6, abs_tol=1e-9)


def _signs(episodes: Sequence[Episode], case: Mapping[str, Any]) -> list[list[int | None]]:
    made = iter(advantages(episodes, "grpo"))
    signs: list[list[int | None]] = []
    for one, told in zip(episodes, case["episodes"], strict=True):
        of_answers: list[int | None] = [None] * len(told["answers"])
        for sequence in one.sequences:
            x = next(made)
            for number in numbers(sequence):
                value = next(
                    a
                    for a, token, ours in zip(x, sequence.tokens, sequence.from_policy, strict=True)
                    if ours and token == FIRST + number
                )
                of_answers[number] = 0 if abs(value) < 1e-6 else 1 if value > 0 else -1
        signs.append(of_answers)
    return signs


# ---- overlong answers ----------------------------------------------------------------------------


def play_overlong(case: dict[str, Any]) -> Outcome:
    """Finds the rewards behind the penalty: each sequence is compared with one that has none."""
    setting = case["setting"]
    wanted = case["expect"]["reward"]
    given = {
        "gen": GenerationHyperparameters(max_new_tokens=setting["gen.max_new_tokens"]),
        "overlong_buffer_len": setting["overlong_buffer"],
        "overlong_penalty_factor": setting["overlong_penalty"],
    }
    found: list[Any] = []
    for number in range(len(setting["episodes"])):
        one = episode({**case, **setting}, number)
        roles = {s.role for s in one.sequences}
        zero = asyncio.run(
            ended(
                [{"role": role, "tokens": 1} for role in sorted(roles)],
                AgentOutcome(reward=0.0),
                rule="math_verify",
            )
        )
        scores = _scores(one, zero, given)
        if isinstance(wanted[number], dict):
            found.append({s.role: x for s, x in zip(one.sequences, scores, strict=True)})
        else:
            found.append(scores if isinstance(wanted[number], list) else scores[0])
    rounded = json.loads(json.dumps(found), parse_float=lambda x: round(float(x), 4))
    if rounded == wanted:
        return passed(case, group="overlong")
    return failed(case, {"reward": rounded}, group="overlong")


def _scores(one: Episode, zero: Episode, settings: Mapping[str, Any]) -> list[float]:
    """Solves for the scores of an episode's sequences: an advantage is a score less the others' mean, and
    the last sequence of the role has score 0."""
    made = advantages([one, zero], "rloo", **settings)
    every = [*one.sequences, *zero.sequences]
    x = [
        next(a for a, ours in zip(advantage, s.from_policy, strict=True) if ours)
        for advantage, s in zip(made, every, strict=True)
    ]
    of_role: Counter[str] = Counter()  # how many are compared
    for made_of in (one, zero):
        compared = [s.role for s in made_of.sequences]
        of_role.update(set(compared) if made_of.shares_reward else compared)
    zeros = {s.role: a for s, a in zip(every, x, strict=True)}  # the last one's
    scores = []
    for s, a in zip(one.sequences, x, strict=False):
        n = of_role[s.role]
        total = -zeros[s.role] * (n - 1)
        scores.append((a * (n - 1) + total) / n)
    return scores


# ---- agents --------------------------------------------------------------------------------------


def play_agent(case: dict[str, Any]) -> Outcome:
    """Ends an episode as the table's agent does."""
    setting, expect = case["setting"], case["expect"]
    if case["id"] == "norule/unknown_interaction":
        return _play_unknown_interaction(case)
    try:
        made, why = asyncio.run(asyncio.wait_for(_agents_end(setting), LIMIT_S)), ""
    except DoubtfulEnd as error:
        made, why = None, f"played again once: {error.what} ({error.where})"
    except RealsysError as error:
        made, why = None, f"{error.what} ({error.where}; {error.fix})"
    if "episode" in expect:
        good = why.startswith("played again once")
    elif "error" in expect:
        named = {"norule/unknown_role": "'c'"}.get(case["id"], "")
        good = named in why and bool(why)
    else:
        good = made is not None and _near(made.reward, expect["reward"])
        for name, value in expect.get("metrics", {}).items():
            good = good and made is not None
            stats = group_of([made]).figures if made is not None else {}
            good = good and stats.get(name.removeprefix("rollout/")) == value
    got = why or (f"reward {made.reward}, {dict(made.stats)}" if made is not None else "")
    return passed(case, group="agents") if good else failed(case, got, group="agents")


async def _agents_end(setting: Mapping[str, Any]) -> Episode:
    roles = setting.get("roles", [None])
    answers: list[dict[str, Any]] = [{"role": role} for role in roles]
    rule = (setting.get("rule") or "") if "rule" in setting else "math_verify"
    if setting["task.agent"] == "command":
        outcome = read_reward(Path("/nonexistent/reward"), problem="")
    else:
        returns = setting.get("returns")
        if returns == "float nan":
            returns = math.nan
        played = "function agents:solve"
        outcome = returned_outcome(_with_nan(returns), played=played)
    if "set_reward" not in setting:
        return await ended(answers, outcome, rule=rule)
    return await _ended_by_session(setting["set_reward"], outcome)


def _with_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _with_nan(v) for k, v in value.items()}
    return math.nan if value == "NaN" else value


async def _ended_by_session(given: Any, outcome: AgentOutcome) -> Episode:
    """An episode whose reward is set by its client."""
    settings = SessionSettings(
        renderer=Renderer(),
        form=ANSWER_FORMS["plain"],
        decode=lambda tokens: "42",
        end_ids=frozenset({END}),
    )
    session = EpisodeSession(id="e", policy=Policy([(0, {})]), settings=settings)
    await talk(session, [{}])
    for reward in given if isinstance(given, list) else [given]:
        session.set_reward(reward)
    seat = EpisodeSeat(
        role="", session=session, address=EpisodeAddress(base_url="", session_url="", key="")
    )
    task = EpisodeTask(
        id="e",
        prompt=(1,),
        record={},
        ask=None,  # type: ignore[arg-type]
        environment=MathVerify(),
        tokenizer=None,
    )
    return await finished_episode(task, [seat], outcome, failed_reward=0.0)


def _play_unknown_interaction(case: dict[str, Any]) -> Outcome:
    settings = SessionSettings(
        renderer=Renderer(),
        form=ANSWER_FORMS["plain"],
        decode=lambda tokens: "42",
        end_ids=frozenset({END}),
    )
    session = EpisodeSession(id="e", policy=Policy([]), settings=settings)
    try:
        session.set_reward(1.0, call_id="resp_other_episode")
    except RealsysError:
        return passed(case, group="agents")
    return failed(case, "is taken", group="agents")


# ---- held-out questions --------------------------------------------------------------------------


def play_evaluation(case: dict[str, Any]) -> Outcome:
    """Plays what is decided by the figures of episodes; what counts as right is decided in a run."""
    if case["id"] != "eval/pass_at_k":
        return not_played(case, A_RUN, group="evaluation")
    num_answers = 4
    result = QuestionResult(
        id="q",
        rewards=(1.0, 0.0, 0.0, 0.0),
        num_correct=1,
        lengths=(3,) * num_answers,
        truncated=(False,) * num_answers,
    )
    figures = {
        name: estimate.value
        for name, estimate in figures_of([result], num_answers=num_answers, seed=1).items()
    }
    got = {"pass_at": {k: figures.get(f"pass@{k}") for k in case["expect"]["pass_at"]}}
    if got == case["expect"]:
        return passed(case, group="evaluation")
    return failed(case, got, group="evaluation")


PLAYED = {
    "group": play_group,
    "overlong": play_overlong,
    "agent": play_agent,
    "evaluation": play_evaluation,
}


def played(case: dict[str, Any]) -> Outcome:
    """Plays a case; what is raised fails it."""
    try:
        return PLAYED[case["kind"]](case)
    except Exception as error:  # each case is told by itself
        return failed(case, f"raises {type(error).__name__}: {error}", group=case["kind"])


if __name__ == "__main__":
    sys.exit(
        main_of(
            __file__,
            __doc__,
            "scores",
            played,
            what="rewards, groups, filters and penalties as an outsider wrote them down",
            ends_after_s=900,
        )
    )
