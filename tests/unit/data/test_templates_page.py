"""What is trained under 51 chat templates is committed, each difference judged, and the page tells it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from templates.templates_page import PAGE, RESULTS, WORTH_KNOWING, page
from templates.twins import JUDGED, VERDICTS

TRL, OUTSIDER = (json.loads(file.read_text()) for file in RESULTS.values())
TWINS = {name: row for name, row in TRL["templates"].items() if "twin" in row}


def test_the_page_tells_the_results() -> None:
    expected = "python tests/by_hand/templates/templates_page.py --write"
    assert PAGE.read_text() == page(TRL, OUTSIDER), expected


@pytest.mark.parametrize("name", TWINS)
def test_each_difference_has_the_judgement_of_the_table(name: str) -> None:
    found: dict[str, Any] = TWINS[name]["differences"]
    judged = JUDGED.get(name, {})
    assert {kind: said["judged"] for kind, said in found.items()} == {
        kind: judged[kind] for kind in found
    }


def test_each_verdict_is_of_a_difference_that_was_found() -> None:
    found = {said["judged"] for row in TWINS.values() for said in row["differences"].values()}
    assert found == set(VERDICTS)
    assert {verdict.right for verdict in VERDICTS.values()} <= {"realsys", "trl", "both"}


def test_all_templates_are_there_and_none_is_wrong() -> None:
    rows = TRL["templates"]
    assert (len(rows), len(TWINS), len(OUTSIDER["templates"])) == (41, 31, 10)
    assert not any(row["wrong"] for row in rows.values())
    named = {name for names in WORTH_KNOWING for name in names.split(", ")}
    assert named <= set(rows)
