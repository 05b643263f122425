"""Experiment + site → LaunchPlan: every decision and every check; all mistakes are reported at once.

For `realsys plan` and `launch`. Nothing is started or written here; apart from the files that an
experiment's own checks read, the functions map values to values. An experiment that needs another one's
product gets a phase for it, whose product is published under a hash of its inputs, so equal content is
prepared once. Whether the product exists already is checked by the supervisor, not by the plan.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.plan.memory_check import (
    ModelsTooLarge,
    WorkerGroup,
    memory_of_plan,
    memory_problems,
    memory_warnings,
    server_problems,
    servers_of_plan,
)
from launcher.plan.product_names import product_name
from realsys.api.cluster import ClusterSpec
from realsys.api.errors import ConfigError, collected, flat, raise_all
from realsys.api.experiment import ChosenSetting, Experiment, ExperimentConfig
from realsys.api.options import range_problems, with_defaults_out_of_range
from realsys.api.plain import to_plain
from realsys.api.plan import LaunchPlan, PhasePlan
from realsys.api.scheduling import ExperimentScheduling, WorkerType
from realsys.config.plugin_arguments import plugin_argument_problems
from realsys.config.secret_values import ENVIRONMENTS, secret_places
from realsys.slurm.gpus import tasks_per_gpu
from realsys.trial.records import trial_dir
from realsys.trial.snapshot import snapshot_imports
from realsys.worker.environment import COMPUTING
from realsys.worker.local_gpus import gpus_needed

if TYPE_CHECKING:
    from launcher.job.job_allocation import JobRequest

MAIN_PHASE = "main"
MAX_NAME_CHARS = 64
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


def resolve(
    experiment_name: str,
    experiment: Experiment,
    *,
    cluster: ClusterSpec,
    trial_name: str,
    user: str,
    imports: Sequence[str] = (),
    machine_cpus: int | None = None,
    machine_gpus: Callable[[], int] | None = None,
    given: Collection[str] = (),
    chosen: Sequence[ChosenSetting] = (),
    earlier: Sequence[ConfigError] = (),
    request: JobRequest | None = None,
    now: datetime | None = None,
    snapshot: bool = False,
    revision: str = "",
    products: Mapping[str, str] | None = None,
    fits_memory: bool = True,
) -> LaunchPlan:
    """Decides the whole trial.

    Args:
        cluster: with an absolute file root (launcher/sites/clusters.py).
        imports: files (absolute) and modules that every worker imports.
        machine_cpus: cores of this machine; a local run that requests more gets a warning.
        machine_gpus: counts the GPUs of this machine, which may take seconds; a local run that requests
            more is refused.
        given: paths of the settings that the user set.
        chosen: settings of ``experiment`` that were chosen for its model.
        earlier: problems found while reading the settings, reported together with those found here.
        request, now: on Slurm, the user's job options, and the local time from which relative times
            count.
        snapshot, revision: whether the trial runs a copy of the code, and its revision.
        products: names that the products of phases had at the trial's launch.
        fits_memory: refuse models that are too large for their GPUs.
    Raises:
        ConfigErrors: all problems found.
    """
    machine_gpus = cache(machine_gpus) if machine_gpus else None  # called again for other settings
    problems = [*earlier, *_name_problems("experiment", experiment_name)]
    problems += _name_problems("trial", trial_name)
    folder = trial_dir(cluster.file_root, user, experiment_name, trial_name)
    requested = experiment
    problems += secret_problems(experiment, cluster, request)
    known = {p.what for p in problems}
    problems += [p for p in _option_problems(experiment) if p.what not in known]
    experiment = with_defaults_out_of_range(experiment)
    phases = _Phases(
        cluster.file_root, experiment_name, trial_name, folder, problems, imports, products or {}
    )
    phases.add(MAIN_PHASE, experiment_name, experiment)
    done, job, job_warnings = phases.done, None, []
    too_many = [p for phase in done for p in _more_than_one_gpu(phase)]
    if cluster.scheduler == "slurm" and done:
        from launcher.job.job_allocation import JobRequest, allocate  # a local plan starts sooner

        found = allocate(
            {p.name: _one_gpu_each(p.scheduling) if too_many else p.scheduling for p in done},
            cluster,
            request or JobRequest(),
            trial=f"{experiment_name}/{trial_name}",
            now=now or datetime.now(),
        )
        problems += found.problems
        job, job_warnings = found.job, list(found.warnings)
        done = [replace(phase, steps=found.steps.get(phase.name, ())) for phase in done]
    problems += too_many or gpu_problems(done, cluster, machine_gpus)
    raise_all(_each_once(problems))
    plan = LaunchPlan(
        experiment_name=experiment_name,
        trial_name=trial_name,
        user=user,
        trial_dir=str(folder),
        cluster=cluster,
        phases=tuple(done),
        options=to_plain(requested),
        chosen=(*chosen, *(_chosen_memory(experiment, done[-1]) if chosen else ())),
        imports=snapshot_imports(imports, folder) if snapshot else tuple(imports),
        warnings=(
            *experiment.remarks(given),
            *_warnings(done, cluster, machine_cpus),
            *job_warnings,
        ),
        trusted_rules=experiment.trusted_rules(),
        job=job,
        snapshot=snapshot,
        revision=revision,
    )
    memory = memory_of_plan(plan)
    if fits_memory:

        def memory_with(changed: Experiment) -> dict[str, list[WorkerGroup]]:
            """Memory of an experiment with other settings. Raises ConfigError if it has no plan."""
            other = resolve(
                experiment_name,
                changed,
                cluster=cluster,
                trial_name=trial_name,
                user=user,
                machine_gpus=machine_gpus,
                request=request,
                now=now,
                fits_memory=False,
            )
            return memory_of_plan(other)

        refused = list(memory_problems(memory))
        if refused:
            from launcher.plan.memory_advice import memory_fix  # for plans that are refused

            refused = list(memory_problems(memory, memory_fix(experiment, plan, memory_with)))
        refused += server_problems(servers_of_plan(plan))
        if refused:
            raise ModelsTooLarge(refused, plan)
    return replace(plan, warnings=(*plan.warnings, *memory_warnings(plan, memory)))


def secret_problems(
    experiment: Experiment, cluster: ClusterSpec, request: JobRequest | None
) -> Iterator[ConfigError]:
    """Yields settings that hold what looks like a secret: the plan is kept, and can be read by others."""
    given = (("", experiment), ("the site file: ", cluster), ("the job's options: ", request))
    for whose, settings in given:
        with suppress(ConfigError):  # what can't be written is a problem of its own
            for path, kind in secret_places(to_plain(settings)):
                name = path.rpartition(".")[2]
                yield ConfigError(
                    f"{name} holds {kind}, and would stand in the plan, which others can read",
                    where=f"{whose}{path}",
                    fix=f"take it out, and export {name} in the shell that launches; on Slurm also name "
                    "it in secrets of the site file, which sends it in a file that only you can read"
                    if path.rpartition(".")[0].rpartition(".")[2] in ENVIRONMENTS
                    else "take it out; name an environment variable or a file where a setting takes one, "
                    "see secrets in docs/site_files.md",
                )


@dataclass
class _Phases:
    """Resolves an experiment after all experiments whose products it needs.

    ``done`` is in running order.
    """

    file_root: str
    experiment_name: str
    trial_name: str
    folder: Path
    problems: list[ConfigError]
    imports: Sequence[str]
    products: Mapping[str, str]
    done: list[PhasePlan] = field(default_factory=list)

    def add(self, name: str, experiment_name: str, experiment: Experiment) -> str | None:
        """Adds the phase and those it needs; returns where its product is published.

        None for the main phase, and for one with problems.
        """
        before = len(self.problems)
        for preparation in experiment.prepared_by():
            self.problems += _name_problems("preparation", preparation.name)
            with _in_phase(preparation.name, self.problems):
                published = self.add(
                    preparation.name, preparation.experiment_name, preparation.experiment
                )
            # A placeholder for a product that can't be made, so that the rest is still checked.
            product = published or f"{self.file_root}/cache/{preparation.name}/unresolved"
            experiment = experiment.with_prepared(preparation.name, product)
        if name != MAIN_PHASE:
            self.problems += _option_problems(experiment)
        resolved = self._resolved(experiment)
        if resolved is None or len(self.problems) > before:
            return None
        config, scheduling = resolved
        publish = None
        if name != MAIN_PHASE:
            product = product_name(
                config,
                experiment.input_files(),
                imports=self.imports,
                products=[done.publish for done in self.done if done.publish is not None],
                former=self.products.get(name),
            )
            publish = f"{self.file_root}/cache/{name}/{product}"
        self.done.append(
            PhasePlan(
                name=name,
                experiment_name=experiment_name,
                folder=str(self.folder if publish is None else self.folder / "prepare" / name),
                publish=publish,
                scheduling=scheduling,
                config=config.set_worker_information(self.experiment_name, self.trial_name),
            )
        )
        return publish

    def _resolved(
        self, experiment: Experiment
    ) -> tuple[ExperimentConfig, ExperimentScheduling] | None:
        before = len(self.problems)
        with collected(self.problems):
            try:
                scheduling = experiment.scheduling.apply_to(experiment.scheduling_setup())
                config = experiment.initial_setup()
                self.problems += unsupported(config)
                known = [p.what for p in self.problems]  # those of settings say the setting's name
                self.problems += [
                    p
                    for p in plugin_argument_problems(config)
                    if not any(p.what in what for what in known)
                ]
                config = config.lazy_init()
            except ConfigError:
                raise
            except Exception:
                # An experiment may rely on valid options; with invalid ones, the problems found so
                # far are reported instead. Otherwise the exception is a bug of the experiment.
                if before:
                    return None
                raise
            self.problems += scheduling_problems(scheduling, config)
        return None if len(self.problems) > before else (config, scheduling)


def scheduling_problems(
    scheduling: ExperimentScheduling, config: ExperimentConfig
) -> Iterator[ConfigError]:
    """Yields worker types whose number of tasks differs from the number of configured workers."""
    groups = scheduling.groups()
    for kind in WorkerType:
        tasks = groups[kind].count if kind in groups else 0
        workers = len(config.workers(kind))
        if tasks != workers:
            yield ConfigError(
                f"{tasks} {kind.value} tasks are scheduled for {workers} configured workers",
                where=f"scheduling_setup().{kind.value}.count and initial_setup().{kind.value}",
                fix=f"make both {workers}" if workers else "remove the group",
            )


def gpu_problems(
    phases: Iterable[PhasePlan], cluster: ClusterSpec, machine_gpus: Callable[[], int] | None
) -> Iterator[ConfigError]:
    """Yields GPUs that model workers can't share, and requests beyond this machine's GPUs.

    On other machines the worker itself checks.
    """
    for phase in phases:
        yield from _shared_gpus(phase)
        if cluster.scheduler != "local" or machine_gpus is None:
            continue
        needed = gpus_needed(phase.scheduling)
        here = machine_gpus() if needed else 0
        if needed > here:
            groups = phase.scheduling.groups().items()
            requested = ", ".join(
                f"{kind.value} {group.count} × {group.scheduling.gpu:g}"
                for kind, group in groups
                if group.scheduling.gpu
            )
            yield ConfigError(
                f"the workers of phase {phase.name} request {needed} GPU{'s' * (needed != 1)} together "
                f"({requested}), but this machine has {here or 'none'}",
                where=f"scheduling of phase {phase.name} on cluster {cluster.name!r}, this machine",
                fix="request fewer, leave the GPUs out to compute on the CPU, or name a site that has them "
                "(--cluster; `realsys clusters` lists them)",
            )


def _more_than_one_gpu(phase: PhasePlan) -> Iterator[ConfigError]:
    """Yields tasks that would leave all but one of their GPUs idle."""
    for kind, group in phase.scheduling.groups().items():
        embedded = all(s.backend_type == "embedded" for s in phase.config.generation_server)
        if kind == WorkerType.GENERATION_SERVER and not embedded:
            continue  # SGLang and vLLM split a model over several
        if kind in COMPUTING and group.scheduling.gpu > 1:
            name = kind.value.replace("_", " ")
            what = f"an {name}" if name[0] in "aeiou" else f"a {name}"
            yield ConfigError(
                f"{what} computes on one GPU, but {group.scheduling.gpu:g} are requested for each",
                where=f"scheduling.{kind.value}.gpu of phase {phase.name}",
                fix=f"use 1, and more {name}s for more GPUs",
            )


def _one_gpu_each(scheduling: ExperimentScheduling) -> ExperimentScheduling:
    """The groups with at most one GPU a task, to look for problems of another cause."""
    groups: dict[str, Any] = {
        kind.value: replace(group, scheduling=replace(group.scheduling, gpu=1.0))
        for kind, group in scheduling.groups().items()
        if group.scheduling.gpu > 1
    }
    return replace(scheduling, **groups)


def _each_once(problems: Iterable[ConfigError]) -> Iterator[ConfigError]:
    """Problems that differ only in their place, such as their phase, as one with all places."""
    same: dict[tuple[type, str, str], list[ConfigError]] = {}
    for problem in problems:
        same.setdefault((type(problem), problem.what, problem.fix), []).append(problem)
    for (kind, what, fix), found in same.items():
        places = "; ".join(dict.fromkeys(p.where for p in found))
        yield found[0] if len(found) == 1 else kind(what, where=places, fix=fix)


def _shared_gpus(phase: PhasePlan) -> Iterator[ConfigError]:
    group = phase.scheduling.model_worker
    gpus = group.scheduling.gpu
    sharing = tasks_per_gpu(gpus) if gpus else 0
    if sharing > 1 and group.count > 1:
        yield ConfigError(
            f"with {gpus:g} GPUs each, {sharing} of {group.count} model workers would share one GPU, which "
            "NCCL does not support",
            where="scheduling.model_worker.gpu",
            fix="use 1, or one model worker",
        )


def unsupported(config: ExperimentConfig) -> Iterator[ConfigError]:
    """Yields settings that this version or this machine can't honour.

    They are refused because the run would silently ignore them.
    """
    if config.wandb.mode != "disabled" and importlib.util.find_spec("wandb") is None:
        yield ConfigError(
            f"wandb.mode is {config.wandb.mode!r}, but the package wandb is not installed",
            where="wandb.mode",
            fix="pip install 'realsys[wandb]', or wandb.mode=disabled",
        )


def _option_problems(experiment: Experiment) -> Iterable[ConfigError]:
    found: list[ConfigError] = list(range_problems(experiment))
    in_range = not found
    experiment = with_defaults_out_of_range(experiment)
    try:
        for problem in experiment.problems():
            found += flat(problem)
    except ConfigError as error:
        found += flat(error)
    except OSError as error:
        found.append(
            ConfigError(
                f"a file can't be read: {error.strerror or error}",
                where=str(error.filename or "problems() of the experiment"),
                fix="check that it exists and that you may read it",
            )
        )
    except Exception:
        if in_range:  # as in _Phases._resolved
            raise
    return found


def _chosen_memory(experiment: Experiment, phase: PhasePlan) -> Iterator[ChosenSetting]:
    """The memory of model workers, which follows from their models, where it is not given."""
    if experiment.scheduling.of(WorkerType.MODEL_WORKER).mem is None:
        yield ChosenSetting(
            path=f"scheduling.{WorkerType.MODEL_WORKER.value}.mem",
            value=phase.scheduling.model_worker.scheduling.mem,
            why="MiB: what models and calls need, and a tenth; at least the default",
        )


@contextmanager
def _in_phase(phase: str, problems: list[ConfigError]) -> Iterator[None]:
    """Adds the phase to the ``where`` of problems found inside, and drops those that were known."""
    before = len(problems)
    yield
    known = {p.what for p in problems[:before]}
    problems[before:] = [
        type(p)(p.what, where=f"phase {phase}: {p.where}", fix=p.fix)
        for p in problems[before:]
        if not any(p.what in reported for reported in known)
    ]


def _name_problems(what: str, name: str) -> Iterator[ConfigError]:
    if len(name) <= MAX_NAME_CHARS and _NAME.fullmatch(name):
        return
    yield ConfigError(
        f"{what} name {name!r} can't be used in paths and keys",
        where=f"{what} name",
        fix=f"use 1 to {MAX_NAME_CHARS} letters, digits, '-', '_' or '.', not '-' or '.' first",
    )


def _warnings(
    phases: Iterable[PhasePlan], cluster: ClusterSpec, machine_cpus: int | None
) -> Iterator[str]:
    if cluster.scheduler != "local" or machine_cpus is None:
        return
    for phase in phases:
        groups = phase.scheduling.groups()
        workers = groups.get(WorkerType.MODEL_WORKER)
        cpus = workers.count * workers.scheduling.cpu if workers else 0
        if cpus > machine_cpus:
            yield (
                f"phase {phase.name}: model workers request {cpus} cores, but this machine has "
                f"{machine_cpus}; they will share them and be slower"
            )
