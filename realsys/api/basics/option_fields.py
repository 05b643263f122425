"""Declares a setting: a dataclass field with its default, meaning, unit and allowed range in one place.

For everything that is configured; options.py has the settings that experiments share. `realsys show
--config`, the checks of ranges and the JSON Schema (realsys.config) read what is kept here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import field
from typing import Any


def option(
    default: Any,
    meaning: str,
    *,
    unit: str = "",
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    lt: float | None = None,
    choices: tuple[str, ...] = (),
    hub_split: str | None = None,
) -> Any:
    """A dataclass field with its meaning, unit and allowed range.

    Args:
        hub_split: the field names files of records, also by names on a hub: the split that such a name
            means if it says none; empty: it must say one. None: no such field.
    """
    # "description" and the ranges are pydantic's names.
    metadata: dict[str, Any] = {"ge": ge, "gt": gt, "le": le, "lt": lt, "choices": choices}
    metadata |= {"meaning": meaning, "unit": unit, "hub_split": hub_split}
    metadata["description"] = f"{meaning} ({unit})" if unit else meaning
    if choices:
        metadata["json_schema_extra"] = {"enum": [*choices, *([None] if default is None else [])]}
    if isinstance(default, Mapping):
        return field(default_factory=lambda: dict(default), metadata=metadata)
    if dataclasses.is_dataclass(default):
        return field(default_factory=lambda: default, metadata=metadata)
    return field(default=default, metadata=metadata)
