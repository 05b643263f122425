"""Names by which settings mean files of records: the endings of files, and names on a Hugging Face hub."""

from __future__ import annotations

RECORD_SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".arrow")
HUB_PREFIX = "hf:"


def is_record_name(name: str) -> bool:
    """Whether a file of this name, without its folder, is taken for a file of records."""
    return not name.startswith((".", "_")) and name.removesuffix(".gz").endswith(RECORD_SUFFIXES)


def is_hub_name(path: str | None) -> bool:
    """Whether a setting names data on a hub, of which no local files are known yet."""
    return path is not None and path.startswith(HUB_PREFIX)
