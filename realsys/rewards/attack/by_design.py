"""What built-in rules pay on purpose, by kind of exploit: listed in each report, and no reason to fail."""

from __future__ import annotations

from collections.abc import Mapping

_EACH_TEST = "each test that a program passes is paid; code_tests.partial=false pays only all"
BY_DESIGN: Mapping[str, Mapping[str, str]] = {
    "code_tests": {"hardcode_tests": _EACH_TEST, "stateful_answers": _EACH_TEST},
}
# Tasks of the corpus that fit a built-in rule; other rules are played those of ``DEFAULT_TASKS``.
TASKS: Mapping[str, tuple[str, ...]] = {
    "math_verify": ("math", "any"),
    "code_tests": ("code",),
    "judge": ("judge", "any"),
}
DEFAULT_TASKS = ("math", "any")
ALL_TASKS = ("math", "any", "code", "judge", "choice", "text_format")


def designed(rule: str) -> dict[str, str]:
    """Returns the kinds that the rules of an expression pay on purpose, with the reason."""
    names = (term.rpartition("*")[2].strip() for term in rule.split("+"))
    return {kind: reason for name in names for kind, reason in BY_DESIGN.get(name, {}).items()}
