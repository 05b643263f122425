"""Which reader reads which calls is committed, the page tells it, and what is used is never wrong."""

from __future__ import annotations

import json

from package_families import OF_PACKAGE
from templates.tool_calls_table import CASES, PAGE, RESULT, with_tables

from realsys.rollout.conversation.form_choice import shown_form

FOUND = json.loads(RESULT.read_text())


def test_the_page_tells_the_result() -> None:
    page = PAGE.read_text()
    expected = "python tests/by_hand/templates/tool_calls_table.py --write"
    assert page == with_tables(page, FOUND), expected


def test_all_families_and_cases_are_there_and_what_is_used_is_right() -> None:
    rows = FOUND["families"]
    assert set(rows) == set(OF_PACKAGE)
    for family, row in rows.items():
        assert row["read_by"] == shown_form("", renderer=family)
        assert {said["used"] for said in row["cases"].values()} == {"right"}
        assert set(CASES) - set(row["cases"]) <= {"thoughts before", "in thoughts"}


def test_a_megabyte_takes_linear_time_and_holds_no_invented_call() -> None:
    assert set(FOUND["hostile"]) >= {"hermes", "renderers: gemma4"}
    for cost in FOUND["hostile"].values():
        assert (cost["calls_invented"], cost["no_nan"]) == (0, True)
        assert cost["doubled"] <= 3
