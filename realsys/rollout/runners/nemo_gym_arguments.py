"""Arguments of ``agent=nemo_gym``, which a plan checks without loading it. No torch, no aiohttp."""

from __future__ import annotations

from dataclasses import dataclass

from realsys.api.errors import ConfigError
from realsys.api.options import option
from realsys.rollout.environments.environment_arguments import check_url
from realsys.rollout.runners.agent_arguments import EndpointArguments


@dataclass(eq=False, kw_only=True)
class NemoGymArguments(EndpointArguments):
    """Arguments of ``agent=nemo_gym``.

    Attributes:
        gym_url: of the agent's server, which has ``POST /run``.
        model_port: at which this worker's policy is, for Gym's model server.
    """

    gym_url: str = option("", "of NeMo Gym's agent server, e.g. http://127.0.0.1:8100")
    model_port: int = option(0, "port of the policy for NeMo Gym's model server", ge=0, le=65535)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_url(self.gym_url, "task.agent_args.gym_url", ("http", "https"))
        if self.listen == "https" or self.roles:
            raise ConfigError(
                "NeMo Gym's model server reaches the policy on its own node, as one model",
                where="task.agent_args.listen and roles",
                fix="leave both out",
            )
