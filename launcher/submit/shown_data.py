"""Finds the records that an experiment trains on, as its workers see them, for ``realsys data show``.

The data set is the one of the experiment's configuration, made here by its name and with its tokenizer as a
worker makes it. That needs the packages of ``realsys[train]``; no model is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, groupby, islice
from pathlib import Path
from typing import Any

from launcher.sites.clusters import find_cluster
from launcher.submit.planning import chosen_experiment, hub_of, import_all
from launcher.submit.shown_prompts import AgentPrompts
from realsys.api import registry
from realsys.api.errors import ConfigError, DataError, did_you_mean
from realsys.api.experiment import Experiment, ExperimentConfig
from realsys.api.model import (
    DatasetAbstraction,
    ModelAbstraction,
    ModelName,
    ParallelGroups,
    ProcessTopology,
)
from realsys.config.extras import missing_packages
from realsys.rollout.runners.form_of_run import answer_form

MAIN = "main"
INPUT, PROMPTS, PROMPT_MASK = "packed_input_ids", "packed_prompts", "prompt_mask"
_NEEDED = ("torch", "transformers")


@dataclass(frozen=True, kw_only=True)
class ShownRecord:
    """One record.

    Attributes:
        where: its file and line; empty if the data set doesn't tell.
        num_tokens: of all its text.
        num_loss_tokens: of the parts that have a loss; 0 for a prompt.
        parts: its text in parts that all have a loss, or none, of one sequence each.
        sequences: number of its parts in each of its sequences: a conversation may have several.
        answer: the known answer, for a prompt.
    """

    where: str
    num_tokens: int
    num_loss_tokens: int
    parts: tuple[tuple[str, bool], ...]
    sequences: tuple[int, ...]
    answer: str


@dataclass(frozen=True, kw_only=True)
class ShownData:
    """A data set and some of its records.

    Attributes:
        type: registered name of the data set.
        args: the arguments that it is made with.
        size: number of its records.
        tokenizer: directory of the tokenizer.
        chat_template: the tokenizer's own; None: it has none.
        prompt: who makes the policy's prompts, and what is shown of them; empty: they are as shown.
        answer_form: what reads the answers of the run's agents; empty: it has no agent that converses.
    """

    type: str
    args: Mapping[str, Any]
    size: int
    tokenizer: str
    chat_template: str | None
    answer_form: str
    records: tuple[ShownRecord, ...]
    prompt: str = ""


def shown_data(
    name: str,
    words: Sequence[str],
    *,
    config: Path | None,
    imports: Sequence[str],
    phase: str,
    split: str,
    num: int,
    cluster: str | None = None,
    report: Callable[[str], None] = lambda _: None,
) -> ShownData:
    """Makes the data set of an experiment's phase, and reads its first records.

    Args:
        words: settings.
        phase: MAIN, or the name of a phase that runs before, e.g. ``sft``.
        split: ``train`` or ``test``.
        num: number of records.
        cluster: the site under whose file root data of a hub are kept.
        report: gets lines about data that are fetched from a hub.
    Raises:
        ConfigError: wrong settings, no such phase, or missing packages or tokenizer. DataError: the data
            can't be read.
    """
    import_all(imports)
    hub = hub_of(find_cluster(cluster), report)
    experiment, _ = chosen_experiment(name, words, config, hub=hub)
    for warning in hub.warnings:
        report(f"warning: {warning}")
    chosen, tokenizer_dir = _phase(name, experiment, phase)
    worker = next(iter(chosen.rollout_worker), None)
    needed = (*_NEEDED, *AgentPrompts.packages(worker))
    for problem in missing_packages(needed, where="realsys data show"):
        raise problem
    abstraction = _dataset(chosen, split)
    tokenizer = _tokenizer(tokenizer_dir)
    seed = chosen.model_worker[0].base_seed
    dataset = registry.make_dataset(abstraction, tokenizer=tokenizer, seed=seed)
    prompts = AgentPrompts(worker=worker, tokenizer=tokenizer)
    return ShownData(
        type=abstraction.type_,
        args=abstraction.args,
        size=len(dataset),
        tokenizer=tokenizer_dir,
        chat_template=getattr(tokenizer, "chat_template", None) or None,
        answer_form=_answer_form(chosen, tokenizer_dir),
        records=tuple(_records(dataset, tokenizer, min(num, len(dataset)), prompts)),
        prompt=prompts.note,
    )


def _phase(name: str, experiment: Experiment, phase: str) -> tuple[ExperimentConfig, str]:
    """Returns the configuration of a phase, and the directory of its tokenizer.

    A phase that starts from another's product has the tokenizer that the other starts from.
    """
    tokenizer = ""
    for earlier in experiment.preparations():
        found = earlier.experiment.initial_setup()
        tokenizer = _tokenizer_dir(found)
        if earlier.name == phase:
            return found, _required(tokenizer, name)
        if tokenizer:
            experiment = experiment.with_prepared(earlier.name, tokenizer)
    if phase != MAIN:
        names = [MAIN, *(earlier.name for earlier in experiment.preparations())]
        raise ConfigError(
            f"{name} has no phase {phase!r}", where="--phase", fix=did_you_mean(phase, names)
        )
    config = experiment.initial_setup()
    return config, _required(_tokenizer_dir(config) or tokenizer, name)


def _answer_form(config: ExperimentConfig, tokenizer: str) -> str:
    workers = config.rollout_worker[:1]
    return next((answer_form(w.agent, w.agent_args, tokenizer) for w in workers), "")


def _tokenizer_dir(config: ExperimentConfig) -> str:
    found = [w.tokenizer_path for w in config.rollout_worker[:1]]
    found += [w.tokenizer_name_or_path or "" for w in config.model_worker[:1]]
    return next(filter(None, found), "")


def _required(tokenizer: str, name: str) -> str:
    if tokenizer:
        return tokenizer
    raise ConfigError(
        f"{name} makes its tokenizer with its first model, so there is none to show records with",
        where="actor.path",
        fix="give a model: actor.path=DIRECTORY (of a fine-tuning, model.path=)",
    )


def _dataset(config: ExperimentConfig, split: str) -> DatasetAbstraction:
    given = [w.datasets for w in config.model_worker] + [w.datasets for w in config.rollout_worker]
    for found in (found for datasets in given for found in datasets):
        if "split" not in found.args:
            return found
        return DatasetAbstraction(found.type_, {**found.args, "split": split})
    raise ConfigError(
        "no worker of this phase reads data", where="experiment", fix="name another experiment"
    )


def _tokenizer(path: str) -> Any:
    """Loads a tokenizer as the worker of a rule does."""
    made = registry.make_model(
        ModelAbstraction("tokenizer_only", {"path": path}),
        name=ModelName("tokenizer"),
        device="cpu",
        topology=ProcessTopology(),
        rank=0,
        groups=ParallelGroups(),
        base_seed=0,
    )
    return made.tokenizer


def _records(
    dataset: Any, tokenizer: Any, num: int, prompts: AgentPrompts
) -> Iterator[ShownRecord]:
    read = getattr(dataset, "record", None)
    where = getattr(getattr(dataset, "records", None), "where", None)
    for index in range(num):
        batch = dataset.batch([index], [f"record-{index}"])
        key = next((key for key in (INPUT, PROMPTS) if key in batch.data), None)
        if key is None:
            raise DataError(
                f"its datapoints have {', '.join(sorted(batch.data))} and no tokens",
                where=f"data set {type(dataset).__name__}",
                fix=f"give them {PROMPTS} or {INPUT} to have them shown",
            )
        tokens, pieces = batch.data[key].tolist(), batch.meta.seqlens[key][0]
        if key == PROMPTS and prompts.note:
            values = {name: values[0] for name, values in batch.meta.metadata.items()}
            tokens = prompts.tokens({**(read(index) if read else {}), **values}, tokens)
            pieces = [len(tokens)]
        mask = (
            batch.data[PROMPT_MASK].tolist() if PROMPT_MASK in batch.data else [True] * len(tokens)
        )
        answers = batch.meta.metadata.get("answer", ("",))
        marked, parts = iter(zip(tokens, mask, strict=True)), []
        for length in pieces:
            grouped = groupby(islice(marked, length), key=lambda pair: bool(pair[1]))
            parts.append(
                [(tokenizer.decode([t for t, _ in part]), not masked) for masked, part in grouped]
            )
        yield ShownRecord(
            where=str(where(index)) if where else "",
            num_tokens=len(tokens),
            num_loss_tokens=mask.count(False),
            parts=tuple(chain.from_iterable(parts)),
            sequences=tuple(map(len, parts)),
            answer=str(answers[0]),
        )
