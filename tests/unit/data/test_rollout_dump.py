"""Rollouts on disk: back bit for bit, whatever became of the process that wrote them."""

import errno
import os
from io import FileIO
from pathlib import Path

import golden
import numpy as np
import pytest
import torch

from realsys.api.errors import DataError
from realsys.data.answers_layout import answer_row, answers_sample
from realsys.data.rollout_dump import DumpWriter, RolloutDump
from realsys.data.sequence_sample import SequenceSample
from realsys.data.sources.replayed_rollouts import RolloutDumpData
from realsys.trial.dump_records import SUFFIX


def sample(name: str, length: int) -> SequenceSample:
    generator = torch.Generator().manual_seed(length)
    return SequenceSample.from_tensors(
        [name],
        {"tokens": [[length, 2]], "rewards": [[1, 1]], "none": [[0, 0]]},
        {
            "tokens": torch.randint(0, 99, (length + 2,), generator=generator),
            "rewards": torch.rand(2, generator=generator),
            "none": torch.empty(0, dtype=torch.bool),
        },
    )


def assert_same(found: SequenceSample, expected: list[SequenceSample]) -> None:
    assert found.ids == tuple(s.ids[0] for s in expected)
    for key in expected[0].keys:
        assert torch.equal(found.data[key], torch.cat([s.data[key] for s in expected]))


def test_datapoints_come_back_in_any_order_and_the_newest_counts(tmp_path):
    samples = {name: sample(name, n) for n, name in enumerate(("0-1", "0-2", "1-1.1"), 1)}
    with DumpWriter(tmp_path / "a.rollouts") as writer:
        writer.append(sample("0-2", 9))
        writer.append(samples["0-1"])
    with DumpWriter(tmp_path / "b.rollouts") as writer:
        writer.append(samples["0-2"])
        writer.append(samples["1-1.1"])
    with golden.raises(DataError):
        RolloutDumpData(folder=str(tmp_path), keys=("rewards", "tokens"))
    (tmp_path / "run.json").write_text('{"dataset_size": 40}')
    data = RolloutDumpData(folder=str(tmp_path), keys=("rewards", "tokens"))
    assert len(data) == 40
    found = data.batch([0, 0, 0], ["1-1.1", "0-1", "0-2"])
    assert_same(found, [samples[n].select(["rewards", "tokens"]) for n in ("1-1.1", "0-1", "0-2")])
    with golden.raises(DataError):
        data.batch([0], ["7-7"])


def test_kept_sets_come_back(tmp_path):
    kept = [np.array(ids, dtype="<i4").tobytes() for ids in ([7, 9, 150_000], [], [~3])]
    rows = [
        answer_row(torch.tensor([5]), torch.tensor([7, 8, 9]), torch.zeros(3), sets)
        for sets in (kept, [b""] * 3)
    ]
    made = [
        answers_sample([name], [rows], torch.tensor([False, True]), metadata={}) for name in "ab"
    ]
    assert made[0].data["packed_kept_ids"].tolist() == [7, 9, 150_000, ~3]
    with DumpWriter(tmp_path / "a.rollouts") as writer:
        for one in made:
            writer.append(one)
    found = RolloutDump([tmp_path / "a.rollouts"]).read(["b", "a"])
    assert_same(found, made[::-1])
    assert found.meta.seqlens["packed_kept_ids"] == ((4, 0), (4, 0))
    with pytest.raises(DataError) as refused:
        answers_sample([], [], torch.zeros(0, dtype=torch.bool), metadata={})
    assert refused.value.where == "generate"


@pytest.mark.parametrize("cut", [1, 5, 30, 60])
def test_a_torn_end_costs_the_last_record_only(tmp_path, cut):
    path = tmp_path / "a.rollouts"
    with DumpWriter(path) as writer:
        writer.append(sample("a", 3))
        whole = path.stat().st_size
        writer.append(sample("b", 4))
    path.write_bytes(path.read_bytes()[:-cut])
    dump = RolloutDump([path])
    assert len(dump) == 1
    assert_same(dump.read(["a"]), [sample("a", 3)])
    with DumpWriter(path) as writer:  # a restarted process does not know of the torn end
        writer.append(sample("c", 5))
    assert whole < path.stat().st_size


def test_an_empty_folder_says_how_to_get_a_dump(tmp_path):
    with golden.raises(DataError):
        RolloutDumpData(folder=str(tmp_path), keys=("x",))


class FullDisk(FileIO):
    """A file on a disk without room: half of what is written gets there, and then none."""

    full = False

    def write(self, data) -> int:
        if not self.full:
            return super().write(data)
        super().write(memoryview(data)[: len(data) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("truncates", [True, False])
def test_a_write_that_failed_leaves_nothing_behind(tmp_path, monkeypatch, truncates):
    """Half a record, filled up with the bytes of the next one, was read as a whole one."""
    monkeypatch.setattr(Path, "open", lambda path, mode="r", **_: FullDisk(path, mode.rstrip("b")))
    if not truncates:

        def refuse(descriptor, length):
            raise OSError(errno.EIO, "it can't")

        monkeypatch.setattr(os, "ftruncate", refuse)
    names = ["0-0", "0-1", "0-2"]
    with DumpWriter(tmp_path / f"a{SUFFIX}") as writer:
        for name in names:
            FullDisk.full = name == "0-1"
            if FullDisk.full:
                with golden.raises(DataError):
                    writer.append(sample(name, 40))
            else:
                writer.append(sample(name, 40))
    monkeypatch.undo()
    dump = RolloutDump(sorted(tmp_path.glob(f"*{SUFFIX}")))
    assert len(dump) == 2
    assert_same(dump.read(["0-0", "0-2"]), [sample("0-0", 40), sample("0-2", 40)])
    with golden.raises(DataError):
        dump.read(["0-1"])


def test_bytes_that_changed_are_not_trained_on(tmp_path):
    path = tmp_path / f"a{SUFFIX}"
    with DumpWriter(path) as writer:
        writer.append(sample("a", 50))
    data = bytearray(path.read_bytes())
    data[-20] ^= 1
    path.write_bytes(data)
    with golden.raises(DataError):
        RolloutDump([path]).read(["a"])


def test_a_dump_has_an_end_and_says_so_once(tmp_path, caplog):
    """A million answers of 32k tokens were 690 GB in the trial's folder, if nobody asked for less."""
    path = tmp_path / f"a{SUFFIX}"
    with DumpWriter(path) as writer:
        assert writer.append(sample("0", 60))
    room = 2 * path.stat().st_size + 20
    path.unlink()
    with DumpWriter(path, room=room) as writer:
        kept = [writer.append(sample(str(i), 60)) for i in range(4)]
        assert not writer.append(sample("5", 1)), "a small one, behind others that are not there"
    assert kept == [True, True, False, False]
    assert path.stat().st_size <= room
    assert len(RolloutDump([path])) == 2
    assert [r.getMessage().count("dump_limit_gib") for r in caplog.records] == [1]


def test_a_token_takes_few_bytes(tmp_path):
    """Ids and versions as 64 bits each were 16 of 21."""
    count = 20_000
    tokens = torch.randint(0, 150_000, (count,), generator=torch.Generator().manual_seed(1))
    data = {
        "packed_input_ids": tokens,
        "packed_versions": torch.arange(count) // 5000,
        "prompt_mask": torch.arange(count) < 200,
        "packed_logprobs": -torch.rand(count, generator=torch.Generator().manual_seed(2)),
    }
    answer = SequenceSample.from_tensors(["a"], {key: [[count]] for key in data}, data)
    path = tmp_path / f"a{SUFFIX}"
    with DumpWriter(path) as writer:
        writer.append(answer)
    assert path.stat().st_size / count < 8
    assert_same(RolloutDump([path]).read(["a"]), [answer])
