"""mini-swe-agent: its DefaultAgent with litellm's model, in an empty folder.

The policy's commands go to a shell of the agent's: those that could do anything but look are refused.
"""

from __future__ import annotations

import logging
import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from typing import Any

os.environ.setdefault("MSWEA_SILENT_STARTUP", "1")
os.environ.setdefault("MSWEA_GLOBAL_CONFIG_DIR", tempfile.mkdtemp(prefix="mini-swe-"))
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it downloads prices

from agent_report import Report, run
from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel
from minisweagent.models.litellm_textbased_model import LitellmTextbasedModel

MODEL, MOST_STEPS = "openai/policy", 3
HARMLESS = ("ls", "pwd", "true", "echo hello")
SYSTEM = "You are a helpful assistant that can run shell commands."
INSTANCE = "Please solve this: {{task}}"


class HarmlessEnvironment(LocalEnvironment):
    """A local shell for a few commands only: the policy is random."""

    def execute(self, action: dict[str, Any], cwd: str = "", **kwargs: Any) -> dict[str, Any]:
        """Runs a harmless command; refuses others."""
        if action.get("command", "").strip() in HARMLESS:
            return super().execute(action, cwd, **kwargs)
        return {"output": "refused", "returncode": 1, "exception_info": ""}


def _model(**options: Any) -> Any:
    return LitellmModel(model_name=MODEL, cost_tracking="ignore_errors", **options)


def _agent(model: Any) -> DefaultAgent:
    return DefaultAgent(
        model,
        HarmlessEnvironment(cwd=tempfile.mkdtemp(prefix="mini-swe-")),
        system_template=SYSTEM,
        instance_template=INSTANCE,
        step_limit=MOST_STEPS,
        max_consecutive_format_errors=0,
    )


def _solve(report: Report, model: Any, task: str) -> None:
    agent = _agent(model)
    agent.run(task)
    for message in agent.messages:
        response = message.get("extra", {}).get("response")
        if isinstance(response, dict):
            report.saw(response["choices"][0]["message"]["content"])
    report.note(f"ended with {agent.messages[-1]['extra']['exit_status']}")


def plain(report: Report) -> None:
    """The agent that reads commands from the text."""
    model = LitellmTextbasedModel(model_name=MODEL, cost_tracking="ignore_errors")
    _solve(report, model, report.question)


def tools(report: Report) -> None:
    """The agent that has commands called as a tool; then from such a call and its output."""
    model = _model()
    _solve(report, model, report.question)
    function = {"name": "bash", "arguments": '{"command": "ls"}'}
    called = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "call_0", "type": "function", "function": function}],
        "extra": {"actions": [{"command": "ls", "tool_call_id": "call_0"}]},
    }
    outputs = [HarmlessEnvironment(cwd=tempfile.mkdtemp()).execute({"command": "ls"})]
    history = [
        {"role": "user", "content": report.question},
        called,
        *model.format_observation_messages(called, outputs),
    ]
    # Not its query(): that raises where the policy calls nothing
    response = model._query(model._prepare_messages_for_api(history))
    report.saw(response.choices[0].message.content)


def parallel(report: Report) -> None:
    """Three agents at the same time, two with the same task."""
    with ThreadPoolExecutor(3) as pool:
        tasks = [report.question, report.question, "Is it even?"]
        list(pool.map(lambda task: _solve(report, _model(), task), tasks))


def retry(report: Report) -> None:
    """An agent; what the connection loses, litellm or the agent itself sends again."""
    _solve(report, _model(), report.question)


if __name__ == "__main__":
    logging.getLogger("agent").setLevel(logging.WARNING)
    run({"plain": plain, "tools": tools, "parallel": parallel, "retry": retry, "cut": retry})
