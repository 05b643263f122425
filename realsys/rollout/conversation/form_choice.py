"""Which form reads a policy's answers: one of ours where it fits, else the package's, else a plain one.

    the setting ``form`` ─▶ else a family named as renderer ─▶ else the marks in the chat template

What a family writes is known by its name, whatever template lies beside the checkpoint.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from realsys.api.errors import ConfigError, did_you_mean
from realsys.config.extras import missing_packages
from realsys.rollout.conversation.answer_forms import (
    ANSWER_FORMS,
    PLAIN_FORMS,
    AnswerForm,
    form_of_template,
)
from realsys.rollout.conversation.forms.family_calls import FAMILY_CALLS, family_of_template
from realsys.rollout.conversation.package_form import PackageForm, form_name
from realsys.rollout.conversation.package_renderer import FAMILIES, PACKAGES

logger = logging.getLogger(__name__)

_OURS: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("qwen3", "qwen3-vl"), "hermes"),
        **dict.fromkeys(("prime-qwen3", "qwen3.5", "qwen3.6", "qwen3.8"), "qwen3_coder"),
        **dict.fromkeys(("nemotron-3", "nemotron-3-ultra", "nemotron-3.5"), "qwen3_coder"),
        **dict.fromkeys(("glm-4.5", "glm-5", "glm-5.1", "glm-5.3"), "glm"),
        **dict.fromkeys(("laguna-xs.2", "laguna-m.1", "laguna-xs-2.1", "laguna-s-2.1"), "glm"),
        **dict.fromkeys(("deepseek-v3", "deepseek-r1"), "deepseek"),
        "llama-3": "llama3_json",
    }
)
FORM_NAMES = (*ANSWER_FORMS, *FAMILY_CALLS)


def check_form(name: str, *, where: str) -> None:
    """Refuses the name of no form; empty is none.

    Raises:
        ConfigError: this.
    """
    if name and name not in FORM_NAMES:
        raise ConfigError(
            f"no form is called {name!r}", where=where, fix=did_you_mean(name, FORM_NAMES)
        )


def form_of_family(family: str) -> str:
    """Returns the form that reads a family of the package renderers; empty: its template tells."""
    return family if family in FAMILY_CALLS else _OURS.get(family, "")


def shown_form(form: str, *, renderer: str, template: str | None = None) -> str:
    """Returns the form that will read a run's answers, in words, as a plan tells it.

    Args:
        template: the chat template's text; None: it is not known yet.
    """
    name = form or form_of_family(renderer)
    if not name and template is None:
        return "the form that the chat template writes"
    if not name:
        name = form_of_template(template or "").name
        if name in PLAIN_FORMS and renderer not in FAMILIES:
            name = family_of_template(template or "") or name
        if name in PLAIN_FORMS and "tools" in (template or ""):
            return f"{name}: no form reads the tool calls of this chat template, they stay text"
    return form_name(name) if name in FAMILY_CALLS else name


def needed_by_form(form: str) -> tuple[str, ...]:
    """Returns the import names of what a form that is named needs."""
    return PACKAGES if form in FAMILY_CALLS else ()


def choose_form(name: str, tokenizer: Any, *, renderer: str, template: str) -> AnswerForm:
    """Returns the form that reads answers.

    Args:
        name: of the form; empty: the first that fits.
        renderer: a family of the package, or ``template``.
        template: the chat template's text.
    Raises:
        ConfigError: a form that was named, or a family's, is read by the package, and that is not
            installed, or does not fit the tokenizer.
    """
    if name := name or form_of_family(renderer):
        if name in ANSWER_FORMS:
            return ANSWER_FORMS[name]
        return PackageForm(tokenizer, name, where="agent_args.form, or --renderer")
    form = form_of_template(template)
    family = family_of_template(template) if form.name in PLAIN_FORMS else ""
    if not family or renderer in FAMILIES:
        return form
    try:
        for problem in missing_packages(PACKAGES, where="the chat template"):
            raise problem
        return PackageForm(tokenizer, family, where="the chat template")
    except ConfigError as error:
        logger.warning(
            "tool calls stay text: the template writes those of %s, and %s; %s",
            *(family, error.what, error.fix),
        )
        return form
