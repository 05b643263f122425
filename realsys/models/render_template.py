"""Program that renders a model's chat template for questions read from stdin.

A template is untrusted code. It runs in jinja2's sandbox, in a process with limited time and memory that
sees only the questions. What it does with longer conversations is tried besides: a template may end with a
question, and not behind an answer. Run by prompt_lengths.py; it needs jinja2 alone. Templates can call what
transformers offers them.
"""

from __future__ import annotations

import json
import resource
import sys
from datetime import datetime
from typing import Any

CPU_S, MEMORY_BYTES = 10, 1 << 30
MAX_CHARS = 64 << 20  # limit over all texts
_UNSET = {"documents": None}  # what transformers gives each template


def environment() -> Any:
    """Makes the jinja2 environment that transformers uses for templates."""
    from jinja2 import nodes
    from jinja2.exceptions import TemplateError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """``{% generation %}`` blocks, which mark assistant text; rendered as plain text here."""

        tags = {"generation"}  # noqa: RUF012 - jinja2 wants it so

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
            return nodes.Scope(body, lineno=line)

    def refuse(message: str) -> None:
        raise TemplateError(message)

    def to_json(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    made.filters["tojson"] = to_json
    made.globals["raise_exception"] = refuse
    made.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return made


def names_read(template: str) -> frozenset[str]:
    """Returns the variables that a template takes from outside; none of one that does not compile."""
    from jinja2 import meta

    made = environment()
    try:
        found = meta.find_undeclared_variables(made.parse(template))
    except Exception:  # whatever is wrong with it is told when it is filled
        return frozenset()
    return frozenset(found) - {*made.globals}


def render_all(
    template: str,
    special: dict[str, str],
    conversations: list[list[list[dict[str, Any]]]],
    args: dict[str, Any],
    trials: list[dict[str, Any]],
    tools: list[list[dict[str, Any]]],
) -> dict[str, Any]:
    """Renders all conversations: ``{"texts": […], "names": […]}``, or ``{"error": what}``; ``names`` are
    those that the template takes from outside.

    Args:
        conversations: forms of the messages of each, of which the first that the template takes counts.
        tools: of each conversation; none: of none.
        trials: variables of further renderings, which must end; whether the template takes them is its own
            matter, and so is what it makes of them.
    """
    try:
        compiled = environment().from_string(template)
    except Exception as error:  # a template may raise anything
        return {"error": f"it does not compile: {_describe(error)}"}
    texts: list[str] = []
    chars = 0
    for forms, offered in zip(conversations, tools or [[]] * len(conversations), strict=True):
        text, first = None, None
        for messages in forms:
            given = {**_UNSET, **special, **args, "messages": messages}
            given["tools"] = offered or args.get("tools")
            try:
                text = compiled.render(**given, add_generation_prompt=True)
                break
            except MemoryError:
                return {"error": f"it needs more than {MEMORY_BYTES >> 20} MiB for one question"}
            except Exception as error:
                first = first or error
        if text is None:
            return {"error": f"it can't be filled with a question: {_describe(first)}"}
        chars += len(text)
        if chars > MAX_CHARS:
            return {"error": f"it makes {chars:,} characters of {len(texts) + 1} questions"}
        texts.append(text)
    for given in trials:
        try:
            chars += len(compiled.render(**{**_UNSET, **special, **args, **given}))
        except MemoryError:
            return {"error": f"it needs more than {MEMORY_BYTES >> 20} MiB for one conversation"}
        except Exception:  # e.g. it takes no tools
            continue
        if chars > MAX_CHARS:
            return {"error": f"it makes {chars:,} characters of short conversations"}
    return {"texts": texts, "names": sorted(names_read(template))}


def _describe(error: BaseException | None) -> str:
    line = getattr(error, "lineno", None)
    said = str(error).strip().splitlines() or [type(error).__name__]
    return said[0][:200] + (f" (line {line})" if line else "")


def limit_process() -> None:
    """Limits the time and memory of this process, and lets it write no files."""
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


if __name__ == "__main__":
    asked = json.load(sys.stdin)
    limit_process()
    answer = render_all(**asked)
    json.dump(answer, sys.stdout)
