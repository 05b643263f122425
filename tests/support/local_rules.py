"""Reward rules that a test makes in its own process: no other could import them, so they run there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from realsys.api.basics.rule_permissions import RulePermissions


def trusted(rule: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function, marked as a rule that runs in the process that has the answers."""
    rule.permissions = RulePermissions(trusted=True)  # type: ignore[attr-defined]
    return rule
