"""What `make test-agents` found is committed, whole, and the page tells it. Runs no client."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import client_proxy
import clients_table
import pytest
from clients_table import CLIENTS, NOT_THERE, PAGE, REAL, RESULT, SCENARIOS, page

AGENTS = Path(clients_table.__file__).parent
CELLS = [(client, scenario) for client in CLIENTS for scenario in (*SCENARIOS, *REAL)]


@pytest.fixture(scope="module")
def said() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(RESULT.read_text())
    return found


@pytest.mark.parametrize(("client", "scenario"), CELLS, ids=" ".join)
def test_each_client_was_in_each_situation(
    said: dict[str, Any], client: str, scenario: str
) -> None:
    cell = said["cells"][client][scenario]
    if scenario in NOT_THERE.get(client, {}):
        assert cell == {"status": "n/a", "why": [NOT_THERE[client][scenario]]}
    else:
        assert cell["status"] in ("ok", "failed")
        assert bool(cell["why"]) == (cell["status"] == "failed")


def test_the_result_is_of_committed_code_and_ok_only_where_all_cells_are(
    said: dict[str, Any],
) -> None:
    for when in ("ran", "ran_real"):
        assert list(said[when]) == list(CLIENTS)
        assert not any(r["changed"] for r in said[when].values()), "commit, then make test-agents"
    failed = [c for row in said["cells"].values() for c in row.values() if c["status"] == "failed"]
    assert said["ok"] == (not failed)


@pytest.mark.parametrize("client", CLIENTS)
def test_the_versions_are_those_that_are_pinned(said: dict[str, Any], client: str) -> None:
    pinned = (AGENTS / "env" / f"{client}.txt").read_text().lower().splitlines()
    assert not any(line.startswith("torch==") for line in pinned)
    for package, version in said["versions"][client].items():
        assert f"{package}=={version}" in pinned


def test_each_client_has_its_program_and_is_installed_by_make() -> None:
    makefile = (AGENTS.parents[2] / "Makefile").read_text()
    (names,) = [line for line in makefile.splitlines() if line.startswith("AGENTS :=")]
    assert sorted(names.split()[2:]) == sorted(CLIENTS)
    for client in CLIENTS.values():
        assert (AGENTS / "programs" / client.program).is_file()


def test_the_page_tells_the_result(said: dict[str, Any]) -> None:
    assert PAGE.read_text() == page(said), "python tests/by_hand/agents/clients_table.py --write"


@pytest.mark.parametrize(
    ("body", "texts"),
    [
        (b'{"choices":[{"message":{"content":"a"}},{"message":{"content":null}}]}', ["a", ""]),
        (b'{"output":[{"type":"message","content":[{"text":"a"},{"text":"b"}]}]}', ["ab"]),
        (b'{"content":[{"type":"text","text":"a"},{"type":"tool_use"}]}', ["a"]),
        (b'{"error":{"message":"no"}}', [""]),
        (
            b'data: {"choices":[{"index":1,"delta":{"content":"b"}}]}\n\n'
            b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\ndata: [DONE]\n\n',
            ["a", "b"],
        ),
        (b'data: {"type":"response.output_text.delta","delta":"a"}\n\n', ["a"]),
        (b'event: x\ndata: {"type":"content_block_delta","delta":{"text":"a"}}\n\n', ["a"]),
    ],
)
def test_the_proxy_reads_the_texts_of_every_dialect(body: bytes, texts: list[str]) -> None:
    assert client_proxy.texts_of(body) == texts


def test_a_stream_that_came_in_one_piece_was_not_cut_off() -> None:
    assert client_proxy.was_sent_whole(b"data: {}\n\ndata: [DONE]\n\n")
    assert not client_proxy.was_sent_whole(b"data: {}\n\n")
    assert not client_proxy.was_sent_whole(b'{"content": "[DONE]"}')
