"""Program that reads the assistant's turns of conversations read from stdin, as a worker trains them.

For conversation_lengths.py: a template is untrusted code, and runs here within render_template.py's limits.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from realsys.api.errors import DataError
from realsys.data.sources.assistant_turns import TurnReader, sequences_of
from realsys.data.sources.record_shape import Message, template_forms
from realsys.models.render_template import MAX_CHARS, environment, limit_process


def longest_sequences(
    template: str,
    special: Mapping[str, str],
    conversations: Sequence[Sequence[Message]],
    args: Mapping[str, Any],
    tools: Sequence[Sequence[Mapping[str, Any]]],
    marks: str,
    last_mark: str,
) -> dict[str, Any]:
    """Returns of each conversation the number of its sequences, and the texts that the one with the most
    characters consists of: ``{"counts": […], "texts": […]}``, or ``{"error": what}``.

    Args:
        marks: pattern of texts that are tokens of their own.
    """
    compiled = environment().from_string(template)
    counts, texts, chars = [], [], 0
    for messages, offered in zip(conversations, tools, strict=True):
        given = {"documents": None, **special, **args, "tools": [*offered] or args.get("tools")}

        def rendered(some: Sequence[Message], opens: bool, given: Any = given) -> str:
            for form in template_forms(some):
                variables = {**given, "messages": form, "add_generation_prompt": opens}
                try:
                    return str(compiled.render(**variables))
                except MemoryError:
                    raise
                except Exception as error:  # a template may raise anything
                    refused = error
            raise DataError(str(refused), where="messages", fix="give messages that it takes")

        reader = TurnReader(rendered, marks=re.compile(marks), last_mark=last_mark)
        try:
            joined = sequences_of(reader.read_all(messages))
        except DataError:
            joined = []
        longest = max(([t for t, _ in parts] for parts in joined), key=_num_chars, default=[])
        counts.append(len(joined))
        texts.append(longest)
        chars += _num_chars(longest)
        if chars > MAX_CHARS:
            return {"error": f"it makes {chars:,} characters of {len(texts)} conversations"}
    return {"counts": counts, "texts": texts}


def _num_chars(texts: Sequence[str]) -> int:
    return sum(map(len, texts))


if __name__ == "__main__":
    request = json.load(sys.stdin)
    limit_process()
    json.dump(longest_sequences(**request), sys.stdout)
