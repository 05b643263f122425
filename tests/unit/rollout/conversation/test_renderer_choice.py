"""The choice of a conversation's renderer: what a plan refuses, and what a worker makes."""

from __future__ import annotations

from typing import Any

import golden
import pytest
from package_families import OF_TEMPLATES

from realsys.api.errors import ConfigError
from realsys.config.plugin_arguments import argument_problems
from realsys.rollout.conversation.chat_rendering import TemplateRenderer
from realsys.rollout.conversation.package_renderer import PackageRenderer
from realsys.rollout.conversation.renderer_choice import make_renderer, needed_packages

QWEN = OF_TEMPLATES["qwen3"]


@pytest.mark.parametrize("agent", ["chat", "external", "harbor"])
@pytest.mark.parametrize(
    ("args", "what", "fix"),
    [
        ({"renderer": "qwen"}, "no renderer is called 'qwen'", "did you mean 'qwen3'"),
        ({"renderer": "renderers"}, "no renderer is called 'renderers'", "deepseek-r1, "),
        ({"renderer": "qwen3", "template": "{{ x }}"}, "uses no chat template", "leave one"),
    ],
)
def test_a_plan_refuses_what_is_no_renderer(
    agent: str, args: dict[str, Any], what: str, fix: str
) -> None:
    (problem,) = argument_problems("agent", agent, args, where="task.agent_args")
    assert what in problem.what
    assert fix in problem.fix
    assert "task.agent_args.renderer" in problem.where


@pytest.mark.parametrize("args", [{}, {"renderer": "template"}, {"renderer": "qwen3"}])
def test_a_plan_takes_a_renderer_without_its_package(args: dict[str, Any]) -> None:
    assert not list(argument_problems("agent", "chat", args, where="task.agent_args"))


def test_the_name_decides_which_renderer_is_made() -> None:
    more: dict[str, Any] = {"end_ids": QWEN.end_ids, "template_args": {"enable_thinking": False}}
    by_template = make_renderer("template", QWEN.tokenizer, keep_thoughts=False, **more)
    assert isinstance(by_template, TemplateRenderer)
    assert not by_template.keep_thoughts
    by_package = make_renderer("qwen3", QWEN.tokenizer, **more)
    assert isinstance(by_package, PackageRenderer)
    assert (
        by_package.template == by_template.template == QWEN.template
    )  # both answers are read alike
    with golden.raises(ConfigError):
        make_renderer("qwen", QWEN.tokenizer, **more)


def test_a_family_needs_its_package() -> None:
    assert needed_packages("template") == ()
    assert needed_packages("qwen3") == ("renderers", "httpx")
