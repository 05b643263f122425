"""Saved checkpoints are evaluated beside the training: the loop on real models, and a whole trial."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from local_rules import trusted
from real_trials import SMALL_PPO, SMALL_PPO_STEPS, Trials, explain, wait_until

from realsys.api.basics import plugin_table
from realsys.api.model import DatasetAbstraction, GenerationHyperparameters
from realsys.api.worker_configs import HELD_OUT, Benchmark, Evaluator
from realsys.evaluator.checkpoints import SavedCheckpoints
from realsys.evaluator.evaluating import evaluate_checkpoint
from realsys.evaluator.evaluator_worker import EvaluatorLoop, Surroundings
from realsys.evaluator.results import Results
from realsys.observability.jsonl import read_jsonl
from realsys.observability.metrics import read_metrics
from realsys.trial.records import PhaseFiles
from realsys.trial.trial_state import State

pytestmark = [pytest.mark.process, pytest.mark.timeout(240)]


def config(n: int = 1, **others: Benchmark) -> Evaluator:
    own = Benchmark(
        dataset=DatasetAbstraction("math_prompts", {"split": "test", "eval_size": 6}),
        n=n,
    )
    return Evaluator(
        benchmarks={HELD_OUT: own, **others},
        gconfig=GenerationHyperparameters(max_new_tokens=8, greedy=True),
        batch_size=4,
        max_tries=2,
        retry_s=0.0,
        poll_s=0.01,
    )


def run_loop(
    files: PhaseFiles, settings: Evaluator, opened: dict[str, Any] | None = None
) -> list[dict[str, Any]]:
    """One run of the worker's loop over what is saved; the lines that it leaves."""
    torch.set_num_threads(1)
    results = Results(files, "actor")
    EvaluatorLoop(
        settings,
        attempt=1,
        saved=SavedCheckpoints(files.checkpoints / "actor", "actor"),
        results=results,
        evaluate=lambda one, before_batch: evaluate_checkpoint(
            one.path,
            settings,
            device="cpu",
            before_batch=before_batch,
            logs=files.root / "agents",
            opened=opened,
        ),
        world=Surroundings(is_over=lambda: True),
    ).run()
    return results.rows()


def test_a_whole_checkpoint_gets_figures_and_a_torn_one_a_reason(
    tiny_policy: Path, tmp_path: Path
) -> None:
    files = PhaseFiles(tmp_path)
    whole, torn = (files.checkpoints / "actor" / f"step-00000{n}" for n in (3, 6))
    for folder in (whole, torn):
        shutil.copytree(tiny_policy, folder)
    weights = torn / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    good, bad = run_loop(files, config(n=3))
    assert (good["step"], good["result"], good["tries"], good["error"]) == (3, "done", 1, "")
    figures = good["figures"]
    assert list(figures) == [
        *("accuracy", "mean_reward", "num_problems", "response_length/mean"),
        *("pass@1", "pass@2", "pass@3"),
    ]
    assert figures["num_problems"] == 6
    assert 1 <= figures["response_length/mean"] <= 8
    assert 0 <= figures["pass@1"] <= figures["pass@2"] <= figures["pass@3"] <= 1
    assert (bad["step"], bad["result"], bad["tries"], bad["figures"]) == (6, "failed", 2, {})
    assert "model.safetensors is half-written" in bad["error"]
    assert run_loop(files, config(n=3)) == [good, bad]  # nothing is left to do


def test_a_benchmark_has_questions_rule_and_number_of_answers_of_its_own(
    tiny_policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    always = trusted(lambda response, answer: 1.0)
    monkeypatch.setitem(plugin_table.registered["reward"], "always", always)
    files = PhaseFiles(tmp_path)
    shutil.copytree(tiny_policy, files.checkpoints / "actor" / "step-000003")
    asked = DatasetAbstraction("math_prompts", {"split": "test", "eval_size": 3})
    (alone,) = run_loop(files, config())
    (files.evaluation_results / "actor-step-000003.json").unlink()
    files.evaluations.unlink()
    (both,) = run_loop(files, config(easy=Benchmark(dataset=asked, reward="always", n=2)))
    figures = both["figures"]
    of_easy = {k: v for k, v in figures.items() if k.startswith("easy/")}
    assert {k: v for k, v in figures.items() if k not in of_easy} == alone["figures"]
    assert (of_easy["easy/accuracy"], of_easy["easy/num_problems"]) == (1, 3)
    assert (of_easy["easy/pass@1"], of_easy["easy/pass@2"]) == (1, 1)


def test_a_benchmark_that_fails_leaves_the_others_their_figures(
    tiny_policy: Path, tmp_path: Path
) -> None:
    files = PhaseFiles(tmp_path)
    shutil.copytree(tiny_policy, files.checkpoints / "actor" / "step-000003")
    asked = DatasetAbstraction("nothing_of_this_name", {})
    (row,) = run_loop(files, config(gone=Benchmark(dataset=asked)))
    assert (row["result"], row["tries"], row["figures"]["num_problems"]) == ("failed", 2, 6)
    assert "called 'nothing_of_this_name'" in row["error"]


def test_a_benchmark_whose_rule_fails_is_no_zero(
    tiny_policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @trusted
    def broken(response: str, answer: str) -> float:
        raise ValueError("no judge for \ud800")

    monkeypatch.setitem(plugin_table.registered["reward"], "broken", broken)
    files = PhaseFiles(tmp_path)
    shutil.copytree(tiny_policy, files.checkpoints / "actor" / "step-000003")
    asked = {
        name: Benchmark(
            dataset=DatasetAbstraction("math_prompts", {"split": "test", "eval_size": size}),
            reward="broken",
        )
        for name, size in (("one", 1), ("many", 9))
    }
    (row,) = run_loop(files, config(**asked))
    assert (row["result"], row["figures"]["num_problems"]) == ("failed", 6)
    assert not any(name.startswith(("one/", "many/")) for name in row["figures"])
    assert "the 1 questions" in row["error"]
    assert re.search("many: .*none of the first 4 records", row["error"])
    assert "no judge for \\ud800" in row["error"]


def test_later_checkpoints_are_asked_the_same_whatever_becomes_of_the_file(
    tiny_policy: Path, tmp_path: Path
) -> None:
    files, asked = PhaseFiles(tmp_path), tmp_path / "asked.jsonl"
    shutil.copytree(tiny_policy, files.checkpoints / "actor" / "step-000003")
    asked.write_text('{"prompt": "1 + 1 = ?", "answer": "2"}\n')
    args = {
        "path": str(asked),
        "eval_path": str(asked),
        "eval_size": 1,
        "split": "test",
    }
    words = Benchmark(dataset=DatasetAbstraction("math_prompts", args))
    opened: dict[str, Any] = {}
    (first,) = run_loop(files, config(words=words), opened=opened)
    assert first["result"] == "done"
    asked.unlink()
    shutil.copytree(tiny_policy, files.checkpoints / "actor" / "step-000006")
    second = run_loop(files, config(words=words), opened=opened)[-1]
    assert (second["step"], second["figures"]) == (6, first["figures"])  # of the same weights


def test_every_saved_checkpoint_of_a_trial_has_its_result(
    trials: Trials, tiny_policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAW_PICTURES", "1")  # read by fork_server/server.py
    questions = tmp_path / "words.jsonl"
    made = [{"prompt": f"What is {n} and {n}?", "answer": str(2 * n)} for n in range(5)]
    questions.write_text("".join(json.dumps(row) + "\n" for row in made))
    files = trials.launch(
        "ppo-math",
        "evaluated",
        f"actor.path={tiny_policy}",
        *SMALL_PPO,
        "auto_eval=true",
        "exp_ctrl.save_freq_steps=4",
        "benchmarks.words=file",
        f"benchmarks.words.path={questions}",
        "benchmarks.words.reward=math_verify",
        "evaluator.n_of.words=2",
    )
    view = trials.wait(files, timeout_s=200)
    assert view.state is State.COMPLETED, explain(files, view)
    phase = files.phase(files.root)
    wait_until(files, lambda _: files.report.exists(), timeout_s=120)  # written when it has ended
    assert phase.graph_picture.read_bytes().startswith(b"\x89PNG")
    assert "data:image/png;base64," in files.report.read_text()
    rows = read_jsonl(phase.evaluations)
    saved = sorted(p.name for p in (phase.checkpoints / "actor").glob("step-*"))
    assert [f"step-{row['step']:06d}" for row in rows] == saved
    assert [(row["step"], row["result"]) for row in rows] == [(n, "done") for n in (4, 8)]
    # The trainer evaluates every 4 steps. The same weights, questions and seeds: the same figures.
    own = {row["step"]: row for row in read_metrics(phase.metrics)}
    for row in rows:
        for name in ("accuracy", "response_length/mean"):
            assert row["figures"][name] == own[row["step"]][f"eval/{name}"]
        assert row["figures"]["words/num_problems"] == 5  # all of the file
        assert {"words/accuracy", "words/pass@2"} < set(row["figures"])
        assert "pass@2" not in row["figures"]
    assert trials.status_json(files)["trial"]["metrics"]["auto_eval/step"] == SMALL_PPO_STEPS
    shown = trials.run("status", "ppo-math/evaluated").stdout
    assert re.search(rf"step {SMALL_PPO_STEPS}: accuracy .* words/accuracy 0", shown)
    assert trials.run("report", "ppo-math/evaluated").returncode == 0
    report = files.report.read_text()
    assert "2 saved checkpoints" in report
    assert "auto_eval/response_length/mean" in report
    events = list((phase.tensorboard / "auto_eval").iterdir())
    assert len(events) == 1
    stories = [json.loads(p.read_text()) for p in sorted(phase.evaluation_results.iterdir())]
    assert [(s["step"], s["standing"], s["tries"]) for s in stories] == [
        (n, "done", 1) for n in (4, 8)
    ]
