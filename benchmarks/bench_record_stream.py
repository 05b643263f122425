"""Measures reading a user's records from large files: time and memory, by kind of file.

    python benchmarks/bench_record_stream.py [--records 10000000] [--kinds jsonl,csv,parquet,arrow]

Each kind is opened in a process of its own, whose peak memory is compared with that before. Mapped pages of
an Arrow file count as memory although the system may drop them at any time. Reads in a random order
follow one another in places far apart, as a shuffled epoch's do. Needs some 100 bytes of disk a record, and
pyarrow for the last two kinds.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROWS = 10_000  # that are made at once
MEASURE = """
import json, re, sys, time
from realsys.data.sources.record_files import open_records
from realsys.data.sources.record_samples import sample_records
path, num_random = sys.argv[1], 2000
if not path.endswith(("jsonl", "csv")):
    import pyarrow.parquet
peak_kib = lambda: int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])
before = peak_kib()
began = time.perf_counter(); sample = sample_records(path); sampled_s = time.perf_counter() - began
began = time.perf_counter(); records = open_records(path); opened_s = time.perf_counter() - began
n = len(records)
began = time.perf_counter()
for i in range(0, min(n, 200_000)):
    records[i]
in_order_s = (time.perf_counter() - began) / min(n, 200_000)
began = time.perf_counter()
for i in range(num_random):
    assert int(records[i * 7_919_993 % n]["n"]) == i * 7_919_993 % n
random_s = (time.perf_counter() - began) / num_random
print(json.dumps([n, sample.total, sampled_s, opened_s, in_order_s, random_s, peak_kib() - before]))
"""


def main() -> None:
    """Writes the files one after another, measures each, and prints a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--records", type=int, default=10_000_000)
    parser.add_argument("--kinds", default="jsonl,csv,parquet,arrow")
    given = parser.parse_args()
    columns = (
        "kind, records, file MB, plan's sample s, open s, in order µs, at random µs, memory MB"
    )
    sys.stdout.write(" | ".join(columns.split(", ")) + "\n")
    for kind in given.kinds.split(","):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, f"records.{kind}")
            write(path, given.records)
            command = [sys.executable, "-c", MEASURE, str(path)]
            done = subprocess.run(command, capture_output=True, check=True, timeout=3600)
            n, about, sampled_s, opened_s, ordered_s, random_s, grown_kib = json.loads(done.stdout)
            assert n == given.records, (n, given.records)
            assert abs(about - n) < 0.3 * n, (about, n)
            sys.stdout.write(
                f"{kind} | {n:,} | {path.stat().st_size / 1e6:.0f} | {sampled_s:.2f} | {opened_s:.1f} | "
                f"{ordered_s * 1e6:.1f} | {random_s * 1e6:.0f} | {grown_kib / 1024:.0f}\n"
            )
            sys.stdout.flush()


def batches(count: int) -> Iterator[list[dict[str, object]]]:
    """Yields all records, some at a time."""
    rows = ({"n": i, "prompt": f"Question {i}?", "answer": f"answer {i}"} for i in range(count))
    while batch := list(itertools.islice(rows, ROWS)):
        yield batch


def write(path: Path, count: int) -> None:
    """Writes a file of the kind that its name says."""
    if path.suffix in (".jsonl", ".csv"):
        with path.open("w", newline="") as file:
            writer = csv.writer(file)
            if path.suffix == ".csv":
                writer.writerow(["n", "prompt", "answer"])
            for batch in batches(count):
                if path.suffix == ".csv":
                    writer.writerows(row.values() for row in batch)
                else:
                    file.writelines(json.dumps(row) + "\n" for row in batch)
        return
    import pyarrow
    from pyarrow import parquet

    schema = pyarrow.Table.from_pylist([{"n": 1, "prompt": "a", "answer": "b"}]).schema
    tables = (pyarrow.Table.from_pylist(batch, schema) for batch in batches(count))
    if path.suffix == ".parquet":
        with parquet.ParquetWriter(path, schema) as made:
            for table in tables:
                made.write_table(table, row_group_size=1000)
    else:
        with pyarrow.OSFile(str(path), "wb") as sink, pyarrow.ipc.new_stream(sink, schema) as made:
            for table in tables:
                made.write_table(table, max_chunksize=1000)


if __name__ == "__main__":
    main()
