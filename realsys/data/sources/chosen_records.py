"""Applies a user's filters and transforms to records. No torch.

They are functions registered by name (``register_filter``, ``register_transform``): a filter says of a
record whether to keep it, a transform returns another one. Filters see the record as it stands in the
file; transforms work on what was kept, in order, each time a record is read. Both must depend on the record
alone: every worker applies them by itself, and a resumed run again.

Filters are applied to all records once, when the data set is opened, since the order of a run depends on
how many are left; 4 bytes are held for each.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from realsys.api import registry
from realsys.api.errors import DataError
from realsys.api.users_code.users_frames import users_place
from realsys.data.sources.record_parts import PartOfRecords, RecordSource
from realsys.runtime.progress import tick

logger = logging.getLogger(__name__)
_TICK_EVERY = 1000


def chosen_records(
    records: RecordSource, *, keep: Sequence[str], transform: Sequence[str], name: str
) -> RecordSource:
    """Drops records by filters and shows the others as transforms make them.

    Args:
        keep: names of filters, all of which must keep a record.
        transform: names of transforms, applied in this order.
        name: of the data set, for the log.
    Raises:
        UnknownName: no such filter or transform. DataError: one raised, or no record is kept.
    """
    if keep:
        filters = [(name, registry.find("filter", name)) for name in keep]
        kept = array("I")
        for index in range(len(records)):
            if index % _TICK_EVERY == 0:
                tick()
            if _is_kept(filters, records, index):
                kept.append(index)
        logger.info(
            "records filtered source=%s filters=%s kept=%d dropped=%d",
            name,
            ",".join(keep),
            len(kept),
            len(records) - len(kept),
        )
        if not kept:
            raise DataError(
                f"the filters {', '.join(keep)} keep none of {len(records):,} records",
                where=name,
                fix="correct the filters: they return True for what is to be kept",
            )
        records = PartOfRecords(records, kept)
    return TransformedRecords(records, transform) if transform else records


class TransformedRecords:
    """Records as transforms make them, when they are read."""

    def __init__(self, records: RecordSource, transform: Sequence[str]) -> None:
        self._records = records
        self._transforms = [(name, registry.find("transform", name)) for name in transform]

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> dict[str, Any]:
        record = self._records[index]
        for name, function in self._transforms:
            made = _called(function, record, f"transform {name!r}", self._records.where, index)
            if not isinstance(made, Mapping):
                raise DataError(
                    f"transform {name!r} returned a {type(made).__name__}",
                    where=self.where(index),
                    fix="return a dict: the record, changed or anew",
                )
            record = dict(made)
        return record

    def where(self, index: int) -> str:
        """Returns where the record stands in its source."""
        return self._records.where(index)


def _is_kept(
    filters: Sequence[tuple[str, Callable[..., Any]]], records: RecordSource, index: int
) -> bool:
    record = records[index] if filters else {}
    return all(
        _called(function, record, f"filter {name!r}", records.where, index)
        for name, function in filters
    )


def _called(
    function: Callable[..., Any],
    record: dict[str, Any],
    name: str,
    where: Callable[[int], str],
    index: int,
) -> Any:
    """Calls a user's function on a record. Raises DataError: it raised."""
    try:
        return function(record)
    except Exception as error:  # a plug-in may raise anything
        place = f"{at}: " if (at := users_place(error)) else ""
        raise DataError(
            f"{place}{name} raised {type(error).__name__}: {error}"[:500],
            where=where(index),
            fix="correct it, so that it takes every record",
        ) from error
