"""The verb that proves what became of every question of a trial: ``audit``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from launcher.cli import shared_options as o
from launcher.terminal.exit_codes import ExitCode

if TYPE_CHECKING:
    from launcher.audit.audit_checks import AuditResult

MOST_SHOWN = 20  # findings of a kind, and reasons; --json has all
_DROPPED = "dropped"


def audit(trial: o.Trial, json: o.Json = False, cluster: o.Cluster = None) -> int:
    """Prove from a trial's files that no datapoint was lost, trained twice or too stale."""
    from launcher.audit.audit_checks import audit_run
    from launcher.audit.audit_reader import AuditReader
    from launcher.terminal import output
    from launcher.trials.find_trials import find_trial, trial_name

    files = find_trial(trial, cluster=cluster)
    reader = AuditReader(files)
    found = audit_run(reader.read())
    output.warn(*reader.notes)
    status = ExitCode.RUN_FAILED if found.findings else ExitCode.OK
    if json:
        output.document(
            trial=trial_name(files),
            clean=not found.findings,
            tickets=found.states,
            dropped=[
                {"state": state, "reason": reason, "tickets": count}
                for (state, reason), count in found.reasons.items()
            ],
            steps=found.steps,
            datapoints=found.datapoints,
            filtered=found.closed,
            tokens=found.tokens,
            findings=found.findings,
        )
        return status
    _print_counts(found)
    output.data(*_verdict(found))
    return status


def _print_counts(found: AuditResult) -> None:
    """Prints the tickets by state, and why some were dropped."""
    from launcher.audit.ticket_fates import TicketState
    from launcher.terminal import output

    if not found.states:
        return
    counts = {
        state.value: found.states.get(state.value, 0)
        for state in TicketState
        if not state.is_dropped
    }
    total = sum(found.states.values())
    counts = {"granted": total, **counts, _DROPPED: total - sum(counts.values())}
    output.table(("tickets", "number"), [(name, str(count)) for name, count in counts.items()])
    if found.reasons:
        ordered = sorted(found.reasons.items(), key=lambda item: (-item[1], item[0]))
        rows = [(state, str(count), reason) for (state, reason), count in ordered[:MOST_SHOWN]]
        output.data("")
        output.table((_DROPPED, "number", "first reason"), rows)
        if (others := len(ordered) - MOST_SHOWN) > 0:
            output.say(f"and {others} other reasons: --json")
    output.data("")


def _verdict(found: AuditResult) -> Iterator[str]:
    """Yields what was checked, and the findings."""
    yield f"{found.steps} steps trained {found.datapoints} datapoints, {found.closed} were filtered"
    tokens = found.tokens
    if tokens.of_dump or tokens.of_rows or tokens.unknown:
        yield (
            f"{tokens.of_dump} trained tokens held against the staleness bound one by one, "
            f"{tokens.of_rows} by the oldest of their datapoint"
            + (f"; of {tokens.unknown} datapoints no version is known" if tokens.unknown else "")
        )
    if not found.findings:
        yield "clean"
        return
    yield f"{len(found.findings)} findings:"
    for kind in dict.fromkeys(finding.kind for finding in found.findings):
        several = [finding for finding in found.findings if finding.kind is kind]
        for finding in several[:MOST_SHOWN]:
            yield f"  {kind}: {finding.what}"
            yield f"    where: {finding.where}"
            yield f"    means: {finding.meaning}"
        if (others := len(several) - MOST_SHOWN) > 0:
            yield f"  {kind}: {others} more (--json)"
