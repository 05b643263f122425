"""Settings that name data on a hub → the same settings with local paths, before a plan is made of them.

Every field that ``option`` declares with ``hub_split`` may hold such a name, at whatever depth.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from launcher.hub.hub_data import DataHub
from launcher.hub.hub_names import amount, files_of, parse_hub_name, pinned
from realsys.api.basics.record_names import is_hub_name
from realsys.api.errors import ConfigError
from realsys.api.experiment import ChosenSetting

E = TypeVar("E")  # an experiment, or other dataclasses of settings
_Locate = Callable[[str, str, str], str]


@dataclass(frozen=True)
class LocatedData(Generic[E]):
    """An experiment, or other settings, whose data are local, as far as they are here.

    Attributes:
        is_complete: whether all are.
        chosen: each setting that named data on a hub, with the name of exactly these files.
    """

    experiment: E
    is_complete: bool = True
    chosen: list[ChosenSetting] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    problems: list[ConfigError] = field(default_factory=list)


def with_local_data(experiment: E, hub: DataHub, *, fetch: bool = False) -> LocatedData[E]:
    """Replaces names on a hub by local paths. A name that means no files stays, with a problem; so does one
    of files that are not here, with its commit and a warning.

    Args:
        fetch: fetch what is not here.
    """
    found = LocatedData(experiment)

    def locate(setting: str, text: str, split: str) -> str:
        try:
            return _located(setting, text, split, hub, found, fetch=fetch)
        except ConfigError as problem:
            found.problems.append(problem)
            return text

    local = _replaced(experiment, "", locate)
    warnings = [*hub.warnings, *found.warnings]
    return dataclasses.replace(
        found, experiment=local, is_complete=not found.warnings, warnings=warnings
    )


def _located(
    setting: str, text: str, split: str, hub: DataHub, found: LocatedData[Any], *, fetch: bool
) -> str:
    """Returns the local path of a name, or the name with its commit. Raises ConfigError."""
    name = parse_hub_name(text, where=setting)
    listing = hub.listing(name, where=setting)
    name = pinned(name, listing, split, where=setting)
    files = files_of(name, listing)
    missing = hub.missing(name, files)
    if missing and fetch:
        hub.fetch(name, missing, listing, where=setting)
        missing = []
    why = amount(files, listing) + (", not here yet" if missing else "")
    found.chosen.append(ChosenSetting(path=setting, value=str(name), why=why))
    if not missing:
        return str(hub.folder(name) / name.files)
    found.warnings.append(
        f"{setting}: {why}. `realsys launch` and `realsys data show` fetch them; this plan knows nothing "
        "of their records"
    )
    return str(name)


def _replaced(group: Any, path: str, locate: _Locate) -> Any:
    """Returns the dataclass with other values where it, or a group or table in it, names data on a hub."""
    changed: dict[str, Any] = {}
    for f in dataclasses.fields(group):
        value, name, split = getattr(group, f.name), f"{path}{f.name}", f.metadata.get("hub_split")
        if dataclasses.is_dataclass(value):
            changed[f.name] = _replaced(value, f"{name}.", locate)
        elif isinstance(value, Mapping):
            changed[f.name] = {
                key: _replaced(entry, f"{name}.{key}.", locate)
                if dataclasses.is_dataclass(entry)
                else entry
                for key, entry in value.items()
            }
        elif split is not None and isinstance(value, str) and is_hub_name(value):
            changed[f.name] = locate(name, value, split)
    changed = {name: new for name, new in changed.items() if new != getattr(group, name)}
    return dataclasses.replace(group, **changed) if changed else group
