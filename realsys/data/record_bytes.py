"""Whole records of a data set as a tensor of a batch, for calls that read them (key ``record``).

They travel from worker to worker as other tensors do, and only to calls that list the key: the master never
holds a record.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from realsys.data.sequence_sample import SequenceSample
from realsys.data.tensor_bytes import bytes_of

RECORD = "record"


def record_key(ids: Sequence[str], records: Sequence[Mapping[str, Any]]) -> SequenceSample:
    """Returns a batch of the key ``record``: uint8, the bytes of each record's JSON."""
    texts = [json.dumps(record).encode() for record in records]
    joined = bytearray(b"".join(texts))
    data = (
        torch.frombuffer(joined, dtype=torch.uint8) if joined else torch.empty(0, dtype=torch.uint8)
    )
    return SequenceSample.from_tensors(
        list(ids), {RECORD: [[len(text)] for text in texts]}, {RECORD: data}
    )


def records_of(data: SequenceSample) -> list[dict[str, Any]]:
    """Returns the record of each id. Raises DataError: the batch has no such key."""
    lengths = data.meta.rows_per_id(RECORD)
    pieces = torch.split(data.data[RECORD].cpu(), list(lengths))
    return [json.loads(bytes(bytes_of(piece))) for piece in pieces]
