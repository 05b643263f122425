"""A tokenizer's chat templates, and their arguments: those that realsys gives itself, and those that a
template reads (pure).
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping

from realsys.api.errors import ConfigError

# Of transformers' apply_chat_template, which takes a template's arguments beside its own.
RESERVED = frozenset(
    (
        *("add_generation_prompt", "chat_template", "continue_final_message", "conversation"),
        *("max_length", "messages", "padding", "return_assistant_tokens_mask", "return_dict"),
        *(
            "return_tensors",
            "sanitize_control_tokens",
            "tokenize",
            "tokenizer_kwargs",
            "truncation",
        ),
    )
)


def template_for(own: object, *, tools: bool) -> str | None:
    """Returns the template that transformers fills; None: there is none.

    Args:
        own: a tokenizer's: a text, or several by name, of which ``tool_use`` is for talks with tools.
    """
    if isinstance(own, Mapping):
        own = own.get("tool_use" if tools and "tool_use" in own else "default")
    return own if isinstance(own, str) and own else None


def all_texts(own: object) -> str:
    """Returns a tokenizer's templates as one text, in which marks are looked for."""
    return "\n".join(map(str, own.values())) if isinstance(own, Mapping) else str(own or "")


def reserved_among(names: Iterable[str]) -> str | None:
    """Returns the first of these names that no setting can give."""
    return next((name for name in names if name in RESERVED), None)


def unread_argument(
    read: Collection[str], names: Iterable[str], *, where: str
) -> ConfigError | None:
    """Returns the error of the first argument that would change nothing.

    Args:
        read: what the template reads. where: what gives them.
    """
    name = next((name for name in names if name not in read), None)
    if name is None:
        return None
    near = difflib.get_close_matches(name, sorted(read), n=1)
    return ConfigError(
        f"the chat template reads no {name!r}",
        where=f"{where}.{name}",
        fix=f"did you mean {near[0]!r}?" if near else "leave it out: it would change nothing",
    )
