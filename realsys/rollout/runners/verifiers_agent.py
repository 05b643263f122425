"""``agent=verifiers``: an episode is one rollout of an environment of verifiers, in its own interpreter.

The environment's reward is the episode's, its metrics are ``rollout/agent/<name>`` (docs/verifiers.md).
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from realsys.rollout.runners.agent_arguments import VerifiersArguments
from realsys.rollout.runners.hosted_agent import HostedAgent


@dataclass(eq=False, kw_only=True)
class VerifiersAgent(VerifiersArguments, HostedAgent):
    """Each episode plays the row that its record holds, as export_verifiers.py wrote it."""

    program = "verifiers_host.py"

    def arguments(self) -> list[str]:
        """The environment and its arguments."""
        return ["play", self.environment, json.dumps(dict(self.environment_args))]

    @property
    def played(self) -> str:
        """The environment."""
        return f"environment {self.environment}"
