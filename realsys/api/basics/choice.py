"""Settings of which one of several kinds is chosen by name: ``schedule=async``.

A choice (``Task``, ``Algorithm``, ``Schedule``, ``Placement``) is an abstract base; its kinds are frozen
dataclasses, each with the settings that mean something for it alone. A field annotated with the base holds
an instance of one kind. On paper (plan, YAML) that is a table with its name under ``kind``.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any, ClassVar, TypeVar

from realsys.api.basics import plugin_table
from realsys.api.errors import ConfigError, UnknownName

KIND = "kind"  # key of the name in a table
K = TypeVar("K", bound="type[Choice]")
F = TypeVar("F")


class Choice:
    """Base of the bases. Registered kinds are found by ``choice`` and ``kind``."""

    # What is chosen, e.g. "schedule": a kind of plug-in (realsys.api.registry).
    choice: ClassVar[str]
    kind: ClassVar[str]  # name of this kind, e.g. "async"

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        """Describes a kind as the dataclass that it is, and a choice as one of its kinds."""
        if hasattr(cls, "kind"):
            return handler(source)
        kinds = [handler.generate_schema(kind) for kind in kinds_of(cls).values()]
        return {"type": "union", "choices": kinds} if kinds else {"type": "any"}

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: Any, handler: Any) -> Any:
        """The same as JSON Schema: a kind's table has its name, and a choice may be a name alone."""
        found = handler(schema)
        if hasattr(cls, "kind"):
            table = handler.resolve_ref_schema(found)
            table["properties"] = {KIND: {"const": cls.kind}, **table.get("properties", {})}
            return found
        return {"anyOf": [{"enum": list(kinds_of(cls))}, *found.get("anyOf", [found])]}


def is_choice(kind: Any) -> bool:
    """Whether a type is a choice or one of its kinds."""
    return isinstance(kind, type) and issubclass(kind, Choice)


def formula_of(chosen: Choice, formulas: Mapping[Any, F], *, own: str) -> F | None:
    """Returns the built-in formula of the kind that is chosen, or of the one that it inherits; None where a
    method ``own`` of a user's kind comes before.
    """
    for kind in type(chosen).__mro__:
        if own in vars(kind):
            return None
        if kind in formulas:
            return formulas[kind]
    return None


def kind_named(choice: type[Choice], name: str, *, where: str = "registry") -> type[Choice]:
    """Returns the registered kind of that name.

    Raises:
        UnknownName: with the nearest names, or because a field takes only some of the kinds.
    """
    found: type[Choice] = plugin_table.find(choice.choice, name, where=where)
    if not issubclass(found, choice):
        fix = "use one of " + ", ".join(kinds_of(choice))
        raise UnknownName(f"{choice.choice} {name!r} is not allowed here", where=where, fix=fix)
    return found


def kinds_of(choice: type[Choice]) -> dict[str, type[Choice]]:
    """Returns the kinds that a field of this type takes, by name, without those that can't be imported."""
    found = {}
    for name in plugin_table.names(choice.choice):
        with suppress(ImportError):
            found[name] = plugin_table.find(choice.choice, name)
    return {name: kind for name, kind in found.items() if issubclass(kind, choice)}


def register_kind(cls: K) -> K:
    """Registers a user's kind of task, algorithm, schedule or placement; usable as a decorator.

    Raises:
        ConfigError: another one has its name, or it is no kind of a choice, or has no name.
    """
    if not is_choice(cls) or not hasattr(cls, "choice"):
        raise ConfigError(
            f"{cls.__name__} inherits none of the bases that are chosen from",
            where=f"{cls.__module__}, class {cls.__name__}",
            fix="inherit Task, Algorithm, Schedule, Placement, PolicyLoss, AnswerEstimator or PairLoss",
        )
    if not isinstance(vars(cls).get("kind"), str):
        raise ConfigError(
            f"{cls.__name__} has no name to choose it by",
            where=f"{cls.__module__}, class {cls.__name__}",
            fix=f'give it one: kind = "{cls.__name__.lower()}"',
        )
    plugin_table.register(cls.choice, vars(cls)["kind"], cls)
    return cls
