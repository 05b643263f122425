"""The code of docs/adding_an_agent.md, as it stands there."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from realsys.api import registry
from realsys.api.agent import Answer
from realsys.api.basics import plugin_table
from realsys.rollout.worker.trajectories import trajectory_fault

PAGE = Path(__file__).parents[3] / "docs" / "adding_an_agent.md"


@pytest.fixture(autouse=True)
def _registered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The page's file, imported as ``--import`` does it."""
    monkeypatch.setattr(plugin_table, "registered", {kind: {} for kind in registry.BUILTIN})
    text = PAGE.read_text()
    (block,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    (name,) = re.findall(r"Put this into `([a-z_]+\.py)`", text)
    assert f"--import {name}" in text
    (tmp_path / name).write_text(block)
    registry.load_plugins([str(tmp_path / name)])
    yield
    sys.modules.pop("realsys_import_" + Path(name).stem, None)


class Characters:
    """A tokenizer with a token a character."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return "".join(map(chr, ids))

    def __call__(self, text: str, add_special_tokens: bool) -> SimpleNamespace:
        return SimpleNamespace(input_ids=list(map(ord, text)))


def test_the_pages_agent_and_environment_make_a_trajectory():
    said = ["I guess 40", "It is 41"]

    async def ask(tokens: Sequence[int], limit: int | None) -> Answer:
        text = said.pop(0)
        count = len(text)
        return Answer(
            tokens=tuple(map(ord, text)),
            logprobs=(-1.0,) * count,
            versions=(3,) * count,
            stopped=True,
        )

    async def episode():
        environment = registry.make_environment("close_enough", reward="math_verify", tolerance=2.0)
        await environment.reset({"prompt": "?", "answer": "42"})
        agent = registry.make_agent("check_twice", nudge="\nHm.\n")
        return await agent.run([63], ask=ask, environment=environment, tokenizer=Characters())

    t = asyncio.run(episode())
    assert trajectory_fault(t, [63]) == ""
    assert "".join(map(chr, t.tokens)) == "?I guess 40\nHm.\nIt is 41"
    assert (t.reward, t.stats) == (0.5, {"draft_length": 10.0, "found_number": 1.0})


def test_the_pages_tables_name_what_is_built_in():
    rows = PAGE.read_text().partition("## Those that are here")[2].partition("\n## ")[0]
    listed = set(re.findall(r"^\| (agent|environment) `(\w+)`", rows, flags=re.MULTILINE))
    assert listed == {
        (kind, name) for kind in ("agent", "environment") for name in registry.BUILTIN[kind]
    }
