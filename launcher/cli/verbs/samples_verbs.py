"""The verb that shows what was said in a trial's episodes: ``samples``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from launcher.cli import shared_options as o

if TYPE_CHECKING:
    from launcher.trials.rollout_samples import RolloutSample

MOST_LISTED = 50  # --json has all
_SHOWN = 60  # characters of a prompt


def samples(
    trial: o.Trial,
    id: Annotated[
        str | None, o.argument("ID", "A question (0-46) or one episode (0-46-3); default: a list.")
    ] = None,
    json: o.Json = False,
    cluster: o.Cluster = None,
) -> None:
    """Show what was said in an asynchronous trial's episodes: requests, branches, tools, rewards, logs."""
    from launcher.terminal import output
    from launcher.trials.find_trials import find_trial, trial_name
    from launcher.trials.rollout_samples import find_samples, rollout_samples, sample_lines

    files = find_trial(trial, cluster=cluster)
    if id is None:
        found = [sample for sample in rollout_samples(files) if sample.episodes]
        if json:
            output.document(trial=trial_name(files), samples=[dict(s.row) for s in found])
        else:
            _list(found)
        return
    found, index = find_samples(files, id)
    if json:
        output.document(
            trial=trial_name(files), episode=index, samples=[dict(s.row) for s in found]
        )
        return
    for sample in found:
        output.data(*sample_lines(sample, index=index))


def _list(found: list[RolloutSample]) -> None:
    """Prints the questions whose texts were kept, the newest last."""
    from launcher.terminal import output

    if not found:
        output.say("no texts were kept: only asynchronous runs keep some (schedule.dump_texts)")
        return
    rows = []
    for sample in found[-MOST_LISTED:]:
        rewards = [float(r) for r in sample.row.get("rewards") or ()]
        mean = f"{sum(rewards) / len(rewards):.3g}" if rewards else ""
        prompt = " ".join(sample.begins.split())
        rows.append(
            (
                sample.id,
                str(sample.row.get("newest", "")),
                str(sample.row.get("outcome", "")),
                str(len(rewards)),
                mean,
                prompt[:_SHOWN] + "…" * (len(prompt) > _SHOWN),
            )
        )
    output.table(("id", "weights", "outcome", "episodes", "mean reward", "prompt"), rows)
    if (others := len(found) - len(rows)) > 0:
        output.say(f"and {others} earlier ones: --json")
