"""A trial's plan made again with some settings changed: for `realsys resume TRIAL NAME=VALUE`.

A plan is never edited. Experiment, the options of the launch and the settings that change go through
resolve.py again, with the plan's own site, names, imports and revision. Made with nothing changed, the
result must be the plan on disk: else this code would change more than was asked for. What may change is
decided in changed_settings.py; what is written, in plan_change.py.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from launcher.job.job_allocation import JobRequest
from launcher.plan.resolve import resolve
from launcher.plan.scheduling_options import PREFIX, LaunchSettings, SchedulingOptions
from launcher.submit.dependencies import dependency_on
from launcher.submit.job_options import JobOptions
from launcher.submit.planning import experiment_type
from launcher.trials.changed_settings import (
    OF_A_START,
    Difference,
    RefusedChange,
    change_text,
    goes_further,
    refused,
    what_differs,
)
from realsys.api.errors import ConfigError
from realsys.api.plain import from_plain, to_plain
from realsys.api.plan import LaunchPlan
from realsys.config.overrides import Applied, apply_overrides, read_settings
from realsys.config.problems import collected, flat, raise_all
from realsys.config.settings import UserSetting
from realsys.trial.records import TrialFiles, TrialRecord
from realsys.worker.machine_gpus import machine_gpus

MANY = 3  # differences that are told
OF_A_START_ONLY = ("--begin", "--after")
_OPTION = "command line --"


@dataclass(frozen=True, kw_only=True)
class RequestedChanges:
    """What stands on the command line of a resume."""

    words: Sequence[str] = ()
    config: Path | None = None
    job: JobOptions = field(default_factory=JobOptions)

    @property
    def is_empty(self) -> bool:
        """Nothing: the plan stays as it is."""
        return not self.words and self.config is None and self.job == JobOptions()


@dataclass(frozen=True, kw_only=True)
class Remade:
    """A plan with other settings.

    Attributes:
        settings: as typed → (value before, value now).
        further: its run is longer by its limits.
        warnings: what the plan warns of that the former did not.
    """

    plan: LaunchPlan
    settings: Mapping[str, tuple[Any, Any]]
    further: bool
    warnings: tuple[str, ...] = ()

    @property
    def lasting(self) -> dict[str, tuple[Any, Any]]:
        """The settings that are not about this start alone."""
        return {k: v for k, v in self.settings.items() if k not in OF_A_START_ONLY}

    def lines(self) -> list[str]:
        """``dataset.max_prompt_len: 128 → 256``."""
        return [f"{name}: {change_text(*values)}" for name, values in self.settings.items()]


def remake(
    files: TrialFiles,
    record: TrialRecord,
    plan: LaunchPlan,
    raw: Mapping[str, Any],
    wish: RequestedChanges,
) -> Remade | None:
    """The trial's plan with what was wished; None where that is what it has already.

    Args:
        raw: the plan as it stands on disk.
    Raises:
        ConfigErrors: every setting that can't be read, is wrong, or can't be changed, with the reason.
    """
    problems: list[ConfigError] = [*wish.job.problems(plan.cluster)]
    read = [*read_settings(wish.words, wish.config, problems), *wish.job.settings()]
    maker = _Maker(files, record, plan, raw)
    before = maker.former()
    asked = _Asked(maker, read)
    problems += asked.problems
    of_job = _of_job(plan, wish.job)
    if not problems and not asked.changes and not of_job:
        return None
    request = _request(plan, wish.job, maker.layout)
    after: LaunchPlan | None = None
    wrong: list[ConfigError] = []
    with collected(wrong):
        after = maker.make(asked.options, asked.scheduling, request, now=True)
    refusals: list[RefusedChange] = (
        [] if after is None else refused(to_plain(before), to_plain(after))
    )
    if refusals or wrong or problems:
        told = list(asked.refusals(before))
        if refusals and not told:
            told = [_refusal("together these settings", refusals[0], "", maker)]
        raise_all([*problems, *told, *(p for one in wrong for p in flat(one))])
    assert after is not None
    if after.job is not None and wish.job.begin is None and not asked.begins:
        after = replace(after, job=replace(after.job, begin=None))
    warnings = tuple(w for w in after.warnings if w not in before.warnings)
    return Remade(
        plan=replace(after, warnings=(*plan.warnings, *warnings)),
        settings={**asked.changes, **of_job},
        further=goes_further(to_plain(before), to_plain(after)),
        warnings=warnings,
    )


class _Maker:
    """Makes the trial's plan again."""

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
            kind = experiment_type(plan.experiment_name)
            self.options = from_plain(kind, plan.options, where="options")
            self.scheduling: SchedulingOptions = from_plain(
                SchedulingOptions, _without_start(plan.scheduling_options), where="scheduling"
            )
        except ConfigError as error:
            raise self._other_code(f"{error.where}: {error.what}") from error

    def make(
        self,
        options: Any,
        scheduling: SchedulingOptions,
        request: JobRequest | None,
        *,
        now: bool = False,
    ) -> LaunchPlan:
        """The plan of these settings.

        Args:
            now: with what this machine says of itself, and a look whether the models fit.
        Raises:
            ConfigErrors: everything that is wrong with them.
        """
        plan = self.plan
        with _in_folder(self.record.folder):
            return resolve(
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
                scheduling=scheduling,
                request=request,
                now=datetime.now(),
                snapshot=plan.snapshot,
                revision=plan.revision,
                fits_memory=now,
            )

    def former(self) -> LaunchPlan:
        """The plan as it is, made by this code.

        Raises:
            ConfigError: it is another one: the code is not the launch's.
        """
        found: list[Difference] = []
        # With a trial's copy of the code another program reads the plan: it must know each word of it.
        raw = self._raw if self.plan.snapshot else to_plain(self.plan)
        if "scheduling_options" not in raw:
            raise self._other_code("an older version made it")
        for layout in (None, *((self.plan.job.layout.value,) if self.plan.job else ())):
            try:
                made = self.make(
                    self.options, self.scheduling, _request(self.plan, JobOptions(), layout)
                )
            except ConfigError as error:
                raise self._other_code(f"{flat(error)[0].where}: {flat(error)[0].what}") from error
            found = what_differs(raw, to_plain(made), aside=OF_A_START)
            if not found:
                self.layout = layout
                return made
        told = "; ".join(
            f"{d.name} was {_shown(d.old)}, would be {_shown(d.new)}" for d in found[:MANY]
        )
        more = f"; and {len(found) - MANY} more" if len(found) > MANY else ""
        raise self._other_code(told + more)

    def _other_code(self, why: str) -> ConfigError:
        code = f"realsys {self.record.realsys_version}" if self.record.realsys_version else ""
        code += f" of revision {self.plan.revision}" if self.plan.revision else ""
        return ConfigError(
            "its settings can't be changed: this code, with the files that the settings name, does not "
            f"make the plan of the launch again ({why})",
            where=str(self.files.plan),
            fix="resume it without settings; or with the code that launched it "
            f"({code or 'see trial.json'}), from the folder of the launch",
        )


class _Asked:
    """The settings that were asked for, on the trial's own."""

    def __init__(self, maker: _Maker, read: Sequence[UserSetting]) -> None:
        self._maker, self._read = maker, read
        own, launch = self._applied(read)
        self.problems = [*own.problems, *launch.problems]
        self.options, self.scheduling = own.options, launch.options.scheduling
        self.changes: dict[str, tuple[Any, Any]] = {}
        for path, origin in {**own.origins, **launch.origins}.items():
            former = LaunchSettings(scheduling=maker.scheduling)
            of_launch = path.startswith(PREFIX)
            old = value_at(former if of_launch else maker.options, path)
            new = value_at(launch.options if of_launch else own.options, path)
            if old != new:
                self.changes[_typed(path, origin)] = (to_plain(old), to_plain(new))

    @property
    def begins(self) -> bool:
        """Whether they say when to begin."""
        return any(s.path.endswith(".begin") for s in self._read if s.path.startswith(PREFIX))

    def refusals(self, before: LaunchPlan) -> Iterator[ConfigError]:
        """Of each setting by itself, where it alone makes a plan that can't be had."""
        plain, former = to_plain(before), self._maker
        for setting in self._read:
            own, launch = self._applied([setting])
            if own.problems or launch.problems:
                continue
            try:
                alone = former.make(
                    own.options,
                    launch.options.scheduling,
                    _request(former.plan, JobOptions(), former.layout),
                )
            except ConfigError:
                continue  # said of all together
            if found := refused(plain, to_plain(alone)):
                typed = _typed(setting.path, setting.origin)
                yield _refusal(typed, found[0], setting.origin, former)

    def _applied(self, read: Sequence[UserSetting]) -> tuple[Applied, Applied]:
        of_launch = [s for s in read if s.path.startswith(PREFIX)]
        own = apply_overrides(self._maker.options, [s for s in read if s not in of_launch])
        return own, apply_overrides(LaunchSettings(scheduling=self._maker.scheduling), of_launch)


def _refusal(name: str, found: RefusedChange, origin: str, maker: _Maker) -> ConfigError:
    """One setting's refusal, in the user's words."""
    path = found.difference.name
    changes = path.removeprefix("phases.").removeprefix("main.").removeprefix("config.")
    return ConfigError(
        f"{name} can't be changed in a trial that has begun: {found.why}",
        where=f"{origin or 'the settings of this resume'}; in the plan: {changes}",
        fix=_instead(maker, origin),
    )


def _instead(maker: _Maker, origin: str) -> str:
    """A new trial from the weights that the trial has saved; or how to have some saved."""
    word = origin.removeprefix("command line ")
    config, saved = maker.plan.phases[-1].config, maker.files.phase(maker.files.root).checkpoints
    roles = dict.fromkeys(c.model_name.role for c in config.model_rpcs if c.is_train)
    starts = [f"{role}.path={saved / role / 'latest'}" for role in roles]
    own = [shlex.quote(ast.literal_eval(word))] if word[:1] in ("'", '"') else []  # a repr
    launch = f"realsys launch {maker.plan.experiment_name} " + " ".join([*starts, *own])
    if all((saved / role / "latest").exists() for role in roles):
        return (
            "leave it out; or launch a new trial from this one's weights, with its other settings "
            f"(realsys show {maker.plan.trial}) and these: {launch}"
        )
    return (
        "leave it out; or save this one's weights (resume it with exp_ctrl.save_freq_steps=1, and stop "
        f"it), and launch a new trial from them, with its other settings: {launch}"
    )


def _typed(path: str, origin: str) -> str:
    """The setting as it stands on the command line."""
    return origin.removeprefix("command line ") if origin.startswith(_OPTION) else path


def value_at(options: Any, path: str) -> Any:
    """The value at a dotted path of a dataclass, also within a table; None where there is none."""
    head, _, rest = path.partition(".")
    if dataclasses.is_dataclass(options):
        value = getattr(options, head, None)
        return value_at(value, rest) if rest else value
    if isinstance(options, Mapping):
        if path in options:
            return options[path]
        return value_at(options.get(head), rest) if rest else None
    return None


def _of_job(plan: LaunchPlan, job: JobOptions) -> dict[str, tuple[Any, Any]]:
    """Options of the job that are no settings, and that change something."""
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
    """The job as the trial has it, with what was asked for; a passed deadline is left out."""
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


def _without_start(given: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """What was set of the tasks, without what was about the first start."""
    return {
        kind: {k: v for k, v in changes.items() if k not in ("begin", "deadline")}
        for kind, changes in given.items()
    }


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"


@contextlib.contextmanager
def _in_folder(folder: str) -> Iterator[None]:
    """Where relative paths in the settings begin; stays where that can't be entered."""
    try:
        entered = contextlib.chdir(folder or ".")
        entered.__enter__()
    except OSError:
        yield
        return
    try:
        yield
    finally:
        entered.__exit__(None, None, None)
