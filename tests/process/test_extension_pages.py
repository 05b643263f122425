"""The code of the extension pages runs as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from real_trials import Trials, explain, metrics_of

from realsys.trial.trial_state import State

pytestmark = pytest.mark.process

DOCS = Path(__file__).parents[2] / "docs"
SMALL_SFT = (
    "init.hidden_size=32",
    "init.num_layers=1",
    "init.num_heads=2",
    "init.num_kv_heads=1",
    "task.train_size=64",
    "train_bs_n_seqs=16",
    "exp_ctrl.benchmark_steps=4",
)


def code_of(page: str, folder: Path) -> Path:
    """Writes the page's one Python block into the file that the page names."""
    text = (DOCS / page).read_text()
    (block,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    name = re.search(r"Put this into `([a-z_]+\.py)`", text)
    assert name is not None
    path = folder / name.group(1)
    path.write_text(block)
    return path


def command_of(page: str) -> list[str]:
    """Words of the page's ``realsys launch`` line behind ``launch``."""
    text = (DOCS / page).read_text()
    found = re.search(r"^realsys launch (.*)$", text, flags=re.MULTILINE)
    assert found is not None
    return found.group(1).split()


@pytest.mark.parametrize("page", ["adding_an_interface.md", "adding_a_backend.md"])
def test_a_page_runs_as_written(trials: Trials, tmp_path: Path, page: str) -> None:
    code = code_of(page, tmp_path)
    experiment, *words = command_of(page)
    words = [str(code) if word == code.name else word for word in words]
    files = trials.launch(experiment, "page", *words, *SMALL_SFT)
    view = trials.wait(files)
    assert view.state is State.COMPLETED, explain(files, view)
    losses = [row["sft_train/loss"] for row in metrics_of(files)]
    assert len(losses) == 4
    assert losses[-1] < losses[0], losses  # type: ignore[operator]
