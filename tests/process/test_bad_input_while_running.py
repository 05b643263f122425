"""What only shows while a trial runs: each ends with an error that says what to do, and can go on.

A port that is taken can't happen: every socket of a trial is bound to port 0, where the kernel picks
a free one, and its address is told to the peers through name resolution. What is tested of it is
that two trials run at the same time without interfering.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from paced import Pace
from real_trials import (
    SMALL_PPO,
    SMALL_PPO_STEPS,
    Trials,
    explain,
    kill_everything,
    metrics_of,
    name_of,
    wait_until,
)

from launcher.terminal.exit_codes import ExitCode
from launcher.trials.trial_view import TrialView
from realsys.models.prompt_lengths import prompt_lengths
from realsys.trial.records import TrialFiles
from realsys.trial.trial_state import State

pytestmark = pytest.mark.process

SMALL_SFT = (
    "init.hidden_size=32",
    "init.num_layers=1",
    "init.num_heads=2",
    "init.num_kv_heads=1",
    "task.train_size=64",
    "train_bs_n_seqs=16",
    "exp_ctrl.benchmark_steps=4",
    "tensorboard=false",
    "scheduling.model_worker.cpu=1",
)
PLUG_IN = '''
from dataclasses import dataclass, replace

from experiments.sft import SFTExperiment
from realsys.api.model import ModelInterfaceAbstraction
from realsys.api.registry import register_experiment, register_interface
from realsys.interfaces.supervised import SFTInterface


@dataclass(frozen=True)
class Divides(SFTInterface):
    def train_step(self, model, data, mb_spec):
        if model.version.global_step == 2:
            raise ZeroDivisionError("my own mistake")
        return super().train_step(model, data, mb_spec)


@dataclass(frozen=True, kw_only=True)
class Mine(SFTExperiment):
    """Fails in its third step."""

    def initial_setup(self):
        config = super().initial_setup()
        call = replace(config.model_rpcs[0], interface_impl=ModelInterfaceAbstraction("divides"))
        return replace(config, model_rpcs=(call,))


register_interface("divides", Divides)
register_experiment("mine", Mine)
'''


def status_of(trials: Trials, files: TrialFiles) -> str:
    """What `realsys status` prints."""
    done = trials.run("status", name_of(files))
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def assert_told(text: str, *wanted: str) -> None:
    """All of ``wanted`` are in ``text``."""
    for piece in wanted:
        assert piece in text, f"{piece!r} is not in:\n{text}"


def failed(trials: Trials, files: TrialFiles) -> TrialView:
    """Waits for the end of a trial that must fail."""
    view = trials.wait(files, timeout_s=120)
    assert view.state is State.FAILED, explain(files, view)
    return view


# ---- out of disk ----------------------------------------------------------------------------


@contextmanager
def small_disk(folder: Path, num_bytes: int) -> Iterator[Path]:
    """``folder`` on a file system of its own with ``num_bytes``; as before when this ends."""
    folder.mkdir(parents=True, exist_ok=True)
    options = f"size={num_bytes},mode=0755"  # by itself it is sticky, as a root for several users
    mount = ["mount", "-t", "tmpfs", "-o", options, "realsys-test", str(folder)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"needs the right to mount a tmpfs: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        for trial in folder.glob("runs/*/*/*"):
            kill_everything(TrialFiles(trial))
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(disk: Path) -> Path:
    """Takes all that is left of a disk; returns the file to remove."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))
    return filler


def test_a_checkpoint_that_the_disk_has_no_room_for_is_named(
    trials: Trials, tiny_policy: Path, tmp_path: Path
) -> None:
    pace = Pace(tmp_path, 10.0)  # the first checkpoint, after step 3, finds the small disk
    words = (f"actor.path={tiny_policy}", *SMALL_PPO, *pace.words)
    files = trials.launch("ppo-math", "full", *words)
    with small_disk(files.phase(files.root).recover, 64 << 10):
        pace.set(0.0)
        view = failed(trials, files)
        text = status_of(trials, files)
    assert view.step == 3, text
    assert_told(text, "model_worker/0", "the checkpoint can't be written")
    assert_told(text, "model_worker-0.pt", "fix       free space", "realsys resume ppo-math/full")


def test_a_disk_without_a_byte_left_ends_the_run_and_a_resume_goes_on(
    tmp_path: Path, tiny_policy: Path
) -> None:
    with small_disk(tmp_path / "disk", 24 << 20) as disk:
        trials = Trials(disk)
        pace = Pace(tmp_path, 1.2)  # it has not ended before the disk is full
        words = (f"actor.path={tiny_policy}", *SMALL_PPO, *pace.words)
        files = trials.launch("ppo-math", "full", *words)
        trials.wait_for_step(files, 4)
        filler = fill(disk)
        pace.set(0.0)
        view = trials.wait(files, timeout_s=120)
        # There may be no room for the exit marker either; then it looks lost.
        assert view.state in (State.FAILED, State.LOST), explain(files, view)
        text = status_of(trials, files)
        assert_told(text, f"no space left on the disk of {files.root}: free some, then resume")
        assert_told(text, "realsys resume ppo-math/full")
        filler.unlink()
        trials.resume(files)
        view = trials.wait(files)
        assert view.state is State.COMPLETED, explain(files, view)
        assert [row["step"] for row in metrics_of(files)] == [0, *range(1, SMALL_PPO_STEPS + 1)]


# ---- what a worker finds out ----------------------------------------------------------------


def test_a_prompt_that_its_chat_template_makes_too_long_is_named(
    trials: Trials, tiny_policy: Path, tmp_path: Path
) -> None:
    """The launcher looks at some of many questions: the worker tells of the others, before step 1."""
    chatty = tmp_path / "chatty"
    shutil.copytree(tiny_policy, chatty)
    template = "{% for m in messages %}" + "please " * 30 + "{{ m['content'] }}{% endfor %}"
    (chatty / "chat_template.jinja").write_text(template)
    questions = tmp_path / "questions.jsonl"
    lines = [json.dumps({"prompt": "What is 3 plus 1?", "answer": "4"})] * 1999
    lines[1] = json.dumps({"prompt": "ÄÖÜ" * 5, "answer": "4"})  # fewer characters, more tokens
    questions.write_text("\n".join(lines) + "\n")
    (limit,) = prompt_lengths(chatty, ["What is 3 plus 1?"]) or ()
    files = trials.launch(
        "ppo-math",
        "chatty",
        f"actor.path={chatty}",
        *[w for w in SMALL_PPO if not w.startswith("task.eval_size")],
        f"task.path={questions}",
        "task.eval_size=0",
        f"task.max_prompt_len={limit}",
    )
    failed(trials, files)
    text = status_of(trials, files)
    assert_told(text, "model_worker/0", "the prompt of record 2 has ", f"the limit is {limit}")
    assert [row["step"] for row in metrics_of(files)] == []
    assert_told(text, "raise max_prompt_len to", "realsys resume ppo-math/chatty")


def test_an_interface_that_raises_is_named_with_worker_error_and_file(
    trials: Trials, tmp_path: Path
) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text(PLUG_IN)
    files = trials.launch("mine", "raises", "--import", str(mine), *SMALL_SFT)
    view = failed(trials, files)
    text = status_of(trials, files)
    assert view.step == 2, text
    assert_told(text, "model_worker/0", "ZeroDivisionError: my own mistake", str(mine))
    assert_told(text, "realsys resume mine/raises")

    mine.write_text("import no_such_module\n" + PLUG_IN)  # a repair that went wrong
    done = trials.run("resume", "mine/raises", "--detach")
    assert done.returncode == ExitCode.CONFIG_INVALID
    assert_told(
        done.stderr, "importing it failed: ModuleNotFoundError", "no_such_module", str(mine)
    )
    assert_told(done.stderr, "repair the file")
    assert len(files.all_attempts()) == 1, "nothing was to be started"

    mine.write_text(PLUG_IN.replace("global_step == 2", "global_step == -1"))
    trials.resume(files)
    view = trials.wait(files)
    assert view.state is State.COMPLETED, explain(files, view)


# ---- from the beginning, and side by side ---------------------------------------------------


def test_two_trials_at_the_same_time_and_one_killed_before_its_first_checkpoint(
    trials: Trials,
) -> None:
    words = [word for word in SMALL_SFT if "benchmark_steps" not in word]
    words.append("exp_ctrl.total_train_epochs=8")  # of 4 steps
    killed = trials.launch("sft-math", "killed", *words)
    other = trials.launch("sft-math", "other", *words)
    trials.wait_for_step(killed, 0)
    kill_everything(killed)
    view = wait_until(killed, lambda v: v.state not in State.live(), timeout_s=60)
    assert view.state is State.LOST, explain(killed, view)
    assert not list(killed.phase(killed.root).recover.glob("step-*"))
    trials.resume(killed)  # while the other still runs, or has just ended
    for files in (killed, other):
        view = trials.wait(files)
        assert view.state is State.COMPLETED, explain(files, view)
    steps = [row["step"] for row in metrics_of(killed)]
    assert steps == [*range(1, 33)]
    assert metrics_of(killed) == metrics_of(other)


RULE = """
from realsys.api.registry import register_reward

def odd(*, response, answer):
    return float("inf") if answer == "6" else len(response) % 7 / 7

register_reward("odd", odd)
"""


@pytest.mark.parametrize(
    ("experiment", "worker", "counted"),
    [
        ("ppo-math", "model_worker", "actor/reward/answers_set_aside"),
        ("ppo-math-async", "master_worker", "rollout/set_aside"),
    ],
)
def test_a_record_for_which_the_rule_gives_no_number_is_set_aside_and_the_run_goes_on(
    trials: Trials, tiny_policy: Path, tmp_path: Path, experiment: str, worker: str, counted: str
) -> None:
    rule, questions = tmp_path / "rule.py", tmp_path / "questions.jsonl"
    rule.write_text(RULE)
    lines = [
        json.dumps({"prompt": f"What is {i} plus 1?", "answer": str(i + 1)}) for i in range(32)
    ]
    questions.write_text("\n".join(lines) + "\n")
    files = trials.launch(
        experiment,
        "odd",
        "--import",
        str(rule),
        f"actor.path={tiny_policy}",
        *[w for w in SMALL_PPO if not w.startswith(("task.eval_size", "task.train_size"))],
        f"task.path={questions}",
        "task.eval_size=0",
        "task.max_prompt_len=64",
        "task.reward=odd",
    )
    view = trials.wait(files)
    assert view.state is State.COMPLETED, explain(files, view)
    assert max(row.get(counted, 0) for row in metrics_of(files)) > 0
    done = trials.run("logs", name_of(files), worker)
    assert_told(done.stdout, "record set aside", "'odd' returned inf", "What is 5 plus 1?")


@pytest.mark.parametrize(
    ("statement", "why"),
    [
        ("raise SystemExit(0)", "code in it called exit: SystemExit: 0 (in train_step, "),
        ("__import__('os')._exit(0)", "ended with exit code 0 before its work was done"),
    ],
    ids=["sys.exit", "os._exit"],
)
def test_code_that_ends_the_worker_with_a_good_code_is_that_workers_failure(
    trials: Trials, tmp_path: Path, statement: str, why: str
) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text(PLUG_IN.replace('raise ZeroDivisionError("my own mistake")', statement))
    files = trials.launch("mine", "exits", "--import", str(mine), *SMALL_SFT)
    view = failed(trials, files)
    assert view.exit is not None
    assert view.exit.first_failure is not None
    assert view.exit.first_failure.worker == "model_worker/0", view.exit
    assert view.reason.startswith("model_worker/0 (pid "), view.reason
    assert why in view.reason
