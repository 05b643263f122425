"""Environments of verifiers, unmodified, through export and real trials; by hand, as they need installing:

tests/by_hand/agents/env/install verifiers-v0 .agents/verifiers-v0
tests/by_hand/agents/env/install verifiers .agents/verifiers
pytest tests/by_hand/agents/verifiers_environments.py
"""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from doc_pages import in_folder
from real_trials import Trials, explain, metrics_of

from realsys.models.from_scratch.tiny_llama import build_tiny_llama
from realsys.rollout.runners import export_verifiers
from realsys.trial.trial_state import State

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]
HERE = Path(__file__).parent
PYTHONS = {
    name: HERE.parents[2] / ".agents" / name / "bin/python"
    for name in ("verifiers-v0", "verifiers")
}
STEPS, GROUP = 3, 2
SMALL = (
    "scheduling.model_worker.cpu=1",
    "train_bs_n_seqs=4",
    f"group_size={GROUP}",
    "gen.max_new_tokens=12",
    f"exp_ctrl.benchmark_steps={STEPS}",
)  # fmt: skip
# Interpreter, environment, arguments, calls of an episode at least and at most
CASES = {
    "single": ("verifiers-v0", "letters-env", {}, 1, 1),
    "twice": ("verifiers-v0", "letters-env", {"kind": "twice"}, 2, 2),
    "tools": ("verifiers-v0", "letters-env", {"kind": "tools"}, 1, 3),
    "taskset": ("verifiers", "letters-taskset", {}, 2, 2),
    "null": ("verifiers", "letters-taskset", {"agent": {"harness": {"id": "null"}}}, 1, 1),
}


@pytest.fixture(scope="module")
def trials(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trials]:
    made = Trials(tmp_path_factory.mktemp("trials") / "root")
    yield made
    made.end_all()


@pytest.mark.parametrize("case", CASES)
def test_an_environments_rewards_are_those_that_are_trained_on(
    trials: Trials,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    case: str,
) -> None:
    name, environment, args, least, most = CASES[case]
    if not PYTHONS[name].exists():
        pytest.skip(f"tests/by_hand/agents/env/install {name} .agents/{name}")
    monkeypatch.setenv("PYTHONPATH", str(HERE / "environments"))
    status = export_verifiers.main(
        [environment, "--python", str(PYTHONS[name]), "--out", str(tmp_path), "--args", json.dumps(args)]
    )  # fmt: skip
    *written, command = capsys.readouterr().out.splitlines()
    assert (status, written) == (0, [f"{tmp_path}/train.jsonl: 40 records"])
    build_tiny_llama(
        tmp_path / "MODEL", seed=1, corpus=[(tmp_path / "train.jsonl").read_text()], hidden_size=32,
        num_layers=1, num_heads=2, num_kv_heads=1, vocab_size=300,
    )  # fmt: skip
    config = tmp_path / "MODEL" / "config.json"
    longer = {**json.loads(config.read_text()), "max_position_embeddings": 2048}
    config.write_text(json.dumps(longer))
    seen = tmp_path / "letters"
    launch, experiment, *words = shlex.split(command.removeprefix("realsys "))
    assert launch == "launch"
    folders = {"PYTHONPATH": str(HERE / "environments"), "LETTERS_FILE": str(seen)}
    files = trials.launch(
        experiment, case, *in_folder(tmp_path, words), *SMALL,
        f"task.agent_args.env={json.dumps(folders)}",
    )  # fmt: skip
    view = trials.wait(files, timeout_s=240)
    assert view.state is State.COMPLETED, explain(files, view)
    rows = [row for row in metrics_of(files) if "rollout/agent/calls" in row]
    assert len(rows) == STEPS
    for row in rows:
        assert least <= float(str(row["rollout/agent/calls"])) <= most
        assert row["rollout/agent/branches"] == 1
        assert row["rollout/agent/failed"] == 0
        assert row["rollout/agent/unread_answers"] == 0
        assert row["rollout/agent/letters"] == pytest.approx(float(str(row["rollout/reward"])))
    scored = Counter(tuple(json.loads(line)) for line in seen.read_text().splitlines())
    logs = [file.read_text() for file in files.root.glob("rows/*/rollouts/*.jsonl")]
    logged = [json.loads(line) for log in logs for line in log.splitlines()]
    kept = [row for row in logged if row["outcome"] == "kept"]
    assert len(kept) >= STEPS * 4
    for row in kept:  # a record's index is its place in the file
        for reward in row["rewards"]:
            scored.subtract([(row["index"], reward)])
    assert min(scored.values()) >= 0, "a reward that no rubric gave"
    assert all(reward > 0 for row in kept for reward in row["rewards"])
    done = trials.run("eval", f"{experiment}/{case}", "task.eval_size=4", "--json", timeout_s=200)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    figures = {name: figure["value"] for name, figure in told["figures"].items()}
    assert (told["num_questions"], told["num_unscored"]) == (4, 0)
    assert least <= figures["agent/calls"] <= most
    assert figures["agent/letters"] == pytest.approx(figures["mean_reward"])
