"""Rewards: what a rule may look at, what it returns, and how several are summed. No torch.

A rule is a function whose parameters name the fields of ``Completion`` that it looks at, or a dataclass
whose instance is called so: its fields are the rule's arguments. It returns a number, or named parts.

    def brief(response): return {"reward": 1.0 / len(response), "correct": len(response) < 80}

Several rules are summed by an expression: ``math_verify + 0.2*brief``. The first decides what is correct.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from realsys.api.basics import plugin_table
from realsys.api.basics.thoughts import text_behind_thoughts
from realsys.api.errors import ConfigError, did_you_mean

REWARD, CORRECT = "reward", "correct"  # parts with a meaning
RAISED = (
    "raised"  # part of an answer that scored 0 since its rule failed on it: 1; answers are counted
)
LARGEST = 3.4e38  # of a score: that of float32
# Field of a mixture's records, and the argument of their data sets: the name of the source.
TASK_SOURCE = "task_source"
# Argument of mixtures' data sets whose epochs differ, which older revisions' plans lack.
GOES_ON = "goes_on"
# In place of an expression: each answer by the rules of its source, which are the arguments.
BY_SOURCE = "@source"
# Metadata of a batch: JSON of [number, role] per sequence of an id: which episode it is a branch of.
EPISODES = "episodes"
UNFINISHED_THOUGHTS = "unfinished_thoughts"  # part of the scores of answers with thoughts
# Metadata of a batch, and field of an environment's record: what is asked, for rules that compare with it.
QUESTION_TEXT = "question_text"
WITH_QUESTION = (
    "with_question"  # argument of data sets to give it, which older revisions' plans lack
)
PARTS = "reward_parts"  # metadata of a batch: JSON of one mapping per answer of an id
MEAN_REWARD = "mean_reward"  # metadata of a batch: of an id's answers; None if it got no reward
_TERM = re.compile(r"\s*(?:(?P<weight>[-+0-9.eE]+)\s*\*\s*)?(?P<name>[A-Za-z_][\w.-]*)\s*\Z")
_FIX = "name registered rules, e.g. math_verify, or math_verify + 0.2*brief"


@dataclass(frozen=True, kw_only=True)
class Completion:
    """An answer of the policy to one record.

    Attributes:
        response: text of the answer, without special tokens; of an episode's last turn.
        answer: the record's known answer (its last part, behind ``####``), "" if it has none.
        record: the whole record as the data set has it, ``prompt`` and ``answer`` included.
        token_ids: the tokens that the policy wrote, end token included.
        finish_reason: ``stop``, or ``length`` for an answer that was cut off.
        final: ``response`` less its thoughts, which is itself if there are none; empty: they never end.
            Left out, it is found by the marks in ``response``.
        question: text that is asked, without system prompts; "" where the data set doesn't give it.
    """

    response: str
    answer: str = ""
    record: Mapping[str, Any] = field(default_factory=dict)
    token_ids: tuple[int, ...] = ()
    finish_reason: Literal["stop", "length"] = "stop"
    final: str | None = None
    question: str = ""

    def __post_init__(self) -> None:
        if self.final is None:
            object.__setattr__(self, "final", text_behind_thoughts(self.response) or "")

    @property
    def unfinished_thoughts(self) -> bool | None:
        """Whether there are thoughts and nothing behind them; None: there are no thoughts."""
        if self.final == self.response:
            return None
        return not (self.final and self.final.strip())

    @property
    def prompt(self) -> Any:
        """The record's prompt as the data set has it: text, or chat messages."""
        return self.record.get("prompt", "")


FIELDS = (*(f.name for f in dataclasses.fields(Completion)), "prompt")
# Of built-in rules, so that a plan need not import them; all others are looked at.
KNOWN_FIELDS = {"math_verify": frozenset({"response", "answer", "final", "question"})}
OF_RECORD = frozenset({"record", "prompt"})  # fields for which the record has to travel along
QUESTION = "question"  # field for which the data set has to give the question's text


@dataclass(frozen=True, kw_only=True)
class Score:
    """What a rule, or a sum of rules, gave for one answer; ``parts`` are for the metrics."""

    value: float
    correct: bool
    parts: Mapping[str, float] = field(default_factory=dict)


def is_count(part: str) -> bool:
    """True for a part of scores that is summed over answers; all others are averaged."""
    return part.rpartition("/")[2] == RAISED


def reward_terms(expression: str) -> tuple[tuple[str, float], ...]:
    """Reads ``a + 0.5*b`` into names and weights, in order.

    Raises:
        ConfigError: it has another form, or names a rule twice.
    """
    terms: list[tuple[str, float]] = []
    for text in re.split(r"(?<!\d[eE])(?<!\.[eE])\+", expression):  # not that of 1e+2
        term = _TERM.match(text)
        try:
            weight = float(term["weight"] or 1.0) if term else float("nan")
        except ValueError:
            weight = float("nan")
        if term is None or not abs(weight) < float("inf"):
            raise ConfigError(f"{text.strip()!r} is no weighted rule", where=expression, fix=_FIX)
        if term["name"] in dict(terms):
            raise ConfigError(f"{term['name']!r} stands twice", where=expression, fix=_FIX)
        terms.append((term["name"], weight))
    return tuple(terms)


def fields_of(rule: Callable[..., Any]) -> frozenset[str]:
    """The fields of ``Completion`` that a rule looks at; a class is asked for its ``__call__``.

    ``**kwargs`` takes those that are at hand anyway; ``record``, ``prompt`` and ``question`` have to be
    named.

    Raises:
        ConfigError: a parameter without a default is no such field.
    """
    taken = inspect.signature(rule.__call__ if isinstance(rule, type) else rule).parameters
    rest = {name for name, p in taken.items() if p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
    own = set(taken) - rest - ({"self"} if isinstance(rule, type) else set())
    if QUESTION in own and taken[QUESTION].default not in (inspect.Parameter.empty, "", None):
        own.remove(QUESTION)  # an argument of its own, as its default shows
    for name in sorted(own):
        if name not in FIELDS and taken[name].default is inspect.Parameter.empty:
            raise ConfigError(
                f"a reward rule wants {name!r}, which an answer does not have",
                where=f"parameters of {getattr(rule, '__qualname__', rule)}",
                fix=did_you_mean(name, FIELDS),
            )
    return frozenset(own | (set(FIELDS) - OF_RECORD - {QUESTION} if rest else set())) & frozenset(
        FIELDS
    )


def fields_of_expression(expression: str) -> frozenset[str]:
    """The fields that the rules of an expression look at. Raises ConfigError for an unknown rule."""
    names = _names(expression)
    found = (KNOWN_FIELDS.get(n) or fields_of(plugin_table.find("reward", n)) for n in names)
    return frozenset().union(*found)


def needs_answer(expression: str) -> bool:
    """Whether a rule of an expression takes ``answer``, without a default; False for unknown rules."""
    with suppress(ConfigError):
        return any(map(_takes_answer, _names(expression)))
    return False


def _takes_answer(name: str) -> bool:
    if name in KNOWN_FIELDS:
        return "answer" in KNOWN_FIELDS[name]
    rule = plugin_table.find("reward", name)
    taken = inspect.signature(rule.__call__ if isinstance(rule, type) else rule).parameters
    return "answer" in taken and taken["answer"].default is inspect.Parameter.empty


def fields_of_rules(expression: str, args: Mapping[str, Any]) -> frozenset[str]:
    """As ``fields_of_expression``, also of a mixture (``BY_SOURCE``), whose records name their source."""
    if expression != BY_SOURCE:
        return fields_of_expression(expression)
    of_sources = (fields_of_rules(s["reward"], s.get("reward_args") or {}) for s in args.values())
    return frozenset({"record"}).union(*of_sources)


def with_thoughts(score: Score, answer: Completion) -> Score:
    """Returns the score of an answer; of one with thoughts, with whether something stands behind them."""
    unfinished = answer.unfinished_thoughts
    if unfinished is None:
        return score
    parts = {**score.parts, UNFINISHED_THOUGHTS: float(unfinished)}
    return dataclasses.replace(score, parts=parts)


def rule_problems(expression: str, args: Mapping[str, Any], *, where: str) -> Iterator[ConfigError]:
    """Yields a wrong expression, unknown rules, parameters that no answer has, arguments of no rule."""
    try:
        names = _names(expression)
    except ConfigError as error:
        yield ConfigError(error.what, where=where, fix=error.fix)
        return
    for name in names:
        if problem := plugin_table.check("reward", name, where=where):
            yield problem
        if problem or (name in KNOWN_FIELDS and name not in args):
            continue
        rule = plugin_table.find("reward", name)
        try:
            fields_of(rule)
        except ConfigError as error:
            yield error
        if name in args and not isinstance(rule, type):
            what, fix = f"reward {name!r} is a function and takes no arguments", "leave them out"
            yield ConfigError(what, where=f"{where}_args.{name}", fix=fix)
    for name in set(args) - set(names):
        fix = did_you_mean(name, names)
        yield ConfigError(
            f"arguments of {name!r}, which is not used", where=f"{where}_args", fix=fix
        )


@functools.cache
def _names(expression: str) -> tuple[str, ...]:
    return tuple(name for name, _ in reward_terms(expression))
