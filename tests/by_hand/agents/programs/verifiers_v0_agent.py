"""verifiers before 0.4: environments with ``load_environment``, evaluated by its own OpenAI client."""

from __future__ import annotations

import logging
import os
from typing import Any

import verifiers as vf
from agent_report import Report, run

MODEL = "policy"


def _evaluate(report: Report, kind: str, *, rollouts: int = 1, concurrent: int = 1) -> None:
    environment = vf.load_environment("counting-env", kind=kind)
    client: Any = vf.ClientConfig(
        api_base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY"
    )
    outputs = environment.evaluate_sync(
        client,
        MODEL,
        sampling_args={"max_tokens": 64},
        num_examples=1,
        rollouts_per_example=rollouts,
        max_concurrent=concurrent,
    )
    for output in outputs["outputs"]:
        assert output.get("error") is None, output["error"]
        for message in output["completion"]:
            if message["role"] == "assistant":
                report.saw(str(message["content"] or ""))
        report.reward = float(output["reward"])


def plain(report: Report) -> None:
    """SingleTurnEnv and MultiTurnEnv."""
    _evaluate(report, "single")
    _evaluate(report, "twice")


def tools(report: Report) -> None:
    """ToolEnv; then behind a call that the policy is said to have made, and its result."""
    _evaluate(report, "tools")
    _evaluate(report, "called")


def parallel(report: Report) -> None:
    """Four rollouts of the same question at the same time."""
    _evaluate(report, "single", rollouts=4, concurrent=4)


def retry(report: Report) -> None:
    """Two turns; what the connection loses, the client sends again by itself."""
    _evaluate(report, "twice")


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    run({"plain": plain, "tools": tools, "parallel": parallel, "retry": retry, "cut": retry})
