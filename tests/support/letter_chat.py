"""A conversation in letters: a tokenizer with a token a letter, and a policy by script."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from jinja2.sandbox import ImmutableSandboxedEnvironment

from realsys.api.agent import AgentHost, Answer, Environment, EpisodeTask

END = "$"  # the end token, a special one


class LetterTokenizer:
    """A token is a letter's number."""

    chat_template = None

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        text = "".join(map(chr, ids))
        return text.replace(END, "") if skip_special_tokens else text

    def __call__(self, text: str, add_special_tokens: bool) -> SimpleNamespace:
        text.encode()  # as real ones, it takes no halves of letters
        return SimpleNamespace(input_ids=list(map(ord, text)))

    def apply_chat_template(
        self, messages: Any, *, chat_template: str, tokenize: bool, **values: Any
    ) -> str:
        template = ImmutableSandboxedEnvironment().from_string(chat_template)
        return template.render(messages=messages, eos_token=END, **values)


class ScriptedPolicy:
    """Gives these answers in turn, each ended unless it ends in "…"; log-probs count up from -1."""

    def __init__(self, *answers: str, context: int = 10_000) -> None:
        self.left, self.context = list(answers), context
        self.asked: list[str] = []
        self.sampled = 0

    async def __call__(
        self, tokens: Sequence[int], limit: int | None = None, /, **_: Any
    ) -> Answer:
        self.asked.append("".join(map(chr, tokens)))
        if len(tokens) >= self.context:
            return Answer(tokens=(), logprobs=(), versions=(), stopped=False)
        text = self.left.pop(0)
        stopped = not text.endswith("…")
        ids = tuple(map(ord, text + END if stopped else text))
        self.sampled += len(ids)
        first = self.sampled - len(ids)
        return Answer(
            tokens=ids,
            logprobs=tuple(-float(first + i + 1) for i in range(len(ids))),
            versions=(len(self.asked),) * len(ids),
            stopped=stopped,
        )


def host(folder: Path) -> AgentHost:
    """A worker with this tokenizer."""
    return AgentHost(
        name="rollout_worker/0",
        tokenizer=LetterTokenizer(),
        end_ids=frozenset({ord(END)}),
        folder=folder,
    )


def task(policy: Any, environment: Environment, record: Mapping[str, Any]) -> EpisodeTask:
    """An episode in a reset environment."""
    return EpisodeTask(
        id="0-1-0",
        prompt=list(map(ord, str(record["prompt"]))),
        record=record,
        ask=policy,
        environment=environment,
        tokenizer=LetterTokenizer(),
    )
