"""Pages of the docs, run as they are written: each launch of a page, on tiny models, to its last step."""

from __future__ import annotations

import json
import math
import os
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import page_stories as stories
import pytest
from doc_pages import DocPage, in_folder
from near import near
from paced import Pace
from real_trials import (
    Trials,
    explain,
    kill_everything,
    metrics_of,
    trained_ids,
    wait_until,
    weights_of,
)

from realsys.data.harbor.task_directory import read_task
from realsys.data.sources.record_parts import items_of_epoch, place
from realsys.rewards.harbor import try_tasks
from realsys.rewards.harbor.harbor_rule import HarborTests
from realsys.trial.records import TrialFiles
from realsys.trial.trial_state import State

STEPS = 2
RL = (  # a user's rule is asked in a fork for each answer
    "scheduling.model_worker.cpu=1",
    "task.eval_size=2",
    "train_bs_n_seqs=4",
    "group_size=2",
    "gen.max_new_tokens=8",
    f"exp_ctrl.benchmark_steps={STEPS}",
    "tensorboard=false",
)
MADE = (*RL, "task.train_size=64")  # of tasks that make their questions
INIT = ("hidden_size=32", "num_layers=1", "num_heads=2", "num_kv_heads=1")
SFT = (  # where a page's launch makes its policy
    *(f"sft.init.{word}" for word in INIT),
    "sft.task.train_size=480",
    "sft.task.eval_size=0",
    "sft.exp_ctrl.benchmark_steps=6",
    "sft.scheduling.model_worker.cpu=1",
)
OF_A_MODEL = (*MADE, "actor.path=MODEL")  # what fine-tuning gives is shown by other pages
# Where a step must have groups whose answers differ, and the samples questions of two kinds.
ENOUGH = {"train_bs_n_seqs=4": "train_bs_n_seqs=8", "task.eval_size=2": "task.eval_size=8"}
MORE, MORE_OF_A_MODEL = (
    tuple(ENOUGH.get(word, word) for word in words) for words in (MADE, OF_A_MODEL)
)
SFT_ALONE = (
    *(f"init.{word}" for word in INIT),
    *("task.train_size=64", "train_bs_n_seqs=16", "exp_ctrl.benchmark_steps=4"),
)
ON_PAIRS = ("train_bs_n_seqs=16", "scheduling.model_worker.cpu=1", "tensorboard=false")
# docs/mixtures.md: what it holds out, and its weights.
SIZES, HELD_OUT = {"sums": 24, "words": 5, "stories": 12}, {"sums": 4, "words": 6, "stories": 8}
WEIGHTS = {"sums": 2.0, "words": 1.0, "stories": 1.0}
ITEMS = {"sums": 24, "words": 12, "stories": 12}
EPOCHS, BATCH = 2, 8
MIXED = (
    "scheduling.model_worker.cpu=1",
    *(f"task.sources.{name}.eval_size={size}" for name, size in HELD_OUT.items()),
    "task.sources.stories.train_size=12",
    f"train_bs_n_seqs={BATCH}",
    "group_size=2",
    "gen.max_new_tokens=6",
    f"exp_ctrl.total_train_epochs={EPOCHS}",
    "exp_ctrl.ckpt_freq_steps=2",
    "exp_ctrl.ckpt_freq_secs=none",
    "exp_ctrl.eval_freq_steps=4",
)
MIXED_STEPS = EPOCHS * sum(ITEMS.values()) // BATCH


@dataclass(frozen=True)
class Launched:
    """A launch of a page that has completed: which of the page's, its words, what it left."""

    number: int
    words: list[str]
    files: TrialFiles
    folder: Path
    rows: list[dict[str, float]]

    def having(self, metric: str, *, steps: int = STEPS) -> list[dict[str, float]]:
        """The steps' rows that have a metric."""
        found = [row for row in self.rows if metric in row]
        assert len(found) == steps, self.words
        return found

    @property
    def reward(self) -> str:
        """What names of the rule's metrics begin with."""
        return "rollout/reward/" if "schedule=async" in self.words else "rew_inf/reward/"

    def parts(self, row: dict[str, float]) -> dict[str, float]:
        """What the rule tells of a step."""
        start = self.reward
        return {k.removeprefix(start): v for k, v in row.items() if k.startswith(start)}


# ---- what is looked at when a launch of a page has completed ---------------------------------


def scored(launch: Launched) -> None:
    for row in launch.having("critic/score/mean"):
        assert 0 <= row["critic/score/mean"] <= 1


def played(launch: Launched) -> None:
    for row in launch.having("rollout/agent/calls"):
        assert row["rollout/agent/calls"] >= 1
        assert row["rollout/agent/branches"] == 1
        assert row["rollout/agent/failed"] == 0
        assert row["rollout/agent/unread_answers"] == 0
        if launch.number == 1:  # its own reward: 1 for an empty answer, less for a longer one
            assert 0 < row["rollout/reward"] <= 1


def took_turns(launch: Launched) -> None:
    for row in launch.having("rollout/agent/turns"):
        assert row["rollout/agent/turns"] >= 1
        assert row["rollout/agent/branches"] == 1
        assert row["rollout/agent/full_context"] == 0


def trained(launch: Launched) -> None:
    rows = launch.having("actor/actor_loss")
    assert all(math.isfinite(row["actor/actor_loss"]) for row in rows)
    assert any(row["actor/grad_norm"] > 0 for row in rows)


def scored_by_tests(launch: Launched) -> None:
    rows = launch.having("critic/score/mean")
    shares = [row[f"{launch.reward}tests_passed"] for row in rows]
    assert all(0 <= share <= 1 for share in shares)
    if launch.reward == "rew_inf/reward/":  # of the same answers
        assert shares == pytest.approx([row["critic/score/mean"] for row in rows], abs=1e-6)
    assert "answers_set_aside" not in " ".join(rows[0])


def scored_by_boxes(launch: Launched) -> None:
    """A random policy writes no file."""
    for row in launch.having("critic/score/mean"):
        assert (
            launch.parts(row).items() >= {"written": 0.0, "right": 0.0, "no_verdict": 0.0}.items()
        )
        assert row["critic/score/mean"] == 0.0
        assert "answers_set_aside" not in " ".join(row)
        if "task.agent=harbor" in launch.words:
            assert row["rollout/agent/turns"] == row["rollout/agent/branches"] == 1


def weighed(launch: Launched) -> None:
    """A reward model's run has its model there; the others have the two parts' weighted sum."""
    if launch.number == 0:
        assert [row for row in launch.rows if "eval/accuracy" in row][-1]["eval/accuracy"] == 1.0
        found = launch.files.root / "checkpoints" / "model" / "latest"
        (launch.folder / "MODEL").symlink_to(found)
        return
    weight, rule_weight = (0.3, 1.0) if launch.number == 1 else (1.0, 0.0)
    for row in launch.having("critic/score/mean"):
        model, rule = (row[f"rew_inf/reward/{part}"] for part in ("model", "rule"))
        assert row["critic/score/mean"] == pytest.approx(
            weight * model + rule_weight * rule, abs=1e-5
        )


def in_parts(launch: Launched) -> None:
    """The mean that is trained on is the weighted sum of what is logged."""
    steps = {"steps", "cut", "correct"}
    of_a_sum = {"worked", "brief", "on_topic", *(f"worked/{name}" for name in steps)}
    for row in launch.having("critic/score/mean"):
        parts = launch.parts(row)
        assert set(parts) == (steps if launch.number == 0 else of_a_sum)
        assert all(0 <= value <= 1 for value in parts.values())
        if launch.number == 1:
            total = parts["worked"] + 0.1 * parts["brief"] + 0.05 * parts["on_topic"]
            assert row["critic/score/mean"] == near(total)


def lower_loss(launch: Launched) -> None:
    losses = [row["sft_train/loss"] for row in launch.rows]
    assert len(losses) == 4
    assert losses[-1] < losses[0], losses


def better_than_chance(launch: Launched) -> None:
    """Held-out accuracy rises."""
    rows = [row for row in launch.rows if "eval/accuracy" in row]
    before, after = rows[0], rows[-1]
    if launch.number == 0:  # dpo: policy and reference are one model
        assert before["eval/accuracy"] == 0.5
        assert before["eval/loss"] == near(math.log(2), rel=1e-4)
    assert after["eval/accuracy"] >= 0.8
    assert after["eval/loss"] < before["eval/loss"]
    product = launch.files.root / "checkpoints" / "model" / "latest" / "config.json"
    assert json.loads(product.read_text())["architectures"] == ["LlamaForCausalLM"]


def of_the_generators(launch: Launched) -> None:
    scored(launch)
    lines = launch.files.phase(launch.files.root).samples.read_text().splitlines()
    prompts = " ".join(json.loads(line)["prompt"] for line in lines)
    assert "Spell this word backward" in prompts or "calculat" in prompts.lower()


def letters(launch: Launched) -> None:
    """The reward is the mean of the page's ``score``: shares of three letters, over 8 × 2 answers."""
    launch.having("actor/actor_loss")
    if launch.number == 0:
        for row in launch.having("critic/score/mean"):
            mean = row["critic/score/mean"]
            assert 0 <= mean <= 1
            assert mean * 48 == pytest.approx(round(mean * 48), abs=1e-3)
    if "auto_eval=true" in launch.words:
        assert (launch.files.root / "evaluations.jsonl").read_text(), "of saved checkpoints"


def by_source(launch: Launched) -> None:
    """Each record as often as its weight says, and each source's own numbers."""
    assert_each_record_as_often_as_its_weight_says(launch.files)
    rows = launch.having("critic/score/mean", steps=MIXED_STEPS)
    told = [launch.parts(row) for row in rows]
    parts = {f"{name}{part}" for name in SIZES for part in ("", "/correct", "/share")}
    assert set().union(*told) == parts | {"sums/math_verify", "sums/brief"}
    shares: Counter[str] = Counter()
    for row in told:
        own = {name: row[f"{name}/share"] for name in SIZES}
        assert sum(own.values()) == pytest.approx(1.0)
        assert {name for name in SIZES if name in row} == {n for n, share in own.items() if share}
        shares.update({name: round(share * BATCH) for name, share in own.items()})
    if launch.number == 0:  # the numbers of a step's answers, over the run
        assert shares == Counter({name: EPOCHS * num for name, num in ITEMS.items()})
        for row, one in zip(rows, told, strict=True):
            mean = sum(one[name] * one[f"{name}/share"] for name in SIZES if name in one)
            assert row["critic/score/mean"] == near(mean)
    last = [row for row in launch.rows if "eval/accuracy" in row][-1]
    assert {name: last[f"eval/num_problems/{name}"] for name in SIZES} == HELD_OUT
    right = sum(last[f"eval/accuracy/{name}"] * HELD_OUT[name] for name in SIZES)
    assert right == pytest.approx(last["eval/accuracy"] * sum(HELD_OUT.values()))


def assert_each_record_as_often_as_its_weight_says(files: TrialFiles) -> None:
    """By the ledger: what was trained, each item of each epoch as the record that it stands for."""
    assert items_of_epoch(SIZES, WEIGHTS) == ITEMS
    trained: Counter[tuple[str, str, int]] = Counter()
    for id_ in trained_ids(files):
        epoch, _, index = id_.partition("-")
        name, number = place(ITEMS, int(index))
        trained[epoch, name, number % SIZES[name]] += 1
    expected = {
        (str(epoch), name, record): ITEMS[name] // size + (record < ITEMS[name] % size)
        for epoch in range(EPOCHS)
        for name, size in SIZES.items()
        for record in range(size)
    }
    assert trained == Counter(expected)


# ---- the pages -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Page:
    """A page's launches that have a word, what makes them small, and what each shows.

    Args:
        code: files of its Python blocks, in their order.
        small: settings of a launch; ``smaller``: of an experiment that needs others.
        prepare: writes its data and models.
    """

    file: str
    launches: int
    small: tuple[str, ...]
    shows: Callable[[Launched], None]
    having: str = ""
    code: tuple[str, ...] = ()
    most_lines: int = 40  # of a user's code
    prepare: Callable[[DocPage, Path], None] | None = None
    smaller: dict[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.file} {self.having}".strip()

    def write(self, folder: Path) -> None:
        """The page's files, and what they need."""
        page = DocPage(self.file)
        if self.code:
            page.write_code(folder, *self.code, most_lines=self.most_lines)
        if self.prepare:
            self.prepare(page, folder)

    def commands(self, folder: Path) -> list[list[str]]:
        """Words of the launches, but for what makes them small."""
        found = DocPage(self.file).commands("launch", self.having)
        assert len(found) == self.launches
        return [in_folder(folder, words) for words in found]


OWN_LOSS = ("--import", "odd.py", "task.reward=odd")
PAGES = [
    Page("your_agent.md", 2, MADE, played, code=("my_agent.py", "my_program.py"),
         having="actor.path=MODEL", prepare=stories.for_sums),
    Page("environments.md", 1, MADE, took_turns, having="task.env=mcp", code=("my_tools.py",),
         prepare=stories.for_sums),
    Page("adding_an_algorithm.md", 4, (*MORE_OF_A_MODEL, *OWN_LOSS), trained,
         code=("gmpo.py", "opo.py"), most_lines=30, prepare=stories.odd_sums),
    Page("adding_an_interface.md", 1, SFT_ALONE, lower_loss, code=("my_interface.py",),
         most_lines=80),
    Page("adding_a_backend.md", 1, SFT_ALONE, lower_loss, code=("my_backend.py",), most_lines=80),
    Page("code_tasks.md", 3, (*MADE, *SFT), scored_by_tests, having="grpo-functions",
         code=("functions.py",)),
    Page("code_tasks.md", 1, RL, scored_by_tests, having="task=file", prepare=stories.programs),
    Page("your_data.md", 2, RL, scored, having="grpo-words", code=("words.py",),
         prepare=stories.words),
    Page("chat_data.md", 2, (*RL, "sft.train_bs_n_seqs=8", *SFT[-2:]), scored, having="grpo-chats",
         code=("chats.py",), prepare=stories.chats),
    Page("harbor.md", 3, RL, scored_by_boxes, having="task=harbor",
         prepare=stories.harbor_tasks),
    Page("reward_models.md", 3, MADE, weighed, prepare=stories.one_pair, smaller={
         "reward-model": (*ON_PAIRS, "exp_ctrl.total_train_epochs=2", "task.eval_size=16")}),
    Page("rewards.md", 3, OF_A_MODEL, in_parts, having="my_rewards.py", code=("my_rewards.py",),
         prepare=stories.for_sums),
    Page("your_task.md", 4, (*MORE, *SFT), letters, having="grpo-backwards",
         code=("backwards.py",)),
    Page("reasoning_gym.md", 2, MORE_OF_A_MODEL, of_the_generators, having="two_tasks.yaml",
         prepare=stories.two_generators),
    Page("preferences.md", 3,
         (*ON_PAIRS, "exp_ctrl.total_train_epochs=3", "task.eval_size=32", "model.optimizer.lr=3e-3"),
         better_than_chance, code=("slic.py",), prepare=stories.pairs),
    Page("mixtures.md", 2, MIXED, by_source, having="grpo-mixed", code=("mixed.py",),
         prepare=stories.two_sources),
]  # fmt: skip


@pytest.fixture(autouse=True)
def in_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a user would type it, in an environment that is activated."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")


# No page waits for another under `pytest --at-once`.
EACH = [pytest.param(p, id=p.name, marks=pytest.mark.together(p.name)) for p in PAGES]


@pytest.mark.parametrize("page", EACH)
def test_a_page_runs_as_written(trials: Trials, tmp_path: Path, page: Page) -> None:
    """One launch after another under one file root: a starting policy is made once."""
    page.write(tmp_path)
    for number, (experiment, *words) in enumerate(page.commands(tmp_path)):
        small = in_folder(tmp_path, list(page.smaller.get(experiment, page.small)))
        # A saved checkpoint in the run of two steps; the tiny policy writes no fenced block.
        given = [word.replace("save_freq_steps=10", "save_freq_steps=1") for word in words]
        if page.file == "harbor.md" and "task.agent=harbor" not in words:
            given.append("task.reward_args.harbor.fenced=false")
        files = trials.launch(experiment, f"run{number}", *in_folder(tmp_path, given), *small)
        view = trials.wait(files)
        assert view.state is State.COMPLETED, explain(files, view)
        rows: list[dict[str, float]] = metrics_of(files)  # type: ignore[assignment]
        page.shows(Launched(number, words, files, tmp_path, rows))
        if page.file == "mixtures.md" and number == 0:
            killed_and_resumed(trials, [experiment, *given, *small], files, tmp_path)


def killed_and_resumed(
    trials: Trials, words: list[str], undisturbed: TrialFiles, folder: Path
) -> None:
    """Killed after a step without a checkpoint: as the run nobody disturbed, each record as often."""
    pace = Pace(folder, 0.7, sequences=4)
    of_stories = [w.replace("task.reward=", "task.sources.stories.reward=") for w in pace.words]
    files = trials.launch(words[0], "killed", *words[1:], *of_stories)
    trials.wait_for_step(files, 3)
    kill_everything(files)
    view = wait_until(files, lambda v: v.state not in State.live(), timeout_s=60)
    assert view.state is State.LOST
    pace.set(0.0)
    trials.resume(files)
    view = trials.wait(files)
    assert view.state is State.COMPLETED, explain(files, view)
    assert_each_record_as_often_as_its_weight_says(files)
    assert trained_ids(files) == trained_ids(undisturbed)
    assert metrics_of(files) == metrics_of(undisturbed)
    assert weights_of(files, "actor") == weights_of(undisturbed, "actor")


def test_a_users_task_names_no_call_of_the_graph() -> None:
    (block,) = DocPage("your_task.md").blocks("python")
    assert not [c for c in ("actor_gen", "rew_inf", "actor_train", "inference") if c in block]


@pytest.mark.parametrize(
    ("page", "shown"),
    [
        ("your_data.md", "Write it backwards: aab\n\nknown answer: baa"),
        ("chat_data.md", "<|system|>You write words backwards.<eos>\n<|user|>Backwards: aab<eos>\n"
         "<|assistant|>\nknown answer: baa"),
    ],
)  # fmt: skip
def test_a_page_shows_its_records(trials: Trials, tmp_path: Path, page: str, shown: str) -> None:
    """`realsys data show` on what the page's launch is trained on."""
    (one,) = [one for one in PAGES if one.file == page]
    one.write(tmp_path)
    words = DocPage(page).commands("data") or [["show", *one.commands(tmp_path)[0]]]
    done = trials.run("data", *in_folder(tmp_path, words[0]), "task.eval_size=8")
    assert done.returncode == 0, done.stderr
    assert shown in done.stdout


def test_the_solution_of_the_harbor_page_gets_1_and_a_wrong_one_0(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = DocPage("harbor.md")
    task = stories.write_harbor_tasks(page, tmp_path, ("count-lines",))
    assert try_tasks.main([str(task.parent), "disk=64"]) == 0
    assert capsys.readouterr().out == page.blocks("text")[1]
    rule = HarborTests(disk=64)
    for script, rewards in {
        str(read_task(task).answer): {"written": 1.0, "right": 1.0},
        "echo 4 > lines.txt": {"written": 1.0, "right": 0.0},
        "cat lines.txt": {"written": 0.0, "right": 0.0},
    }.items():
        assert rule.verdict(script, task).rewards == rewards, script
    assert rule._sandbox is not None
    rule._sandbox._sandbox.close()
