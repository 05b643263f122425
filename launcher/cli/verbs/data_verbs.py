"""The verb for data: ``data show`` prints records as the trainer sees them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from launcher.cli import shared_options as o
from launcher.terminal.exit_codes import ExitCode

if TYPE_CHECKING:
    from launcher.submit.shown_data import ShownData, ShownRecord


def data(
    action: Annotated[str, o.argument("show", "Print records as the trainer sees them.")],
    experiment: o.Experiment,
    overrides: o.Overrides = None,
    config: o.Config = None,
    imports: o.Imports = None,
    num: Annotated[int, o.option("--num -n N", "Number of records.", min=0)] = 3,
    split: Annotated[str, o.option("--split train|test", "Which records.")] = "train",
    phase: Annotated[
        str, o.option("--phase NAME", "Of an earlier phase, e.g. sft; default: the last.")
    ] = "main",
    json: o.Json = False,
) -> int:
    """Show records as the trainer sees them: rendered, counted, with what has a loss."""
    from launcher.submit.shown_data import shown_data
    from launcher.terminal import output

    if action != "show":
        raise typer.BadParameter(f"no action {action!r}; use `realsys data show EXPERIMENT`")
    if split not in ("train", "test"):
        raise typer.BadParameter(f"--split {split}: use train or test")
    words = overrides or []
    found = shown_data(
        experiment, words, config=config, imports=imports or [], phase=phase, split=split, num=num
    )
    if json:
        output.document(data=found)
        return ExitCode.OK
    _print_head(found)
    for number, record in enumerate(found.records, 1):
        _print_record(number, record)
    return ExitCode.OK


def _print_head(found: ShownData) -> None:
    """Prints what all records have in common."""
    from launcher.terminal import output

    shown = {
        name: value
        for name, value in found.args.items()
        if value not in (None, [], {}) and name != "task"
    }
    rows = [
        ("data set", f"{found.type}, {found.size:,} records"),
        *((name, _plain(value)) for name, value in shown.items()),
        ("tokenizer", found.tokenizer),
        (
            "template",
            "the tokenizer's chat template" if found.chat_template else "none: plain text",
        ),
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
    head = f"{number}  {record.where}  {record.num_tokens} tokens{loss}"
    output.data("", head)
    if output.colour(sys.stdout):
        from rich.text import Text

        text = Text()
        for part, has_loss in record.parts:
            text.append(visible(part), style="green" if has_loss else "")
        output.console().print(text, soft_wrap=True)
    else:
        marked = (f"⟦{part}⟧" if has_loss else part for part, has_loss in record.parts)
        output.data("".join(marked))
    if record.answer:
        output.data(f"known answer: {record.answer}")
