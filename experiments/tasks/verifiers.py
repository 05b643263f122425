"""Tasks of an environment of verifiers: ``task=verifiers task.path=RECORDS``.

``task.agent_args.environment`` names it. The records are its own, written by
``realsys.rollout.runners.export_verifiers``. Each is played and scored by the environment in an interpreter
of its own (realsys/rollout/runners/verifiers_agent.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from experiments.task import FileTask
from realsys.api.options import option


@dataclass(frozen=True, kw_only=True)
class VerifiersTask(FileTask):
    """Records that an environment of verifiers plays."""

    kind = "verifiers"
    own_agents = ("verifiers",)

    path: str | None = option(None, "records of the environment, as export_verifiers writes them")
    eval_size: int = option(0, "held-out records; auto_eval and eval play them", ge=0)
    max_prompt_len: int = option(
        4096, "longest question of a record; see long_prompts", unit="tokens", ge=1
    )
    agent: str = option("verifiers", "registered agent, where generation servers sample")

    @property
    def rule(self) -> str:
        """The registered rule; episodes are rewarded by their environment."""
        return self.reward or self.kind

    @property
    def needs_answer(self) -> bool:
        """Whether a rule is named that compares with the answer."""
        return self.reward is not None and super().needs_answer
