"""Prompts that clients give as texts or tokens, with no conversation: which answer do they continue?"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from realsys.api.errors import DataError
from realsys.rollout.conversation.answer_tree import AnswerNode, AnswerTree
from realsys.rollout.conversation.chat_messages import Prompt
from realsys.rollout.conversation.large_texts import beside_loop

_END = 8  # tokens


def no_texts(text: str) -> Sequence[int]:
    """Refuses a text where there is no tokenizer of texts. Raises DataError."""
    raise DataError("texts are not tokenised here", where="prompt", fix="send token ids")


async def prompt_tokens(
    prompt: Prompt, encode: Callable[[str], Sequence[int]], *, num_ids: int | None
) -> tuple[int, ...]:
    """Returns the tokens of a prompt: as given, or those of a text.

    Args:
        num_ids: tokens that there are; None: the engine knows it.
    Raises:
        DataError: there are none, or one that does not exist.
    """
    if not isinstance(prompt, str):
        tokens = prompt
    else:
        text = prompt
        tokens = await beside_loop(lambda: tuple(encode(text)), size=len(text))
    if not tokens:
        raise DataError("a prompt has no tokens", where="prompt", fix="send some text")
    if num_ids is not None and not 0 <= min(tokens) <= max(tokens) < num_ids:
        raise DataError(
            f"a token id is not among the model's {num_ids:,}",
            where="prompt",
            fix="send ids of the policy's own tokenizer",
        )
    return tokens


def continued_answer(tree: AnswerTree, tokens: tuple[int, ...]) -> AnswerNode | None:
    """Returns the answer with most tokens up to its end that ``tokens`` begin with; None: there is none.

    Of several with the same tokens, one that the client has got; of those, the newest.
    """
    best: tuple[int, bool, int, AnswerNode | None] = (0, False, -1, None)
    places = {id(node): place for place, node in enumerate(tree.nodes)}
    left = [(node, 0) for node in tree.nodes if node.parent is None]
    while left:
        node, at = left.pop()
        for piece in (node.observed, node.answer.tokens):
            end = at + len(
                piece
            )  # most differ there: long pieces are compared where they may be equal
            if tokens[max(at, end - _END) : end] != piece[-_END:] or tokens[at:end] != piece:
                break
            at += len(piece)
        else:
            found = (at, node.delivered, places[id(node)], node)
            best = max(best, found, key=lambda one: one[:3])
            left += [(child, at) for child in node.children]
    return best[3]
