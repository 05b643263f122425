"""The line of a plan that tells which form reads the answers of its agents."""

from __future__ import annotations

from collections.abc import Iterator

from realsys.api import registry
from realsys.api.experiment import ExperimentConfig


def answer_form_lines(config: ExperimentConfig) -> Iterator[str]:
    """Yields the line of a phase with agents; none for other phases."""
    for worker in config.rollout_worker[:1]:
        if not hasattr(registry.arguments_class("agent", worker.agent), "renderer"):
            continue  # most plans need not load what reads conversations
        from realsys.rollout.runners.form_of_run import answer_form

        form = answer_form(worker.agent, worker.agent_args, worker.tokenizer_path)
        yield f"          answers read by {form}"
