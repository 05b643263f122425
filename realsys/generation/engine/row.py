"""State of a request in the continuous engine, its limits and its end conditions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from realsys.api.errors import DataError
from realsys.generation.engine.engine_requests import GenerationOutput, GenerationRequest
from realsys.generation.engine.stop_texts import StopTexts
from realsys.generation.engine.token_grammar import TokenGrammar

WHERE = "generation request"
_AHEAD = 64  # minimum number of tokens that a row gets before it may be retracted


@dataclass(eq=False)
class Row:
    """A request and its answer so far.

    Attributes:
        slot: where its keys and values are; -1 while it waits.
        version: of the weights that all its keys and values come from; -1: of several.
    """

    request: GenerationRequest
    output: GenerationOutput
    stop_ids: frozenset[int]
    stop_texts: StopTexts | None
    grammar: TokenGrammar | None = None
    slot: int = -1
    version: int = -1

    @property
    def text(self) -> tuple[int, ...]:
        """Tokens of prompt and answer."""
        return (*self.request.prompt, *self.output.tokens)

    @property
    def length(self) -> int:
        """Number of tokens of ``text``."""
        return len(self.request.prompt) + len(self.output.tokens)

    @property
    def most(self) -> int:
        """Maximum number of tokens that it can reach."""
        return len(self.request.prompt) + self.request.gconfig.max_new_tokens

    @property
    def expected(self) -> int:
        """Number of tokens assumed for admission: its current length plus a margin, at most ``most``."""
        length = self.length
        return min(self.most, length + max(_AHEAD, length // 4))

    @property
    def number(self) -> int:
        """Index of the next token in the whole answer."""
        return self.request.position + len(self.output.tokens)

    def ending(self, token: int) -> str:
        """Returns how the answer ends with ``token``, its newest; empty if it continues."""
        gconfig, num = self.request.gconfig, len(self.output.tokens)
        if token in self.stop_ids:
            return "stop"
        if self.stop_texts is not None and num > gconfig.min_new_tokens:
            begin = len(self.request.prompt) - self.request.position  # of the answer's earlier part
            if self.stop_texts.completed(self.text[begin:]):
                return "stop"
        return "length" if num >= gconfig.max_new_tokens else ""


# Names and bounds on prompt and new tokens; None: no bound.
Rooms = Sequence[tuple[str, int | None]]


def room_left(num_tokens: int, rooms: Rooms) -> int | None:
    """Returns how many new tokens fit after ``num_tokens``; None: any number.

    >>> room_left(30, [("positions", 32), ("max_tokens", None)])
    2
    """
    return min((max(0, room - num_tokens) for _, room in rooms if room is not None), default=None)


def within(request: GenerationRequest, rooms: Rooms) -> GenerationRequest:
    """Limits ``request`` to the tokens that fit; unchanged if there is no limit."""
    gconfig, left = request.gconfig, room_left(len(request.prompt), rooms)
    if not left or gconfig.max_new_tokens <= left:
        return request
    least = min(gconfig.min_new_tokens, left)
    return replace(request, gconfig=replace(gconfig, max_new_tokens=left, min_new_tokens=least))


def check_request(request: GenerationRequest, *, vocabulary: int, rooms: Rooms) -> None:
    """Checks that a request can be answered at all.

    Args:
        vocabulary: number of tokens that the model knows.
    Raises:
        DataError: it can't.
    """

    def refuse(what: str, fix: str) -> None:
        raise DataError(what, where=f"{WHERE} {request.rid}", fix=fix)

    if not request.prompt:
        refuse("the prompt has no tokens", "begin prompts with a BOS token")
    lowest, highest = min(request.prompt), max(request.prompt)
    if lowest < 0 or highest >= vocabulary:
        bad = lowest if lowest < 0 else highest
        what = f"token {bad} is not one of the model's {vocabulary}"
        refuse(what, "use the tokenizer of this model")
    length = len(request.prompt)
    for name, room in rooms:
        if room is not None and length >= room:
            what = f"a prompt of {length} tokens leaves no room for an answer in {name}={room}"
            refuse(what, "shorten the prompt")
    if not 0 <= request.position <= length:
        what = f"position {request.position} with a prompt of {length} tokens"
        refuse(what, "count the tokens of the answer that the prompt ends with")
