"""Which form reads the answers of a run's agents, as a plan tells it before there is a worker. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from realsys.api import registry
from realsys.api.errors import ConfigError
from realsys.models.prompt_lengths import chat_template
from realsys.rollout.conversation.form_choice import shown_form
from realsys.rollout.conversation.renderer_choice import TEMPLATE
from realsys.rollout.runners.agent_arguments import ConversationArguments


def answer_form(agent: str, args: Mapping[str, Any], tokenizer: str) -> str:
    """Returns the form in words; empty: the agent does not speak to the policy in messages.

    Args:
        agent, args: registered name, and its arguments.
        tokenizer: directory of the tokenizer; empty: not known yet.
    """
    takes = registry.arguments_class("agent", agent)
    if takes is None or not issubclass(takes, ConversationArguments):
        return ""
    template = str(args.get("template") or "") or None
    if template is None and tokenizer and Path(tokenizer).is_dir():
        try:
            template = chat_template(Path(tokenizer), tools=True) or ""
        except ConfigError:  # told where its prompts are counted
            template = None
    return shown_form(
        str(args.get("form") or ""), renderer=str(args.get("renderer", TEMPLATE)), template=template
    )
