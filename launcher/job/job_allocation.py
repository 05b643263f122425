"""Computes a trial's Slurm request: phases and site → job, components and steps (pure).

The phases run one after the other in the same allocation, so a component has the nodes of its largest
phase, and each node the resources of its fullest phase. Every check is made and every problem collected;
nothing is raised. Parts: groups.py (which groups share nodes), component_nodes.py on task_placement.py
(which tasks run where), times.py and group_checks.py (limits).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime

from launcher.job.component_nodes import ComponentNodes, StepKey, component_nodes
from launcher.job.group_checks import (
    group_problems,
    group_warnings,
    node_limit,
    overcommitted_partitions,
)
from launcher.job.groups import (
    SITE_DEFAULTS,
    PlacedGroup,
    components_of,
    disagreements,
    groups_of,
    too_many_components,
)
from launcher.job.times import JobTimes, job_times, partition_limit_problems, training_time_problems
from realsys.api.cluster import ClusterSpec
from realsys.api.errors import ConfigError, UnknownName, did_you_mean
from realsys.api.plan import JobComponent, JobLayout, JobPlan, StepPlan
from realsys.api.scheduling import ExperimentScheduling

AUTO = "auto"
PREFLIGHTS = ("off", "warn", "stop")


@dataclass(frozen=True, kw_only=True)
class JobRequest:
    """A launch's own job options, which override the site's and the experiment's. None: not given."""

    layout: str | None = None
    begin: str | None = None
    deadline: str | None = None
    dependency: str | None = None
    after: str | None = None
    requeue: bool | None = None
    preflight: str | None = None


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """The job and each phase's steps; ``job`` is None if there are problems."""

    job: JobPlan | None = None
    steps: Mapping[str, tuple[StepPlan, ...]] = field(default_factory=dict)
    problems: tuple[ConfigError, ...] = ()
    warnings: tuple[str, ...] = ()


def allocate(
    phases: Mapping[str, ExperimentScheduling],
    cluster: ClusterSpec,
    request: JobRequest,
    *,
    trial: str,
    now: datetime,
) -> Allocation:
    """Computes the trial's job, or all problems that prevent it.

    Args:
        phases: in running order.
        trial: location of problems that belong to no single group.
        now: local time, from which relative times count.
    """
    problems: list[ConfigError] = []
    groups = groups_of(phases, cluster, problems)
    if not groups:
        problems.append(ConfigError("no phase has a task", where=trial, fix="schedule tasks"))
    layout, components = _chosen_layout(groups, cluster, request, problems)
    times = job_times(groups, cluster, begin=request.begin, deadline=request.deadline, now=now)
    problems += times.problems
    for group in groups:
        problems += group_problems(group, cluster, dependency=request.dependency is not None)
    planned = _planned(components, groups, times, cluster, problems)
    problems += overcommitted_partitions([c for c, _ in planned], layout, cluster)
    problems += _no_requeue(layout, request, cluster)
    problems += _no_such_preflight(request)
    if layout is JobLayout.HET:
        problems += _inherited_options([component for component, _ in planned])
    warnings = [*times.warnings, *(w for g in groups for w in group_warnings(g, cluster))]
    warnings += _nodes_that_may_be_spared(planned)
    unique_warnings = tuple(dict.fromkeys(warnings))
    if problems:
        return Allocation(problems=tuple(_without_repeats(problems)), warnings=unique_warnings)
    wanted = cluster.slurm.requeue if request.requeue is None else request.requeue
    job = JobPlan(
        layout=layout if len(planned) > 1 else JobLayout.SINGLE,
        components=tuple(component for component, _ in planned),
        begin=times.begin.text if times.begin else None,
        deadline=times.deadline.text if times.deadline else None,
        requeue=wanted,
        dependency=request.dependency,
        after=request.after if request.dependency else None,
        preflight=request.preflight or cluster.slurm.preflight,
        spare=tuple(
            nodes.spare
            for c, (_, nodes) in zip(components, planned, strict=True)
            if c[0].partition is not None
        ),
    )
    steps: dict[StepKey, StepPlan] = {}
    for _, nodes in planned:
        steps.update(nodes.steps)
    by_phase = {
        phase: tuple(steps[phase, kind] for kind in scheduling.groups())
        for phase, scheduling in phases.items()
    }
    return Allocation(job=job, steps=by_phase, warnings=unique_warnings)


def _nodes_that_may_be_spared(
    planned: Sequence[tuple[JobComponent, ComponentNodes]],
) -> Iterator[str]:
    """Tasks are placed by a simple rule, which some mixes of sizes defeat."""
    for component, nodes in planned:
        if nodes.least_nodes < nodes.nodes:
            yield (
                f"{component.name}: its tasks take {nodes.nodes} nodes as we place them, and no fewer than "
                f"{nodes.least_nodes} in any way: sizes of tasks that divide a node waste none"
            )


def _no_requeue(
    layout: JobLayout, request: JobRequest, cluster: ClusterSpec
) -> Iterator[ConfigError]:
    """Refuses --requeue with the job layout split: Slurm requeues one job, and the others would be gone
    by then.
    """
    wanted = cluster.slurm.requeue if request.requeue is None else request.requeue
    if layout is JobLayout.SPLIT and wanted:
        yield ConfigError(
            "jobs that start separately can't be requeued together",
            where="--layout split and --requeue",
            fix="use layout single or het, or --no-requeue and `realsys resume`",
        )


def _no_such_preflight(request: JobRequest) -> Iterator[ConfigError]:
    if request.preflight not in (None, *PREFLIGHTS):
        fix = did_you_mean(request.preflight, PREFLIGHTS)
        yield UnknownName(f"no preflight {request.preflight!r}", where="--preflight", fix=fix)


def _inherited_options(components: Sequence[JobComponent]) -> Iterator[ConfigError]:
    """Refuses options that Slurm passes on to later components that set none of their own.

    See heterogeneous_jobs.html.
    """
    for name in ("account", "qos"):
        value = getattr(components[0], name) if components else None
        for component in components[1:] if value else ():
            if getattr(component, name) is None:
                yield ConfigError(
                    f"Slurm would apply {name} {value!r} of {components[0].name} to "
                    f"{component.name} too",
                    where=f"{name} in layout het",
                    fix=f"set {name} for every group, or for none",
                )


def _chosen_layout(
    groups: Sequence[PlacedGroup],
    cluster: ClusterSpec,
    request: JobRequest,
    problems: list[ConfigError],
) -> tuple[JobLayout, list[list[PlacedGroup]]]:
    """Chooses the job layout and the groups of each component; no components if groups conflict."""
    word = request.layout or cluster.slurm.layout
    if word not in (AUTO, *JobLayout):
        fix = did_you_mean(word, (AUTO, *(known.value for known in JobLayout)))
        problems.append(UnknownName(f"no layout {word!r}", where="--layout", fix=fix))
        word = AUTO
    layout = JobLayout.HET if word == AUTO else JobLayout(word)
    components = components_of(groups, layout)
    found = [p for component in components for p in disagreements(component, layout)]
    found += too_many_components(components)
    problems += found
    return layout, [] if found else components


def _planned(
    components: Sequence[Sequence[PlacedGroup]],
    all_groups: Sequence[PlacedGroup],
    times: JobTimes,
    cluster: ClusterSpec,
    problems: list[ConfigError],
) -> list[tuple[JobComponent, ComponentNodes]]:
    """Plans each component that fits its partition."""
    found = []
    for index, groups in enumerate(components):
        partition = groups[0].partition
        limit = times.limit(groups, all_groups)
        problems += partition_limit_problems(groups, limit, times)
        problems += training_time_problems(groups, limit, times, cluster.slurm.grace_seconds)
        if partition is None:
            continue  # groups_of has reported it
        nodes = component_nodes(
            index, groups, partition, node_limit(groups, partition), cluster, problems
        )
        if nodes is None:
            continue
        own = {
            (g.phase, g.kind.value): replace(
                nodes.steps[g.phase, g.kind], time_limit=times.step_limit(g, limit)
            )
            for g in groups
        }
        component = _component(groups, nodes, limit.text if limit else None, cluster)
        found.append((component, replace(nodes, steps=own)))
    return found


def _component(
    groups: Sequence[PlacedGroup],
    nodes: ComponentNodes,
    time_limit: str | None,
    cluster: ClusterSpec,
) -> JobComponent:
    task, kinds = groups[0].task, tuple(dict.fromkeys(g.kind for g in groups))
    gpu_types = [g.task.gpu_type for g in groups if g.task.gpu] or [
        g.partition.gpu_type for g in groups if g.partition
    ]
    return JobComponent(
        name="+".join(kind.value for kind in kinds),
        worker_types=kinds,
        nodes=nodes.nodes,
        cpus_per_node=nodes.cpus,
        threads_per_core=nodes.node.core,
        memory_mib_per_node=nodes.memory_mib,
        gpus_per_node=nodes.gpus,
        gpu_type=gpu_types[0] if nodes.gpus else None,
        time_limit=time_limit,
        exclusive=cluster.slurm.exclusive,
        extra=dict(task.extra),
        **{name: getattr(task, name) for name in (*SITE_DEFAULTS, "nodelist", "exclude")},
    )


def _without_repeats(problems: Sequence[ConfigError]) -> Iterator[ConfigError]:
    """Removes repeated problems: one common to all groups is reported for the first."""
    seen: set[str] = set()
    for problem in problems:
        if problem.what not in seen:
            seen.add(problem.what)
            yield problem
