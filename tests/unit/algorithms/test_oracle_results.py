"""What `make oracle` found is committed, whole, and fits the table of what it compares. Runs no peer."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import golden
import numpy as np
import oracle
import oracle_table
import pytest
import torch
from near import near
from oracle_batches import REACH, make_batches
from oracle_results import (
    FLOAT32_WITHIN,
    HEADING,
    PAGE,
    RESULT,
    WITHIN,
    checked_against_others,
    problems_of,
)
from peer_io import evaluate, read_batches, write_batches

ROWS = [(row, peer) for row in oracle_table.ROWS for peer in row.peers]
NAMES = [f"{row.group}: {row.name}, {peer}" for row, peer in ROWS]


@pytest.fixture(scope="module")
def said() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(RESULT.read_text())
    return found


def test_rows_have_names_of_their_own() -> None:
    assert len(set(NAMES)) == len(NAMES)


def test_the_result_has_each_row_and_no_other(said: dict[str, Any]) -> None:
    assert [f"{r['group']}: {r['name']}, {r['peer']}" for r in said["rows"]] == NAMES, "make oracle"


@pytest.mark.parametrize("index", range(len(ROWS)), ids=NAMES)
def test_a_row_turned_out_as_the_table_says(said: dict[str, Any], index: int) -> None:
    (row, name), result = ROWS[index], said["rows"][index]
    peer = row.peers[name]
    assert (result["form"], result["options"]) == (peer.form, json.loads(json.dumps(peer.options)))
    assert result["batches"] >= 200
    if row.ours is None:
        assert result["status"] == "theirs only"
    elif row.differs is not None:
        differs = row.differs
        assert result["status"] == "differs"
        assert max(result["claimed"].values()) <= WITHIN < max(result["apart"].values())
        told = (differs.ours, differs.theirs, differs.source)
        assert (result["ours"], result["theirs"], result["source"]) == told
    else:
        assert result["status"] == "agrees"
        assert max(result["float64"].values()) <= WITHIN
        assert result["float32"] <= FLOAT32_WITHIN
        compared = set(result["float64"])
        if row.only is None:
            assert {"value"} <= compared
            assert ("gradient" in compared) == (row.wrt is not None)
        else:
            assert compared == {row.only}


def test_it_is_of_the_versions_that_are_pinned(said: dict[str, Any]) -> None:
    assert said["ok"] is True
    assert said["changed"] is False, "commit first, then make oracle"
    assert problems_of(said["rows"]) == []
    install = (Path(oracle_table.__file__).parent / "env" / "install").read_text()
    for peer in ("verl", "trl"):
        assert f"{peer}=={said['versions'][peer]}" in install


def test_the_section_names_each_row_and_the_page_has_it(said: dict[str, Any]) -> None:
    text = checked_against_others(said)
    assert said["revision"][:12] in text
    lines = text.splitlines()
    for row in oracle_table.ROWS:
        starts = (
            f"| {row.group}: {row.name} |",
            f"- **{row.name}** (",
            f"- {row.group}: {row.name} (",
        )
        assert any(line.startswith(starts) for line in lines), row.name
    assert {line.count(" | ") for line in lines if re.match(r"\| [^-]", line)} == {3}
    assert PAGE.read_text().endswith(HEADING + text), "oracle_results.py --write"


def test_differences_are_relative_and_of_all_batches() -> None:
    theirs = [{"x": np.array([1.0, -2.0])}, {"x": np.array([4.0, 1e-9])}]
    ours = [{"x": np.array([1.0, -2.0])}, {"x": np.array([4.0, 1e-9 + 1e-5])}]
    # 1e-9 counts as a hundredth of the median of 1e-9, 1, 2, 4, which is 1.5
    found = oracle.differences(ours, theirs, oracle.relative)
    assert found["x"] == near(1e-5 / 0.015)
    narrow = oracle.differences(ours, theirs, oracle.relative_to_largest)
    assert narrow["x"] == near(1e-5 / 4)
    with golden.raises(ValueError):
        oracle.differences([ours[0], {"x": np.ones(3)}], theirs, oracle.relative)


def test_ours_compute_in_float64_for_the_comparison() -> None:
    third = torch.tensor(1 / 3, dtype=torch.float64)
    with oracle.wide():
        assert third.float().item() == 1 / 3
    assert third.float().item() != 1 / 3


def test_what_failed_is_told_with_its_reason() -> None:
    rows = [
        {"name": "a", "peer": "verl", "status": "agrees"},
        {"name": "b", "peer": "verl", "status": "failed", "why": "Traceback\nValueError: x"},
        {"name": "c", "peer": "trl", "status": "failed", "float64": {"value": 0.5}},
    ]
    assert problems_of(rows) == [
        "b, verl: ValueError: x",
        "c, trl: {'float64': {'value': 0.5}}",
    ]


@pytest.mark.parametrize("which", REACH)
def test_batches_are_the_same_each_time_and_reach_as_far_as_they_say(which: str) -> None:
    once, again = make_batches(which, 8), make_batches(which, 8)
    for a, b in zip(once, again, strict=True):
        assert all(np.array_equal(a[name], b[name]) for name in a)
        ratio = np.abs(a["logprobs"] - a["old_logprobs"])
        assert ratio.max() <= REACH[which] + 1e-3
        assert (a["logprobs"].astype(np.float32) == a["logprobs"]).all()
        assert which == "past" or a["mask"].any(1).all()
    assert any((batch["mask"][:, :-1] < batch["mask"][:, 1:]).any() for batch in once)  # holes
    lonely = [np.unique(x["groups_with_ones"], return_counts=True)[1].min() for x in once]
    assert min(lonely) == 1
    assert all(np.unique(x["groups"], return_counts=True)[1].min() > 1 for x in once)


def test_batches_and_gradients_survive_the_way_to_a_runner(tmp_path: Path) -> None:
    batches = make_batches("near", 2)
    write_batches(tmp_path / "batches.npz", batches)
    back = read_batches(tmp_path / "batches.npz")
    assert [sorted(x) for x in back] == [sorted(x) for x in batches]
    x = {"logprobs": np.array([1.0, 2.0])}
    form = lambda batch, power: {"value": batch["logprobs"] ** power}  # noqa: E731
    found = evaluate(form, x, wrt="logprobs", options={"power": 3})
    assert found["value"].tolist() == [1.0, 8.0]
    assert found["gradient"].tolist() == [3.0, 12.0]
    assert torch.get_default_dtype() == torch.float32
