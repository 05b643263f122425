"""Which saved checkpoint is evaluated next, what is written down of it, and the figures of many answers."""

from __future__ import annotations

import json
import math
from itertools import combinations
from pathlib import Path

import golden
import pytest
from hypothesis import given
from hypothesis import strategies as st

from realsys.api.errors import InternalError
from realsys.api.worker_configs import Evaluator
from realsys.evaluator.answer_statistics import mean_pass_at_k, pass_at_k
from realsys.evaluator.checkpoints import SavedCheckpoints
from realsys.evaluator.evaluator_worker import CUT_OFF, EvaluatorLoop, Surroundings
from realsys.evaluator.pending import (
    EvaluateNow,
    GiveUpOnCheckpoint,
    SavedCheckpoint,
    Wait,
    next_action,
)
from realsys.evaluator.results import Evaluation, EvaluationState, Results
from realsys.observability.evaluations import last_figures, metric_rows
from realsys.trial.records import PhaseFiles

# ---- what is next ----------------------------------------------------------------------------


def checkpoint(step: int, weights: str = "w") -> SavedCheckpoint:
    return SavedCheckpoint(role="actor", step=step, path=Path(f"step-{step:06d}"), weights=weights)


def evaluation(
    step: int,
    standing: EvaluationState,
    *,
    tries: int = 1,
    attempt: int = 1,
    at: float = 0.0,
    weights: str = "w",
) -> Evaluation:
    return Evaluation(
        role="actor",
        step=step,
        weights=weights,
        standing=standing,
        tries=tries,
        attempt=attempt,
        at=at,
    )


def decide(
    checkpoints: list[SavedCheckpoint], *known: Evaluation, now: float = 100.0, attempt: int = 1
):
    return next_action(
        checkpoints,
        {e.step: e for e in known},
        attempt=attempt,
        now=now,
        max_tries=3,
        retry_s=30.0,
    )


def test_checkpoints_are_taken_in_the_order_of_steps():
    both = [checkpoint(12), checkpoint(6)]
    assert decide(both) == EvaluateNow(checkpoint=both[1], number=1)
    assert decide(both, evaluation(6, EvaluationState.DONE)) == EvaluateNow(
        checkpoint=both[0], number=1
    )
    over = (evaluation(6, EvaluationState.FAILED, tries=3), evaluation(12, EvaluationState.DONE))
    assert decide(both, *over) is None


def test_nothing_is_pending_where_nothing_was_saved():
    assert decide([]) is None
    assert decide([], evaluation(6, EvaluationState.TRYING)) is None  # its checkpoint is gone


def test_one_that_failed_rests_and_the_next_one_is_taken_meanwhile():
    both, failed = [checkpoint(6), checkpoint(12)], evaluation(6, EvaluationState.RETRY, at=90.0)
    assert decide(both, failed) == EvaluateNow(checkpoint=both[1], number=1)
    assert decide(both, failed, evaluation(12, EvaluationState.DONE)) == Wait()
    assert decide(both, failed, now=120.0) == EvaluateNow(checkpoint=both[0], number=2)
    assert decide(both, failed, now=50.0) == EvaluateNow(checkpoint=both[0], number=2)  # put back


@pytest.mark.parametrize(
    ("tries", "attempt", "number"),
    [
        (1, 1, 2),  # it took its process down: it counts
        (1, 2, 1),  # the former attempt of the trial ended under it: it does not
        (3, 2, 3),
    ],
)
def test_a_try_that_was_cut_off_counts_unless_the_attempt_ended(tries, attempt, number):
    one = checkpoint(6)
    known = evaluation(6, EvaluationState.TRYING, tries=tries)
    assert decide([one], known, attempt=attempt) == EvaluateNow(checkpoint=one, number=number)


def test_a_checkpoint_that_kills_the_evaluator_is_given_up():
    one, known = checkpoint(6), evaluation(6, EvaluationState.TRYING, tries=3)
    assert decide([one], known) == GiveUpOnCheckpoint(checkpoint=one, evaluation=known)


@pytest.mark.parametrize("standing", EvaluationState)
def test_a_step_that_was_saved_with_other_weights_is_evaluated_anew(standing):
    anew = checkpoint(6, "others")
    known = evaluation(6, standing, tries=3, at=99.0)
    assert decide([anew], known) == EvaluateNow(checkpoint=anew, number=1)


# ---- what is written down --------------------------------------------------------------------


def test_whatever_is_over_gets_one_line(tmp_path):
    results = Results(PhaseFiles(tmp_path), "actor")
    results.write(evaluation(6, EvaluationState.TRYING))
    assert results.append_finished() == []
    for step, standing in (
        (12, EvaluationState.DONE),
        (6, EvaluationState.FAILED),
        (18, EvaluationState.RETRY),
    ):
        results.write(evaluation(step, standing))
    again = Results(PhaseFiles(tmp_path), "actor")  # it was killed between file and line
    assert [(r["step"], r["result"]) for r in again.append_finished()] == [
        (6, "failed"),
        (12, "done"),
    ]
    assert again.append_finished() == []
    again.write(evaluation(6, EvaluationState.DONE, weights="others"))
    assert [(r["step"], r["weights"]) for r in again.append_finished()] == [(6, "others")]
    assert [r["step"] for r in again.rows()] == [6, 12, 6]


def test_results_of_another_role_and_damaged_ones_are_left_alone(tmp_path):
    files = PhaseFiles(tmp_path)
    Results(files, "critic").write(
        Evaluation(role="critic", step=6, weights="c", standing="done", tries=1, attempt=1, at=0.0)
    )
    mine = Results(files, "actor")
    mine.write(evaluation(6, EvaluationState.DONE))
    mine.write(evaluation(12, EvaluationState.DONE))
    (files.evaluation_results / "actor-step-000012.json").write_text('{"role": "act')
    assert mine.read() == {6: evaluation(6, EvaluationState.DONE)}


def save(folder: Path, step: int, content: bytes) -> Path:
    path = folder / f"step-{step:06d}"
    path.mkdir(parents=True, exist_ok=True)
    (path / "model.safetensors").write_bytes(content)
    return path


def test_a_checkpoint_is_what_its_weight_files_hold(tmp_path):
    saved = SavedCheckpoints(tmp_path, "actor")
    assert saved.present() == []
    first, second = save(tmp_path, 12, b"one"), save(tmp_path, 6, b"two")
    (tmp_path / "latest").symlink_to(first.name)
    (tmp_path / ".step-000018.partial").mkdir()
    six, twelve = saved.present()
    assert [(c.step, c.path) for c in (six, twelve)] == [(6, second), (12, first)]
    assert six.weights != twelve.weights
    save(tmp_path, 6, b"two")  # saved again, the same
    assert [c.weights for c in saved.present()] == [six.weights, twelve.weights]
    save(tmp_path, 6, b"other weights")
    assert not saved.is_unchanged(six)
    assert saved.is_unchanged(twelve)
    assert saved.present()[0].weights not in (six.weights, twelve.weights)


def test_what_is_known_is_not_read_again(tmp_path, monkeypatch):
    save(tmp_path, 6, b"one")
    (before,) = SavedCheckpoints(tmp_path, "actor").present()
    later = SavedCheckpoints(tmp_path, "actor")
    later.add_known(6, before.stamp, before.weights)

    def refuse(files: object) -> str:
        raise AssertionError("it was read again")

    monkeypatch.setattr("realsys.evaluator.checkpoints.digest_of", refuse)
    assert later.present() == [before]


# ---- the loop --------------------------------------------------------------------------------


class Bench:
    """A loop over made-up checkpoints; ``plays`` says what each evaluation does."""

    def __init__(self, root: Path, plays: dict[int, list[object]], *, attempt: int = 1) -> None:
        self.files, self.plays = PhaseFiles(root), plays
        self.results = Results(self.files, "actor")
        self.tried: list[int] = []
        self.shown: list[int] = []
        self.loop = EvaluatorLoop(
            Evaluator(poll_s=0.001, retry_s=0.0, max_tries=3),
            attempt=attempt,
            saved=SavedCheckpoints(self.files.checkpoints / "actor", "actor"),
            results=self.results,
            evaluate=self.evaluate,
            world=Surroundings(
                is_over=lambda: True, shows=lambda rows: self.shown.extend(r["step"] for r in rows)
            ),
        )

    def evaluate(self, one: SavedCheckpoint, before_batch) -> dict[str, float]:
        self.tried.append(one.step)
        before_batch()
        play = self.plays[one.step].pop(0)
        if callable(play):
            play()
        if isinstance(play, BaseException):
            raise play
        before_batch()
        return {"accuracy": play if isinstance(play, float) else 0.0}

    def run(self) -> list[tuple[object, ...]]:
        for step in self.plays:
            save(self.files.checkpoints / "actor", step, str(step).encode())
        self.loop.run()
        return [
            (r["step"], r["result"], r["tries"], r["figures"].get("accuracy"), r["error"])
            for r in self.results.rows()
        ]


def test_a_failed_evaluation_is_tried_again_and_in_the_end_noted(tmp_path):
    bench = Bench(tmp_path, {6: [OSError("gone")] * 3, 12: [ValueError("odd\nindeed"), 0.5]})
    (*failed, error), done = bench.run()
    assert failed == [6, "failed", 3, None]
    assert str(error).startswith("test_evaluator.py:")
    assert str(error).endswith(" in evaluate: OSError: gone")
    assert done == (12, "done", 2, 0.5, "")
    assert bench.tried == [6, 6, 6, 12, 12]
    assert bench.shown == [6, 12]
    assert metric_rows(bench.results.rows()) == [{"step": 12, "auto_eval/accuracy": 0.5}]


def test_what_is_done_is_done_and_told_again_to_a_new_board(tmp_path):
    Bench(tmp_path, {6: [0.25]}).run()
    again = Bench(tmp_path, {6: [], 12: [0.75]})
    assert [row[:2] for row in again.run()] == [(6, "done"), (12, "done")]
    assert (again.tried, again.shown) == ([12], [6, 12])


def test_a_process_that_dies_of_a_checkpoint_three_times_gives_it_up(tmp_path):
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):  # what no handler of ours takes, as a kill
            Bench(tmp_path, {6: [KeyboardInterrupt()]}).run()
    last = Bench(tmp_path, {6: []})
    assert last.run() == [(6, "failed", 3, None, CUT_OFF)]
    assert last.tried == []


def test_told_to_leave_it_leaves_and_the_next_attempt_begins_anew(tmp_path):
    bench = Bench(tmp_path, {6: []})
    bench.plays[6].append(lambda: bench.loop.leave())
    assert bench.run() == []
    assert bench.results.read()[6].standing is EvaluationState.TRYING
    later = Bench(tmp_path, {6: [0.5]}, attempt=2)
    assert later.run() == [(6, "done", 1, 0.5, "")]


def test_figures_of_a_checkpoint_that_changed_meanwhile_are_not_kept(tmp_path):
    folder = tmp_path / "checkpoints" / "actor"
    bench = Bench(tmp_path, {6: [lambda: save(folder, 6, b"saved anew"), 0.75]})
    (row,) = bench.run()
    assert row == (6, "done", 1, 0.75, "")
    assert bench.tried == [6, 6]


def test_while_nothing_is_pending_names_are_looked_at_and_no_files(tmp_path, monkeypatch):
    """A checkpoint that comes is seen at the next look, and one that comes with the end."""
    looks, over, folder = [0], [False], tmp_path / "checkpoints" / "actor"
    bench = Bench(tmp_path, {6: [0.5], 12: [0.75], 18: [1.0]})
    real = SavedCheckpoints.present
    monkeypatch.setattr(
        SavedCheckpoints, "present", lambda self: looks.__setitem__(0, looks[0] + 1) or real(self)
    )
    turns = 0

    def is_over() -> bool:
        nonlocal turns
        turns += 1
        if turns == 100:
            assert looks == [2], "one look that finds it, one that finds nothing more"
            save(folder, 12, b"12")
        if turns == 200:
            assert (looks, bench.tried) == ([4], [6, 12])
            save(folder, 18, b"18")
            over[0] = True
        return over[0]

    bench.loop._world = Surroundings(is_over=is_over)
    save(folder, 6, b"6")
    bench.loop.run()
    assert bench.tried == [6, 12, 18]


def test_the_newest_figures_are_those_of_the_last_step():
    rows = [
        {"step": 12, "role": "actor", "figures": {"accuracy": 0.5}},
        {"step": 6, "role": "actor", "figures": {"accuracy": 0.1}},
        {"step": 12, "role": "actor", "figures": {"accuracy": 0.75}},  # saved anew
        {"step": 18, "role": "actor", "figures": {}, "result": "failed"},
        {"role": "actor"},
    ]
    assert [json.dumps(row) for row in metric_rows(rows)] == [
        '{"step": 6, "auto_eval/accuracy": 0.1}',
        '{"step": 12, "auto_eval/accuracy": 0.75}',
    ]
    assert last_figures(rows) == {"auto_eval/step": 12, "auto_eval/accuracy": 0.75}
    assert last_figures([]) == {}


# ---- pass@k ----------------------------------------------------------------------------------


@given(data=st.data(), n=st.integers(1, 8))
def test_pass_at_k_is_the_share_of_choices_with_a_right_answer(data, n):
    c, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    answers = [True] * c + [False] * (n - c)
    chosen = list(combinations(answers, k))
    assert math.isclose(pass_at_k(n, c, k), sum(map(any, chosen)) / len(chosen))


def test_pass_at_k_of_many_answers_is_exact():
    # 1 - (199·…·150)/(200·…·151) = 1 - 150/200: one right answer of 200 is among 50 in a quarter.
    assert pass_at_k(200, 1, 50) == 0.25
    assert pass_at_k(10_000, 10_000, 1) == 1.0


@pytest.mark.parametrize(("n", "c", "k"), [(4, 5, 1), (4, -1, 1), (4, 1, 0), (4, 1, 5)])
def test_pass_at_k_of_nonsense_is_refused(n, c, k):
    with golden.raises(InternalError):
        pass_at_k(n, c, k)


def test_means_over_questions():
    # n = 3; right answers 0, 3, 1: pass@1 = (0 + 1 + 1/3) / 3, pass@2 = (0 + 1 + 2/3) / 3, pass@3 = 2/3
    found = mean_pass_at_k([0, 3, 1], 3)
    assert list(found) == ["pass@1", "pass@2", "pass@3"]
    assert list(found.values()) == pytest.approx([4 / 9, 5 / 9, 2 / 3])
    assert mean_pass_at_k([1], 1) == {"pass@1": 1.0}
