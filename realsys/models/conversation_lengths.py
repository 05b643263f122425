"""Counts the sequences of conversations, and the tokens of the longest, as fine-tuning would make them.

For the plan, as prompt_lengths.py is: the template is filled in a process with limits. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from realsys.data.sources.assistant_turns import any_of
from realsys.data.sources.marks_as_text import MarksAsText
from realsys.data.sources.record_shape import Message, Tool, with_system
from realsys.models.prompt_lengths import (
    by_template,
    directory_marks,
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
) -> list[tuple[int, int]] | None:
    """Returns of each conversation the number of its sequences, and the tokens of the one with the most
    characters; (0, 0) of one that the template refuses or of which it writes no turn. None: only the worker
    can tokenize, or there is no template.

    Raises:
        CheckpointError: the tokenizer or its chat template is faulty, or exceeds the limits.
    """
    root = Path(path)
    tokenizer, args = read_tokenizer(root), dict(template_args or {})
    offers = [list(offered) for offered in tools] or [[] for _ in conversations]
    chosen = by_template(root, [bool(offered or args.get("tools")) for offered in offers])
    if tokenizer is None or chosen is None:
        return None
    special = special_tokens(root)
    added = [str(token) for token in tokenizer.get_added_tokens_decoder().values()]
    literal = MarksAsText(directory_marks(root, tokenizer), of=marks_as_text)
    found = [(0, 0)] * len(conversations)
    for template, places in chosen:
        talks = (with_system(tuple(conversations[i]), system) for i in places)
        answer = limited(
            _PROGRAM,
            {
                "template": template,
                "special": special,
                "conversations": [literal.messages(talk) for talk in talks],
                "args": args,
                "tools": [offers[i] for i in places],
                "marks": any_of({*added, *special.values()}).pattern,
                "last_mark": special.get("eos_token", ""),
            },
            where=str(root),
        )
        texts = answer["texts"]
        tokens = iter(token_counts(tokenizer, [text for parts in texts for text in parts], root))
        for i, count, parts in zip(places, answer["counts"], texts, strict=True):
            found[i] = (count, sum(next(tokens) for _ in parts))
    return found
