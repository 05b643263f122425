"""Reads question-and-answer records from a JSONL file. No torch: the launcher checks files with it too.

JSONL is UTF-8 text, with or without a byte order mark, or such text packed by gzip. Only a newline ends a
record: other separators of Unicode (U+2028, U+0085) may stand inside a JSON string.

Two spellings are read: ``{"prompt": …, "answer": …}`` and GSM8K's ``{"question": …, "answer": …}``
whose answer works step by step and ends in ``#### 42``. A data set may carry further fields; they
are ignored.
"""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path
from typing import Any

from realsys.api.basics.bounded_files import bounded_lines, open_regular, parse_json
from realsys.api.errors import DataError, did_you_mean

FINAL = "####"
_GZIP = b"\x1f\x8b"


def read_records(path: str | Path) -> list[dict[str, str]]:
    """Reads all records as ``{"prompt", "answer"}`` (the answer with its steps, as written).

    Raises:
        DataError: the file is missing, is not JSON or has no records; or a line has no prompt or answer.
    """
    path = Path(path)
    try:
        with open_regular(path) as file:
            packed = file.read(2) == _GZIP
            file.seek(0)
            lines = bounded_lines(gzip.GzipFile(fileobj=file) if packed else file, path)
            records = [
                _record(text, f"{path}:{n}")
                for n, line in enumerate(lines, 1)
                if (text := line.decode("utf-8-sig" if n == 1 else "utf-8")).strip()
            ]
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise DataError(
            f"the data set can't be read: {error}",
            where=str(path),
            fix="give a readable JSONL file in UTF-8, plain or gzip-compressed",
        ) from error
    if not records:
        raise DataError(
            "the data set is empty", where=str(path), fix='add lines of {"prompt": …, "answer": …}'
        )
    return records


def final_answer(answer: str) -> str:
    """Returns the text after the last ``####``, or the whole text if there is none."""
    return answer.rpartition(FINAL)[2].strip()


def _record(line: str, where: str) -> dict[str, str]:
    try:
        record = parse_json(line)
    except ValueError as error:
        raise DataError(f"not JSON: {error}", where=where, fix="write one object a line") from error
    if not isinstance(record, dict):
        raise DataError(
            f"a {type(record).__name__}, not an object", where=where, fix="write one object a line"
        )
    prompt = record.get("question") if record.get("prompt") is None else record["prompt"]
    answer = record.get("answer")
    for name, value in (("prompt", prompt), ("answer", answer)):
        if isinstance(value, bool) or not isinstance(value, str | int | float) or value == "":
            raise DataError(
                f"{name!r} {_fault(record, name, value)}",
                where=where,
                fix="every record needs a prompt and an answer"
                + ("" if name in record else f" ({did_you_mean(name, record)})"),
            )
    return {"prompt": str(prompt), "answer": str(answer)}


def _fault(record: dict[str, Any], name: str, value: Any) -> str:
    if value == "":
        return "is empty"
    if value is None:
        return "is null" if name in record else "is missing"
    return f"is a {type(value).__name__}"
