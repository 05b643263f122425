"""Trials whose agents are clients' programs, and what must hold of them at their end."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from client_proxy import ClientProxy, Fault, Reply
from real_trials import Trials, explain, metrics_of, trained_ids, wait_until

from realsys.data.rollout_dump import RolloutDump
from realsys.data.sequence_sample import SequenceSample
from realsys.trial.records import TrialFiles
from realsys.trial.trial_state import State

PROGRAMS = Path(__file__).parent / "programs"
PROGRAM_S, TRIAL_S, START_S = 240, 600, 180
STEPS, QUESTIONS, GROUP = 2, 2, 2
KILL_STEPS, KILL_QUESTIONS = 2, 1  # all that are given out before the first step are trained on
SETTINGS = {
    "task.train_size": 96,
    "task.eval_size": 8,
    "train_bs_n_seqs": QUESTIONS,
    "group_size": GROUP,
    "gen.max_new_tokens": 16,
    "schedule.new_tokens_per_chunk": 2,  # else a stream comes in one piece, and nothing can be cut off
    "exp_ctrl.benchmark_steps": STEPS,
    "scheduling.model_worker.cpu": 1,
    "tensorboard": "false",
}
TRAINING = ("algorithm.ppo_n_minibatches=1", "exp_ctrl.ckpt_freq_secs=none")


def settings(*words: str) -> list[str]:
    """``SETTINGS``, and others beside or in place of them."""
    others = dict(word.split("=", 1) for word in words)
    return [f"{name}={value}" for name, value in {**SETTINGS, **others}.items()]


@dataclass(frozen=True, kw_only=True)
class Played:
    """An episode that a client's program has played. ``problem``: why it failed; empty: it did not."""

    scenario: str
    episode: str
    seen: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    problem: str = ""


@dataclass(kw_only=True)
class Client:
    """A client's environment and its program."""

    name: str
    python: Path
    program: str

    def argv(self, scenario: str) -> list[str]:
        """The command of a scenario."""
        return [str(self.python), str(PROGRAMS / self.program), scenario]


@dataclass
class ExternalRun:
    """A running trial with ``task.agent=external``, behind a proxy."""

    files: TrialFiles
    proxy: ClientProxy
    url: str
    admin_key: str = field(repr=False)
    played: list[Played] = field(default_factory=list)

    def start(self, wait_s: float) -> dict[str, Any]:
        """Starts a session. Raises HTTPError 429 where none may start in time."""
        return self._post("/rl/start_session", {"wait_s": wait_s}, self.admin_key)

    def play(self, client: Client, scenario: str, faults: Sequence[Fault] = ()) -> Played:
        """Has a program play a session, with these faults for its first requests; rewards and ends it."""
        return self.play_in(self.start(START_S / 3), client, scenario, faults)

    def play_in(
        self, session: Mapping[str, Any], client: Client, scenario: str, faults: Sequence[Fault]
    ) -> Played:
        """The same in a session that has started."""
        key = str(session["api_key"])
        self.proxy.faults[key].extend(faults)
        with tempfile.TemporaryDirectory(prefix="client-") as folder:
            task, report = Path(folder, "task.json"), Path(folder, "report.json")
            task.write_text(json.dumps(session["task"]))
            environment = {
                **{k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "REALSYS"))},
                "OPENAI_BASE_URL": f"{self.proxy.url}/v1",
                "OPENAI_API_BASE": f"{self.proxy.url}/v1",
                "OPENAI_API_KEY": key,
                "ANTHROPIC_BASE_URL": self.proxy.url,
                "ANTHROPIC_API_KEY": key,
                "NO_PROXY": "127.0.0.1,localhost",
                "no_proxy": "127.0.0.1,localhost",
                "REALSYS_TASK_FILE": str(task),
                "REALSYS_REWARD_FILE": str(Path(folder, "reward")),
                "AGENT_REPORT_FILE": str(report),
                "TMPDIR": folder,
            }
            problem, told = "", {"seen": (), "notes": ()}
            try:
                done = subprocess.run(
                    client.argv(scenario),
                    env=environment,
                    cwd=folder,
                    capture_output=True,
                    text=True,
                    timeout=PROGRAM_S,
                    check=False,
                )
            except subprocess.TimeoutExpired:
                problem = f"the program ran for more than {PROGRAM_S} s"
            else:
                if done.returncode == 0:
                    told = json.loads(report.read_text())
                else:
                    told_us = done.stderr.replace(f"{PROGRAMS.parents[3]}/", "")
                    tail = "\n".join(told_us.strip().splitlines()[-12:])
                    problem = f"the program ended with {done.returncode}: {tail}"
            reward = Path(folder, "reward")
            given = json.loads(reward.read_text())["reward"] if reward.exists() else 0.0
        self._post("/rl/set_reward", {"reward": given}, key)
        self._post("/rl/end_session", {}, key)
        played = Played(
            scenario=scenario,
            episode=str(session["session_id"]),
            seen=tuple(told["seen"]),
            notes=tuple(told["notes"]),
            problem=problem,
        )
        self.played.append(played)
        return played

    def play_at_once(self, client: Client, scenario: str, count: int) -> None:
        """Several programs at the same time, a session each."""
        with ThreadPoolExecutor(count) as pool:
            list(pool.map(lambda _: self.play(client, scenario), range(count)))

    def play_to_the_end(self, client: Client) -> None:
        """Plays plain sessions until the trial has all that it trains on, and is over."""
        deadline_s = time.monotonic() + TRIAL_S
        while True:
            try:
                session = self.start(2.0)
            except urllib.error.HTTPError as error:
                if error.code != 429:
                    raise
            except OSError:
                break  # the trial is over
            else:
                self.play_in(session, client, "plain", ())
            if state_of(self.files) not in State.live() or time.monotonic() > deadline_s:
                break
        view = wait_until(self.files, lambda v: v.state not in State.live(), timeout_s=60)
        if view.state is not State.COMPLETED:
            raise AssertionError(explain(self.files, view))

    def _post(self, path: str, body: Mapping[str, Any], key: str) -> dict[str, Any]:
        request = urllib.request.Request(
            self.url + path,
            json.dumps(body).encode(),
            {"Authorization": f"Bearer {key}", "Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=START_S) as response:
            read: dict[str, Any] = json.load(response)
        return read


def state_of(files: TrialFiles) -> State:
    """The trial's state now."""
    return wait_until(files, lambda _: True, timeout_s=60).state


@contextmanager
def external_run(
    trials: Trials, name: str, *words: str, experiment: str = "grpo-math-async"
) -> Iterator[ExternalRun]:
    """Launches a trial that waits for clients; ends what is left of it."""
    files = trials.launch(experiment, name, "task.agent=external", *settings(*words))
    try:
        found: list[Path] = []

        def is_open(view: Any) -> bool:
            assert view.state in State.live(), explain(files, view)
            found[:] = files.root.glob("rows/*/agents/0/endpoint.json")
            return bool(found)

        wait_until(files, is_open, timeout_s=START_S)
        told = json.loads(found[0].read_text())
        with ClientProxy(told["url"]) as proxy:
            yield ExternalRun(files, proxy, told["url"], told["admin_key"])
    finally:
        trials.end_all()


def kill_run(trials: Trials, client: Client, policy: Path, tokens: int, marker: Path) -> list[str]:
    """Runs a trial of programs (``task.agent=command``), one of them killed; returns what does not hold."""
    words = (f"actor.path={policy}", *TRAINING, f"exp_ctrl.benchmark_steps={KILL_STEPS}")
    words += (f"gen.max_new_tokens={tokens}", f"train_bs_n_seqs={KILL_QUESTIONS}")
    arguments = {
        "command": client.argv("kill"),
        "env": {"AGENT_KILLED_FILE": str(marker)},
        "timeout_s": PROGRAM_S,
    }
    given = [f"task.agent_args.{name}={json.dumps(value)}" for name, value in arguments.items()]
    files = trials.launch(
        "grpo-math-async",
        f"{client.name}-killed",
        "task.agent=command",
        *settings(*words),
        *given,
    )
    try:
        view = trials.wait(files, timeout_s=TRIAL_S)
        if view.state is not State.COMPLETED:
            return [explain(files, view)]
        rows, trained = log_rows(files), trained_ids(files)
        killed = [r for r in rows if "killed by a signal" in r.get("why", "")]
        found = [] if marker.exists() and killed else ["no question failed by the kill"]
        kept = {r["id"] for r in rows if r["outcome"] == "kept" and r["tries"]}
        found += [f"{r['id']} was not asked again" for r in killed if r["id"] not in kept]
        found += [f"{r['id']} was not trained on" for r in killed if r["id"] not in trained]
        if len(set(trained)) != len(trained) or len(trained) != KILL_STEPS * KILL_QUESTIONS:
            found.append(f"trained on {trained}")
        return found
    finally:
        trials.end_all()


# ---- what must hold ------------------------------------------------------------------------------


def log_rows(files: TrialFiles) -> list[dict[str, Any]]:
    """The lines of the rollouts log."""
    paths = sorted(files.root.glob("rows/*/rollouts/*.jsonl"))
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


def sample_of(episode: str) -> str:
    """``0-46.1`` of ``0-46.1-0``: the question, its try, and the episode's number."""
    return episode.rpartition("-")[0]


class FinishedRun:
    """What a trial left: its log, ledger and dump."""

    def __init__(self, files: TrialFiles, tokenizer: Any) -> None:
        self.files, self._tokenizer = files, tokenizer
        self.rows = log_rows(files)
        self.kept = {row["id"] for row in self.rows if row["outcome"] == "kept"}
        self.trained = trained_ids(files)
        self._dump = RolloutDump(files.phase(files.root).rollout_dump.glob("*.rollouts"))

    def problems(self, steps: int = STEPS) -> list[str]:
        """What does not hold of the whole trial."""
        twice = [name for name, count in Counter(self.trained).items() if count > 1]
        found = [f"trained twice: {twice}"] if twice else []
        missing = [name for name in self.trained if question_of(name) not in self.kept]
        if missing:
            found.append(f"trained on, and not kept by the rollouts log: {missing}")
        if len(self.trained) != steps * QUESTIONS:
            found.append(f"trained on {len(self.trained)} questions, not {steps * QUESTIONS}")
        return found

    def problems_of(self, played: Played, replies: Sequence[Reply]) -> list[str]:
        """What does not hold of an episode: its client's texts, the proxy's, the tokens trained on."""
        if played.problem:
            return [played.problem]
        own = [r for r in replies if r.id.startswith(f"chatcmpl-{played.episode}-")]
        found = []
        if not own or not played.seen:
            found.append("the program saw no answer")
        passed = Counter(_shape(t) for r in own if r.fault is None for t in r.texts)
        unknown = Counter(map(_shape, played.seen)) - passed
        if unknown:
            found.append(f"the client saw what was not written to it: {sorted(unknown)}")
        sample = sample_of(played.episode)
        if sample in self._dump.ids:
            decoded = list(self._texts(self._dump.read([sample])))
            read = {r.id: r.texts for r in own if r.fault is None and r.status == 200}
            for id_, texts in read.items():
                for text in texts:
                    if not _is_among(text, decoded):
                        found.append(f"{id_}: {text!r} is not among the tokens of {sample}")
        return found

    def _texts(self, sample: SequenceSample) -> Iterator[str]:
        """What the policy wrote, decoded answer by answer."""
        tokens = sample.data["packed_input_ids"].tolist()
        is_prompt = sample.data["prompt_mask"].tolist()
        run: list[int] = []
        starts = self._starts(sample)
        for place, token in enumerate(tokens):
            if (is_prompt[place] or place in starts) and run:
                yield self._decoded(run)
                run = []
            if not is_prompt[place]:
                run.append(token)
        if run:
            yield self._decoded(run)

    def _starts(self, sample: SequenceSample) -> set[int]:
        starts, at = set(), 0
        for length in sample.piece_lengths("packed_input_ids"):
            starts.add(at)
            at += length
        return starts

    def _decoded(self, tokens: Sequence[int]) -> str:
        if tokens[-1] == self._tokenizer.eos_token_id:
            tokens = tokens[:-1]
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=False))

    def calls_trained(self) -> float:
        """Requests an episode, as the metrics have it, over all steps."""
        rows = [r for r in metrics_of(self.files) if "rollout/agent/calls" in r]
        return sum(float(str(r["rollout/agent/calls"])) for r in rows) / max(1, len(rows))


def question_of(name: str) -> str:
    """``0-46`` of ``0-46.1``: the question's id in the rollouts log."""
    return name.partition(".")[0]


def _shape(text: str) -> str:
    return text.strip()


def _is_among(text: str, decoded: Sequence[str]) -> bool:
    """A reply's content is what was decoded; where calls were read out of it, its beginning."""
    wanted = text.strip()
    return any(
        wanted == d.strip() or ("<tool_call>" in d and d.strip().startswith(wanted))
        for d in decoded
    )


def problems_of_faults(replies: Sequence[Reply], episode: str) -> list[str]:
    """A reply that was lost comes again: with the id that it had, so it was sampled once."""
    own = [r for r in replies if r.id.startswith(f"chatcmpl-{episode}-")]
    found = []
    for place, reply in enumerate(own):
        if reply.fault is None or (reply.fault is Fault.CUT and not reply.is_cut):
            continue
        later = [r for r in own[place + 1 :] if _same_question(r.question, reply.question)]
        if not later:
            found.append(f"{reply.fault} of {reply.id}: the client did not ask again")
        elif later[0].id != reply.id:
            found.append(f"{reply.fault} of {reply.id}: sampled again as {later[0].id}")
    return found


def _same_question(one: bytes, other: bytes) -> bool:
    return bool(json.loads(one) == json.loads(other))
