"""What `plan` prints for people, as lines and tables.

Apart from launcher/cli/tables.py: a plan's memory needs the planner, which `status` and `ls` do not load.
"""

from __future__ import annotations

from collections.abc import Sequence

from launcher.plan.answer_form import answer_form_lines
from launcher.plan.memory_check import (
    memory_gaps,
    memory_of_plan,
    scheduling_of,
    servers_of_plan,
)
from launcher.plan.plan_view import (
    ALLOCATION_HEAD,
    CHOSEN_HEAD,
    MEMORY_HEAD,
    allocation_rows,
    chosen_rows,
    memory_rows,
    rollout_lines,
    server_rows,
)
from launcher.terminal import output
from realsys.api.plan import LaunchPlan, PhasePlan

MANY_WORKERS = 16  # of more, the first and the last stand for all


def print_plan(plan: LaunchPlan) -> None:
    """Everything that was decided."""
    say, memory, servers = output.data, memory_of_plan(plan), servers_of_plan(plan)
    # Of GPUs a warning says it.
    gaps = {k: v for k, v in memory_gaps(plan).items() if not scheduling_of(plan.phase(k)).gpu}
    say(f"{plan.trial} on {plan.cluster.name} ({plan.cluster.scheduler})")
    say(f"  folder  {plan.trial_dir}")
    say(f"  store   {plan.name_resolve_url}")
    for name in plan.imports:
        say(f"  import  {name}")
    if plan.chosen:
        say("")
        output.table(CHOSEN_HEAD, chosen_rows(plan.chosen))
    for i, phase in enumerate(plan.phases, 1):
        say("")
        _print_phase(
            phase, f"phase {i} of {len(plan.phases)}: {phase.name} ({phase.experiment_name})"
        )
        say("")
        output.table(ALLOCATION_HEAD, allocation_rows(phase.config))
        if rows := memory_rows(memory[phase.name]) + server_rows(servers[phase.name]):
            say("")
            output.table(MEMORY_HEAD, rows)
        if gap := gaps.get(phase.name):
            say(f"  {gap}")
    say("")
    output.warn(*plan.warnings)


def _print_phase(phase: PhasePlan, title: str) -> None:
    say = output.data
    say(title)
    control = phase.config.exp_ctrl
    steps = "" if control.benchmark_steps is None else f", at most {control.benchmark_steps} steps"
    say(f"  length  {control.total_train_epochs} epoch(s){steps}")
    for kind, group in phase.scheduling.groups().items():
        s = group.scheduling
        image = f", image {s.container_image}" if s.container_image else ""
        say(
            f"  tasks   {group.count} × {kind.value}: {s.cpu} cpu, {s.gpu:g} gpu, {s.mem} MiB{image}"
        )
    graph = phase.config.graph()
    for number, level in enumerate(graph.levels, 1):
        calls = [
            f"{name} ({graph[name].model_name} {graph[name].interface_type.value}, "
            f"{graph[name].n_seqs} seqs)"
            for name in level
        ]
        _print_wrapped(f"  level {number} ", calls)
    for line in (*rollout_lines(phase.config), *answer_form_lines(phase.config)):
        say(line)
    workers = phase.config.model_worker
    shown = range(len(workers)) if len(workers) <= MANY_WORKERS else (0, 1, 2, len(workers) - 1)
    for i in shown:
        if i and i - 1 not in shown:
            say(f"  … {i - 3} more")
        shards = [f"{s.id} [{s.backend.type_}]" for s in workers[i].shards]
        _print_wrapped(f"  model_worker/{i} ", shards or ["nothing"])
    if phase.publish:
        say(f"  product {phase.publish}")


def _print_wrapped(title: str, items: Sequence[str], width: int = 96) -> None:
    """Items after a title, as many a line as fit, none cut."""
    line = title
    for i, item in enumerate(items):
        piece = item + (", " if i + 1 < len(items) else "")
        if len(line) + len(piece) > width and line.strip():
            output.data(line.rstrip())
            line = " " * len(title)
        line += piece
    output.data(line)
