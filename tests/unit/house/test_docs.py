"""The pages agree with the code: links, paths, commands, and the tables that tell what code decides."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from launcher.cli.front_page import VERBS
from launcher.submit.planning import default_experiment
from launcher.terminal.exit_codes import ExitCode
from realsys.config.overrides import with_settings
from realsys.runtime import worker_exit_codes
from realsys.runtime.lifecycle import TRANSITIONS

ROOT = Path(__file__).parents[3]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "experiments/README.md"])
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
ROOMS = (
    "launcher",
    "experiments",
    "cluster_specs",
    "realsys",
    "tests",
    "benchmarks",
    "docs",
    "release",
    ".ci",
)
NO_ROOMS = ("build", "dist", "venv", "__pycache__")  # made by tools


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def blocks(text: str, language: str) -> list[str]:
    """Contents of the fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)


def commands(text: str) -> list[list[str]]:
    """Words of every `realsys …` line in bash blocks, up to a comment."""
    lines = [line for block in blocks(text, "bash") for line in block.splitlines()]
    return [line.partition(" #")[0].split() for line in lines if line.startswith("realsys ")]


def rows(text: str, heading: str) -> list[str]:
    """The lines of the first table below a heading, without its two head lines."""
    _, found, rest = text.partition(f"\n## {heading}\n")
    assert found, f"no heading {heading!r}"
    table = re.search(r"((?:^\|.*\n)+)", rest.partition("\n## ")[0], flags=re.MULTILINE)
    assert table is not None, f"no table under {heading!r}"
    return table[1].splitlines()[2:]


def folders(path: Path) -> set[str]:
    """Names of the folders in ``path`` that belong to the repository."""
    return {
        p.name
        for p in path.iterdir()
        if p.is_dir()
        and not p.name.startswith(".")
        and not p.name.endswith(".egg-info")
        and p.name not in NO_ROOMS
    }


def test_all_pages_are_here() -> None:
    assert {"README.md", "CHANGELOG.md", "CONTRIBUTING.md", "docs/architecture.md"} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_relative_links_lead_somewhere(name: str) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", text_of(name))
    relative = [link.partition("#")[0] for link in links if "://" not in link and link[0] != "#"]
    missing = [link for link in relative if not (ROOT / name).parent.joinpath(link).exists()]
    assert not missing


@pytest.mark.parametrize("name", NAMES)
def test_paths_in_backticks_exist(name: str) -> None:
    prose = re.sub(r"^```.*?^```", "", text_of(name), flags=re.DOTALL | re.MULTILINE)
    quoted = re.findall(r"`([\w.]+/[\w./-]*)`", prose)
    paths = [path for path in quoted if path.partition("/")[0] in ROOMS]
    missing = [path for path in paths if not (ROOT / path).exists()]
    assert not missing


@pytest.mark.parametrize("name", NAMES)
def test_a_page_is_finished_and_of_no_one_machine(name: str) -> None:
    text = text_of(name)
    for word in ("TODO_LEAD", "/root/", "/home/"):
        assert word not in text, f"{word} in line {text[: text.index(word)].count(chr(10)) + 1}"


@pytest.mark.parametrize("name", NAMES)
def test_commands_use_verbs_and_options_that_exist(name: str) -> None:
    for _, verb, *words in commands(text_of(name)):
        assert verb in VERBS, f"realsys {verb}"
        unknown = {word for word in words if word.startswith("--")} - set(VERBS[verb])
        assert not unknown, f"realsys {verb} {unknown}"


@pytest.mark.parametrize(
    ("page", "experiment"),
    [
        ("configuration", "ppo-math"),
        ("generation_servers", "ppo-math-async"),
        ("reasoning_gym", "ppo-math"),
    ],
)
def test_a_pages_settings_files_are_accepted(page: str, experiment: str, tmp_path: Path) -> None:
    found = blocks(text_of(f"docs/{page}.md"), "yaml")
    assert found
    for number, block in enumerate(found):
        (file := tmp_path / f"{number}.yaml").write_text(block)
        with_settings(default_experiment(experiment), config=file)


def test_readmes_tree_lists_the_rooms() -> None:
    (tree,) = blocks(text_of("README.md"), "text")
    assert set(re.findall(r"^(\w+)/ ", tree, flags=re.MULTILINE)) == folders(ROOT)
    assert set(re.findall(r"^  (\w+)/ ", tree, flags=re.MULTILINE)) == folders(ROOT / "realsys")


def test_readme_links_every_page() -> None:
    text = text_of("README.md")
    linked_elsewhere = [str(page.relative_to(ROOT)) for page in decisions()]
    wanted = [name for name in NAMES if name not in ("README.md", *linked_elsewhere)]
    assert [name for name in wanted if f"({name})" not in text] == []


def decisions() -> list[Path]:
    """The pages of single decisions."""
    return sorted((ROOT / "docs/decisions").glob("0*.md"))


def test_the_index_of_decisions_lists_every_one_by_its_title() -> None:
    listed = re.findall(
        r"^\| (\d+) \| \[(.+)\]\((.+)\) \|", text_of("docs/decisions/README.md"), re.M
    )
    titles = [page.read_text().partition("\n")[0] for page in decisions()]
    assert [(number, name) for number, _, name in listed] == [
        (str(int(page.name[:4])), page.name) for page in decisions()
    ]
    assert titles[1:] == [f"# {number}. {title}" for number, title, _ in listed][1:]


@pytest.mark.parametrize("page", decisions()[1:], ids=lambda page: page.stem)
def test_a_decision_says_why_what_follows_and_how_it_is_tested(page: Path) -> None:
    headings = re.findall(r"^## (.+)$", page.read_text(), re.M)
    assert headings == ["Context", "Decision", "Consequences", "Tested by"]


def test_cli_page_lists_every_verb() -> None:
    listed = [row.split("`")[1] for row in rows(text_of("docs/cli.md"), "Verbs")]
    assert sorted(listed) == sorted(VERBS)


def test_cli_pages_exit_statuses_are_the_codes() -> None:
    listed = [row.split(" | ")[:2] for row in rows(text_of("docs/cli.md"), "Exit status")]
    assert listed == [[f"| {code.value}", f"`{code.name}`"] for code in ExitCode]


def test_workers_pages_lifecycle_is_the_codes() -> None:
    expected = [
        f"| `{state.value}` | `{event.value}` | `{after.value}` |"
        for (state, event), after in TRANSITIONS.items()
    ]
    assert rows(text_of("docs/workers.md"), "A worker's life") == expected


def test_workers_pages_exit_codes_are_the_codes() -> None:
    known = {value: name for name, value in vars(worker_exit_codes).items() if name.isupper()}
    listed = [
        row.split(" | ")[:2] for row in rows(text_of("docs/workers.md"), "Exit codes of workers")
    ]
    assert listed == [[f"| {code}", f"`{name}`"] for code, name in sorted(known.items())]


def test_supported_versions_are_those_of_the_tested_environment() -> None:
    lines = text_of("locks/realsys.txt").splitlines()
    pins = dict(line.split(" ")[0].split("==") for line in lines[1:] if not line.endswith("# cpu"))
    table = re.findall(
        r"^\| ([\w-]+) \| [^|]+ \| ([\d.]+)[,| ]", text_of("docs/supported_versions.md"), re.M
    )
    ours = {name: version for name, version in table if name in pins}
    assert len(ours) == 5
    assert ours == {name: pins[name] for name in ours}


def test_readme_quotes_the_recorded_run() -> None:
    run = json.loads(text_of("docs/pictures/ppo_math_run.json"))
    accuracy = run["held_out_accuracy"]
    figures = f"{accuracy['start']:.1%} | {accuracy['end']:.1%} | {run['minutes']} |".replace(
        "%", " %"
    )
    (row,) = [x for x in text_of("README.md").splitlines() if x.startswith("| the recorded run")]
    assert row.endswith(figures)


@pytest.mark.parametrize(
    ("readme", "benchmarks"),
    [
        ("2.06 times as fast as taking turns, 97 %", "| 2.06 (2.04, 2.06, 2.16) | 97 % "),
        ("5,000 tasks placed on 1,000 nodes in 0.7 ms", "tasks on 1,000 nodes (625 used) | 0.7 ms"),
        ("crash: 0.4 s at most in 200", "| etcd: the master (`PeerWatch`) | 0.05 | 0.33 | 0.40 |"),
        ("node cut off: 19.3 s at most in 40", "(goal: p99 25 s) | 16.1 | 17.9 | 19.3 | 19.3 |"),
        ("20 stops at random moments", "`stop` at 20 random moments of a run"),
        ("5.2 times as fast as trl 1.16.0", "| 1.380 | 1.522 | 5.63 | 5.20 |"),
        ("1.4 times with even ones", "| 0.793 | 0.982 | 1.50 | 1.39 |"),
    ],
)
def test_readmes_figures_are_those_of_the_benchmarks(readme: str, benchmarks: str) -> None:
    assert readme in text_of("README.md")
    assert benchmarks in text_of("docs/benchmarks.md")
