"""Do episodes on NeMo Gym and OpenEnv end as somebody has it who has not read our code? By hand; a minute.

    python tests/by_hand/agents/outsider_gyms.py [--only TEXT]  writes results/outsider_gyms.json

Plays outsider/gyms.jsonl (OUTSIDER_CALLS.md) against stand-ins of their servers on this machine. An episode
that ends in an error is played again, at most three times, as a rollout worker does. "Plain HTTP" is
OpenEnv's transport by requests.
"""

from __future__ import annotations

import asyncio
import json
import math
import socket
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from aiohttp import web

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[2]), str(HERE.parents[1] / "support"), str(HERE)]

from letter_chat import ScriptedPolicy, host, task  # noqa: E402
from openenv_double import OpenEnvDouble, error, observed  # noqa: E402
from outsider_gym_servers import (  # noqa: E402
    Gym,
    Late,
    Script,
    body_script,
    forgetful,
    half,
    hanging,
    redirecting,
    status_script,
    unasking,
    well,
    zipped,
)
from outsider_tables import (  # noqa: E402
    Outcome,
    failed,
    main_of,
    not_played,
    passed,
)

from realsys.api.agent import DoubtfulEnd, Environment, Observation  # noqa: E402
from realsys.api.errors import RealsysError, WaitTimeout  # noqa: E402
from realsys.rollout.environments.openenv_environment import OpenEnvEnvironment  # noqa: E402
from realsys.rollout.runners.nemo_gym_agent import NemoGymAgent  # noqa: E402

LIMIT_S = 120.0  # of a case
TRIES = 3
FAILED_REWARD = -1.0


# ---- NeMo Gym ------------------------------------------------------------------------------------


@dataclass
class Run:
    """What became of an episode: its reward, and the errors of its tries before."""

    reward: float | None = None
    problem: str = ""
    stats: dict[str, float] = field(default_factory=dict)
    errors: list[RealsysError] = field(default_factory=list)
    asked: list[tuple[int, str]] = field(default_factory=list)  # statuses and texts of the policy

    @property
    def is_failed(self) -> bool:
        """Whether it has the reward of a failed one."""
        return self.reward == FAILED_REWARD and bool(self.problem)

    def shown(self) -> str:
        """For a line."""
        errors = [f"{type(e).__name__}: {e.what}"[:160] for e in self.errors]
        return f"reward {self.reward}, problem {self.problem[:160]!r}, before that {errors}"

    def said(self, word: str) -> bool:
        """Tells whether a word is in what is told of it."""
        return any(word in text for text in (self.problem, *(e.what for e in self.errors)))


class Unscored(Environment):
    """Is never asked: Gym has the reward."""

    async def reset(self, record: Any) -> None:
        """Does nothing."""

    async def step(self, action: str) -> Observation:
        """Fails: the reward is Gym's."""
        raise AssertionError("the reward is Gym's")


async def run_gym(gym: Gym, *, away_first: bool = False, **args: Any) -> Run:
    """Plays an episode on a server, as often as a worker would."""
    run = Run()
    await gym.start()
    url = f"http://127.0.0.1:{gym.port}"
    with tempfile.TemporaryDirectory() as folder:
        # An agent asks a server that is busy again as long as an episode may take
        given = {"timeout_s": 15.0, **args}
        agent = NemoGymAgent(gym_url=url, failed_reward=FAILED_REWARD, **given)
        await agent.open(host(Path(folder)))
        gym.policy_url = agent.model_url
        if away_first:
            await gym.stop()
        try:
            is_doubtful = False
            for _ in range(TRIES):
                one = task(ScriptedPolicy(*["5"] * 4), Unscored(), {"prompt": "2+3?"})
                try:
                    made = await agent.run_episode(replace(one, is_doubtful=is_doubtful))
                except RealsysError as caught:
                    run.errors.append(caught)
                    is_doubtful = is_doubtful or isinstance(caught, DoubtfulEnd)
                    if away_first and len(run.errors) == 1:
                        await gym.start()
                    continue
                run.reward, run.problem, run.stats = made.reward, made.problem, dict(made.stats)
                break
            await asyncio.sleep(0)
        finally:
            await agent.close()
            await gym.stop()
    run.asked = gym.asked
    return run


def _is_scored(run: Run) -> bool:
    return run.reward == 1.0 and not run.problem


def _is_failed_by_doubt(run: Run) -> bool:
    return run.is_failed and len(run.errors) == 1 and isinstance(run.errors[0], DoubtfulEnd)


def _is_refused(run: Run) -> bool:
    return bool(run.errors) and run.reward in (None, FAILED_REWARD)


Check = Callable[[Run], bool]


def _refused_for_reward(run: Run) -> bool:
    return _is_refused(run) and run.said("reward")


def _once(status: int) -> tuple[Script, Check]:
    ask = status == 500
    return status_script(status, times=1, ask=ask), _is_scored


def _refusal(status: int) -> tuple[Script, Check]:
    return status_script(
        status
    ), lambda run: run.is_failed and not run.errors and run.said(str(status))


NEMO: dict[str, tuple[Script, Check]] = {
    "run_ok": (well, lambda run: _is_scored(run) and not run.errors),
    **{f"run_{s}": _refusal(s) for s in (400, 413, 422)},
    "run_404": (  # a wrong URL, says the note
        status_script(404),
        lambda run: run.reward in (None, FAILED_REWARD) and run.said("404"),
    ),
    **{f"run_{s}": _once(s) for s in (408, 429, 502, 503, 504)},
    "run_500_once": _once(500),
    "run_500_always": (status_script(500), _is_failed_by_doubt),
    "run_500_all": (status_script(500), lambda run: run.reward is None),
    "retry_after_date": (
        status_script(429, times=1, ask=False, **{"Retry-After": "soon"}),
        _is_scored,
    ),
    "body_html": (body_script("<html>no</html>", content_type="text/html"), _is_refused),
    "body_empty": (body_script(""), _is_refused),
    "body_list": (body_script("[]"), _is_refused),
    "body_half": (half, lambda run: _is_scored(run) and bool(run.errors)),
    "body_nan": (body_script('{"reward": NaN}'), _is_failed_by_doubt),
    "body_infinity": (body_script('{"reward": 1e999}'), _is_failed_by_doubt),
    "reward_int_big": (body_script('{"reward": 1' + "0" * 400 + "}"), _is_failed_by_doubt),
    "reward_missing": (body_script('{"response": {}}'), _refused_for_reward),
    "reward_null": (body_script('{"reward": null}'), _refused_for_reward),
    "reward_true": (body_script('{"reward": true}'), _is_scored),
    "reward_text": (body_script('{"reward": "0.5"}'), _refused_for_reward),
    "reward_list": (body_script('{"reward": [1, 0]}'), _refused_for_reward),
    "reward_negative_zero": (body_script('{"reward": -0.0}'), lambda run: run.reward == 0.0),
    "metrics": (
        body_script('{"reward": 1, "accuracy": 1, "note": "x", "extra": {"a": 2}, "bad": NaN}'),
        lambda run: _is_scored(run) and not {"note", "extra", "bad"} & set(run.stats),
    ),
    "no_model_call": (unasking, lambda run: run.reward is None and bool(run.errors)),
    "model_without_session": (
        forgetful,
        lambda run: (
            run.asked[0][0] >= 400
            and any("metadata" in text for _, text in run.asked)
            and run.reward in (None, FAILED_REWARD)
        ),
    ),
    "redirect": (redirecting, _is_scored),
    "gzip": (zipped, _is_scored),
    "charset": (
        body_script('{"reward": 1.0, "note": "é"}'.encode("latin-1"), charset="latin-1"),
        _is_scored,
    ),
}
NEMO_NOT_PLAYED = {
    "retry_after": "the pause may be the worker's",
    "tool_422": "is within Gym's own servers",
    "session_cookie": "is within Gym's own servers",
    "huge": "200 MB on a machine that others use",
}


async def play_nemo(case: dict[str, Any]) -> Outcome:
    """Plays a case of NeMo Gym."""
    name = case["id"].split("/")[1]
    if name in NEMO_NOT_PLAYED:
        return not_played(case, NEMO_NOT_PLAYED[name], group="nemo_gym")
    late = Late()
    if name == "hangs":
        run = await run_gym(Gym(hanging), timeout_s=1.0)
        good = run.is_failed
    elif name == "restarts":
        run = await run_gym(Gym(well), away_first=True)
        good = _is_scored(run) and len(run.errors) == 1
    elif name == "late_model_call":
        run = await _late(late)
        good = _is_scored(run) and late.status == 410
    else:
        script, check = NEMO[name]
        run = await run_gym(Gym(script))
        good = check(run)
    if good:
        return passed(case, group="nemo_gym")
    more = f", late request {late.status}" if late.status else ""
    asked = f", the policy answered {run.asked[:1]}" if name.startswith("model") else ""
    return failed(case, run.shown() + more + asked, group="nemo_gym")


async def _late(late: Late) -> Run:
    gym = Gym(late)
    await gym.start()
    with tempfile.TemporaryDirectory() as folder:
        agent = NemoGymAgent(gym_url=f"http://127.0.0.1:{gym.port}")
        await agent.open(host(Path(folder)))
        gym.policy_url = agent.model_url
        try:
            one = task(ScriptedPolicy("5", "5"), Unscored(), {"prompt": "2+3?"})
            made = await agent.run_episode(one)
            await late.ended()
        finally:
            await agent.close()
            await gym.stop()
    return Run(reward=made.reward, problem=made.problem)


# ---- OpenEnv -------------------------------------------------------------------------------------

RESET = observed({"message": "Begin."})
ENDED = observed({"message": "end"}, 1, done=True)


@dataclass
class Steps:
    """What the steps of an episode came to, and the error that ended it."""

    opening: str = ""
    said: list[Observation] = field(default_factory=list)
    error: RealsysError | None = None
    left_open: int = 0

    def shown(self) -> str:
        """For a line."""
        said = [(o.text[:60], o.reward, o.done) for o in self.said]
        ended = f"{type(self.error).__name__}: {self.error.what}"[:200] if self.error else "none"
        return f"opening {self.opening[:60]!r}, {said}, error {ended}, {self.left_open} open"

    @property
    def reward(self) -> float:
        """The sum over its steps."""
        return math.fsum(o.reward for o in self.said)


async def steps(server: OpenEnvDouble, num: int, **args: Any) -> Steps:
    """Does steps until one fails or ends the episode."""
    made = Steps()
    async with server:
        environment = OpenEnvEnvironment(url=server.url, **args)
        try:
            await environment.reset({"prompt": "?"})
            made.opening = environment.opening()
            for i in range(num):
                made.said.append(await environment.step(f"step {i}"))
                if made.said[-1].done:
                    break
        except RealsysError as caught:
            made.error = caught
        finally:
            await environment.close()
        for _ in range(500):
            if not server.open:
                break
            await asyncio.sleep(0.01)
        made.left_open = server.open
    return made


def _all_seen(*words: str) -> Callable[[Steps], bool]:
    return lambda made: (
        made.error is None
        and all(w in json.dumps([o.text for o in made.said], ensure_ascii=False) for w in words)
    )


SESSION_CASES: dict[str, tuple[Sequence[Any], int, Callable[[Steps], bool]]] = {
    "ok": (
        (RESET, observed({"message": "a"}, 0), observed({"message": "b"}, None), ENDED),
        3,
        lambda made: made.error is None and made.reward == 1.0 and made.said[-1].done,
    ),
    "step_422": (
        (RESET, error("VALIDATION_ERROR"), ENDED),
        2,
        lambda made: made.error is None and made.said[0].info.get("wrong_actions") == 1.0,
    ),
    "step_500": ((RESET, error("EXECUTION_ERROR"), ENDED), 2, lambda made: made.error is not None),
    "lost_session": ((RESET,), 2, lambda made: made.error is not None),
    "reward_text": (
        (RESET, observed({"message": "a"}, "1", done=True)),
        1,
        lambda made: made.error is not None,
    ),
    "reward_nan": (
        (RESET, observed({"message": "a"}, math.nan, done=True)),
        1,
        lambda made: made.error is not None or math.isnan(made.reward),
    ),
    "reward_true": (
        (RESET, observed({"message": "a"}, True, done=True)),
        1,
        lambda made: made.error is None and made.reward == 1.0,
    ),
    "done_text": (
        (
            RESET,
            {
                "type": "observation",
                "data": {"observation": {"message": "a"}, "reward": 0, "done": "false"},
            },
            ENDED,
        ),
        2,
        lambda made: made.error is not None,
    ),
    "done_at_reset": (
        (observed({"message": "over"}, 1, done=True), ENDED),
        0,
        lambda made: made.error is not None,
    ),
    "observation_odd": (
        (
            RESET,
            *(
                {"type": "observation", "data": {"observation": o, "reward": 0, "done": False}}
                for o in ([1, 2], 7, "AAEC")
            ),
        ),
        3,
        _all_seen("[1, 2]", "7", "AAEC"),
    ),
    "not_json": ((RESET, "no JSON", ENDED), 2, lambda made: made.error is not None),
    "huge_frame": (
        (RESET, observed({"message": "x" * (20 << 20)}, 0), ENDED),
        2,
        lambda made: made.error is None or bool(made.error.what),
    ),
    "old_frame": ((RESET, None, ENDED), 2, lambda made: isinstance(made.error, WaitTimeout)),
}


async def play_openenv(case: dict[str, Any]) -> Outcome:
    """Plays a case of OpenEnv's sessions."""
    name = case["id"].split("/")[1]
    if name == "lost_session_http":
        made, _ = await http_steps([404], {})
        good = made.error is not None
    elif name == "capacity":
        made = await steps(OpenEnvDouble(RESET, ENDED, full=2), 1)
        good = made.error is None and made.reward == 1.0
    elif name == "capacity_leak":
        made = await _cancelled_in_reset()
        good = made.left_open == 0
    else:
        replies, num, check = SESSION_CASES[name]
        args = {"message_timeout_s": 1.0} if name == "old_frame" else {}
        made = await steps(OpenEnvDouble(*replies), num, **args)
        good = check(made)
    if good and made.left_open == 0:
        return passed(case, group="openenv")
    return failed(case, made.shown(), group="openenv")


async def _cancelled_in_reset() -> Steps:
    made = Steps()
    async with OpenEnvDouble(None) as server:
        for _ in range(4):
            environment = OpenEnvEnvironment(url=server.url)
            resetting = asyncio.create_task(environment.reset({"prompt": "?"}))
            while not server.open and not resetting.done():
                await asyncio.sleep(0.01)
            resetting.cancel()
            await asyncio.wait([resetting])
            await environment.close()
            for _ in range(500):
                if not server.open:
                    break
                await asyncio.sleep(0.01)
        made.left_open = server.open
    return made


# ---- plain HTTP ----------------------------------------------------------------------------------


async def http_steps(statuses: Sequence[int], headers: dict[str, str]) -> tuple[Steps, int]:
    """Does two steps at a server that answers these statuses to the first requests of a step."""
    left, made, asked = list(statuses), Steps(), [0]

    async def step(_: web.Request) -> web.Response:
        asked[0] += 1
        if left and (status := left.pop(0)) != 200:
            return web.json_response({"detail": "wrong"}, status=status, headers=headers)
        return web.json_response(observed({"message": "went on"}, 0.5)["data"])

    async def reset(_: web.Request) -> web.Response:
        return web.json_response(RESET["data"])

    async def schema(_: web.Request) -> web.Response:
        properties = {"message": {"type": "string"}, "metadata": {}}
        return web.json_response({"action": {"properties": properties, "required": ["message"]}})

    app = web.Application()
    app.add_routes([web.post("/step", step), web.post("/reset", reset), web.get("/schema", schema)])
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    environment = OpenEnvEnvironment(url=url, transport="http", message_timeout_s=20.0)
    try:
        await environment.reset({"prompt": "?"})
        for i in range(2):
            made.said.append(await environment.step(f"step {i}"))
    except RealsysError as caught:
        made.error = caught
    finally:
        await environment.close()
        await runner.cleanup()
    return made, asked[0]


async def play_http(case: dict[str, Any]) -> Outcome:
    """Plays a case of plain HTTP."""
    name = case["id"].split("/")[1]
    if name.startswith("step_"):
        status = int(name.removeprefix("step_"))
        made, _ = await http_steps([status], {})
        good = made.error is None and len(made.said) == 2
        if "told" in case["expect"]:
            words = (case["expect"]["told"], "VALIDATION_ERROR" if status == 422 else "HTTP")
            good = good and any(word in made.said[0].text for word in words)
        if status in (500, 504):  # or the episode is played again, says the note
            good = good or made.error is not None
    elif name == "401":
        made, _ = await http_steps([401] * 9, {})
        good = made.error is not None and "401" in made.error.what
    else:
        made = Steps()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        url = "http://no-such-host.invalid" if name == "dns" else f"http://127.0.0.1:{port}"
        environment = OpenEnvEnvironment(url=url, transport="http", message_timeout_s=10.0)
        try:
            await environment.reset({"prompt": "?"})
        except RealsysError as caught:
            made.error = caught
        finally:
            await environment.close()
        good = isinstance(made.error, WaitTimeout) or (name == "dns" and made.error is not None)
    if good:
        return passed(case, group="http")
    return failed(case, made.shown(), group="http")


PLAYED = {"nemo_gym": play_nemo, "openenv": play_openenv, "http": play_http}


def played(case: dict[str, Any]) -> Outcome:
    """Plays a case in an event loop of its own; what is raised, or lasts too long, fails it."""
    try:
        return asyncio.run(asyncio.wait_for(PLAYED[case["gym"]](case), LIMIT_S))
    except TimeoutError:
        return failed(case, f"takes more than {LIMIT_S:.0f} s", group=case["gym"])
    except Exception as error:  # each case is told by itself
        return failed(case, f"raises {type(error).__name__}: {error}", group=case["gym"])


if __name__ == "__main__":
    sys.exit(
        main_of(
            __file__,
            __doc__,
            "gyms",
            played,
            what="episodes on servers of gyms as an outsider wrote them down",
            ends_after_s=1500,
        )
    )
