"""Runs `realsys plan --search`: sets up limits and costs, and prints the plan found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from launcher.plan.memory_check import gpu_bytes, scheduling_of, usable_bytes
from launcher.plan.time_predictions import (
    CostSources,
    costs_for,
    gpus_per_node,
    prediction_lines,
    print_gantt,
    seconds,
)
from launcher.terminal import output
from realsys.api.errors import ConfigError
from realsys.api.plan import LaunchPlan
from realsys.planner.allocation import CallAllocation, format_allocation, workers_text
from realsys.planner.gpu_models import DEVICES, Device
from realsys.planner.memory.memory_messages import TOLD, advice, largest, size
from realsys.planner.memory.memory_of_workers import fullest_worker, memory_of_plans
from realsys.planner.placed import degrees_of, model_made_before, place_experiment, refusal
from realsys.planner.predict import Prediction, predict
from realsys.planner.read_profile import formulas_of
from realsys.planner.search.search import FoundPlan, Limits, NoPlanFits, search
from realsys.planner.time.gantt import gantt

SLACK = 0.01  # fraction by which a simpler plan may be slower


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """The plan found by the search, as settings for the command line."""

    overrides: tuple[str, ...]
    num_workers: int
    found: FoundPlan
    prediction: Prediction
    now: Prediction | None
    now_fits: bool
    most_bytes: float  # on the fullest GPU
    limit_bytes: float | None


def memory_limit(plan: LaunchPlan, device: Device | None) -> float | None:
    """Returns the bytes of a GPU available to models: of the named device, else of the site's."""
    whole = (
        device.memory_bytes if device else gpu_bytes(plan.cluster, scheduling_of(plan.phases[-1]))
    )
    config = plan.phases[-1].config
    roles = {call.role for call in config.model_rpcs}
    workers = len(config.model_worker)
    return usable_bytes(whole, workers=workers, copies=len(roles)) if whole else None


def propose(
    plan: LaunchPlan,
    *,
    gpus: int | None,
    profiles: Sequence[str],
    device: str | None,
    cluster: str | None,
    within_s: float,
) -> Proposal:
    """Searches for a better allocation of a plan.

    Raises:
        ConfigErrors: no allocation is within the limits. Others as ``costs_for``.
    """
    if "placement" not in plan.options:
        raise ConfigError(
            f"{plan.experiment_name} has no setting placement, so it could not run a plan found by the "
            "search",
            where="plan --search",
            fix="search with an experiment that has pools and allocations, e.g. ppo-math",
        )
    found = place_experiment(plan)
    if found.unknown:
        role, why = next(iter(found.unknown.items()))
        raise ConfigError(
            f"the sizes of {role}'s model are unknown: {why}",
            where="plan --search",
            fix=f"set {role}.path= to a Hugging Face directory of a known family",
        )
    known = costs_for(plan, found, profiles=profiles, device=device, cluster=cluster)
    if known is None:
        costs = formulas_of(found, DEVICES["cpu"], gpus_per_node=gpus_per_node(plan))
        basis = "formulas for a CPU: valid for comparing plans, not as absolute times"
        known = CostSources(costs=costs, basis=basis, device=None)
    num_workers = gpus or found.num_workers
    limit = memory_limit(plan, known.device if device else None)
    config = plan.phases[-1].config
    limits = Limits(
        memory_bytes=limit,
        bytes_per_worker=memory_of_plans(config, model_made_before(plan)),
        num_workers=num_workers,
        degrees=degrees_of(found, gpus_per_node=gpus_per_node(plan)),
        refusal=partial(refusal, found),
    )
    try:
        best = search(
            found.graph, known.costs, limits, ahead=found.ahead, deadline_s=within_s, slack=SLACK
        )
    except NoPlanFits as error:
        raise _too_large(error, plan) from error
    now = (
        predict(found, known.costs, basis=known.basis) if num_workers >= found.num_workers else None
    )

    def fullest(allocation: Mapping[str, CallAllocation]) -> float:
        return max(limits.bytes_per_worker(allocation).values(), default=0.0)

    return Proposal(
        most_bytes=fullest(best.allocation),
        limit_bytes=limit,
        overrides=overrides_of(best.allocation, num_workers),
        num_workers=num_workers,
        found=best,
        prediction=predict(found, known.costs, basis=known.basis, allocation=best.allocation),
        now=now,
        now_fits=limit is None or fullest(found.allocation) <= limit,
    )


def _too_large(error: NoPlanFits, plan: LaunchPlan) -> ConfigError:
    """The search's refusal with the largest terms of its smallest plan, and what makes those smaller."""
    config = plan.phases[-1].config
    memory = fullest_worker(config, error.smallest, model_made_before(plan))
    terms = largest(memory, memory.peak_call)
    listed = "; ".join(f"{name} {size(n)}" for name, n in terms[:TOLD])
    return ConfigError(
        f"{error.what}: {listed}",
        where=error.where,
        fix=f"{advice(terms[:2])}; or search on more GPUs (--gpus) or larger ones (--device). Without "
        "--search, realsys plan tries settings and names those that fit, if any",
    )


def overrides_of(allocation: Mapping[str, CallAllocation], num_workers: int) -> tuple[str, ...]:
    """Renders settings that place every call as in ``allocation``."""
    pools, text = format_allocation(allocation)
    return (
        f"placement.n_model_workers={num_workers}",
        *(f"placement.pools.{name}={workers}" for name, workers in pools.items()),
        f"placement.allocation='{text}'",
    )


def print_proposal(plan: LaunchPlan, proposal: Proposal) -> None:
    """Prints the proposal: settings, times and reasons."""
    found, say = proposal.found, output.data
    proof = (
        f"no plan is better by more than {SLACK:.0%}" if found.exact else "the best of those tried"
    )
    say(
        f"plan search for {plan.experiment_name} on {proposal.num_workers} GPUs: {found.plans:,.0f} "
        f"plans, {found.evaluated:,} simulations in {found.seconds:.1f} s; {proof}"
    )
    for line in prediction_lines(proposal.prediction):
        say(line)
    room = f" of {size(proposal.limit_bytes)}" if proposal.limit_bytes else ""
    say(f"  memory         {size(proposal.most_bytes)}{room} on the fullest GPU")
    if proposal.now is not None:
        small = "" if proposal.now_fits else ", does not fit"
        say(f"  present plan   {seconds(proposal.now.figures.wall_s)} a step{small}")
    say("")
    rows = [
        (
            work.call,
            str(found.allocation[work.call].topology),
            workers_text(work.workers),
            seconds(work.seconds),
            seconds(sum(m.seconds for m in work.before)) if work.before else "",
        )
        for work in proposal.prediction.works
    ]
    output.table(("call", "layout", "workers", "computes", "weights before"), rows)
    say("")
    print_gantt(gantt(proposal.prediction.timeline))
    say("")
    say("paste:")
    say("  " + " ".join(proposal.overrides))
