"""A policy for tests that answers what they say, in tokens that no tokenizer would make."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from chat_families import FAMILIES, ChatFamily
from fuzzed_history import session_of

from realsys.api.agent import Answer, AnswerSoFar
from realsys.rollout.conversation.episode_session import EpisodeSession

END = "<|im_end|>"


@dataclass
class ScriptedPolicy:
    """Answers with given texts or tokens, or raises given errors, in order.

    Args:
        go: waited for before an answer; ``halfway``: when half of its tokens have come.
        breaks: raised halfway.
    """

    family: ChatFamily
    script: list[Any]
    contexts: list[tuple[int, ...]] = field(default_factory=list)
    wishes: list[Mapping[str, Any]] = field(default_factory=list)
    go: asyncio.Event | None = None
    halfway: asyncio.Event | None = None
    breaks: BaseException | None = None
    version: int = 7

    async def sample(
        self,
        tokens: Sequence[int],
        *,
        limit: int | None,
        stop: Sequence[str],
        sampling: Mapping[str, Any],
        on_tokens: Callable[[Sequence[int]], None] | None,
        grammar: str = "",
        answer_prefix: int = 0,
    ) -> Answer:
        self.contexts.append(tuple(tokens))
        wishes = {"limit": limit, "stop": stop, "grammar": grammar, **sampling}
        self.wishes.append(wishes | ({"answer_prefix": answer_prefix} if answer_prefix else {}))
        said = self.script[len(self.contexts) - 1]
        if self.go is not None:
            await self.go.wait()
        if isinstance(said, BaseException):
            raise said
        if isinstance(said, Answer):
            return said
        made = self.tokens(said) if isinstance(said, str) else tuple(said)
        logprobs = tuple(-float(i + 1) for i in range(len(made)))
        versions = (self.version,) * len(made)
        for i in range(len(made)):
            if 2 * i >= len(made):
                if self.halfway is not None:
                    await self.halfway.wait()
                if self.breaks is not None:
                    raise self.breaks
            if on_tokens is not None:
                so_far = (made[: i + 1], logprobs[: i + 1], versions[: i + 1])
                on_tokens(AnswerSoFar(tokens=so_far[0], logprobs=so_far[1], versions=so_far[2]))
                await asyncio.sleep(0)
        return Answer(
            tokens=made,
            logprobs=logprobs,
            versions=versions,
            stopped=made[-1] in self.family.end_ids,
        )

    def tokens(self, text: str) -> tuple[int, ...]:
        """One token a byte but for marks, so that a tokenizer would never make these."""
        tokenizer = self.family.tokenizer
        made: list[int] = []
        for token in tokenizer.encode(text):
            letters = tokenizer.convert_ids_to_tokens(token)
            is_mark = token in tokenizer.added_tokens_decoder
            made += tokenizer.convert_tokens_to_ids([letters] if is_mark else list(letters))
        return tuple(made)


def scripted(
    *script: Any, family: str = "chatml", **more: Any
) -> tuple[EpisodeSession, ScriptedPolicy]:
    policy = ScriptedPolicy(FAMILIES[family], list(script))
    return session_of(FAMILIES[family], policy, **more), policy  # type: ignore[arg-type]
