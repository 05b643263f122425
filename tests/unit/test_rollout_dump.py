"""Rollouts on disk: back bit for bit, whatever became of the process that wrote them."""

import pytest
import torch

from realsys.api.errors import DataError
from realsys.data_plane.rollout_dump import DumpWriter, RolloutDump
from realsys.data_plane.sequence_sample import SequenceSample
from realsys.datasets.rollout_dump import RolloutDumpData


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
    with pytest.raises(DataError, match=r"run\.json"):
        RolloutDumpData(folder=str(tmp_path), keys=("rewards", "tokens"))
    (tmp_path / "run.json").write_text('{"dataset_size": 40}')
    data = RolloutDumpData(folder=str(tmp_path), keys=("rewards", "tokens"))
    assert len(data) == 40
    found = data.batch([0, 0, 0], ["1-1.1", "0-1", "0-2"])
    assert_same(found, [samples[n].select(["rewards", "tokens"]) for n in ("1-1.1", "0-1", "0-2")])
    with pytest.raises(DataError, match=r"'7-7' is in no dump"):
        data.batch([0], ["7-7"])


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
    with pytest.raises(DataError, match="no rollouts were dumped"):
        RolloutDumpData(folder=str(tmp_path), keys=("x",))
