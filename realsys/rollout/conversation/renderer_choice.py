"""Which renderer turns a model's conversations into tokens: the chat template, or a family of a package.

For agents, whose plan checks the choice without the package, and for a served model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from realsys.api.errors import ConfigError, did_you_mean
from realsys.rollout.conversation.chat_rendering import ChatRenderer, TemplateRenderer
from realsys.rollout.conversation.package_renderer import FAMILIES, PACKAGES, PackageRenderer

TEMPLATE = "template"


def check_renderer(name: str, *, template: bool, where: str) -> None:
    """Refuses an unknown name, and a template that would not be used.

    Args:
        template: one is given in place of the tokenizer's.
    Raises:
        ConfigError: these.
    """
    if name not in (TEMPLATE, *FAMILIES):
        raise ConfigError(
            f"no renderer is called {name!r}",
            where=where,
            fix=did_you_mean(name, (TEMPLATE, *FAMILIES)),
        )
    if template and name != TEMPLATE:
        raise ConfigError(
            f"the renderer {name!r} uses no chat template, and one is given",
            where=where,
            fix="leave one of them out",
        )


def needed_packages(name: str) -> tuple[str, ...]:
    """Returns the import names of what the renderer called ``name`` needs besides a tokenizer."""
    return () if name == TEMPLATE else PACKAGES


def make_renderer(
    name: str,
    tokenizer: Any,
    *,
    end_ids: Iterable[int],
    template: str | None = None,
    template_args: Mapping[str, Any] | None = None,
    keep_thoughts: bool = True,
    marks_as_text: str = "tools",
) -> ChatRenderer:
    """Makes the renderer called ``name``; the arguments are those of ``TemplateRenderer``.

    Raises:
        ConfigError: it is unknown, not installed, or does not fit the tokenizer.
    """
    check_renderer(name, template=bool(template), where="renderer")
    if name == TEMPLATE:
        return TemplateRenderer(
            tokenizer,
            end_ids=end_ids,
            template=template,
            template_args=template_args,
            keep_thoughts=keep_thoughts,
            marks_as_text=marks_as_text,
        )
    return PackageRenderer(
        tokenizer, name, template_args=template_args, keep_thoughts=keep_thoughts
    )
