"""A resume with other settings, up to the hand-over: the plan made, what is refused, what is written.

Nothing is started: the hand-over is noted down. `tests/process/test_resume_settings.py` starts the trials.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import golden
import pytest

from launcher.cli.command_line import run
from launcher.control.replay_trial import replay_warnings
from launcher.job.job_allocation import JobRequest
from launcher.plan.resolve import resolve
from launcher.sites.places import user_name
from launcher.submit import plan_change
from launcher.submit import submit as submit_module
from launcher.submit.job_options import JobOptions
from launcher.submit.plan_change import read_stored_plan, replace_plan, restore_plan
from launcher.submit.planning import default_experiment
from launcher.submit.remake import RequestedChanges
from launcher.submit.submit import make_trial, record_of, resubmit, trial_lock
from launcher.trials.status import trial_view
from launcher.trials.submission import Submission
from realsys.api.basics.reward import GOES_ON, WITH_QUESTION
from realsys.api.cluster import ClusterSpec, PartitionSpec, SlurmSpec
from realsys.api.errors import ClusterError, ConfigError, ConfigErrors, RealsysError, TrialError
from realsys.api.experiment import ChosenSetting
from realsys.api.plan import LaunchPlan, plan_hash, plan_text, read_plan
from realsys.config.overrides import with_settings
from realsys.trial.records import (
    AttemptRecord,
    ExitMarker,
    Result,
    TrialFiles,
    TrialRecord,
    read_record,
    write_record,
)

CONSTANT = tuple(
    f"{role}.optimizer.{setting}"
    for role in ("actor", "critic")
    for setting in ("lr_schedule=constant", "warmup_steps_proportion=0")
)


@dataclass
class Site:
    """A file root, and what was handed over."""

    root: Path
    started: list[tuple[LaunchPlan, str]] = field(default_factory=list)
    told: list[str] = field(default_factory=list)
    refuses: str = ""

    def cluster(self, *, slurm: bool) -> ClusterSpec:
        spec = ClusterSpec(
            file_root=str(self.root), name_resolve=f"file://{self.root}/name_resolve"
        )
        if not slurm:
            return spec
        parts = {
            "cpu": PartitionSpec(
                nodes=4, cpus=64, threads_per_core=1, memory_mib=256000, max_time="1-00:00:00"
            ),
            "short": PartitionSpec(nodes=4, cpus=64, threads_per_core=1, memory_mib=256000),
        }
        return replace(
            spec,
            name="site",
            scheduler="slurm",
            partitions=parts,
            slurm=SlurmSpec(partition="cpu", time_limit="1:00:00", accounting=False),
        )

    def launched(
        self,
        *words: str,
        slurm: bool = False,
        request: JobRequest | None = None,
        name: str = "ppo-math",
        change: Callable[[LaunchPlan], LaunchPlan] = lambda plan: plan,
        config: Path | None = None,
    ) -> TrialFiles:
        """A trial's folder as a launch leaves it."""
        plan = resolve(
            name,
            with_settings(default_experiment(name), words=words, config=config),
            cluster=self.cluster(slurm=slurm),
            trial_name="run1",
            user=user_name(),
            request=request,
        )
        plan = change(plan)
        return make_trial(plan, record_of(plan, ("realsys", "launch")))

    def resume(
        self, files: TrialFiles, *words: str, config: Path | None = None, **job: Any
    ) -> LaunchPlan:
        """The plan that was handed over."""
        wish = RequestedChanges(words=words, config=config, job=JobOptions(**job))
        resubmit(
            files, changes=wish, command=("realsys", "resume", *words), report=self.told.append
        )
        plan, handed = self.started[-1]
        record = record_in(files)
        assert handed == record.plan_hash == plan_hash(files.plan.read_text())
        return plan

    def ended(self, files: TrialFiles, result: Result, attempt: int = 1) -> None:
        """An attempt that is over."""
        me = files.attempt(attempt)
        write_record(
            me.record,
            AttemptRecord(
                number=attempt,
                token="t",
                host="h",
                supervisor_pid=1,
                supervisor_start=1,
                started_at=1.0,
            ),
        )
        marker = ExitMarker(result=result, attempt=attempt, ended_at=2.0, phase="main")
        write_record(me.exit, marker)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    made = Site(tmp_path / "root")
    made.root.mkdir()

    def start(files: TrialFiles, plan: LaunchPlan, hash_of_plan: str) -> Submission:
        if made.refuses:
            raise ClusterError(made.refuses, where="sbatch", fix="ask for less")
        made.started.append((plan, hash_of_plan))
        return Submission(job_id="1", host="h", after_attempt=0, at=1.0)

    monkeypatch.setattr(submit_module, "start_attempt", start)
    return made


def record_in(files: TrialFiles) -> TrialRecord:
    found = read_record(TrialRecord, files.record)
    assert found is not None
    return found


def everything(root: Path) -> dict[str, tuple[int, bytes]]:
    """Mode and content of each file; but the lock, which holds nothing."""
    return {
        str(p.relative_to(root)): (p.stat().st_mode, b"" if p.is_dir() else p.read_bytes())
        for p in sorted(root.rglob("*"))
        if p.name != "lock"
    }


def problems_of(error: RealsysError) -> list[ConfigError]:
    assert isinstance(error, ConfigError)
    return list(error.problems) if isinstance(error, ConfigErrors) else [error]


# ---- what is made ---------------------------------------------------------------------------------


def test_a_setting_is_changed_told_and_noted_down(site: Site) -> None:
    files = site.launched("task.max_prompt_len=128")
    before = read_plan(files.plan)
    site.ended(files, Result.FAILED)
    plan = site.resume(files, "task.max_prompt_len=256", "exp_ctrl.ckpt_freq_steps=5")
    golden.check(site.told)
    config = plan.phases[-1].config
    assert config.model_worker[0].datasets[0].args["max_prompt_len"] == 256
    assert config.master_worker[0].exp_ctrl.ckpt_freq_steps == 5
    assert plan.options["task"]["max_prompt_len"] == 256
    assert read_plan(files.plan) == plan
    record = record_in(files)
    (change,) = record.changes
    assert (change.from_attempt, change.plan_hash) == (2, record.plan_hash)
    assert change.command == ("realsys", "resume", *change.command[2:])
    assert dict(change.settings) == {
        "task.max_prompt_len": (128, 256),
        "exp_ctrl.ckpt_freq_steps": (None, 5),
    }
    assert record.command == ("realsys", "launch")
    kept = [read_plan(files.plan_of(h)) for h in (plan_hash(plan_text(before)), record.plan_hash)]
    assert kept == [before, plan]
    for path in files.plans.iterdir():
        assert path.stat().st_mode == files.plan.stat().st_mode
    (told, _) = trial_view(files).changes
    golden.check(told)
    (remark,) = replay_warnings(files)
    golden.check(remark)


def test_what_was_chosen_for_the_model_stays_in_the_record(site: Site) -> None:
    chosen = (ChosenSetting(path="gen.max_new_tokens", value=16, why="long enough"),)
    files = site.launched(change=lambda plan: replace(plan, chosen=chosen))
    site.ended(files, Result.FAILED)
    assert site.resume(files, "exp_ctrl.ckpt_freq_steps=5").chosen == chosen


def test_changes_add_up_and_can_be_taken_back(site: Site) -> None:
    files = site.launched()
    former = files.plan.read_text()
    site.resume(files, "task.max_prompt_len=256")
    plan = site.resume(files, "exp_ctrl.eval_freq_steps=3")
    assert plan.options["task"]["max_prompt_len"] == 256
    assert plan.options["exp_ctrl"]["eval_freq_steps"] == 3
    site.resume(files, "exp_ctrl.eval_freq_steps=10", "task.max_prompt_len=128")
    assert files.plan.read_text() == former
    assert len(record_in(files).changes) == 3


def test_settings_from_a_file_and_those_that_are_as_they_were(site: Site, tmp_path: Path) -> None:
    files = site.launched()
    config = tmp_path / "more.yaml"
    config.write_text("task:\n  max_prompt_len: 300\nseed: 1\n")
    plan = site.resume(files, config=config)
    assert plan.options["task"]["max_prompt_len"] == 300
    golden.check(site.told)


def test_nothing_is_written_where_nothing_changes(site: Site) -> None:
    files = site.launched()
    before = everything(files.root)
    site.resume(files, "seed=1", "task.max_prompt_len=128")
    assert everything(files.root) == before
    assert site.told == []
    assert len(site.started) == 1


def test_without_settings_a_resume_needs_no_experiment(site: Site) -> None:
    files = site.launched(change=lambda plan: replace(plan, experiment_name="of-another-file"))
    assert site.resume(files) == read_plan(files.plan)
    with golden.raises(ConfigError):
        site.resume(files, "task.max_prompt_len=256")


def test_a_copy_of_the_code_is_resumed_whatever_its_settings_are_called_here(site: Site) -> None:
    def of_other_code(plan: LaunchPlan) -> LaunchPlan:
        return replace(plan, options={"of": "another version"}, snapshot=True)

    files = site.launched(change=of_other_code)
    assert site.resume(files) == read_plan(files.plan)
    with golden.raises(ConfigError):
        site.resume(files, "task.max_prompt_len=256")


def test_relative_paths_begin_where_the_launch_was(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = json.dumps({"prompt": "1 + 1 = ?", "answer": "2"}) + "\n"
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "q.jsonl").write_text(line * 200)
    monkeypatch.chdir(tmp_path / "there")
    words = ("task.path=q.jsonl", "task.eval_size=8", "train_bs_n_seqs=8")
    files = site.launched(*words, name="sft-math")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "more.yaml").write_text("task.max_prompt_len: 200\n")
    plan = site.resume(files, config=Path("more.yaml"))
    (data,) = plan.phases[-1].config.model_worker[0].datasets
    assert data.args["path"] == str(tmp_path / "there" / "q.jsonl")
    assert Path.cwd() == tmp_path


LEGS = "{kind: reasoning_gym, names: [leg_counting], max_prompt_len: 128}"
MIXED = f"{{kind: mixture, sources: {{sums: {{kind: math}}, legs: {LEGS}}}}}"


@pytest.mark.parametrize("name", ["grpo-math", "sft-math"])
@pytest.mark.parametrize(
    ("task", "setting"),
    [(LEGS, "task.max_prompt_len"), (MIXED, "task.sources.legs.max_prompt_len")],
    ids=["generated", "mixed"],
)
def test_a_longer_question_is_allowed_whatever_kind_of_task_it_is_of(
    site: Site, tmp_path: Path, name: str, task: str, setting: str
) -> None:
    config = tmp_path / "task.yaml"
    config.write_text(f"task: {task}\n" + (f"sft: {{task: {task}}}\n" if "sft" not in name else ""))
    files = site.launched("train_bs_n_seqs=8", name=name, config=config)
    plan = site.resume(files, f"{setting}=300")
    golden.check(site.told)
    assert "300" in str(plan.options["task"])


# ---- what is refused ------------------------------------------------------------------------------


def test_all_that_can_not_be_changed_is_told_at_once_and_nothing_is_touched(site: Site) -> None:
    files = site.launched()
    site.ended(files, Result.STOPPED)
    before = everything(files.root)
    words = (
        "seed=2",
        "actor.optimizer.lr=0.1",
        "task.max_prompt_len=256",
        "train_bs_n_seqs=32",
        "sft.seed=3",
        "group_sise=4",
        "exp_ctrl.ckpt_keep=0",
    )
    with pytest.raises(ConfigErrors) as refusal:
        site.resume(files, *words)
    told = "\n".join(p.what for p in problems_of(refusal.value))
    golden.check(told)
    assert "max_prompt_len" not in told
    assert "group_sise" in told
    assert "exp_ctrl.ckpt_keep is 0" in told
    assert everything(files.root) == before
    assert site.started == []
    assert site.told == []


def test_a_refusal_says_where_it_stands_what_it_changes_and_what_to_do_instead(site: Site) -> None:
    files = site.launched()
    with pytest.raises(ConfigError) as refusal:
        site.resume(files, "actor.optimizer.lr=0.1")
    error = refusal.value
    golden.check(error)
    assert "command line 'actor.optimizer.lr=0.1'" in error.where
    assert error.fix.endswith(" actor.optimizer.lr=0.1")
    assert "exp_ctrl.save_freq_steps=1" in error.fix  # none is saved yet
    for role in ("actor", "critic"):
        (files.root / "checkpoints" / role / "latest").mkdir(parents=True)
    with pytest.raises(ConfigError) as refusal:
        site.resume(files, "actor.optimizer.lr=0.1")
    assert "save_freq_steps" not in refusal.value.fix


def test_options_of_a_job_are_refused_on_this_machine(site: Site) -> None:
    files = site.launched()
    with golden.raises(ConfigError):
        site.resume(files, time="2:00:00")


def test_a_plan_that_this_code_would_not_make_is_not_changed(site: Site) -> None:
    def of_other_code(plan: LaunchPlan) -> LaunchPlan:
        main = plan.phases[-1]
        config = replace(main.config, tensorboard=False)
        return replace(
            plan, phases=(*plan.phases[:-1], replace(main, config=config)), revision="abc123"
        )

    files = site.launched(change=of_other_code)
    before = everything(files.root)
    with golden.raises(ConfigError) as refusal:
        site.resume(files, "task.max_prompt_len=256")
    assert "revision abc123" in refusal.value.fix
    assert everything(files.root) == before
    assert site.resume(files) == read_plan(files.plan)


def test_a_mixture_of_an_older_trial_begins_its_epochs_as_before(site: Site) -> None:
    at = ("task", "sft.task")
    sources = [f"{task}.sources.{name}=math" for task in at for name in "ab"]
    files = site.launched(
        *(f"{task}=mixture" for task in at), *sources, "task.weights.a=2", *CONSTANT
    )

    def before(plan: dict[str, Any]) -> None:
        (data,) = plan["phases"][-1]["config"]["model_worker"][0]["datasets"]
        assert data["args"].pop(GOES_ON)

    write_plan_text(files, before)
    plan = site.resume(files, "exp_ctrl.save_freq_steps=7")
    assert GOES_ON not in plan_text(plan)


def test_rules_of_an_older_trial_go_on_without_the_questions_text(site: Site) -> None:
    def without(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: without(v) for k, v in value.items() if k != WITH_QUESTION}
        return [without(v) for v in value] if isinstance(value, list) else value

    files = site.launched(*CONSTANT)
    assert WITH_QUESTION in files.plan.read_text()
    write_plan_text(files, lambda plan: plan.update(without(plan)))
    assert WITH_QUESTION not in files.plan.read_text()
    plan = site.resume(files, "task.max_prompt_len=256")
    assert WITH_QUESTION not in plan_text(plan)
    (data,) = plan.phases[-1].config.model_worker[0].datasets
    assert data.args["max_prompt_len"] == 256


def test_held_out_questions_of_an_older_trial_with_an_agent_are_asked_as_before(site: Site) -> None:
    def held_out(plan: Any) -> Any:
        config = plan["phases"][-1]["config"]
        return [s for worker in config["model_worker"] for s in worker["shards"]]

    plain = json.loads(site.launched("task.eval_size=8", *CONSTANT).plan.read_text())
    (old,) = {json.dumps(s["eval_dataset"]) for s in held_out(plain) if s["eval_dataset"]}
    files = site.launched(
        "task.eval_size=8", "task.agent=math_multi_turn", "schedule=async", name="grpo-math"
    )
    numbers = []

    def before(plan: dict[str, Any]) -> None:
        for number, one in enumerate(held_out(plan)):
            if one["id"]["model_name"]["role"] == "actor":
                one["eval_dataset"] = json.loads(old)
                numbers.append(number)

    write_plan_text(files, before)
    plan = site.resume(files, "exp_ctrl.save_freq_steps=7")
    shards = held_out(json.loads(plan_text(plan)))
    assert numbers
    assert [n for n, s in enumerate(shards) if s["eval_dataset"]] == numbers
    assert all(shards[n]["eval_dataset"] == json.loads(old) for n in numbers)


def test_of_an_older_trial_with_resources_of_its_own_settings_stay(site: Site) -> None:
    files = site.launched("scheduling.model_worker.mem=5000")
    write_plan_text(files, lambda plan: plan["options"].pop("scheduling"))
    with golden.raises(ConfigError):
        site.resume(files, "task.max_prompt_len=256")


def write_plan_text(files: TrialFiles, change: Callable[[dict[str, Any]], Any]) -> None:
    """Another plan.json, and its hash in the record."""
    plan = json.loads(files.plan.read_text())
    change(plan)
    files.plan.write_text(json.dumps(plan))
    record = replace(record_in(files), plan_hash=plan_hash(files.plan.read_text()))
    write_record(files.record, record)


# ---- on Slurm -------------------------------------------------------------------------------------


def job_of(plan: LaunchPlan) -> Any:
    assert plan.job is not None
    return plan.job


def test_time_partition_and_memory_of_the_job(site: Site) -> None:
    files = site.launched(slurm=True, request=JobRequest(requeue=True, begin="now+1hour"))
    assert job_of(read_plan(files.plan)).begin is not None
    plan = site.resume(files, "scheduling.model_worker.mem=9000", time="2:00:00", partition="short")
    (component,) = job_of(plan).components
    assert (component.time_limit, component.partition) == ("02:00:00", "short")
    steps = {s.worker_type.value: s.memory_mib for s in plan.phases[-1].steps}
    assert steps == {"model_worker": 9000, "master_worker": 2048}
    assert job_of(plan).requeue
    assert job_of(plan).begin is None
    golden.check(site.told)
    assert plan.options["scheduling"] == {
        "all": {"time_limit": "2:00:00", "partition": "short"},
        "model_worker": {"mem": 9000},
    }
    again = site.resume(files, time="3:00:00")
    assert job_of(again).components[0].partition == "short"
    golden.check(site.told[-1])


def test_settings_of_the_launch_stay_with_the_job(site: Site) -> None:
    words = ("scheduling.all.qos=high", "scheduling.model_worker.env_vars.A=1")
    files = site.launched(*words, slurm=True)
    plan = site.resume(files, "task.max_prompt_len=256", "scheduling.model_worker.env_vars.B=2")
    assert job_of(plan).components[0].qos == "high"
    steps = {s.worker_type.value: dict(s.env_vars) for s in plan.phases[-1].steps}
    assert steps["model_worker"] == {"A": "1", "B": "2"}


def test_what_was_asked_of_the_first_start_alone_is_not_asked_again(site: Site) -> None:
    soon = (datetime.now() + timedelta(days=2)).strftime("%Y-%m-%dT%H:%M:%S")
    request = JobRequest(begin="now+1hour", deadline=soon)
    files = site.launched("scheduling.all.begin=now+3hours", slurm=True, request=request)
    plan = site.resume(files, "task.max_prompt_len=256")
    assert (job_of(plan).begin, job_of(plan).deadline) == (None, soon)
    tomorrow = site.resume(files, begin="now+1day", requeue=True)
    assert job_of(tomorrow).begin is not None
    assert job_of(tomorrow).requeue
    golden.check(site.told[-2:])
    assert list(record_in(files).changes[-1].settings) == ["--requeue"]
    assert job_of(site.resume(files)).begin is None


def test_a_layout_that_was_left_open_stays_open(site: Site) -> None:
    """One kind of node before, two now: the job becomes a heterogeneous one."""
    files = site.launched(slurm=True)
    plan = site.resume(files, "scheduling.model_worker.partition=short")
    assert [c.partition for c in job_of(plan).components] == ["cpu", "short"]


def test_resources_that_no_node_has_are_refused(site: Site) -> None:
    files = site.launched(slurm=True)
    before = everything(files.root)
    with pytest.raises(ConfigErrors) as refusal:
        site.resume(files, "scheduling.model_worker.mem=900000", time="3-00:00:00")
    told = "\n".join(p.what for p in problems_of(refusal.value))
    assert "900000" in told
    assert "3-00:00:00" in told
    assert everything(files.root) == before


def test_when_slurm_refuses_the_job_the_trial_is_as_it_was(site: Site) -> None:
    files = site.launched(slurm=True)
    plan, record = files.plan.read_text(), files.record.read_text()
    site.refuses = "Invalid partition name specified"
    with golden.raises(ClusterError):
        site.resume(files, partition="short")
    assert (files.plan.read_text(), files.record.read_text()) == (plan, record)
    assert site.told == []
    site.refuses = ""
    assert job_of(site.resume(files)).components[0].partition == "cpu"


# ---- a trial that has completed ------------------------------------------------------------------


def test_a_completed_trial_goes_on_if_its_limit_was_all(site: Site) -> None:
    files = site.launched("exp_ctrl.benchmark_steps=10", *CONSTANT)
    site.ended(files, Result.COMPLETED)
    longer = "exp_ctrl.benchmark_steps=20"
    before = everything(files.root)
    for words in ((), ("task.max_prompt_len=256",), ("exp_ctrl.benchmark_steps=5",)):
        with golden.raises(TrialError):
            site.resume(files, *words)
    with golden.raises(TrialError):
        site.resume(files, longer)
    assert everything(files.root) == before
    (files.root / "recover" / "step-000008.1").mkdir(parents=True)
    with golden.raises(TrialError):
        site.resume(files, "task.max_prompt_len=256")
    assert site.resume(files, longer).phases[-1].config.exp_ctrl.benchmark_steps == 20


# ---- crashes and others ------------------------------------------------------------------------------


class Crash(Exception):
    """The machine stops."""


@pytest.mark.parametrize("at", range(1, 5))
def test_a_crash_between_two_writes_leaves_the_old_plan_or_the_new_one(
    site: Site, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """Four files are put into place: both plans, the record, the plan. The record decides."""
    files = site.launched()
    old = files.plan.read_text()
    replaced, done = os.replace, []

    def replace_or_crash(source: str, target: str) -> None:
        done.append(target)
        if len(done) == at:
            raise Crash
        replaced(source, target)

    monkeypatch.setattr(os, "replace", replace_or_crash)
    monkeypatch.setattr(submit_module, "restore_plan", lambda *_: None)  # a crash puts nothing back
    with pytest.raises(Crash):
        site.resume(files, "task.max_prompt_len=256")
    monkeypatch.undo()
    record = record_in(files)
    changed = at > 3
    assert bool(record.changes) is changed
    assert files.plan.read_text() == old  # for those who only look, too
    looked = read_stored_plan(files, finish=False)
    assert files.plan.read_text() == old
    current = read_stored_plan(files, finish=True)
    assert looked == current
    assert current.plan.options["task"]["max_prompt_len"] == (256 if changed else 128)
    assert plan_hash(files.plan.read_text()) == record.plan_hash == current.hash
    assert not list(files.root.glob(".plan*"))


def test_a_crash_while_the_former_plan_is_put_back(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = site.launched()
    old = read_stored_plan(files, finish=True)
    plan = replace(old.plan, revision="new")
    replace_plan(files, old, plan, settings={}, command=())
    monkeypatch.setattr(plan_change, "_write_whole", lambda *_, **__: None)
    restore_plan(files, old)
    monkeypatch.undo()
    assert read_plan(files.plan) == plan
    assert read_stored_plan(files, finish=True) == old
    assert read_plan(files.plan) == old.plan


def test_a_plan_that_was_edited_is_still_refused(site: Site) -> None:
    files = site.launched()
    site.resume(files, "task.max_prompt_len=256")
    files.plan.write_text(files.plan.read_text().replace("256", "512"))
    with golden.raises(ConfigError):
        site.resume(files)


def test_two_resumes_do_not_interleave(site: Site) -> None:
    files = site.launched()
    before = everything(files.root)
    with (
        trial_lock(files),
        golden.raises(RealsysError),
    ):
        site.resume(files, "task.max_prompt_len=256")
    assert everything(files.root) == before


def test_a_setting_written_as_an_option_is_told_how_to_write_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(["resume", "ppo-math/run1", "--lr=1"]) == 2
    golden.check(capsys.readouterr().err)


def test_show_prints_all_settings_as_words_and_what_was_changed(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    files = site.launched("scheduling.all.qos=high", slurm=True)
    site.resume(files, "task.max_prompt_len=256", time="2:00:00")
    assert run(["show", str(files.root)]) == 0
    shown = capsys.readouterr()
    words = shown.out.splitlines()
    assert "task.max_prompt_len=256" in words
    assert {"scheduling.all.qos=high", "scheduling.all.time_limit=2:00:00"} <= set(words)
    golden.check(shown.err.splitlines())


def test_a_kind_is_a_setting_too(site: Site) -> None:
    """Named again it changes nothing; another is refused, under the name that was typed."""
    files = site.launched("schedule=one_step_off")
    before = files.plan.read_text()
    site.resume(files, "schedule=one_step_off")
    assert files.plan.read_text() == before
    with golden.raises(ConfigError):
        site.resume(files, "schedule=sync")
    assert files.plan.read_text() == before
