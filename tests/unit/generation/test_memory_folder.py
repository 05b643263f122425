"""Weights for SGLang and vLLM as a folder in host memory: what is in it, who can read it, what stays."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import golden
import pytest
import torch
from real_trials import make_policy
from safetensors.torch import load_file

from realsys.api.errors import ClusterError, DataError
from realsys.generation.served_engines import memory_folder
from realsys.generation.served_engines.memory_folder import (
    MEMORY_NAME,
    MemoryFolder,
    TensorExtent,
    check_weights,
    place_for,
    readable_by,
)
from realsys.models.hf_directory import safetensors_shapes, weight_shapes

WEIGHTS = {
    "odd": torch.arange(3, dtype=torch.bfloat16),
    "wide": torch.randn(5, 7, dtype=torch.float64),
    "columns": torch.randn(6, 4)[:, ::2],
    "scalar": torch.tensor(1.5),
    "half": torch.randn(2, 2).half(),
}


def open_memory() -> list[str]:
    """Anonymous files of weights that this process has open."""
    found = []
    for fd in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the one that lists them
            found.append(os.readlink(fd))
    return [link for link in found if MEMORY_NAME in link]


@pytest.mark.parametrize("place", TensorExtent)
def test_an_engine_reads_the_weights_bit_by_bit(place: TensorExtent) -> None:
    folder = MemoryFolder(WEIGHTS, place=place)
    (file,) = Path(folder.path).iterdir()
    found = load_file(file)
    assert found.keys() == WEIGHTS.keys()
    for name, x in WEIGHTS.items():
        assert found[name].dtype == x.dtype
        assert torch.equal(found[name], x), name
    assert safetensors_shapes(file) == {name: list(x.shape) for name, x in WEIGHTS.items()}
    assert folder.num_bytes == sum(x.nbytes for x in WEIGHTS.values())
    folder.close()
    assert not Path(folder.path).exists()
    assert torch.equal(found["wide"], WEIGHTS["wide"]), "an engine keeps what it has mapped"


def test_no_disk_holds_them_and_nothing_stays() -> None:
    before = len(open_memory())
    folder = MemoryFolder(WEIGHTS)
    (link,) = Path(folder.path).iterdir()
    assert link.is_symlink()
    assert link.lstat().st_size < 100
    assert os.readlink(link).startswith(f"/proc/{os.getpid()}/fd/")
    assert len(open_memory()) == before + 1
    folder.close()
    assert len(open_memory()) == before


def test_strangers_stay_out_and_nobody_changes_what_an_engine_reads() -> None:
    folder = MemoryFolder(WEIGHTS)
    try:
        file = Path(folder.path) / "model.safetensors"
        assert Path(folder.path).stat().st_mode & 0o777 == 0o700
        assert file.stat().st_mode & 0o777 == 0o400
        fd = int(os.readlink(file).rpartition("/")[2])
        for change in (lambda: os.pwrite(fd, b"x", 100), lambda: os.ftruncate(fd, 10)):
            with pytest.raises(PermissionError):
                change()
    finally:
        folder.close()


@pytest.mark.thorough
def test_memory_goes_with_the_process_that_made_it(tmp_path: Path) -> None:
    """Also when it is killed: what is left is a folder with a link to nothing."""
    code = (
        "import sys, torch; from realsys.generation.served_engines.memory_folder import MemoryFolder\n"
        "folder = MemoryFolder({'a': torch.ones(9)}); print(folder.path, flush=True)\n"
        "sys.stdin.read()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    assert process.stdout is not None
    file = Path(process.stdout.readline().strip()) / "model.safetensors"
    assert torch.equal(load_file(file)["a"], torch.ones(9))
    process.kill()
    process.communicate()
    assert file.is_symlink()
    assert not file.exists()


def test_no_memory_left_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, data: bytes | memoryview) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(memory_folder, "_write", full)
    before = len(open_memory())
    with golden.raises(ClusterError):
        MemoryFolder(WEIGHTS)
    assert len(open_memory()) == before


def test_the_place_is_one_that_the_engine_can_read() -> None:
    asked: list[TensorExtent] = []

    def from_disk(place: TensorExtent) -> bool:
        asked.append(place)
        return place is TensorExtent.DISK

    assert place_for(from_disk) is TensorExtent.DISK
    assert asked == [TensorExtent.MEMORY, TensorExtent.DISK]
    assert place_for(lambda place: True) is TensorExtent.MEMORY
    assert place_for(lambda place: False) is None


def test_whether_it_can_is_tried_with_its_interpreter(tmp_path: Path) -> None:
    assert readable_by(sys.executable, TensorExtent.MEMORY)
    assert readable_by(sys.executable, TensorExtent.DISK)
    elsewhere = tmp_path / "python"  # as one in a container that sees neither
    elsewhere.write_text('#!/bin/sh\nexec "$0.real" -c "raise SystemExit(1)"\n')
    elsewhere.chmod(0o700)
    assert not readable_by(str(elsewhere), TensorExtent.MEMORY)
    assert not readable_by(str(tmp_path / "nowhere"), TensorExtent.MEMORY)


@pytest.mark.parametrize(
    "change",
    [
        {"model.norm.weight": None},
        {"model.other.weight": (3,)},
        {"model.norm.weight": (7, 2)},
    ],
)
def test_weights_of_another_model_are_refused(
    tmp_path: Path, change: dict[str, tuple[int, ...] | None]
) -> None:
    """Engines load what fits, warn of the rest, and go on."""
    policy = str(make_policy(tmp_path / "policy"))
    shapes = {name: tuple(shape) for name, shape in weight_shapes(policy).items()}
    for name, shape in change.items():
        shapes.pop(name, None)
        if shape is not None:
            shapes[name] = shape
    found = {name: SimpleNamespace(shape=shape) for name, shape in shapes.items()}
    with golden.raises(DataError) as caught:
        check_weights(found, policy, where="trainers")
    assert re.search("give weights of the model in", caught.value.fix)


def test_tied_weights_come_once(tmp_path: Path) -> None:
    """Some folders hold them twice; trainers never give the second name."""
    policy = make_policy(tmp_path / "policy")
    found = {n: SimpleNamespace(shape=tuple(s)) for n, s in weight_shapes(policy).items()}
    first = {n: x for n, x in found.items() if n != "lm_head.weight"}
    if "lm_head.weight" in found:
        with golden.raises(DataError):
            check_weights(first, str(policy), where="trainers")
    config = json.loads((policy / "config.json").read_text())
    (policy / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    check_weights(first, str(policy), where="trainers")
    check_weights(found, str(policy), where="trainers")
