"""A harness of verifiers' v1 that asks in this process: every call goes through its interception."""

from __future__ import annotations

from typing import Any

import openai
import verifiers.v1 as vf
from verifiers.v1.runtimes import ProgramResult

__all__ = ["CountingHarness", "CountingHarnessConfig"]


class CountingHarnessConfig(vf.HarnessConfig):
    """``turns``: questions of a rollout; ``tools``: offered with each, in the form of Chat Completions."""

    turns: int = 1
    tools: list[dict[str, Any]] = []  # noqa: RUF012 - pydantic copies it


class CountingHarness(vf.Harness[CountingHarnessConfig]):
    """Asks, and asks once more."""

    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: Any,
        data: Any,
    ) -> ProgramResult:
        """Plays one rollout; calls are answered with a fixed result."""
        client = openai.AsyncOpenAI(base_url=endpoint, api_key=secret)
        messages: Any = [{"role": "user", "content": data.prompt}]
        more: Any = {"tools": self.config.tools} if self.config.tools else {}
        for turn in range(self.config.turns):
            reply = await client.chat.completions.create(model=ctx.model, messages=messages, **more)
            message = reply.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            called = [call.model_dump() for call in message.tool_calls or ()]
            if self.config.tools and not called:  # as if it had, so that results are sent
                function = {"name": "calculate", "arguments": '{"operation":"add","a":2,"b":3}'}
                called = [{"id": f"call_{turn}", "type": "function", "function": function}]
                messages += [
                    {"role": "user", "content": "Use the tool."},
                    {"role": "assistant", "content": None, "tool_calls": called},
                ]
            messages += [
                {"role": "tool", "tool_call_id": call["id"], "content": "5"} for call in called
            ]
            messages.append({"role": "user", "content": "Are you sure?"})
        return ProgramResult(exit_code=0, stdout="", stderr="")
