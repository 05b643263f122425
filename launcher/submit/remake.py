"""Makes a trial's plan again with changed settings, for `realsys resume TRIAL NAME=VALUE`.

A plan is never edited. The experiment, the launch's options and the changed settings go through
resolve.py again, with the plan's own site, names, imports and revision. Remade without changes, the
result must equal the plan on disk; otherwise this code would change more than was requested.
changed_settings.py decides what may change, plan_change.py writes it.
"""

from __future__ import annotations

import ast
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from launcher.job.job_allocation import JobRequest
from launcher.plan.resolve import resolve
from launcher.submit.dependencies import dependency_on
from launcher.submit.job_options import JobOptions
from launcher.submit.planning import default_experiment
from launcher.trials.changed_settings import (
    PER_START,
    Difference,
    RefusedChange,
    change_text,
    extends_run,
    refused_changes,
    relevant_differences,
)
from launcher.trials.launch_folder import in_launch_folder
from realsys.api.basics.reward import GOES_ON, WITH_QUESTION
from realsys.api.errors import ConfigError, collected, flat, raise_all
from realsys.api.plain import from_plain, to_plain
from realsys.api.plan import LaunchPlan
from realsys.config.option_tree import value_at
from realsys.config.overrides import apply_overrides, read_settings
from realsys.config.settings import UserSetting
from realsys.trial.records import TrialFiles, TrialRecord
from realsys.trial.snapshot import code_that_made
from realsys.worker.machine_gpus import machine_gpus

MAX_DIFFERENCES = 3  # differences listed in a message
OF_A_START_ONLY = ("--begin", "--after")
_OPTION = "command line --"


@dataclass(frozen=True, kw_only=True)
class RequestedChanges:
    """The changes given on the command line of a resume."""

    words: Sequence[str] = ()
    config: Path | None = None
    job: JobOptions = field(default_factory=JobOptions)

    @property
    def is_empty(self) -> bool:
        """Whether nothing was given, so that the plan remains unchanged."""
        return not self.words and self.config is None and self.job == JobOptions()


@dataclass(frozen=True, kw_only=True)
class RemadePlan:
    """A plan with changed settings.

    Attributes:
        settings: name as typed → (former value, new value).
        extends_run: whether its limits allow a longer run.
        warnings: warnings that the former plan did not have.
    """

    plan: LaunchPlan
    settings: Mapping[str, tuple[Any, Any]]
    extends_run: bool
    warnings: tuple[str, ...] = ()

    @property
    def lasting(self) -> dict[str, tuple[Any, Any]]:
        """The settings that apply beyond this start."""
        return {k: v for k, v in self.settings.items() if k not in OF_A_START_ONLY}

    def lines(self) -> list[str]:
        """Renders ``task.max_prompt_len: 128 → 256``."""
        return [f"{name}: {change_text(*values)}" for name, values in self.settings.items()]


def remake(
    files: TrialFiles,
    record: TrialRecord,
    plan: LaunchPlan,
    raw: Mapping[str, Any],
    changes: RequestedChanges,
) -> RemadePlan | None:
    """Makes the trial's plan with the requested changes; None if nothing would change.

    Args:
        raw: the plan's JSON, as on disk.
    Raises:
        ConfigErrors: every setting that can't be read, is invalid, or can't be changed, with the reason.
    """
    problems: list[ConfigError] = [*changes.job.problems(plan.cluster)]
    read = [*read_settings(changes.words, changes.config, problems), *changes.job.settings()]
    maker = _PlanMaker(files, record, plan, raw)
    before = maker.former()
    requested = _RequestedSettings(maker, read)
    problems += requested.problems
    of_job = _changed_job_options(plan, changes.job)
    if not problems and not requested.changes and not of_job:
        return None
    request = _request(plan, changes.job, maker.layout)
    after: LaunchPlan | None = None
    wrong: list[ConfigError] = []
    with collected(wrong):
        after = maker.make(requested.options, request, now=True)
    refusals: list[RefusedChange] = (
        [] if after is None else refused_changes(to_plain(before), to_plain(after))
    )
    if refusals or wrong or problems:
        refused_settings = list(requested.refusals(before))
        if refusals and not refused_settings:
            refused_settings = [_refusal("these settings together", refusals[0], "", maker)]
        raise_all([*problems, *refused_settings, *(p for error in wrong for p in flat(error))])
    assert after is not None
    if after.job is not None and changes.job.begin is None and not requested.has_begin:
        after = replace(after, job=replace(after.job, begin=None))
    warnings = tuple(w for w in after.warnings if w not in before.warnings)
    return RemadePlan(
        plan=replace(after, chosen=plan.chosen, warnings=(*plan.warnings, *warnings)),
        settings={**requested.changes, **of_job},
        extends_run=extends_run(to_plain(before), to_plain(after)),
        warnings=warnings,
    )


class _PlanMaker:
    """Makes the trial's plan again, with given settings."""

    def __init__(
        self,
        files: TrialFiles,
        record: TrialRecord,
        plan: LaunchPlan,
        raw: Mapping[str, Any],
    ) -> None:
        self.files, self.record, self.plan, self._raw = files, record, plan, raw
        self.layout: str | None = None
        try:
            kind = type(default_experiment(plan.experiment_name))
            self.options = from_plain(kind, _without_start(plan.options), where="options")
        except ConfigError as error:
            raise self._other_code(f"{error.where}: {error.what}") from error

    def make(self, options: Any, request: JobRequest | None, *, now: bool = False) -> LaunchPlan:
        """Makes the plan with these settings.

        Args:
            now: check against this machine's CPUs and GPUs, and that the models fit.
        Raises:
            ConfigErrors: all problems with the settings.
        """
        plan = self.plan
        with in_launch_folder(self.record):
            made = resolve(
                plan.experiment_name,
                options,
                cluster=plan.cluster,
                trial_name=plan.trial_name,
                user=plan.user,
                imports=plan.imports,
                machine_cpus=len(os.sched_getaffinity(0)),
                machine_gpus=partial(machine_gpus, {**os.environ, **plan.cluster.env_vars})
                if now
                else None,
                request=request,
                now=datetime.now(),
                snapshot=plan.snapshot,
                revision=plan.revision,
                products={p.name: Path(p.publish).name for p in plan.phases if p.publish},
                fits_memory=now,
            )
        # The rules of a trial that began without the question's text go on without it, a mixture that began
        # each epoch with the same records goes on so, and a trainer that asked an agent's held-out
        # questions itself goes on asking them.
        plain = to_plain(made, seen={})
        keeps = _keep_held_out(plain, self._raw)
        lacking = [
            name
            for name in (WITH_QUESTION, GOES_ON)
            if _has(plain, name) and not _has(self._raw, name)
        ]
        for name in lacking:
            plain = _without(plain, name, {})
        return from_plain(LaunchPlan, plain, seen={}) if lacking or keeps else made

    def former(self) -> LaunchPlan:
        """Makes the present plan with this code.

        Raises:
            ConfigError: the result differs from the plan on disk, so the code is not the launch's.
        """
        found: list[Difference] = []
        # With a snapshot, that older code reads the plan and must know each of its fields.
        raw = self._raw if self.plan.snapshot else to_plain(self.plan)
        for layout in (None, *((self.plan.job.layout.value,) if self.plan.job else ())):
            try:
                made = self.make(self.options, _request(self.plan, JobOptions(), layout))
            except ConfigError as error:
                raise self._other_code(f"{flat(error)[0].where}: {flat(error)[0].what}") from error
            found = relevant_differences(raw, to_plain(made), ignored=PER_START)
            if not found:
                self.layout = layout
                return made
        listed = "; ".join(
            f"{d.name} was {_shown(d.old)}, would be {_shown(d.new)}"
            for d in found[:MAX_DIFFERENCES]
        )
        more = f"; and {len(found) - MAX_DIFFERENCES} more" if len(found) > MAX_DIFFERENCES else ""
        raise self._other_code(listed + more)

    def _other_code(self, why: str) -> ConfigError:
        made_by, get_it = code_that_made(self.record, self.plan.revision)
        return ConfigError(
            "its settings can't be changed: this code, with the files that the settings name, does not "
            f"reproduce the plan of the launch ({why})",
            where=str(self.files.plan),
            fix="resume it without settings; or with the code that launched it, "
            f"{made_by} ({get_it}), from the folder of the launch",
        )


def _keep_held_out(plain: Any, old: Any) -> bool:
    """Gives a plan's JSON the held-out questions of shards that have none in it and had some in the old
    plan; returns whether there were any."""
    if isinstance(plain, list) and isinstance(old, list):
        kept = [_keep_held_out(*both) for both in zip(plain, old, strict=False)]
        return any(kept)
    if not (isinstance(plain, dict) and isinstance(old, Mapping)):
        return False
    name = "eval_dataset"
    kept = [_keep_held_out(plain[key], old[key]) for key in plain.keys() & old.keys()]
    if name in plain and plain[name] is None and old.get(name) is not None:
        plain[name] = old[name]
        return True
    return any(kept)


def _has(plain: Any, name: str) -> bool:
    """True if some table within a plan's JSON has an entry of that name (pure)."""
    if isinstance(plain, Mapping):
        return name in plain or any(_has(value, name) for value in plain.values())
    return isinstance(plain, list) and any(_has(value, name) for value in plain)


def _without(plain: Any, name: str, seen: dict[int, Any]) -> Any:
    """Returns a plan's JSON without any entry of that name; what is one object stays one (pure)."""
    if not isinstance(plain, Mapping | list):
        return plain
    if id(plain) not in seen:
        seen[id(plain)] = (
            [_without(value, name, seen) for value in plain]
            if isinstance(plain, list)
            else {key: _without(value, name, seen) for key, value in plain.items() if key != name}
        )
    return seen[id(plain)]


class _RequestedSettings:
    """The requested settings, applied to the trial's own."""

    def __init__(self, maker: _PlanMaker, read: Sequence[UserSetting]) -> None:
        self._maker, self._read = maker, read
        applied = apply_overrides(maker.options, read)
        self.problems, self.options = applied.problems, applied.options
        self.changes: dict[str, tuple[Any, Any]] = {}
        for path, origin in applied.origins.items():
            old, new = value_at(maker.options, path), value_at(applied.options, path)
            if old != new:
                self.changes[_typed(path, origin)] = (to_plain(old), to_plain(new))

    @property
    def has_begin(self) -> bool:
        """Whether the settings include a begin time."""
        return any(re.search(r"\bscheduling\..*\.begin$", s.path) for s in self._read)

    def refusals(self, before: LaunchPlan) -> Iterator[ConfigError]:
        """Yields the refusal of each setting that alone makes an inadmissible plan."""
        plain, former = to_plain(before), self._maker
        for setting in self._read:
            applied = apply_overrides(former.options, [setting])
            if applied.problems:
                continue
            try:
                request = _request(former.plan, JobOptions(), former.layout)
                alone = former.make(applied.options, request)
            except ConfigError:
                continue  # reported for all settings together
            if found := refused_changes(plain, to_plain(alone)):
                typed = _typed(setting.path, setting.origin)
                yield _refusal(typed, found[0], setting.origin, former)


def _refusal(name: str, found: RefusedChange, origin: str, maker: _PlanMaker) -> ConfigError:
    """Makes the error for one refused setting, under the name the user typed."""
    path = found.difference.name
    changes = path.removeprefix("phases.").removeprefix("main.").removeprefix("config.")
    return ConfigError(
        f"{name} can't be changed in a trial that has started: {found.why}",
        where=f"{origin or 'the settings of this resume'}; in the plan: {changes}",
        fix=_alternative(maker, origin),
    )


def _alternative(maker: _PlanMaker, origin: str) -> str:
    """Proposes a new trial from the trial's saved weights, or how to save some."""
    word = origin.removeprefix("command line ")
    config, saved = maker.plan.phases[-1].config, maker.files.phase(maker.files.root).checkpoints
    roles = dict.fromkeys(c.model_name.role for c in config.model_rpcs if c.is_train)
    starts = [f"{role}.path={saved / role / 'latest'}" for role in roles]
    own = [shlex.quote(ast.literal_eval(word))] if word[:1] in ("'", '"') else []  # a repr
    launch = f"realsys launch {maker.plan.experiment_name} " + " ".join([*starts, *own])
    if all((saved / role / "latest").exists() for role in roles):
        return (
            "leave it out; or launch a new trial from this trial's weights, with its other settings "
            f"(realsys show {maker.plan.trial}) and these: {launch}"
        )
    return (
        "leave it out; or save this trial's weights (resume it with exp_ctrl.save_freq_steps=1, and stop "
        f"it), and launch a new trial from them, with its other settings: {launch}"
    )


def _typed(path: str, origin: str) -> str:
    """Returns the setting's name as on the command line."""
    return origin.removeprefix("command line ") if origin.startswith(_OPTION) else path


def _changed_job_options(plan: LaunchPlan, job: JobOptions) -> dict[str, tuple[Any, Any]]:
    """Returns the job options that are not settings and that change something."""
    if plan.job is None:
        return {}
    old = plan.job
    former = {
        "layout": old.layout.value,
        "requeue": old.requeue,
        "preflight": old.preflight,
    }
    found = {}
    for name in (*former, "begin", "deadline", "after"):
        value = getattr(job, name)
        if value is not None and value != former.get(name):
            found[f"--{name}"] = (former.get(name), value)
    return found


def _request(plan: LaunchPlan, job: JobOptions, layout: str | None) -> JobRequest | None:
    """Returns the trial's job options with the requested ones applied; a past deadline is dropped."""
    if plan.job is None:
        return None
    old = plan.job
    passed = old.deadline and datetime.fromisoformat(old.deadline) <= datetime.now()
    return JobRequest(
        layout=job.layout or layout,
        begin=job.begin,
        deadline=job.deadline or (None if passed else old.deadline),
        dependency=dependency_on(job.after) if job.after else None,
        after=job.after,
        requeue=old.requeue if job.requeue is None else job.requeue,
        preflight=job.preflight or old.preflight,
    )


def _without_start(options: Mapping[str, Any], *, tasks: bool = False) -> dict[str, Any]:
    """Removes what concerned only the first start from the task settings among ``options``."""
    return {
        name: _without_start(value, tasks=tasks or name == "scheduling")
        if isinstance(value, Mapping)
        else value
        for name, value in options.items()
        if not (tasks and name in ("begin", "deadline"))
    }


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"
