"""Arguments of ``agent=chat``, which a plan checks without loading it. No torch, no aiohttp."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from realsys.api.options import option


@dataclass(eq=False, kw_only=True)
class ChatArguments:
    """Arguments of ``agent=chat``.

    Attributes:
        system: in front of questions that have no system message of their own.
        keep_thoughts, form, template, template_args: as of the agents behind the endpoint, see
            ``EndpointArguments``.
    """

    max_turns: int = option(8, "most answers of an episode", ge=1)
    system: str = option("", "system message")
    keep_thoughts: bool = option(True, "thoughts of earlier answers stay in the conversation")
    form: Literal[
        "", "hermes", "qwen3_coder", "llama3_json", "mistral", "deepseek", "plain", "plain_thoughts"
    ] = ""
    template: str = option("", "chat template in place of the tokenizer's")
    template_args: Mapping[str, Any] = field(default_factory=dict)
