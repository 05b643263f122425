"""Counts the sequences of conversations, and their tokens, as fine-tuning would make them. No torch.

For the plan, as prompt_lengths.py is: the template is filled in a process with limits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from realsys.data.sources.assistant_turns import any_of
from realsys.data.sources.marks_as_text import MarksAsText, marks_of
from realsys.data.sources.record_shape import Message, Tool, with_system
from realsys.models.prompt_lengths import (
    chat_template,
    limited,
    read_tokenizer,
    special_tokens,
    token_counts,
)

_PROGRAM = "realsys.models.turns_program"


def conversation_lengths(
    path: str | Path,
    conversations: Sequence[Sequence[Message]],
    *,
    system: str | None = None,
    template_args: Mapping[str, Any] | None = None,
    tools: Sequence[Sequence[Tool]] = (),
    marks_as_text: str = "tools",
) -> list[list[int]] | None:
    """Returns the lengths in tokens of the sequences of each conversation; none of one that the template
    refuses. None: only the worker can tokenize, or there is no template.

    Raises:
        CheckpointError: the tokenizer or its chat template is faulty.
    """
    root = Path(path)
    tokenizer, args = read_tokenizer(root), dict(template_args or {})
    offers = [list(offered) for offered in tools] or [[] for _ in conversations]
    has_tools = any(offers) or bool(args.get("tools"))
    template = chat_template(root, tools=has_tools)
    if tokenizer is None or template is None:
        return None
    special = special_tokens(root)
    added = [(str(t), t.special) for t in tokenizer.get_added_tokens_decoder().values()]
    literal = MarksAsText(marks_of(added, special.values(), template), of=marks_as_text)
    answer = limited(
        _PROGRAM,
        {
            "template": template,
            "special": special,
            "conversations": [
                literal.messages(with_system(tuple(c), system)) for c in conversations
            ],
            "args": args,
            "tools": offers,
            "marks": any_of({*(text for text, _ in added), *special.values()}).pattern,
            "last_mark": special.get("eos_token", ""),
        },
        where=str(root),
    )
    texts = answer["texts"]
    counted = iter(token_counts(tokenizer, [t for c in texts for s in c for t in s], root))
    return [[sum(next(counted) for _ in parts) for parts in c] for c in texts]
