"""Lines of `realsys plan` on servers, rollout workers, staleness and the transmission graph."""

from __future__ import annotations

from collections.abc import Iterator

from realsys.api.experiment import ExperimentConfig
from realsys.api.worker_configs import RolloutControl


def rollout_lines(config: ExperimentConfig) -> Iterator[str]:
    """Yields the lines of a phase with rollout workers; none for other phases."""
    if config.replay is not None:
        yield f"  replay  {config.replay}"
    control = config.rollout
    if control is None:
        return
    engines = sorted({server.backend_type for server in config.generation_server})
    yield (
        f"  rollout {len(config.generation_server)} × {' and '.join(engines)} server, "
        f"{len(config.rollout_worker)} × rollout worker ({config.rollout_worker[0].agent}, "
        f"{config.rollout_worker[0].env})"
    )
    if not control.trains:
        yield "          nothing trains: the servers keep their initial weights"
        return
    yield (
        f"          max_staleness {control.max_staleness} ({control.policy}), weights by "
        f"{control.weights_through}"
        + (f" every {control.update_steps} steps" if control.update_steps > 1 else "")
        + (f", at most {control.buffer_limit} wait for a trainer" if control.buffer_limit else "")
    )
    yield from _graph_lines(control)


def _graph_lines(control: RolloutControl) -> Iterator[str]:
    """Yields the transmission graph: sources and destinations; trainer i is model_worker/i."""
    for maker in control.makers:
        servers = ", ".join(f"generation_server/{i}" for i in maker.servers)
        workers = ", ".join(f"rollout_worker/{i}" for i in maker.rollout_workers)
        to = ", ".join(f"model_worker/{i}" for i in maker.holders)
        by = ", ".join(f"model_worker/{i}" for i in maker.sources)
        yield f"  {maker.name:<9} {servers}, {workers} → {to}; weights from {by}"
