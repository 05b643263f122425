"""Settings of a trial as rows for the report: value, default, unit, meaning. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from realsys.api import registry
from realsys.api.basics.choice import KIND
from realsys.api.errors import RealsysError
from realsys.api.plain import to_plain
from realsys.config.option_tree import rows

_MISSING = object()


@dataclass(frozen=True, kw_only=True)
class ReportOptionRow:
    """One setting. ``default`` is None in text form if unknown."""

    name: str
    value: str
    default: str | None
    unit: str = ""
    meaning: str = ""

    @property
    def differs(self) -> bool:
        """True if the default is known and the value differs."""
        return self.default is not None and self.value != self.default


def option_rows(options: Mapping[str, Any], experiment_name: str) -> list[ReportOptionRow]:
    """Returns every setting in order of declaration, with the experiment's metadata.

    Uses the experiments registered in this process; imports no file of the trial.
    """
    experiment = _default_experiment(experiment_name)
    declared = {row.path: row for row in rows(experiment)} if experiment is not None else {}
    defaults = dict(_flat(to_plain(experiment))) if experiment is not None else {}
    found = []
    for name, value in _flat(options):
        default = defaults.get(name, _MISSING)
        row = declared.get(name) or declared.get(name.removesuffix(f".{KIND}"))
        found.append(
            ReportOptionRow(
                name=name,
                value=_text(value),
                default=None if default is _MISSING else _text(default),
                unit=row.unit if row else "",
                meaning=row.meaning if row else "",
            )
        )
    return found


def _default_experiment(name: str) -> Any:
    if not name or registry.check("experiment", name, where="report") is not None:
        return None
    try:
        experiment = registry.make_experiment(name)
    except (RealsysError, TypeError, ImportError):  # required options, or a plug-in that is gone
        return None
    return experiment if dataclasses.is_dataclass(experiment) else None


def _flat(options: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in options.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{path}{name}.")
        else:
            yield f"{path}{name}", value


def _text(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple):
        return ", ".join(map(_text, value)) or "none"
    return str(value) if value != {} else "none"
