"""What of an outsider's case is trained on, compared with what was sampled and what its clients have read.

Not measured: what the server holds in memory for a client that does not read, and whether what is chosen
depends on the size of socket buffers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from case_play import FAILED_REWARD, PlayedCase
from case_policy import CaseAsk, SampledAnswer
from raw_client import RawExchange

_CALL = re.compile(r"<tool_call>.*?(</tool_call>|$)", re.DOTALL)


@dataclass(frozen=True)
class TrainedPart:
    """Tokens of one answer that are trained on. ``entry``: as the policy sampled it; None: it has not."""

    text: str
    num_tokens: int
    entry: SampledAnswer | None


def trained_parts(made: PlayedCase) -> list[TrainedPart]:
    """Returns what is trained on, in the order of the sequences."""
    parts = []
    for sequence in made.episode.sequences if made.episode is not None else ():
        start = 0
        flags = (*sequence.from_policy, False)
        for at, (now, follows) in enumerate(pairwise(flags)):
            if now and (at == 0 or not flags[at - 1]):
                start = at
            if now and not follows:
                parts.append(_part(made.ask, sequence.tokens, start, at + 1))
    return parts


def _part(ask: CaseAsk, tokens: tuple[int, ...], start: int, end: int) -> TrainedPart:
    context, own = tokens[:start], tokens[start:end]
    fitting = (e for e in ask.log if e.context == context and e.tokens[: len(own)] == own)
    return TrainedPart(ask.text(own), end - start, next(fitting, None))


def trained_problems(
    case: Mapping[str, Any], made: PlayedCase, others: Mapping[str, PlayedCase]
) -> Iterator[str]:
    """Yields what is otherwise than ``expect`` says of training."""
    expect = case["expect"]
    parts = trained_parts(made)
    texts = [part.text for part in parts]
    said = _message(made)
    if made.error is not None and not said:
        yield f"the episode raised {made.error!r:.200}"
    if any(part.entry is None for part in parts):
        yield f"trained on tokens that were not sampled in that context: {texts!r:.200}"
    if any(status not in (200, None) for status in made.statuses):
        yield f"reward or end of the session: {made.statuses}"
    wanted = [expect["trained"]] if "trained" in expect else expect.get("trained_any_of", [])
    if wanted:
        found = [list(_as_wanted(what, case, made, parts)) for what in wanted]
        if all(found):
            yield f"trained, wanted {' or '.join(wanted)}: {'; '.join(found[0])}"
    if "left_one" in expect:
        yield from _as_wanted("delivered", case, made, parts)
    yield from _of_parts(expect, made, parts)
    if expect.get("reward_counts"):
        reward = made.rewards[-1] if made.rewards else 1.0
        if made.episode is None or any(s.reward != reward for s in made.episode.sequences):
            yield "the reward is not on the trained tokens"
    if expect.get("episode_failed") is False and (
        made.error is not None or made.episode is None or made.episode.stats["failed"]
    ):
        yield f"the episode failed: {said or made.error!r:.200}"
    if expect.get("reward") == "failed_reward" and (
        made.episode is None or made.episode.reward != FAILED_REWARD
    ):
        yield f"no failed_reward: {said or made.episode!r:.150}"
    for name, count in expect.get("counters", {}).items():
        got = (
            float(made.error is not None) if made.episode is None else made.episode.stats["failed"]
        )
        got = made.figures.get(name, 0.0) if name != "failed" else got
        if got != count:
            yield f"{name} is {got:g}, wanted {count}"
    rules = expect.get("message", {})
    if any(word in said.lower() for word in rules.get("must_not_say", ())):
        yield f"the message says {said!r:.200}"
    if (any_word := rules.get("must_say_any")) and not any(w in said.lower() for w in any_word):
        yield f"the message says none of {any_word}: {said!r:.200}"
    if (other := expect.get("same_result_as")) in others:
        theirs = [part.text for part in trained_parts(others[other])]
        if texts != theirs:
            yield f"trained {texts!r:.100}, and in {other} {theirs!r:.100}"


def _of_parts(
    expect: Mapping[str, Any], made: PlayedCase, parts: list[TrainedPart]
) -> Iterator[str]:
    texts = [part.text for part in parts]
    first, whole = (texts or [""])[0], "".join(texts)
    if "branches" in expect and made.figures.get("branches") != expect["branches"]:
        yield f"branches are {made.figures.get('branches', 0):g}, wanted {expect['branches']}"
    for name in ("trained_text", "trained_text_of_first"):
        if name in expect and first != expect[name]:
            yield f"{name} is {first!r:.120}, wanted {expect[name]!r:.120}"
    if "trained_text_ends_with" in expect and not first.endswith(expect["trained_text_ends_with"]):
        yield f"the trained text ends with {first[-30:]!r}"
    if "calls_in_trained" in expect and whole.count("</tool_call>") != expect["calls_in_trained"]:
        yield f"{whole.count('</tool_call>')} calls are trained, wanted {expect['calls_in_trained']}"
    for bad in expect.get("trained_must_not_hold", ()):
        if bad in whole:
            yield f"trained holds {bad!r}"
    if expect.get("client_text_trained") is False and "Uno dos" in whole:
        yield "the client's text is trained on"
    if "second_answer" in expect and (
        len(made.ask.log) < 2 or made.ask.text(made.ask.log[1].tokens) not in texts
    ):
        yield f"the second answer is not trained in full: {texts!r:.150}"
    if "sampled_answers" in expect and len(made.ask.log) != expect["sampled_answers"]:
        yield f"{len(made.ask.log)} answers were sampled, wanted {expect['sampled_answers']}"
    if "scored_text" in expect and made.scored != [expect["scored_text"]]:
        yield f"scored were {made.scored!r:.120}, wanted {expect['scored_text']!r}"
    if "no_replacement_character_in" in expect and "\ufffd" in "".join(
        [whole, *(got.text for got in made.exchanges)]
    ):
        yield "a replacement character was delivered or trained"
    if expect.get("episode_ends") and isinstance(made.error, TimeoutError):
        yield "the episode did not end"


def _message(made: PlayedCase) -> str:
    if made.error is not None:
        return str(getattr(made.error, "what", "") or made.error)
    return made.episode.problem if made.episode is not None else ""


def _as_wanted(
    what: str, case: Mapping[str, Any], made: PlayedCase, parts: list[TrainedPart]
) -> Iterator[str]:
    """Yields where the trained tokens are not ``what``: nothing, all, delivered, or some of the answers."""
    whole = [made.ask.text(entry.tokens) for entry in made.ask.log]
    texts = [part.text for part in parts]
    if what == "nothing":
        if texts:
            yield f"trained {texts!r:.150}"
    elif what == "all":
        if sorted(texts) != sorted(whole):
            yield f"trained {texts!r:.150}, sampled {whole!r:.150}"
    elif what == "delivered":
        yield from _as_delivered(case, made, parts)
    elif sorted(texts) != sorted(whole):  # the answers that there were, each once
        yield f"trained {texts!r:.150}, sampled {whole!r:.150}"


def _as_delivered(
    case: Mapping[str, Any], made: PlayedCase, parts: list[TrainedPart]
) -> Iterator[str]:
    """Yields where what a client has read is not trained, or what it was not sent is."""
    texts = [part.text for part in parts]
    if any(got.left and not got.events and got.body for got in made.exchanges) or case[
        "expect"
    ].get("client_read_nothing"):
        return  # how much was written is not known
    if len(texts) > sum(len(got.texts) or bool(got.thoughts) for got in made.exchanges):
        yield f"more is trained than was read by anybody: {texts!r:.150}"
    unused = list(parts)
    for got in made.exchanges:
        for index in {*got.texts, *got.thoughts}:
            fitting = [p for p in unused if _covers(p.text, got, index)]
            if not fitting:
                yield f"read and not trained: {got.texts.get(index, '')!r:.80}; trained {texts!r:.150}"
                continue
            best = min(fitting, key=lambda p: p.num_tokens)
            if not _is_asked_again(made):
                unused.remove(best)
            yield from _beyond(made, got, best)
    bounds = case["expect"].get("delivered_characters", {})
    lengths = [len(text) for text in texts[:1]] or [0]
    if lengths[0] < bounds.get("at_least", 0) or lengths[0] > bounds.get("at_most", lengths[0]):
        yield f"{lengths[0]} characters are trained, wanted {bounds}"


def _is_asked_again(made: PlayedCase) -> bool:
    """True where several requests are for one answer."""
    return len(made.exchanges) > len(made.ask.log)


def _covers(text: str, got: RawExchange, index: int) -> bool:
    """True if a text holds what a client has read, but for calls and white space."""
    said = "".join(_CALL.sub("", text).split())
    read = "".join(got.texts.get(index, "").split())
    return read in said and got.thoughts.get(index, "").strip() in text


def _beyond(made: PlayedCase, got: RawExchange, part: TrainedPart) -> Iterator[str]:
    """Yields it if a text is trained on that the policy held back until its client had left."""
    hold = made.ask.hold
    if not got.left or hold is None or made.ask.ran_out or part.entry is None:
        return
    tokens = part.entry.tokens
    held = (n for n in range(len(tokens) + 1) if hold(made.ask.text(tokens[:n]), n))
    most = next(held, None)
    if most is not None and part.num_tokens > most and not _is_asked_again(made):
        yield f"trained {part.num_tokens} tokens, and {most} were sampled while the client was there"
