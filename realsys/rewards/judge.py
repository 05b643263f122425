"""Rule ``judge``: a language model behind an OpenAI-compatible URL grades an answer.

POST {url}/chat/completions with one user message (https://platform.openai.com/docs/api-reference/chat); the
last number of the reply, divided by ``out_of``, is the score.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from realsys.api.basics.rule_permissions import RulePermissions
from realsys.api.errors import ConfigError, RewardError
from realsys.api.options import option

QUESTION = """Grade the answer to a question from 0 (wrong) to 10 (right and complete).
Question: {prompt}
Known answer: {answer}
Answer to grade: {response}
Reply with the number alone."""
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
_PLACE = re.compile(r"\{(prompt|answer|response)\}")
_CACHED = 65536  # grades kept in memory
_LONGEST_REPLY = 1 << 20  # bytes
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.5, 60.0


@dataclass(kw_only=True)
class Judge:
    """Grades by a model; parts ``judge_tokens`` (used by this answer) and ``judge_cached``.

    Attributes:
        api_key_env: environment variable with the key, a secret of the site file; None: no key is sent.
        at_once, per_minute: limits on the requests of one process.
        max_retries: after a reply without a number, 429, 5xx or a lost connection.
    """

    url: str = option("", "base URL, e.g. http://judge:8000/v1")
    model: str = option("", "its name there")
    question: str = option(QUESTION, "text with {prompt}, {response}, {answer}")
    out_of: float = option(10.0, "grade that scores 1", gt=0)
    api_key_env: str | None = option(None, "environment variable with the key")
    at_once: int = option(16, "requests at the same time", ge=1)
    per_minute: int | None = option(None, "requests a minute; none: no limit", ge=1)
    max_retries: int = option(4, "further requests for an answer after a failure", ge=0)
    timeout_s: float = option(60.0, "limit of one request", unit="s", gt=0)
    max_tokens: int = option(16, "longest reply", unit="tokens", ge=1)
    _grades: OrderedDict[str, float] = field(init=False, repr=False, default_factory=OrderedDict)
    _free_at_s: float = field(init=False, repr=False, default=0.0)
    _running: int = field(init=False, repr=False, default=0)

    @property
    def permissions(self) -> RulePermissions:
        """The network and its key, nothing else."""
        return RulePermissions(network=True, env=(self.api_key_env,) if self.api_key_env else ())

    def __post_init__(self) -> None:
        for name in ("url", "model"):
            if not getattr(self, name):
                raise ConfigError(
                    f"the judge has no {name}",
                    where="task.reward_args.judge",
                    fix=f"set task.reward_args.judge.{name}",
                )
        if "{response}" not in self.question:
            raise ConfigError(
                "the judge's question does not show it the answer",
                where="task.reward_args.judge.question",
                fix="write {response} where the answer belongs",
            )

    async def __call__(self, prompt: Any, response: str, answer: str = "") -> dict[str, float]:
        """Returns the score with its parts. Raises RewardError: no grade after all retries."""
        given = {"prompt": prompt, "answer": answer, "response": response}
        # In one pass, and not str.format: braces of a prompt or an answer are text.
        text = _PLACE.sub(lambda place: str(given[place[1]]), self.question)
        key = hashlib.blake2b(text.encode(errors="replace")).hexdigest()
        if (grade := self._grades.get(key)) is not None:
            return {"reward": grade, "judge_tokens": 0.0, "judge_cached": 1.0}
        grade, tokens = await self._graded(text)
        self._grades[key] = grade
        while len(self._grades) > _CACHED:
            self._grades.popitem(last=False)
        return {"reward": grade, "judge_tokens": tokens, "judge_cached": 0.0}

    async def _graded(self, text: str) -> tuple[float, float]:
        wait_s, why = _FIRST_WAIT_S, ""
        for number in range(1 + self.max_retries):
            if number:
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
            await self._turn()
            try:
                reply, tokens = await self._asked(text)
            except _TryAgain as error:
                why, wait_s = str(error), max(wait_s, error.after_s)
                continue
            finally:
                self._running -= 1
            if numbers := _NUMBER.findall(reply):
                return float(numbers[-1]) / self.out_of, tokens
            why = f"no number in its reply {reply[:100]!r}"
        raise RewardError(
            f"the judge gave no grade in {1 + self.max_retries} requests; the last: {why}",
            where=f"reward rule 'judge', {self.url}",
            fix="look whether it answers, and raise task.reward_args.judge.max_retries or lower at_once",
        )

    async def _turn(self) -> None:
        """Waits until one more request may start; no semaphore, since each batch has its own event loop."""
        while self._running >= self.at_once or time.monotonic() < self._free_at_s:
            await asyncio.sleep(min(0.05, max(0.001, self._free_at_s - time.monotonic())))
        self._running += 1
        if self.per_minute is not None:
            self._free_at_s = time.monotonic() + 60.0 / self.per_minute

    async def _asked(self, text: str) -> tuple[str, float]:
        import aiohttp  # a plan looks at the rule without it

        key = os.environ.get(self.api_key_env or "")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": text}],
            "max_tokens": self.max_tokens,
            "temperature": 0,
        }
        limit = aiohttp.ClientTimeout(total=self.timeout_s)
        try:
            async with (
                aiohttp.ClientSession(timeout=limit, headers=headers) as session,
                session.post(f"{self.url.rstrip('/')}/chat/completions", json=body) as reply,
            ):
                if reply.status == 429 or reply.status >= 500:
                    after = reply.headers.get("Retry-After", "")
                    raise _TryAgain(
                        f"HTTP {reply.status}", float(after) if after.isdigit() else 0.0
                    )
                raw = await reply.content.read(_LONGEST_REPLY)
                if reply.status != 200:
                    raise RewardError(
                        f"the judge refuses: HTTP {reply.status}, {raw[:200].decode(errors='replace')!r}",
                        where=f"reward rule 'judge', {self.url}",
                        fix="correct task.reward_args.judge: url, model, api_key_env",
                    )
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise _TryAgain(f"{type(error).__name__}: {error}") from error
        return _read(raw)


class _TryAgain(Exception):
    def __init__(self, why: str, after_s: float = 0.0) -> None:
        super().__init__(why)
        self.after_s = min(after_s, _LONGEST_WAIT_S)


def _read(raw: bytes) -> tuple[str, float]:
    """The reply's text and the tokens used; 0 where they are not said."""
    try:
        found = json.loads(raw)
        text = str(found["choices"][0]["message"]["content"])
        return text, float((found.get("usage") or {}).get("total_tokens", 0))
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise _TryAgain(f"not a chat completion: {raw[:100]!r}") from error
