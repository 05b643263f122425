"""Records of any file by number: the same records, their places in messages, bounded memory."""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import golden
import pytest

from realsys.api.errors import ConfigError, DataError
from realsys.config import extras
from realsys.data.sources import arrow_records, record_samples, text_records
from realsys.data.sources.record_files import open_records, record_paths
from realsys.data.sources.record_samples import sample_records

ROWS = [
    {"prompt": f'Question {i}?\nwith a line, a "quote" and ä', "answer": str(i * 10)}
    for i in range(500)
]


def jsonl(rows: list[dict]) -> str:
    return "".join(json.dumps(row, ensure_ascii=i % 2 == 0) + "\n" for i, row in enumerate(rows))


def csv_text(rows: list[dict], delimiter: str = ",") -> str:
    out = io.StringIO()
    writer = csv.DictWriter(out, list(rows[0]), delimiter=delimiter)
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def written(tmp_path: Path, kind: str) -> Path:
    """The same rows in a file of one kind."""
    path = tmp_path / f"rows.{kind}"
    if kind in ("jsonl", "weird"):
        path.write_text(jsonl(ROWS))
    elif kind == "jsonl.gz":
        path.write_bytes(gzip.compress(jsonl(ROWS).encode()))
    elif kind in ("csv", "tsv"):
        path.write_text(csv_text(ROWS, "\t" if kind == "tsv" else ","), newline="")
    elif kind == "csv.gz":
        path.write_bytes(gzip.compress(csv_text(ROWS).encode("utf-8-sig")))
    elif kind == "parquet":
        pyarrow = pytest.importorskip("pyarrow")
        parquet = pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pyarrow.Table.from_pylist(ROWS), path, row_group_size=70)
    else:
        write_arrow(path, ROWS, stream=kind == "stream.arrow")
    return path


def write_arrow(path: Path, rows: list[dict], *, stream: bool) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    table = pyarrow.Table.from_pylist(rows)
    make = pyarrow.ipc.new_stream if stream else pyarrow.ipc.new_file
    with pyarrow.OSFile(str(path), "wb") as sink, make(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=90)


KINDS = "jsonl weird jsonl.gz csv tsv csv.gz parquet stream.arrow file.arrow".split()


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("block", [64, 7, 1])
def test_every_kind_of_file_gives_the_same_records_in_any_order(
    tmp_path: Path, kind: str, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_records, "BLOCK_RECORDS", block)
    records = open_records(written(tmp_path, kind))
    assert len(records) == len(ROWS)
    order = list(range(len(ROWS)))
    random.Random(1).shuffle(order)
    assert [records[i] for i in order] == [ROWS[i] for i in order]
    assert list(records) == ROWS
    for outside in (-1, len(ROWS)):
        with pytest.raises(IndexError):
            records[outside]


@pytest.mark.parametrize(("records", "size"), [(2, 1 << 20), (99, 18), (1, 1 << 20)])
def test_a_block_of_neighbours_is_read_once(
    tmp_path: Path, records: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nine bytes a record; a block ends with its records or its bytes, whichever is first."""
    monkeypatch.setattr(text_records, "BLOCK_RECORDS", records)
    monkeypatch.setattr(text_records, "BLOCK_BYTES", size)
    path = tmp_path / "r.jsonl"
    path.write_text("".join(f'{{"a": {i}}}\n' for i in range(7)))
    opened, reads = open_records(path), list[tuple[int, int]]()
    read = text_records.PlainBytes.read
    monkeypatch.setattr(
        text_records.PlainBytes,
        "read",
        lambda self, begin, end: reads.append((begin, end)) or read(self, begin, end),
    )
    assert [row["a"] for row in opened] == list(range(7))
    step = 9 * min(records, size // 9)
    assert reads == [(begin, min(begin + step, 63)) for begin in range(0, 63, step)]


def test_a_place_is_the_line_where_the_record_begins(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text('\n{"a": 1}\n\n \n{"a": 2}\n{"a": 3}')
    records = open_records(path)
    assert [records.where(i) for i in range(3)] == [f"{path}:{n}" for n in (2, 5, 6)]
    table = tmp_path / "r.csv"
    table.write_text('a,b\n"one\ntwo",2\n\nthree,4\n')
    records = open_records(table)
    assert list(records) == [{"a": "one\ntwo", "b": "2"}, {"a": "three", "b": "4"}]
    assert [records.where(i) for i in range(2)] == [f"{table}:{n}" for n in (2, 5)]


def test_shards_are_read_in_the_order_of_their_names(tmp_path: Path) -> None:
    folder = tmp_path / "shards"
    folder.mkdir()
    (folder / "part-2.jsonl").write_text(jsonl(ROWS[200:]))
    (folder / "part-0.jsonl.gz").write_bytes(gzip.compress(jsonl(ROWS[:100]).encode()))
    (folder / "part-1.jsonl.gz").write_bytes(gzip.compress(jsonl(ROWS[100:200]).encode()))
    for other in ("_SUCCESS", ".part-9.jsonl", "README.md"):
        (folder / other).write_text("x")
    for path in (folder, f"{folder}/part-*", f"{folder}/part-?.jsonl*"):
        records = open_records(path)
        assert list(records) == ROWS
        assert records.where(150) == f"{folder}/part-1.jsonl.gz:51"
    with golden.raises(DataError):
        open_records(f"{folder}/parts-*")
    named = tmp_path / "[v1]"
    named.mkdir()
    (named / "a.jsonl").write_text(jsonl(ROWS[:1]))
    with golden.raises(DataError):
        open_records(f"{tmp_path}/[v1]/*.jsonl")
    assert list(open_records(f"{tmp_path}/[[]v1]/*.jsonl")) == ROWS[:1]
    with golden.raises(DataError):
        open_records(tmp_path)


def test_a_saved_dataset_is_its_arrow_files_in_their_order(tmp_path: Path) -> None:
    """As ``datasets.Dataset.save_to_disk`` of 4.x lays them out."""
    folder = tmp_path / "saved" / "train"
    folder.mkdir(parents=True)
    names = ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
    for name, rows in zip(names, (ROWS[:300], ROWS[300:]), strict=True):
        write_arrow(folder / name, rows, stream=True)
    state = {"_data_files": [{"filename": name} for name in names], "_fingerprint": "x"}
    (folder / "state.json").write_text(json.dumps(state))
    (folder.parent / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert list(open_records(folder)) == ROWS
    with golden.raises(DataError) as refused:
        open_records(folder.parent)
    assert str(folder) in refused.value.fix
    (folder / "state.json").write_text(json.dumps({**state, "_indices_data_files": [{}]}))
    with golden.raises(DataError):
        open_records(folder)


def test_values_that_json_has_not_become_such_that_it_has(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    import datetime
    import decimal

    from pyarrow import parquet

    row = {
        "when": datetime.datetime(2026, 1, 2, 3, 4),
        "price": decimal.Decimal("1.50"),
        "nothing": float("nan"),
        "nested": [{"a": [1, None]}],
    }
    parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "v.parquet")
    (found,) = open_records(tmp_path / "v.parquet")
    assert found == {
        "when": "2026-01-02T03:04:00",
        "price": 1.5,
        "nothing": None,
        "nested": [{"a": [1, None]}],
    }
    # What nothing reads: bytes, also within others, as pictures are.
    picture = {"bytes": b"\xff", "path": "a.png"}
    row = {"prompt": "q", "image": b"\xff", "picture": picture, "all": [picture], "n": 1}
    parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "i.parquet")
    assert list(open_records(tmp_path / "i.parquet")) == [{"prompt": "q", "n": 1}]


def test_a_row_group_too_large_for_memory_is_refused_with_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path, "parquet")
    monkeypatch.setattr("realsys.data.sources.arrow_records.MAX_GROUP_BYTES", 100)
    with golden.raises(DataError) as refused:
        open_records(path)
    assert "row_group_size" in refused.value.fix


def bomb(folder: Path, kind: str) -> Path:
    """Writes a file of few bytes that stand for many."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    large = "x" * (2 << 20)
    path = folder / f"{kind}.parquet"
    if kind == "nulls":  # a list that is nothing but a length
        nulls = pyarrow.ListArray.from_arrays([0, 1 << 22], pyarrow.nulls(1 << 22))
        table = pyarrow.table({"prompt": nulls})
        path = path.with_suffix(".arrow")
        with (
            pyarrow.OSFile(str(path), "wb") as file,
            pyarrow.ipc.new_file(file, table.schema) as to,
        ):
            to.write_table(table)
    elif kind == "named again":
        made = pyarrow.DictionaryArray.from_arrays([0] * 1000, pyarrow.array(["x" * (1 << 16)]))
        table = pyarrow.table({"prompt": pyarrow.ListArray.from_arrays([0, 1000], made)})
        path = path.with_suffix(".arrow")
        with (
            pyarrow.OSFile(str(path), "wb") as file,
            pyarrow.ipc.new_file(file, table.schema) as to,
        ):
            to.write_table(table)
    elif kind == "dictionary":
        parquet.write_table(pyarrow.table({"prompt": [large] * 64}), path, compression="zstd")
    elif kind == "nested":
        rows = [[{"role": "user", "content": large}]] * 64
        parquet.write_table(pyarrow.table({"messages": rows}), path, compression="zstd")
    else:
        table = pyarrow.table({"prompt": [large] * 64})
        how = {"use_dictionary": False, "column_encoding": {"prompt": "DELTA_BYTE_ARRAY"}}
        parquet.write_table(table, path, compression="zstd", **how)
    assert path.stat().st_size < (1 << 18)
    return path


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["dictionary", "nested", "prefixes", "nulls", "named again"])
def test_few_bytes_that_stand_for_many_are_refused_before_they_fill_the_memory(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = 8 << 20
    for name, value in (("MAX_GROUP", limit), ("_BATCH", limit), ("MAX_LINE", 1 << 20)):
        monkeypatch.setattr(f"realsys.data.sources.arrow_records.{name}_BYTES", value)
    path = bomb(tmp_path, kind)
    pyarrow = pytest.importorskip("pyarrow")
    usual = pyarrow.default_memory_pool()
    counted = pyarrow.proxy_memory_pool(usual)  # its largest is of this file alone
    pyarrow.set_memory_pool(counted)
    try:
        with golden.raises(DataError):
            next(iter(open_records(path)))
    finally:
        pyarrow.set_memory_pool(usual)
    assert counted.max_memory() < 4 * limit


def test_of_groups_whose_footer_says_less_few_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each unpacks to 2 MiB, and its footer says some hundred bytes: a text that repeats."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path, text = tmp_path / "r.parquet", "x" * 1024
    parquet.write_table(pyarrow.table({"prompt": [text] * 8 * 2048}), path, row_group_size=2048)
    monkeypatch.setattr(arrow_records, "KEPT_BYTES", 5 << 20)
    rows = arrow_records.ParquetRows(path)
    assert max(rows._bytes) < 1 << 20
    assert [len(rows[n]["prompt"]) for n in range(0, 8 * 2048, 2048)] == [1024] * 8
    kept = [table.get_total_buffer_size() for table in rows._kept.values()]
    assert len(kept) == 2
    assert 4 << 20 < sum(kept) <= 5 << 20
    monkeypatch.setattr(arrow_records, "MAX_GROUP_BYTES", 1 << 20)
    monkeypatch.setattr(arrow_records, "_BATCH_BYTES", 0)
    monkeypatch.setattr(pyarrow, "total_allocated_bytes", lambda: 0)  # another thread freed as much
    with pytest.raises(DataError) as refused:
        rows[0]
    assert refused.value.where == str(path)
    assert 0 not in rows._kept


def test_texts_that_stay_a_dictionary_are_the_same_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path, "parquet")
    parquet = pytest.importorskip("pyarrow.parquet")
    found = parquet.read_metadata(path)
    largest = max(found.row_group(i).total_byte_size for i in range(found.num_row_groups))
    monkeypatch.setattr("realsys.data.sources.arrow_records.MAX_GROUP_BYTES", largest)
    assert arrow_records._dictionary_columns(found)
    assert list(open_records(path)) == ROWS


def test_without_pyarrow_the_command_that_installs_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "r.parquet"
    path.write_bytes(b"PAR1 and more")
    monkeypatch.setattr(extras, "find_spec", lambda name: None)
    with golden.raises(ConfigError) as refused:
        open_records(path)
    assert "pip install 'realsys[data]'" in refused.value.fix


@pytest.mark.parametrize(
    ("name", "text", "where"),
    [
        ("a.jsonl", '[\n{"a": 1}\n]\n', ":1"),
        ("a.jsonl", '{"a": 1}\n[1]\n', ":2"),
        ("a.jsonl", '[{"a": 1}, {"a": 2}]\n', ":1"),
        ("a.jsonl", '{"a": 1}\n{"a": NaN}\n', ":2"),
        ("a.csv", "a,b\n1,2\n1\n", ":3"),
        ("a.csv", "a,a\n1,2\n", ":1"),
        ("a.csv", 'a,b\n1,"2\n3,4\n', ":2"),
        ("a.jsonl", "\n\n", ""),
        ("a.csv", "a,b\n", ""),
        ("a.parquet", "PAR1", ""),
    ],
)
def test_what_is_wrong_with_a_file_is_said_with_its_place(
    tmp_path: Path, name: str, text: str, where: str
) -> None:
    if name.endswith(".parquet"):
        pytest.importorskip("pyarrow")
    path = tmp_path / name
    path.write_text(text)
    with golden.raises(DataError) as refused:
        list(open_records(path))
    assert refused.value.where == f"{path}{where}"


def test_what_is_no_file_to_read_is_refused_in_bounded_time(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jsonl")
    for path in (tmp_path / "pipe.jsonl", Path("/dev/zero"), tmp_path / "none.jsonl"):
        with golden.raises(DataError):
            open_records(path)
        with golden.raises(DataError):
            sample_records(path)


def test_a_file_that_changes_while_it_is_read_is_told(tmp_path: Path) -> None:
    path = written(tmp_path, "jsonl")
    records = open_records(path)
    path.write_text(jsonl(ROWS[1:]))
    with golden.raises(DataError):
        records[400]


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "csv", "parquet"])
def test_of_a_large_file_a_plan_reads_beginning_end_and_between(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_samples, "WHOLE_BYTES", 1000)
    monkeypatch.setattr(record_samples, "WHOLE_PACKED_BYTES", 100)
    monkeypatch.setattr(record_samples, "WHOLE_ROWS", 100)
    monkeypatch.setattr(record_samples, "RUN_RECORDS", 5)
    monkeypatch.setattr(record_samples, "_TAIL_BYTES", 500)
    found = sample_records(written(tmp_path, kind))
    assert not found.is_whole
    numbers = [int(record["answer"]) // 10 for record in found.records]
    assert numbers[:5] == [0, 1, 2, 3, 4]
    assert all(found.records[i] == ROWS[n] for i, n in enumerate(numbers))
    if kind in ("jsonl", "parquet"):
        assert numbers == sorted(numbers)
        assert len(numbers) == len(set(numbers)) >= 35
        assert numbers[-1] >= 495
    assert found.total == pytest.approx(500, rel=0.35)
    assert found.is_exact == (kind == "parquet")


def test_a_small_file_is_read_whole_by_a_plan(tmp_path: Path) -> None:
    found = sample_records(written(tmp_path, "jsonl"))
    assert (found.is_whole, found.is_exact, found.total) == (True, True, 500)


def test_record_paths_of_one_file_is_that_file(tmp_path: Path) -> None:
    path = tmp_path / "with [brackets].jsonl"
    path.write_text("{}")
    assert record_paths(path) == [path]


STREAM = """
import json, re, sys
from realsys.data.sources.record_files import open_records
peak = lambda: int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])
before = peak()
records = open_records(sys.argv[1])
n = len(records)
total = sum(records[i]["n"] for i in range(0, n, 5))
step = 7919
spread = sum(records[i * step % n]["n"] for i in range(5000))
after = peak()
print(json.dumps([n, total, spread, (after - before) * 1024]))
"""


@pytest.mark.thorough
def test_many_lines_take_a_few_megabytes(tmp_path: Path) -> None:
    """In a process of its own, whose peak is measured; the file has 18 MB."""
    path, count = tmp_path / "stream.jsonl", 300_000
    with path.open("w") as file:
        for start in range(0, count, 1000):
            file.writelines(
                f'{{"n": {i}, "text": "some words of a record, number {i}"}}\n'
                for i in range(start, start + 1000)
            )
    done = subprocess.run(
        [sys.executable, "-c", STREAM, str(path)],
        capture_output=True,
        text=True,
        check=True,
        timeout=250,
    )
    num, total, spread, grown = json.loads(done.stdout)
    assert num == count
    assert total == sum(range(0, count, 5))
    assert spread == sum(i * 7919 % count for i in range(5000))
    assert grown < 5 << 20, grown


def test_bytes_of_arrow_values_by_hand():
    """Eight of each value, and those of its text; what a dictionary names twice counts twice."""
    pa = pytest.importorskip("pyarrow")
    pairs = pa.array([[("before", 1)], [("k", 1), ("lm", 2)]], pa.map_(pa.string(), pa.int64()))
    tensors, plain = pa.fixed_shape_tensor(pa.int8(), [2]), pa.list_(pa.int8(), 2)
    arrays = {
        "numbers": (pa.array([1, 2]), 16),
        "nulls": (pa.nulls(5), 40),
        "texts": (pa.array(["a", "bcd", None, "ä"]), 32 + 6),
        "large texts": (pa.array(["abc"], pa.large_string()), 11),
        "bytes": (pa.array([b"abc", b""]), 19),
        "large bytes": (pa.array([b"abc"], pa.large_binary()), 11),
        "dictionary": (pa.array(["aa", "aa", "b"]).dictionary_encode(), 24 + 5),
        "lists": (pa.array([[1, 2], [3], None]), 24 + 24),
        "large lists": (pa.array([[1, 2]], pa.large_list(pa.int8())), 8 + 16),
        "lists of two": (pa.array([["a", "bc"]], pa.list_(pa.string(), 2)), 8 + 16 + 3),
        "structs": (pa.array([{"a": 1, "b": "xy"}]), 8 + 8 + 10),
        "a part of maps": (pairs.slice(1), 8 + (16 + 3) + 16),
        "tensors": (pa.ExtensionArray.from_storage(tensors, pa.array([[1, 2]], plain)), 8 + 16),
    }
    found = {name: arrow_records.unpacked_bytes(array) for name, (array, _) in arrays.items()}
    assert found == {name: size for name, (_, size) in arrays.items()}


def test_arrow_values_that_can_overlap_are_not_counted():
    pa = pytest.importorskip("pyarrow")
    views = [pa.array(["a"], pa.string_view()), pa.array([b"a"], pa.binary_view())]
    inner = [*views, pa.array([{"a": 1}]), pa.array([[1]])]
    named = [pa.DictionaryArray.from_arrays(pa.array([0, 0]), array) for array in inner]
    runs = pa.RunEndEncodedArray.from_arrays(pa.array([9], pa.int32()), pa.array(["a"]))
    union = pa.UnionArray.from_sparse(pa.array([0], pa.int8()), [pa.array(["a"])])
    for array in (*views, *named, runs, union):
        with pytest.raises(arrow_records.UnreadableColumn):
            arrow_records.unpacked_bytes(array)


def test_a_run_of_records_begins_with_the_next_line(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text('{"a": 1}\n\n{"a": 22}\n{"a": 3}')
    first, second, third = (9, f"{path}:1", {"a": 1}), (10, 11, {"a": 22}), (9, 21, {"a": 3})
    at = {0: [first, (10, f"{path}:3", {"a": 22}), (9, f"{path}:4", {"a": 3})]}
    for start in range(1, 29):
        later = [one for one in (second, third) if one[1] > start]
        wanted = [(size, f"{path}, byte {byte}", row) for size, byte, row in later]
        at[start] = wanted
    assert {start: list(record_samples._run(path, start)) for start in at} == at


def test_the_number_of_rows_heeds_that_later_lines_are_longer(tmp_path: Path) -> None:
    """Measured at eight places: four with lines of 8 bytes, four with lines of 32."""
    path = tmp_path / "r.csv"
    path.write_bytes(b"1234567\n" * (4 << 12) + (b"x" * 31 + b"\n") * (4 << 10))
    assert record_samples._line_growth(path) == pytest.approx(1.6)
    path.write_bytes((b"x" * 31 + b"\n") * (4 << 10) + b"1234567\n" * (4 << 12))
    assert record_samples._line_growth(path) == pytest.approx(0.4)


def test_runs_begin_everywhere_in_files_that_can_be_read_from_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_samples, "_TAIL_BYTES", 10)
    lines, packed, table = (tmp_path / f"r.{kind}" for kind in ("jsonl", "jsonl.gz", "csv"))
    for path in (lines, table):
        path.write_bytes(b"x" * 72)
    packed.write_bytes(gzip.compress(b"x"))
    starts = [0, 9, 19, 29, 40, 50, 60, 62]  # 72 k / 7 less a byte, not in the last ten
    assert list(record_samples._places([lines], [72])) == [(lines, start) for start in starts]
    for path in (packed, table):
        assert set(record_samples._places([path], [72])) == {(path, 0)}
    both = dict.fromkeys(path for path, _ in record_samples._places([table, lines], [72, 72]))
    assert list(both) == [table, lines]


@pytest.mark.parametrize(
    ("begin", "most"), [(b"\x1f\x8b", 4 << 20), (b"{}", 32 << 20), (b"\x1fx", 32 << 20)]
)
def test_small_files_are_read_whole(
    begin: bytes, most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "r.jsonl"
    path.write_bytes(begin)
    monkeypatch.setattr(record_samples, "open_records", lambda path: ["all"])
    monkeypatch.setattr(record_samples, "_sample_of_texts", lambda *files: "some")
    os.truncate(path, most)  # a hole: nothing is written
    found = sample_records(path)
    assert (found.records, found.total, found.is_exact, found.is_whole) == (["all"], 1, True, True)
    os.truncate(path, most + 1)
    assert sample_records(path) == "some"


def test_of_many_rows_some_of_everywhere_are_read() -> None:
    few, many = (record_samples._sample_of_rows(range(n)) for n in (20_000, 20_001))
    assert (few.records, few.total, few.is_exact, few.is_whole) == (
        range(20_000),
        20_000,
        True,
        True,
    )
    assert (many.total, many.is_exact, many.is_whole) == (20_001, True, False)
    assert list(many.records) == [run * 19_876 // 7 + i for run in range(8) for i in range(125)]
