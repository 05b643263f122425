"""What an audit decides about hand-made runs: clean ones are clean, and each violation is found."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import golden
import pytest

from launcher.audit.audit_checks import AuditResult, CheckedTokens, audit_run
from launcher.audit.audited_run import AuditedRun, FindingKind, TicketRecord, TrainedStep
from launcher.audit.ticket_fates import TicketIndex, TicketState, counted_reasons, ticket_fates
from realsys.trial.dump_records import SampledVersions
from realsys.trial.episode_records import EpisodeState as E


def ticket(
    id: str, tries: int = 0, *, attempt: int = 1, worker: int = 0, **changes: Any
) -> TicketRecord:
    """A delivered ticket of 6 tokens of version 0, decided when no step was trained."""
    name = f"{id}.{tries}@{attempt}/{worker}"
    fields: dict[str, Any] = {
        "attempt": attempt,
        "worker": f"rollout_worker/{worker}",
        "id": id,
        "try_number": tries,
        "granted": f"grant of {name}",
        "ended": f"end of {name}",
        "end": E.DELIVERED,
        "version": 0,
        "oldest": 0,
        "num_tokens": 6,
    }
    return TicketRecord(**{**fields, **changes})


def unended(id: str, tries: int = 0, **changes: Any) -> TicketRecord:
    """A granted ticket of which no line says how it ended."""
    nothing = {"ended": "", "end": None, "version": None, "oldest": None, "num_tokens": 0}
    return ticket(id, tries, **{**nothing, **changes})


def step(number: int, *samples: str, filtered: tuple[str, ...] = ()) -> TrainedStep:
    """A line of the ledger."""
    return TrainedStep(
        step=number,
        ids=tuple(sample.partition(".")[0] for sample in samples),
        samples=samples,
        filtered=filtered,
        where=f"ledger:{number}",
    )


def run(*tickets: TicketRecord, steps: tuple[TrainedStep, ...], **changes: Any) -> AuditedRun:
    """A completed run of one attempt, four questions, two a step, staleness 1."""
    fields: dict[str, Any] = {
        "limits": {1: None},
        "tickets": tickets,
        "steps": steps,
        "dataset_size": 4,
        "max_staleness": 1,
        "complete_rows": frozenset({1, 2, 3}),
        "is_completed": True,
    }
    return AuditedRun(**{**fields, **changes})


FOUR = tuple(ticket(f"0-{n}") for n in range(4))
TWO_STEPS = (step(1, "0-0", "0-1"), step(2, "0-2", "0-3"))
# Attempt 2 went on from step 1 of attempt 1.
RESUMED: dict[str, Any] = {"limits": {2: None, 1: 1}}


def kinds(audited: AuditedRun) -> list[FindingKind]:
    """What kinds of findings there are."""
    return [finding.kind for finding in audit_run(audited).findings]


def states(audited: AuditedRun) -> dict[str, TicketState]:
    """What became of each ticket, by sample and attempt."""
    fates = ticket_fates(TicketIndex(audited))
    return {f"{f.ticket.sample}@{f.ticket.attempt}": f.state for f in fates}


# ---- clean runs -----------------------------------------------------------------------------------


def test_a_run_that_keeps_its_promises_is_clean() -> None:
    assert audit_run(run(*FOUR, steps=TWO_STEPS)) == AuditResult(
        states={"trained": 4},
        reasons={},
        steps=2,
        datapoints=4,
        closed=0,
        tokens=CheckedTokens(of_rows=4 * 6),
        findings=(),
    )


def test_each_ticket_has_a_fate_and_each_dropped_one_a_reason() -> None:
    tickets = (
        ticket("0-0"),
        unended("0-1", is_lost=True),
        ticket("0-1", 1, worker=1),
        ticket("0-2", end=E.FAILED, why="request 17 took 3.5 s"),
        ticket("0-2", 1, end=E.FILTERED, why="its mean reward 0 is below 0.01", closed=True),
        ticket("0-3", end=E.REFUSED, why="superseded: prompt 3 is at rollout_worker/1 now (try 1)"),
        ticket("0-3", 1, worker=1),
        ticket("1-0"),
        unended("1-1"),
    )
    audited = run(
        *tickets,
        steps=(step(1, "0-0", "0-1.1"),),
        is_completed=False,
        is_live=True,
        limits={1: None},
    )
    assert list(states(audited).values()) == [
        *(TicketState.TRAINED, TicketState.WORKER_LOST, TicketState.TRAINED, TicketState.FAILED),
        *(TicketState.FILTERED, TicketState.REFUSED, TicketState.WAITING, TicketState.WAITING),
        TicketState.RUNNING,
    ]
    found = audit_run(audited)
    assert found.findings == ()
    assert found.closed == 1
    golden.line(set(found.reasons), "rollout_worker")


def test_reasons_that_differ_in_numbers_alone_count_as_the_first_of_them() -> None:
    """Numbers in names are other names."""
    whys = ["fp16 model2: -1.5e-3 of 12", "fp16 model2: 7 of 8", "fp16 model3: 7 of 8"]
    failed = [ticket(f"0-{i}", end=E.FAILED, why=why) for i, why in enumerate(whys)]
    assert counted_reasons(ticket_fates(TicketIndex(run(*failed, steps=())))) == {
        ("failed", whys[0]): 2,
        ("failed", whys[2]): 1,
    }


def test_the_end_of_an_attempt_is_the_reason_of_what_it_was_at() -> None:
    audited = run(*FOUR, unended("1-0"), steps=TWO_STEPS, is_completed=False)
    assert states(audited)["1-0@1"] is TicketState.ATTEMPT_ENDED
    assert kinds(audited) == []


def test_what_an_attempt_did_after_its_checkpoint_does_not_count() -> None:
    """Attempt 1 trained step 2 and was killed; attempt 2 went on from step 1 and did it again."""
    tickets = (
        *FOUR[:2],
        *(ticket(f"0-{n}", version=2) for n in (2, 3)),
        *(ticket(f"0-{n}", attempt=2, version=1) for n in (2, 3)),
    )
    audited = run(*tickets, steps=TWO_STEPS, **RESUMED)
    assert kinds(audited) == []
    assert states(audited) == {
        **{f"0-{n}@1": TicketState.TRAINED for n in (0, 1)},
        **{f"0-{n}@1": TicketState.ATTEMPT_ENDED for n in (2, 3)},
        **{f"0-{n}@2": TicketState.TRAINED for n in (2, 3)},
    }


def test_what_a_checkpoint_held_is_trained_by_the_next_attempt() -> None:
    held = (*FOUR[:2], ticket("0-2", version=1), ticket("0-3", version=0))
    audited = run(*held, steps=TWO_STEPS, **RESUMED)
    assert kinds(audited) == []
    assert set(states(audited).values()) == {TicketState.TRAINED}


def test_a_delivery_at_the_checkpoints_own_version_was_before_it_unless_it_is_given_out_again() -> (
    None
):
    """Attempt 2 went on from step 1, and attempt 1 decided when 1 step was trained."""
    kept, again = ticket("1-0", version=1), unended("1-0", attempt=2)
    alone = TicketIndex(run(kept, steps=(), is_completed=False, **RESUMED))
    both = TicketIndex(run(kept, again, steps=(), is_completed=False, **RESUMED))
    assert alone.decided_in_time(kept)
    assert not both.decided_in_time(kept)
    assert [fate.state for fate in ticket_fates(alone)] == [TicketState.WAITING]
    assert [fate.state for fate in ticket_fates(both)] == [TicketState.ATTEMPT_ENDED] * 2
    # An attempt that the run does not consist of does not count.
    other = replace(again, attempt=3)
    left = TicketIndex(run(kept, other, steps=(), is_completed=False, **RESUMED))
    assert left.decided_in_time(kept)
    assert not left.decided_in_time(other)


def test_a_delivery_whose_worker_died_before_it_wrote_the_line_counts() -> None:
    lost = unended("0-3", is_lost=True)
    found = audit_run(run(*FOUR[:3], lost, steps=TWO_STEPS))
    assert found.findings == ()
    assert found.tokens.unknown == 1


def test_a_datapoint_of_unknown_versions_is_not_judged_by_those_of_the_one_before() -> None:
    """Version 0, which step 2 may train, would be too old for step 3."""
    lost = unended("0-3", is_lost=True)
    steps = (step(1, "0-0", "0-1"), step(2, "0-2"), step(3, "0-3"))
    found = audit_run(run(*FOUR[:3], lost, steps=steps))
    assert found.findings == ()
    assert found.tokens == CheckedTokens(of_dump=0, of_rows=3 * 6, unknown=1)


def test_what_got_too_stale_is_made_again() -> None:
    tickets = (*FOUR[:3], ticket("0-3"), ticket("0-3", 1, version=1, oldest=1))
    steps = (TWO_STEPS[0], step(2, "0-2", "0-3.1"))
    audited = run(*tickets, steps=steps, drops_stale=True, in_order=False)
    assert kinds(audited) == []
    assert states(audited)["0-3@1"] is TicketState.TOO_STALE


def test_filtered_questions_are_not_missing() -> None:
    filtered = ticket("0-3", end=E.FILTERED, closed=True)
    steps = (TWO_STEPS[0], step(2, "0-2", "1-0"))
    assert kinds(run(*FOUR[:3], filtered, ticket("1-0"), steps=steps)) == []


def test_of_a_synchronous_run_the_ledger_is_audited_alone() -> None:
    steps = (step(1, "0-0", "0-1"), step(2, "0-2", "1-0", filtered=("0-3",)))
    ledger_only: dict[str, Any] = {"has_tickets": False, "max_staleness": None}
    found = audit_run(run(steps=steps, **ledger_only))
    assert found.findings == ()
    assert found.tokens == CheckedTokens(of_dump=0, of_rows=0, unknown=0)
    lost = (steps[0], step(2, "0-2", "1-0"))
    assert kinds(run(steps=lost, **ledger_only)) == [FindingKind.MISSING]
    twice = (steps[0], step(2, "0-2", "0-0"))
    assert kinds(run(steps=twice, **ledger_only)) == [FindingKind.TRAINED_TWICE]


# ---- violations -----------------------------------------------------------------------------------


def test_a_datapoint_that_is_trained_twice_is_found() -> None:
    (finding,) = audit_run(run(*FOUR, steps=(*TWO_STEPS, step(3, "0-0")), max_staleness=2)).findings
    assert finding.kind is FindingKind.TRAINED_TWICE
    golden.check(finding)
    assert finding.where == "ledger:1 and ledger:3"


def test_a_datapoint_that_is_trained_and_filtered_is_found() -> None:
    filtered = ticket("0-1", 1, end=E.FILTERED, closed=True)
    found = kinds(run(*FOUR, filtered, steps=TWO_STEPS))
    assert found[0] is FindingKind.TRAINED_TWICE


@pytest.mark.parametrize("numbers", [(1, 3), (1, 1)], ids=["a step lacks", "a step is there twice"])
def test_a_ledger_that_skips_or_repeats_a_step_is_found(numbers: tuple[int, int]) -> None:
    first, second = numbers
    steps = (step(first, "0-0", "0-1"), step(second, "0-2", "0-3"))
    wanted = FindingKind.MISSING if second == 3 else FindingKind.TRAINED_TWICE
    assert kinds(run(*FOUR, steps=steps, max_staleness=9)) == [wanted]


def test_a_trained_datapoint_that_nobody_delivered_is_found() -> None:
    (finding,) = audit_run(run(*FOUR[:3], steps=TWO_STEPS)).findings
    assert finding.kind is FindingKind.NOT_DELIVERED
    golden.check(finding)


def test_rows_of_later_attempts_are_not_needed_to_find_what_nobody_delivered() -> None:
    """Step 1 is of attempt 1, of which each grant has a line; of attempt 2 there are ends only."""
    audited = run(*FOUR[:1], steps=TWO_STEPS[:1], complete_rows=frozenset({1}), **RESUMED)
    (finding,) = audit_run(replace(audited, is_completed=False)).findings
    assert (finding.kind, finding.where) == (FindingKind.NOT_DELIVERED, "ledger:1")
    of_second = replace(audited, complete_rows=frozenset({2}), is_completed=False)
    assert audit_run(of_second).findings == ()


def test_a_trained_datapoint_that_was_refused_is_found() -> None:
    refused = ticket("0-3", end=E.REFUSED, why="superseded")
    (finding,) = audit_run(run(*FOUR[:3], refused, steps=TWO_STEPS)).findings
    assert finding.kind is FindingKind.NOT_DELIVERED
    golden.check(finding)


def test_where_only_ends_were_written_a_missing_line_proves_nothing() -> None:
    assert kinds(run(*FOUR[:3], steps=TWO_STEPS, complete_rows=frozenset())) == []


def test_a_datapoint_that_its_checkpoint_cannot_hold_is_found() -> None:
    """Attempt 1 took it when 2 steps were trained, and attempt 2 went on from step 1."""
    late = (*FOUR[:2], ticket("0-2", version=1), ticket("0-3", version=2))
    assert kinds(run(*late, steps=TWO_STEPS, **RESUMED)) == [FindingKind.NOT_DELIVERED]


def test_a_datapoint_that_two_workers_delivered_is_found() -> None:
    """Two tries of it were accepted; without policy drop none is made again."""
    (*others, finding) = audit_run(run(*FOUR, ticket("0-3", 1, worker=1), steps=TWO_STEPS)).findings
    assert {f.kind for f in (*others, finding)} == {FindingKind.DELIVERED_TWICE}
    golden.check(others[0])


def test_one_try_that_two_workers_delivered_is_found_with_policy_drop_too() -> None:
    found = kinds(run(*FOUR, ticket("0-3", worker=1), steps=TWO_STEPS, drops_stale=True))
    assert found == [FindingKind.DELIVERED_TWICE, FindingKind.NO_END]


def test_a_question_that_an_older_checkpoint_held_and_is_made_again_is_found() -> None:
    """Accepted before step 1 was trained, so the checkpoint of step 1 has it."""
    tickets = (*FOUR, ticket("0-3", attempt=2, version=1))
    assert kinds(run(*tickets, steps=TWO_STEPS, **RESUMED)) == [FindingKind.DELIVERED_TWICE]


def test_a_question_that_is_given_out_after_its_training_is_found() -> None:
    again = unended("0-1", 1, worker=1, is_lost=True)
    assert kinds(run(*FOUR, again, steps=TWO_STEPS)) == [FindingKind.DELIVERED_TWICE]
    elsewhere = replace(again, attempt=4)  # which the run does not consist of
    assert kinds(run(*FOUR, elsewhere, steps=TWO_STEPS)) == []


def test_a_token_that_is_too_old_is_found_by_its_delivery() -> None:
    """Step 3 trains version 2; version 0 is 2 steps behind, and 1 is allowed."""
    steps = (*TWO_STEPS, step(3, "1-0"))
    (finding,) = audit_run(run(*FOUR, ticket("1-0"), steps=steps)).findings
    assert finding.kind is FindingKind.TOO_STALE
    golden.check(finding)
    assert kinds(run(*FOUR, ticket("1-0", oldest=1), steps=steps)) == []
    assert kinds(run(*FOUR, ticket("1-0"), steps=steps, max_staleness=2)) == []


def test_the_dump_is_believed_before_the_delivery() -> None:
    steps = (*TWO_STEPS, step(3, "1-0"))
    dumped = {(1, "0", "1-0"): SampledVersions(oldest=0, newest=2, num_tokens=5)}
    found = audit_run(run(*FOUR, ticket("1-0", oldest=2), steps=steps, dumped=dumped))
    assert [finding.kind for finding in found.findings] == [FindingKind.TOO_STALE]
    assert (found.tokens.of_dump, found.tokens.of_rows) == (5, 4 * 6)


def test_the_dump_of_another_attempt_is_not_believed() -> None:
    steps = (*TWO_STEPS, step(3, "1-0"))
    dumped = {(2, "0", "1-0"): SampledVersions(oldest=0, newest=2, num_tokens=5)}
    assert kinds(run(*FOUR, ticket("1-0", oldest=2), steps=steps, dumped=dumped)) == []


def test_a_question_that_a_completed_run_lost_is_found() -> None:
    lost = unended("0-3", is_lost=True)
    steps = (TWO_STEPS[0], step(2, "0-2", "1-0"))
    (finding,) = audit_run(run(*FOUR[:3], lost, ticket("1-0"), steps=steps)).findings
    assert finding.kind is FindingKind.MISSING
    golden.check(finding)
    assert finding.where == "grant of 0-3.0@1/0"
    assert "its worker ended" in finding.meaning
    failed = ticket("0-3", end=E.FAILED)  # of that there is no doubt
    (finding,) = audit_run(run(*FOUR[:3], failed, ticket("1-0"), steps=steps)).findings
    assert finding.kind is FindingKind.MISSING
    assert "its worker ended" not in finding.meaning


def test_a_question_that_was_never_given_out_is_found_when_its_epoch_is_over() -> None:
    steps = (TWO_STEPS[0], step(2, "0-2", "1-0"))
    tickets = (*FOUR[:3], ticket("1-0"))
    assert kinds(run(*tickets, steps=steps)) == [FindingKind.MISSING]
    assert kinds(run(*tickets, steps=steps, is_completed=False)) == [FindingKind.MISSING]
    # Where steps take what is finished first it may still come, and with a curriculum there is no order.
    assert kinds(run(*tickets, steps=steps, is_completed=False, in_order=False)) == []
    assert kinds(run(*tickets, steps=steps, in_epochs=False)) == []


def test_where_no_size_is_recorded_an_epoch_has_as_many_questions_as_were_seen() -> None:
    tickets = (ticket("0-0"), ticket("0-2"), ticket("1-0"))
    audited = run(*tickets, steps=(step(1, "0-0", "0-2"), step(2, "1-0")), dataset_size=None)
    (finding,) = audit_run(audited).findings
    assert (finding.kind, finding.where) == (FindingKind.MISSING, "ledger:2")
    assert "0-1" in finding.what
    assert kinds(replace(audited, dataset_size=3)) == [FindingKind.MISSING]
    assert kinds(replace(audited, dataset_size=4)) == [FindingKind.MISSING] * 2
    seen_later = (ticket("0-0"), ticket("1-1"))  # the last of the data, which the first epoch lacks
    (finding,) = audit_run(
        run(*seen_later, steps=(step(1, "0-0", "1-1"),), dataset_size=None)
    ).findings
    assert "0-1" in finding.what


def test_a_completed_run_that_trained_nothing_has_lost_what_it_gave_out() -> None:
    found = audit_run(run(ticket("1-0"), steps=(), dataset_size=1)).findings
    assert [(f.kind, f.where) for f in found] == [
        (FindingKind.MISSING, "end of 1-0.0@1/0"),
        (FindingKind.MISSING, ""),  # 0-0, of which no line says anything
    ]


def test_a_delivery_that_a_completed_run_left_lying_is_found() -> None:
    assert kinds(run(*FOUR, ticket("1-0"), steps=TWO_STEPS)) == [FindingKind.MISSING]
    assert kinds(run(*FOUR, ticket("1-0"), steps=TWO_STEPS, is_shortened=True)) == []


def test_an_end_without_a_grant_is_found() -> None:
    (finding,) = audit_run(run(*FOUR[:3], ticket("0-3", granted=""), steps=TWO_STEPS)).findings
    assert finding.kind is FindingKind.NO_END
    golden.check(finding)
