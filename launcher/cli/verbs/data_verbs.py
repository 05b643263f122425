"""The verbs for data: ``data show`` prints records, ``data score`` attacks a reward rule, ``rescore``
scores stored rollouts by another one.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

import typer

from launcher.cli import shared_options as o
from launcher.terminal.exit_codes import ExitCode

if TYPE_CHECKING:
    from launcher.control.rescore_trial import RescoredSums
    from launcher.submit.shown_data import ShownData, ShownRecord
    from realsys.evaluator.rescore import StoredRollouts

PROGRESS_S = 5.0  # between two lines that say how far a rescoring is


def data(
    action: Annotated[
        str,
        o.argument(
            "show|score", "Print records as the trainer sees them, or attack a reward rule."
        ),
    ],
    experiment: Annotated[
        str,
        o.argument("EXPERIMENT|RULE", "Name of an experiment; of `score`, an expression of rules."),
    ],
    overrides: o.Overrides = None,
    config: o.Config = None,
    imports: o.Imports = None,
    num: Annotated[int, o.option("--num -n N", "Number of records.", min=0)] = 3,
    split: Annotated[str, o.option("--split train|test", "Which records.")] = "train",
    phase: Annotated[
        str, o.option("--phase NAME", "Of an earlier phase, e.g. sft; default: the last.")
    ] = "main",
    attack: Annotated[
        bool,
        o.option(
            "--attack", "score: play exploits and honest paraphrases, print both error rates."
        ),
    ] = False,
    tasks: Annotated[
        str | None,
        o.option("--tasks NAMES", "score: tasks of the corpus, or generators of reasoning-gym."),
    ] = None,
    records: Annotated[
        Path | None, o.option("--records FILE", "score: questions of your own, JSON lines.")
    ] = None,
    deadline: Annotated[
        float, o.option("--deadline SECONDS", "score: of one answer; then it has hung.", min=1)
    ] = 120.0,
    json: o.Json = False,
    cluster: o.Cluster = None,
) -> int:
    """Show records as the trainer sees them; `data score RULE --attack` attacks a reward rule."""
    from launcher.submit.shown_data import shown_data
    from launcher.terminal import output

    if action == "score":
        if not attack:
            raise typer.BadParameter("use `realsys data score RULE --attack`")
        return _attack(experiment, overrides or [], imports or [], tasks, records, deadline, json)
    if action != "show":
        raise typer.BadParameter(f"no action {action!r}; use `realsys data show EXPERIMENT`")
    if split not in ("train", "test"):
        raise typer.BadParameter(f"--split {split}: use train or test")
    words = overrides or []
    found = shown_data(
        experiment,
        words,
        config=config,
        imports=imports or [],
        phase=phase,
        split=split,
        num=num,
        cluster=cluster,
        report=output.say,
    )
    if json:
        output.document(data=found)
        return ExitCode.OK
    _print_head(found)
    for number, record in enumerate(found.records, 1):
        _print_record(number, record)
    return ExitCode.OK


def _attack(
    rule: str,
    words: list[str],
    imports: list[str],
    tasks: str | None,
    records: Path | None,
    deadline: float,
    json: bool,
) -> int:
    """Plays the corpus on a rule. The exit status is 1 where an exploit succeeds."""
    from launcher.control.attack_rule import attack_rule
    from launcher.terminal import output

    found = attack_rule(
        rule,
        words,
        imports=imports,
        tasks=[name for name in (tasks or "").split(",") if name],
        records=records,
        deadline_s=deadline,
        say=output.say,
    )
    status = ExitCode.RUN_FAILED if found.is_exploited else ExitCode.OK
    if json:
        output.document(rule=found.rule, exploited=found.is_exploited, parts=found.to_json())
        return status
    for name, report in found.to_json().items():
        output.data("", f"{found.rule}: {name}")
        _print_attack(report)
    return status


def _print_attack(report: Mapping[str, Any]) -> None:
    """Prints both error rates, and the texts."""
    from launcher.terminal import output

    counts, rates = report["counts"], report["rates"]
    rows = []
    for title, role, name in (
        ("exploits paid above an honest wrong answer", "exploit", "paid"),
        ("honest right answers refused", "honest", "refused"),
    ):
        shares = [rates.get(f"{name}/{side}") for side in ("own", "outside")]
        texts = ["-" if share is None else f"{100 * share:.1f} %" for share in shares]
        rows.append((title, *texts, str(sum(n for k, n in counts.items() if k.startswith(role)))))
    output.table(("", "ours", "an outsider's", "of"), rows)
    output.data(
        f"{report['kinds']} kinds of exploits; programs run: {len(report['ran'])}, "
        f"hung: {len(report['hung'])}, texts that the rule failed on: {report['raised']}"
    )
    if report["pays_all"]:
        output.data("every wrong answer to a question is right for it")
    if report["excuse"]:
        output.data(f"listed, and drawn only where it is named: {report['excuse']}")
    for name in ("paid", "ran", "hung", "by_design", "refused", "no_score"):
        if not report[name]:
            continue
        output.data("", f"{name.replace('_', ' ')}:")
        output.table(
            ("kind", "score", "compared with", "text", "why or source"),
            [
                (
                    row["kind"],
                    *("-" if row[n] is None else f"{row[n]:g}" for n in ("score", "compared")),
                    row["text"],
                    row.get("by_design") or row.get("source") or row["what"],
                )
                for row in report[name]
            ],
        )


def _print_head(found: ShownData) -> None:
    """Prints what all records have in common."""
    from launcher.terminal import output

    shown = {
        name: value
        for name, value in found.args.items()
        if value not in (None, [], {}) and name != "task"
    }
    none_left = "" if found.size else ": all are held out or dropped (see eval_size and keep)"
    rows = [
        ("data set", f"{found.type}, {found.size:,} records{none_left}"),
        *((name, _plain(value)) for name, value in shown.items()),
        ("tokenizer", found.tokenizer),
        (
            "template",
            "the tokenizer's chat template" if found.chat_template else "none: plain text",
        ),
        *([("prompt", found.prompt)] if found.prompt else []),
        *([("answers read by", found.answer_form)] if found.answer_form else []),
    ]
    output.data(*output.aligned(rows))


def _plain(value: Any) -> str:
    """Renders an argument: a table as ``name=value``, a list with commas."""
    if isinstance(value, Mapping):
        return " ".join(f"{name}={_plain(v)}" for name, v in value.items() if v is not None)
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _print_record(number: int, record: ShownRecord) -> None:
    """Prints one record; what has a loss is green, or in ⟦ ⟧ where there is no colour."""
    from launcher.terminal import output
    from launcher.terminal.text import visible

    loss = f", {record.num_loss_tokens} with a loss" if record.num_loss_tokens else ""
    several = f", {len(record.sequences)} sequences" if len(record.sequences) > 1 else ""
    output.data("", f"{number}  {record.where}  {record.num_tokens} tokens{loss}{several}")
    parts = iter(record.parts)
    for place, count in enumerate(record.sequences, start=1):
        if several:
            output.data(f"{number}.{place}")
        if output.colour(sys.stdout):
            from rich.text import Text

            text = Text()
            for part, has_loss in islice(parts, count):
                text.append(visible(part), style="green" if has_loss else "")
            output.console().print(text, soft_wrap=True)
        else:
            marked = (f"⟦{part}⟧" if has_loss else part for part, has_loss in islice(parts, count))
            output.data("".join(marked))
    if record.answer:
        output.data(f"known answer: {record.answer}")


def rescore(
    trial: o.Trial,
    arguments: Annotated[
        list[str] | None,
        o.argument("NAME=VALUE", "Arguments of rules: task.reward_args.RULE.FIELD=VALUE."),
    ] = None,
    reward: Annotated[
        str | None,
        o.option("--reward RULE", "The rule, e.g. 'a + 0.2*b'; default: the trial's own."),
    ] = None,
    imports: o.Imports = None,
    out: Annotated[
        Path | None, o.option("--out FILE", "Also write a JSON line for each datapoint.")
    ] = None,
    json: o.Json = False,
    cluster: o.Cluster = None,
) -> int:
    """Score an asynchronous trial's stored answers by another reward rule; changes nothing in it."""
    from launcher.control.rescore_trial import stored_rollouts
    from launcher.terminal import output
    from launcher.trials.find_trials import find_trial

    files = find_trial(trial, cluster=cluster)
    stored = stored_rollouts(files, reward=reward, words=arguments or [], imports=imports or [])
    sums = _rescored(stored, out)
    rows = sums.rows()
    status = ExitCode.RUN_FAILED if sums.is_unscored else ExitCode.OK
    if sums.problem:
        number = "all " * sums.is_unscored + str(rows["all"]["unscored"])
        output.warn(f"{number} datapoints got no score; the first: {sums.problem}")
    if json:
        output.document(reward=stored.reward, reward_args=stored.reward_args, weights=rows)
        return status
    output.data(stored.reward)
    _print_means(rows)
    return status


def _rescored(stored: StoredRollouts, out: Path | None) -> RescoredSums:
    """Scores all datapoints; says on stderr how far it is, and writes them to ``out``."""
    from launcher.control.rescore_trial import RescoredSums
    from launcher.terminal import output
    from realsys.trial.records import dumps

    sums, reported_at = RescoredSums(), time.monotonic()
    with _opened(out) as file:
        for number, datapoint in enumerate(stored, 1):
            sums.add(datapoint)
            if file is not None:
                file.write(dumps(datapoint) + b"\n")
            if time.monotonic() - reported_at > PROGRESS_S:
                reported_at = time.monotonic()
                output.say(f"{number:,} of {len(stored):,} datapoints")
    return sums


def _opened(out: Path | None) -> AbstractContextManager[BinaryIO | None]:
    from realsys.api.errors import ConfigError

    try:
        return out.open("wb") if out is not None else nullcontext()
    except OSError as error:
        what = f"{out} can't be written: {error.strerror}"
        raise ConfigError(what, where="--out", fix="name a file in a folder that exists") from error


def _print_means(rows: Mapping[str, Mapping[str, Any]]) -> None:
    """Prints a row for each version of the weights, and one for all."""
    from launcher.terminal import output

    counts, means = ("datapoints", "unscored", "answers"), ("old", "new", "correct")
    parts = sorted({part for row in rows.values() for part in row["parts"]})
    shown = []
    for name, row in rows.items():
        numbers = [row[mean] for mean in means] + [row["parts"].get(part) for part in parts]
        texts = ["-" if number is None else f"{number:.4f}" for number in numbers]
        shown.append([name, *(str(row[count]) for count in counts), *texts])
    output.table(("weights", *counts, *means, *parts), shown)
