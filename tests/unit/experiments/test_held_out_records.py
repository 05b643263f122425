"""Held-out questions are trained on in no phase: of every recipe, and of every page's commands."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from doc_pages import DOCS, DocPage
from harbor_tasks import write_task

from experiments.compose import RLExperiment
from experiments.parts.held_out_records import held_out_problems_of
from experiments.sft import SFTExperiment
from launcher.submit.planning import chosen_experiment
from realsys.api import registry
from realsys.api.basics import plugin_table
from realsys.api.errors import ConfigError
from realsys.api.model import DatasetAbstraction
from realsys.api.plain import from_plain
from realsys.data.sources.dataset_arguments import (
    MathRecordsArguments,
    MathSFTArguments,
    PreferencePairsArguments,
)
from realsys.data.sources.math_questions import records_of
from realsys.data.sources.record_shape import question_of

ROWS, HELD_OUT = 90, 20
ARGUMENTS = {
    "math_prompts": MathRecordsArguments,
    "math_sft": MathSFTArguments,
    "preference_pairs": PreferencePairsArguments,
}
Options = RLExperiment | SFTExperiment


def asked(dataset: DatasetAbstraction) -> Iterator[str]:
    """What the records of a data set ask, as a worker reads them."""
    if dataset.type_ == "mixture":
        for source in dataset.args["sources"].values():
            split = {"split": dataset.args["split"]}
            yield from asked(DatasetAbstraction(dataset.args["of"], {**source, **split}))
        return
    args = from_plain(ARGUMENTS[dataset.type_], dict(dataset.args))
    records = records_of(args, seed=1)
    for index in range(len(records)):
        found = question_of(
            records[index], args.columns, records.where(index), needs_answer=args.needs_answer
        )
        yield json.dumps(found.prompt)


def trained_and_held_out(options: Options) -> tuple[dict[str, set[str]], set[str]]:
    """Questions that each phase trains on, and those that are held out."""
    if isinstance(options, SFTExperiment):
        held_out = options.task.answers("test", max_answer_len=64)
        return {"own": set(asked(options.task.answers("train", max_answer_len=64)))}, set(
            asked(held_out)
        )
    phases = {"own": set(asked(options.task.prompts("train")))}
    for phase in options.preparations():
        before = phase.experiment
        assert isinstance(before, SFTExperiment)
        phases[phase.name] = set(asked(before.task.answers("train", max_answer_len=64)))
    return phases, set(asked(options.task.prompts("test")))


def refused(options: Options) -> list[ConfigError]:
    wrong = options.problems()
    return [p for p in wrong if "trained on" in p.what or "holds out" in p.what]


def write_records(path: Path, *, first: int = 0, rows: int = ROWS, **more: Any) -> Path:
    """Records that every page's columns find something in."""
    with path.open("w") as file:
        for number in range(first, first + rows):
            asks, answer = f"{number} + 1 = ?", str(number + 1)
            row: Mapping[str, Any] = {
                "prompt": asks,
                "answer": answer,
                "problem": asks,
                "meta": {"solution": answer},
                "level": number % 4,
                "chosen": answer,
                "rejected": "0",
                **more,
            }
            file.write(json.dumps(row) + "\n")
    return path


@pytest.fixture
def plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is gone after it."""
    for kind, table in plugin_table.registered.items():
        monkeypatch.setitem(plugin_table.registered, kind, dict(table))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plugins: None) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


# ---- recipes and pages --------------------------------------------------------------------------

RECIPES = [
    name
    for name in registry.names("experiment")
    if not name.startswith(("qwen", "dpo", "reward-model"))
]


@pytest.mark.thorough
@pytest.mark.parametrize("name", RECIPES)
def test_no_recipe_trains_on_what_it_holds_out(name: str, here: Path) -> None:
    made, _ = chosen_experiment(name, ["task.train_size=800"])
    assert isinstance(made, Options)
    if made.task.num_held_out:
        phases, held_out = trained_and_held_out(made)
        assert {phase: len(found & held_out) for phase, found in phases.items()} == dict.fromkeys(
            phases, 0
        )
    write_records(here / "q.jsonl")
    words = ["task.path=q.jsonl", f"task.eval_size={HELD_OUT}", "train_bs_n_seqs=8"]
    prepared = [] if isinstance(made, SFTExperiment) else ["sft.task.path=q.jsonl"]
    options, _ = chosen_experiment(name, [*words, *prepared])
    assert isinstance(options, Options)
    phases, held_out = trained_and_held_out(options)
    assert len(held_out) == HELD_OUT
    assert [len(found) for found in phases.values()] == [ROWS - HELD_OUT] * len(phases)
    assert not held_out & set().union(*phases.values())
    assert refused(options) == []


def shown() -> Iterator[tuple[str, int, list[str]]]:
    """Commands of all pages that name files of records: page, place among them, words."""
    for file in sorted((*DOCS.glob("*.md"), DOCS.parent / "README.md")):
        page = DocPage(os.path.relpath(file, DOCS))
        found = [words for verb in ("launch", "plan") for words in page.commands(verb)]
        for number, words in enumerate(found):
            if any(re.match(r"(sft\.)?task\.(\S+\.)?path=(?!hf:)", word) for word in words):
                yield page_name(file), number, words


def page_name(file: Path) -> str:
    return os.path.relpath(file, DOCS)


SHOWN = list(shown())


def register(page: DocPage, folder: Path) -> None:
    """Registers what a page's Python does, block by block, as ``--import`` would."""
    for number, block in enumerate(page.blocks("python")):
        if "register_experiment(" in block:
            file = folder / f"page_code_{number}.py"
            file.write_text(block)
            spec = importlib.util.spec_from_file_location(file.stem, file)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules[file.stem] = module
            spec.loader.exec_module(module)
            del sys.modules[file.stem]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "words"), [pytest.param(p, w, id=f"{p}-{n}") for p, n, w in SHOWN]
)
def test_no_page_s_command_trains_on_what_it_holds_out(
    name: str, words: list[str], here: Path
) -> None:
    page = DocPage(name)
    register(page, here)
    experiment, *rest = words
    task = [w for w in rest if re.match(r"(sft\.)?(task|model)(\.|=)|actor\.path=", w)]
    task = [w for w in task if not re.match(r"(task\.(agent|env|reward))", w)]
    for number, word in enumerate(task):
        setting, _, path = word.partition("=")
        if not re.search(r"task\.(\S+\.)?(eval_)?path$", setting):
            continue
        file = here / path
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.exists():
            continue
        if "task=harbor" in task:
            for one in range(30):
                write_task(file / f"t{one:02}", **{"instruction.md": f"Write {one}."})
        else:
            write_records(file, first=1000 * number)
    mixed = [w.removesuffix(".path=" + w.partition(".path=")[2]) for w in task if ".sources." in w]
    sizes = [f"{at}.eval_size=5" for at in mixed if not at.endswith("jsonl")]
    options, _ = chosen_experiment(experiment, [*task, *(sizes or ["task.eval_size=5"])])
    assert isinstance(options, Options)
    read = list(options.task.read_questions("task"))
    assert read
    before = [] if isinstance(options, SFTExperiment) or options.actor.path else [options.sft.task]
    trained = [*read, *(q for one in before for q in one.read_questions("sft.task"))]
    assert list(held_out_problems_of(read, trained)) == []
    phases, held_out = trained_and_held_out(options)
    assert len(held_out) >= 5
    assert not held_out & set().union(*phases.values())


def test_the_pages_with_records_are_all_tried() -> None:
    pages = {page for page, _, _ in SHOWN}
    assert {"chat_data.md", "your_data.md", "mixtures.md", "preferences.md", "harbor.md"} <= pages
    assert len(SHOWN) > 15


# ---- what clashes -------------------------------------------------------------------------------

PREPARED = ("task.path=q.jsonl", f"task.eval_size={HELD_OUT}", "train_bs_n_seqs=8")


def with_words(*words: str, experiment: str = "grpo-math") -> Options:
    options, _ = chosen_experiment(experiment, [*PREPARED, "sft.train_bs_n_seqs=8", *words])
    assert isinstance(options, Options)
    return options


CLASHES = {
    "fewer are held out": ("sft.task.path=q.jsonl", "sft.task.eval_size=8"),
    "all, by a file of their own": ("sft.task.path=q.jsonl", "sft.task.eval_path=other.jsonl"),
    "a copy, and fewer": ("sft.task.path=copy.jsonl", "sft.task.eval_size=0"),
    "a link, and fewer": ("sft.task.path=link.jsonl", "sft.task.eval_size=0"),
    "a folder with the file": ("sft.task.path=folder",),
    "other filters": (
        "sft.task=file",
        "sft.task.path=q.jsonl",
        "sft.task.keep=[even]",
        "sft.task.eval_size=0",
    ),
    "the held-out file": ("task.eval_path=other.jsonl", "sft.task.path=other.jsonl"),
    "one's own held-out file": ("task.eval_path=q.jsonl", "actor.path=M"),
    "a benchmark": (
        "benchmarks.hard=file",
        "benchmarks.hard.path=q.jsonl",
        "benchmarks.hard.eval_size=20",
        "benchmarks.hard.reward=math_verify",
        "actor.path=M",
    ),
    "in a mixture": (
        "sft.task=mixture",
        "sft.task.sources.a=file",
        "sft.task.sources.a.path=q.jsonl",
        "sft.task.sources.a.eval_size=3",
    ),
}


@pytest.fixture
def files(here: Path) -> Path:
    registry.register_filter("even", lambda record: int(record["answer"]) % 2 == 0)
    registry.register_filter("odd", lambda record: int(record["answer"]) % 2 == 1)
    write_records(here / "q.jsonl")
    write_records(here / "other.jsonl", first=500)
    shutil.copy(here / "q.jsonl", here / "copy.jsonl")
    (here / "link.jsonl").symlink_to(here / "q.jsonl")
    (here / "folder").mkdir()
    shutil.copy(here / "q.jsonl", here / "folder/a.jsonl")
    shutil.copy(here / "other.jsonl", here / "folder/b.jsonl")
    return here


@pytest.mark.parametrize("words", CLASHES.values(), ids=CLASHES.keys())
def test_settings_that_would_train_on_held_out_records_are_refused(
    words: tuple[str, ...], files: Path
) -> None:
    found = refused(with_words(*words))
    assert len(found) == 1, [p.what for p in found]
    named = "benchmarks" if "benchmarks" in words[0] else "task"
    assert all(re.match(rf"(sft\.)?{named}|task", part) for part in found[0].where.split(" and "))
    assert found[0].fix


def test_a_task_of_one_s_own_file_that_is_held_out_from_is_refused(files: Path) -> None:
    words = ["task=preferences", "task.path=q.jsonl", "task.eval_path=copy.jsonl"]
    options, _ = chosen_experiment("reward-model", [*words, "task.eval_size=4"])
    assert [p.where for p in refused(options)] == ["task.path and task.eval_path"]  # type: ignore[arg-type]


AGREES = {
    "the same file": (("sft.task.path=q.jsonl",), HELD_OUT),
    "a copy of it": (("sft.task.path=copy.jsonl",), HELD_OUT),
    "more held out": (("sft.task.path=q.jsonl", "sft.task.eval_size=30"), 30),
    "another file": (("sft.task.path=other.jsonl", "sft.task.eval_size=0"), 0),
    "the same two files": (
        ("sft.task.path=q.jsonl", "task.eval_path=other.jsonl", "sft.task.eval_size=0"),
        0,
    ),
    "in a mixture": (
        ("sft.task=mixture", "sft.task.sources.a=file", "sft.task.sources.a.path=q.jsonl"),
        HELD_OUT,
    ),
}


@pytest.mark.parametrize(("words", "size"), AGREES.values(), ids=AGREES.keys())
def test_fine_tuning_before_holds_out_what_the_run_holds_out(
    words: tuple[str, ...], size: int, files: Path
) -> None:
    options = with_words(*words)
    assert isinstance(options, RLExperiment)
    assert refused(options) == []
    assert options.sft.task.num_held_out == size
    phases, held_out = trained_and_held_out(options)
    assert not held_out & phases["sft"]


def saved_by(trial: Path, **args: Any) -> Path:
    """A model that a trial saved, and the trial's plan as far as it is read."""
    model = trial / "checkpoints/model/step-000005"
    model.mkdir(parents=True)
    (model.parent / "latest").symlink_to(model.name)
    data = {"type_": "math_sft", "args": {"max_prompt_len": 9, "split": "train", **args}}
    phase = {"name": "main", "config": {"model_worker": [{"datasets": [data]}]}}
    (trial / "plan.json").write_text(json.dumps({"phases": [phase]}))
    return model.parent / "latest"


@pytest.mark.parametrize(
    ("args", "warned"),
    [
        ({"eval_size": 0}, True),
        ({"eval_size": HELD_OUT - 1}, True),
        ({"eval_size": HELD_OUT}, False),
        ({"eval_size": 0, "split": "test"}, False),
        ({"eval_size": HELD_OUT, "eval_path": "other.jsonl"}, True),
    ],
)
def test_a_model_that_an_earlier_trial_taught_the_held_out_records_is_told(
    args: dict[str, Any], warned: bool, files: Path
) -> None:
    model = saved_by(files / "trial", path=str(files / "q.jsonl"), **args)
    options = with_words(f"actor.path={model}")
    remarks = [r for r in options.remarks(()) if "held out here" in r]
    assert bool(remarks) is warned
    (model.parents[2] / "plan.json").write_text("[]")
    assert not [r for r in options.remarks(()) if "held out here" in r]


def test_folders_of_tasks_are_parted_alike(here: Path) -> None:
    for one in range(12):
        write_task(here / f"tasks/t{one:02}", **{"instruction.md": f"Write {one}."})
    words = ("task=harbor", "task.path=tasks", "task.eval_size=4", "sft.task=harbor")
    options, _ = chosen_experiment("grpo-math", [*words, "sft.task.path=tasks"])
    assert isinstance(options, RLExperiment)
    assert refused(options) == []
    phases, held_out = trained_and_held_out(options)
    assert (len(held_out), {len(found) for found in phases.values()}) == (4, {8})
    assert not held_out & set().union(*phases.values())
    one_of_them, _ = chosen_experiment("grpo-math", [*words, "sft.task.path=tasks/t03"])
    assert isinstance(one_of_them, RLExperiment)
    assert len(refused(one_of_them)) == 1  # whether it is held out is not looked at


def test_filters_that_share_no_record_part_one_file(files: Path) -> None:
    sources = ("a", "even"), ("b", "odd")
    words = [f"task.sources.{s}=file" for s, _ in sources]
    words += [f"task.sources.{s}.path=q.jsonl" for s, _ in sources]
    words += [f"task.sources.{s}.eval_size=5" for s, _ in sources]
    words += [f"task.sources.{s}.reward=math_verify" for s, _ in sources]
    words += ["task=mixture", "actor.path=M"]
    apart, _ = chosen_experiment(
        "grpo-math", [*words, *(f"task.sources.{s}.keep=[{k}]" for s, k in sources)]
    )
    assert isinstance(apart, RLExperiment)
    assert refused(apart) == []
    together, _ = chosen_experiment("grpo-math", [*words, "task.sources.a.keep=[even]"])
    assert isinstance(together, RLExperiment)
    where = "task.sources.b.path and task.sources.a.eval_size"
    assert [p.where for p in refused(together)] == [where]
