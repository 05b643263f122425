"""Settings of which one of several kinds is chosen by name: ``schedule=async``.

A choice (``Task``, ``Algorithm``, ``Schedule``, ``Placement``) is an abstract base; its kinds are frozen
dataclasses, each with the settings that mean something for it alone. A field annotated with the base holds
an instance of one kind. On paper (plan, YAML) that is a table with its name under ``kind``.
"""

from __future__ import annotations

from typing import Any, ClassVar, TypeVar

from realsys.api import registry

KIND = "kind"  # key of the name in a table
K = TypeVar("K", bound="type[Choice]")


class Choice:
    """Base of the bases. Registered kinds are found by ``choice`` and ``kind``."""

    choice: ClassVar[
        str
    ]  # what is chosen, e.g. "schedule": a kind of plug-in (realsys.api.registry)
    kind: ClassVar[str]  # name of this kind, e.g. "async"


def is_choice(kind: Any) -> bool:
    """Whether a type is a choice or one of its kinds."""
    return isinstance(kind, type) and issubclass(kind, Choice)


def kind_named(choice: type[Choice], name: str) -> type[Choice]:
    """Returns the registered kind of that name. Raises UnknownName."""
    found: type[Choice] = registry.find(choice.choice, name)
    return found


def register_kind(cls: K) -> K:
    """Registers a user's kind of task, algorithm, schedule or placement; usable as a decorator.

    Raises:
        ConfigError: another one has its name.
    """
    registry.register(cls.choice, cls.kind, cls)
    return cls
