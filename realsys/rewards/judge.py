"""Rule ``judge``: a language model behind an OpenAI-compatible URL grades an answer.

POST {url}/chat/completions with one user message (https://platform.openai.com/docs/api-reference/chat).
A reply counts if it is a grade from 0 to ``out_of`` and nothing else can be meant; over ``out_of`` it is
the score. Else the judge is asked again, with the reason; a number is never guessed.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from realsys.api.basics.bounded_files import parse_json
from realsys.api.basics.rule_permissions import RulePermissions
from realsys.api.basics.thoughts import FinalTextRule, text_behind_thoughts
from realsys.api.errors import ConfigError, RewardError, RewardServiceAway
from realsys.api.options import option
from realsys.rewards.judge_places import JudgePlaces

QUESTION = """Grade the answer to a question from 0 (wrong) to {out_of} (right and complete).
Question: {prompt}
Known answer: {answer}
Answer to grade: {response}
Reply with the number alone."""
_AGAIN = """

Your last reply was not read as a grade: {why}. Reply with one number from 0 to {out_of} alone."""
# One number, also as N/M, "Grade: N" and **N**; ASCII, since float() also reads other digits.
_GRADE = re.compile(
    r"(?:grade|score)?\s*[:=]?\s*(-?[0-9]{1,9}(?:\.[0-9]{1,9})?)(?:\s*/\s*([0-9]{1,9}(?:\.[0-9]{1,9})?))?\s*\.?",
    re.I,
)
_NAMED = re.compile(r"(?:grade|score)\s*[:=]", re.I)
_LONGEST_GRADE = 80  # characters of a line with a grade
_PLACE = re.compile(r"\{(prompt|answer|response|out_of)\}")
_CACHED = 65536  # grades kept in memory
_LONGEST_REPLY, _PIECE_BYTES = 1 << 20, 1 << 16
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.5, 60.0


@dataclass(kw_only=True)
class Judge(FinalTextRule):
    """Grades by a model; parts ``judge_tokens`` (used by this answer) and ``judge_cached``.

    Attributes:
        api_key_env: environment variable with the key, a secret of the site file; None: no key is sent.
        at_once, per_minute: limits on the requests of one process.
        max_retries: after a reply that is no grade, 429, 5xx or a lost connection.
    """

    url: str = option("", "base URL, e.g. http://judge:8000/v1")
    model: str = option("", "its name there")
    question: str = option(QUESTION, "text with {prompt}, {response}, {answer}, {out_of}")
    out_of: float = option(10.0, "grade that scores 1", gt=0)
    api_key_env: str | None = option(None, "environment variable with the key")
    at_once: int = option(16, "requests at the same time", ge=1)
    per_minute: int | None = option(None, "requests a minute; none: no limit", ge=1)
    max_retries: int = option(4, "further requests for an answer after a failure", ge=0)
    timeout_s: float = option(60.0, "limit of one request", unit="s", gt=0)
    max_tokens: int = option(
        16, "longest reply, thoughts of a reasoning judge included", unit="tokens", ge=1
    )
    _grades: OrderedDict[str, float] = field(init=False, repr=False, default_factory=OrderedDict)
    _free_at_s: float = field(init=False, repr=False, default=0.0)
    _places: JudgePlaces = field(init=False, repr=False)

    @property
    def permissions(self) -> RulePermissions:
        """The network and its key, nothing else."""
        return RulePermissions(network=True, env=(self.api_key_env,) if self.api_key_env else ())

    def __post_init__(self) -> None:
        self._places = JudgePlaces(self.at_once)
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

    async def __call__(
        self, prompt: Any, response: str, answer: str = "", final: str | None = None
    ) -> dict[str, float]:
        """Returns the score with its parts.

        Raises:
            RewardError: no grade after all retries. RewardServiceAway: the judge was away at the last.
        """
        final_text = self.text_of(response, final)
        if final_text is None:
            return {"reward": 0.0, "judge_tokens": 0.0, "judge_cached": 0.0}
        given = {"prompt": prompt, "answer": answer, "response": final_text}
        shown = {name: readable_text(value) for name, value in given.items()}
        shown["out_of"] = f"{self.out_of:g}"
        # In one pass, and not str.format: braces of a prompt or an answer are text.
        text = _PLACE.sub(lambda place: shown[place[1]], self.question)
        key = hashlib.blake2b(text.encode(errors="replace")).hexdigest()
        if (grade := self._grades.get(key)) is not None:
            return {"reward": grade, "judge_tokens": 0.0, "judge_cached": 1.0}
        grade, tokens = await self._graded(text)
        self._grades[key] = grade
        while len(self._grades) > _CACHED:
            self._grades.popitem(last=False)
        return {"reward": grade, "judge_tokens": tokens, "judge_cached": 0.0}

    async def _graded(self, text: str) -> tuple[float, float]:
        wait_s, why, asked, tokens = _FIRST_WAIT_S, "", text, 0.0
        kind: type[RewardError] = RewardError
        for number in range(1 + self.max_retries):
            if number:
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
            try:
                async with self._turn():
                    reply, used = await self._asked(asked)
                tokens += used
                return read_grade(reply, self.out_of) / self.out_of, tokens
            except _NoGrade as error:
                # At temperature 0 the same question has the same reply. What the judge wrote is not
                # repeated to it: it may quote the answer that it judges.
                asked = text + _AGAIN.format(why=error.why, out_of=f"{self.out_of:g}")
                why, kind = str(error), RewardError
            except _TryAgain as error:
                why, wait_s = str(error), max(wait_s, error.after_s)
                kind = RewardServiceAway if error.is_away else RewardError
        raise kind(
            f"the judge gave no grade in {1 + self.max_retries} requests; the last: {why}",
            where=f"reward rule 'judge', {self.url}",
            fix="look whether it answers, and in the form that task.reward_args.judge.question asks for; "
            "raise task.reward_args.judge.max_tokens for one that thinks, max_retries, or lower at_once",
        )

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        """Waits in line until one more request may start, and holds its place while it runs."""
        async with self._places.held():
            if self.per_minute is not None:
                now_s = time.monotonic()
                start_s = max(now_s, self._free_at_s)
                self._free_at_s = start_s + 60.0 / self.per_minute
                await asyncio.sleep(start_s - now_s)
            yield

    async def _asked(self, text: str) -> tuple[_Reply, float]:
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
                    is_number = after.isascii() and after.isdigit()
                    after_s = float(after[:9]) if is_number else 0.0
                    raise _TryAgain(f"HTTP {reply.status}", after_s, is_away=True)
                raw = bytearray()  # of one body, which may come in pieces
                async for piece in reply.content.iter_chunked(_PIECE_BYTES):
                    raw += piece
                    if len(raw) > _LONGEST_REPLY:
                        raise _TryAgain(f"a reply of more than {_LONGEST_REPLY:,} bytes")
                if reply.status != 200:
                    raise RewardError(
                        f"the judge refuses: HTTP {reply.status}, {raw[:200].decode(errors='replace')!r}",
                        where=f"reward rule 'judge', {self.url}",
                        fix="correct task.reward_args.judge: url, model, api_key_env",
                    )
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise _TryAgain(f"{type(error).__name__}: {error}", is_away=True) from error
        return _read(bytes(raw))


class _TryAgain(Exception):
    def __init__(self, why: str, after_s: float = 0.0, *, is_away: bool = False) -> None:
        super().__init__(why)
        self.is_away = is_away  # it said nothing at all
        self.after_s = min(after_s, _LONGEST_WAIT_S)


class _NoGrade(Exception):
    """A reply that is no grade; ``why`` is told to the judge and quotes nothing of it."""

    def __init__(self, why: str, text: str) -> None:
        super().__init__(f"{why}: {text[-100:]!r}")
        self.why = why


@dataclass(frozen=True, kw_only=True, slots=True)
class _Reply:
    """What a judge wrote, and whether it came to its own end."""

    text: str
    was_cut: bool


def read_grade(reply: _Reply, out_of: float) -> float:
    """Returns the grade in a reply: its only number, or that of a last line ``Grade: N``.

    Thoughts before it are left out. Raises _NoGrade: there is none, or it is not within 0 … ``out_of``.
    """
    text = reply.text
    if reply.was_cut:
        raise _NoGrade("it was cut off, as it was too long", text)
    behind = text_behind_thoughts(text)
    if behind is None:
        raise _NoGrade("its thoughts did not end", text)
    lines = behind.strip().splitlines() or [""]
    line = lines[-1].strip().strip("*_`").strip() if len(lines[-1]) <= _LONGEST_GRADE else ""
    line = line.replace("**", "")
    found = _GRADE.fullmatch(line)
    if not found or (len(lines) > 1 and not _NAMED.match(line)):
        raise _NoGrade("it is neither one number nor does it end with a line 'Grade: N'", text)
    grade, scale = float(found[1]), found[2]
    if scale is not None and float(scale) != out_of:
        raise _NoGrade(f"its grade is not out of {out_of:g}", text)
    if not 0 <= grade <= out_of:
        raise _NoGrade(f"its grade is not from 0 to {out_of:g}", text)
    return grade


def readable_text(value: Any) -> str:
    """Returns what a judge is to read: a text as it is, messages with their roles, else JSON."""
    if isinstance(value, str):
        return value
    if isinstance(value, Sequence) and value and all(isinstance(m, Mapping) for m in value):
        messages = [m for m in value if "content" in m]
        if len(messages) == len(value):
            return "\n\n".join(f"{m.get('role', '')}: {_content(m['content'])}" for m in messages)
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        return str(value)


def _content(content: Any) -> str:
    """Returns the text of a message; of parts, that of each, or its kind: a judge sees no pictures."""
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence) and all(isinstance(part, Mapping) for part in content):
        parts = (part.get("text", f"[{part.get('type', 'part')}]") for part in content)
        return "\n".join(map(str, parts))
    return "" if content is None else readable_text(content)


def _read(raw: bytes) -> tuple[_Reply, float]:
    """The reply and the tokens used; 0 where they are not said."""
    try:
        found = parse_json(raw)
        choice = found["choices"][0]
        text = choice["message"]["content"]
        was_cut = choice.get("finish_reason") == "length"
        if not isinstance(text, str):  # all of it thoughts, or a refusal
            text = ""
        tokens = float((found.get("usage") or {}).get("total_tokens") or 0)
        return _Reply(text=text, was_cut=was_cut), max(tokens, 0.0)
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError) as error:
        raise _TryAgain(f"not a chat completion: {raw[:100]!r}") from error
