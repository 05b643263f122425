"""The error of a conversation that leaves no room for an answer (pure). Words: dialects/error_bodies.py."""

from __future__ import annotations

from realsys.api.errors import DataError


class ContextFull(DataError):
    """The conversation fills the model's context: nothing can be sampled behind it.

    Attributes:
        num_prompt: tokens of the conversation; 0: nobody has said.
        num_answer: tokens of the answer that was asked for, 1 at least.
        context_length: most tokens of both together; 0: nobody has said.
    """

    num_prompt = 0
    num_answer = 1
    context_length = 0


def context_full(
    num_prompt: int,
    *,
    num_answer: int | None,
    context_length: int,
    what: str = "conversation",
    where: str = "messages",
) -> ContextFull:
    """Makes the error.

    Args:
        num_prompt: tokens.
        num_answer: most tokens that the client wants; None: it has not said.
        context_length: tokens; 0: the server has not said.
        what: is too long. where: the field that holds it.
    """
    of = f" of {context_length} tokens" if context_length else ""
    error = ContextFull(
        f"the {what} of {num_prompt} tokens fills the model's context length{of}",
        where=where,
        fix=f"send a shorter {what}",
    )
    error.num_prompt, error.num_answer = num_prompt, num_answer or 1
    error.context_length = context_length
    return error
