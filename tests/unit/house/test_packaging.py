"""What pyproject.toml declares is what the code imports, part by part; files made from it hold it."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType, SimpleNamespace

import pytest
import yaml

import realsys
from launcher.cli import command_line
from launcher.submit.submit import packages_missing_here
from launcher.terminal.exit_codes import ExitCode
from realsys.config import extras
from realsys.config.extras import EXTRA_OF, missing_module, missing_packages

ROOT = Path(__file__).parents[3]
OURS = ("realsys", "launcher", "experiments")
# Import name → name in an index, where they differ.
DISTRIBUTIONS = {
    "yaml": "PyYAML",
    "zmq": "pyzmq",
    "grpc": "grpcio",
    "google": "protobuf",
    "huggingface_hub": "huggingface-hub",
    "megatron": "megatron-core",
    "reasoning_gym": "reasoning-gym",
    "math_verify": "math-verify",
}
# Read as files (etcd3's messages), or imported by transformers (accelerate) and renderers (httpx).
NOT_IMPORTED = {"etcd3", "accelerate", "httpx"}


def project() -> dict[str, object]:
    found: dict[str, object] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return found


def names_of(needs: object) -> set[str]:
    """Package names of a list of requirements, our own extras left out."""
    assert isinstance(needs, list)
    return {re.split(r"[<>=\[ ]", n)[0] for n in needs if not n.startswith("realsys[")}


def declared() -> dict[str, set[str]]:
    """Part → what it names; the control plane's part is ''."""
    found = project()
    extra = found["optional-dependencies"]
    assert isinstance(extra, dict)
    return {"": names_of(found["dependencies"]), **{k: names_of(v) for k, v in extra.items()}}


def imported(path: Path) -> Iterator[str]:
    """First parts of the modules that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


def others() -> set[str]:
    """Import names of packages that are not ours and not Python's."""
    files = [path for package in OURS for path in (ROOT / package).rglob("*.py")]
    names = {name for path in files for name in imported(path)}
    return names - {*OURS, "cluster_specs"} - sys.stdlib_module_names


def test_what_is_imported_is_declared_and_what_is_declared_is_imported() -> None:
    parts = declared()
    runtime = set().union(*(names for part, names in parts.items() if part != "dev"))
    assert {DISTRIBUTIONS.get(name, name) for name in others()} == runtime - NOT_IMPORTED


def test_the_table_of_extras_agrees_with_pyproject() -> None:
    parts = declared()
    listed: dict[str, set[str]] = {}
    for name, extra in EXTRA_OF.items():
        listed.setdefault(extra, set()).add(DISTRIBUTIONS.get(name, name))
    assert listed == {part: names for part, names in parts.items() if part not in ("", "dev")}


@pytest.mark.parametrize("name", ["constraints.txt", "THIRD_PARTY_NOTICES.md"])
def test_files_made_from_pyproject_name_every_package(name: str) -> None:
    text = (ROOT / name).read_text().lower()
    wanted = {need.lower() for names in declared().values() for need in names}
    missing = {need for need in wanted if not re.search(rf"\b{re.escape(need)}\b", text)}
    assert not missing, f"make {name} anew: .venv/bin/python release/dependency_files.py"


def test_constraints_name_no_place() -> None:
    lines = [x for x in (ROOT / "constraints.txt").read_text().splitlines() if x[0] != "#"]
    assert all(re.fullmatch(r"[a-z0-9-]+==[0-9][\w.]*", line) for line in lines)


def test_the_changelog_has_the_version() -> None:
    assert f"\n## {realsys.__version__}\n" in (ROOT / "CHANGELOG.md").read_text()


def test_missing_packages_are_one_error_for_each_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "find_spec", lambda name: object() if name == "numpy" else None)
    found = missing_packages(["torch", "numpy", "megatron", "aiohttp"], where="w", instead="or b")
    assert [(e.what.partition(" not ")[0], e.where, e.fix) for e in found] == [
        ("torch and aiohttp are", "w", "pip install 'realsys[train]'; or b"),
        ("megatron is", "w", "pip install 'realsys[megatron]'; or b"),
    ]


def test_a_module_of_no_extra_is_no_refusal() -> None:
    assert missing_module("torch.nn", "w") is not None
    assert missing_module("torchvision", "w") is None


def plan_of(
    *,
    venv: str | None,
    images: tuple[str | None, ...],
    slurm: bool,
    backend: str,
    agent_args: Mapping[str, object] = MappingProxyType({}),
):
    """As much of a LaunchPlan as is looked at."""
    one = SimpleNamespace
    groups = [one(scheduling=one(container_image=image)) for image in images]
    shard = one(backend=one(type_=backend))
    phase = one(
        scheduling=one(groups=lambda: dict(enumerate(groups))),
        config=one(
            model_worker=[one(shards=[shard])],
            rollout_worker=[one(agent_args=agent_args)] * 2,
            evaluator=[],
        ),
    )
    return one(cluster=one(venv=venv, name="lab"), phases=[phase], job=object() if slurm else None)


@pytest.mark.parametrize(
    ("venv", "images", "slurm", "backend", "packages"),
    [
        (None, (None,), False, "fsdp", ["torch", "transformers"]),
        ("/v", (None,), False, "fsdp", ["torch", "transformers"]),  # here it is not used
        (None, (None, "i"), True, "megatron", ["torch", "transformers", "megatron"]),
        (None, ("i", "i"), True, "fsdp", []),
        ("/v", (None,), True, "fsdp", []),
    ],
)
def test_packages_are_asked_of_the_python_that_the_workers_will_have(
    monkeypatch: pytest.MonkeyPatch, venv, images, slurm, backend, packages
) -> None:
    monkeypatch.setattr(extras, "find_spec", lambda name: None)
    plan = plan_of(venv=venv, images=images, slurm=slurm, backend=backend)
    found = packages_missing_here(plan)
    assert " ".join(e.what for e in found).count("torch") == packages.count("torch")
    assert [e for e in found if "megatron" in e.what] == found[1:]
    assert len(found) == (2 if "megatron" in packages else bool(packages))
    assert all(("venv" in e.fix) == slurm for e in found)


@pytest.mark.parametrize(("renderer", "is_missing"), [("template", False), ("qwen3", True)])
def test_a_run_needs_the_package_of_its_conversations_renderer(
    monkeypatch: pytest.MonkeyPatch, renderer: str, is_missing: bool
) -> None:
    here = {"torch", "transformers"}
    monkeypatch.setattr(extras, "find_spec", lambda name: object() if name in here else None)
    plan = plan_of(
        venv=None, images=(), slurm=False, backend="fsdp", agent_args={"renderer": renderer}
    )
    found = [(e.what.partition(" not ")[0], e.fix) for e in packages_missing_here(plan)]
    wanted = [("renderers and httpx are", "pip install 'realsys[renderers]'")]
    assert found == (wanted if is_missing else [])


@pytest.mark.parametrize(("module", "status"), [("torch", 4), ("no_such_thing", ExitCode.BUG)])
def test_a_verb_that_lacks_a_package_is_refused_with_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], module: str, status: int
) -> None:
    def main(**_: object) -> None:
        raise ModuleNotFoundError(f"No module named {module!r}", name=module)

    command = SimpleNamespace(main=main)
    monkeypatch.setattr(command_line.typer.main, "get_command", lambda app: command)
    assert command_line.run(["graph", "ppo-math"]) == status
    listed = capsys.readouterr().err
    assert ("pip install 'realsys[train]'" in listed) == (module == "torch")


def test_the_release_is_tried_on_every_python_that_is_declared() -> None:
    classifiers = project()["classifiers"]
    assert isinstance(classifiers, list)
    declared_pythons = re.findall(r"Python :: (3\.\d+)", "\n".join(classifiers))
    workflow = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())
    assert workflow["jobs"]["test"]["strategy"]["matrix"]["python"] == declared_pythons
    assert (ROOT / "release/try_wheel").stat().st_mode & 0o111


def test_pre_commit_runs_what_make_check_runs() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    (rule,) = re.findall(r"^check: install\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.M)
    checks = [line.strip().removeprefix("$(BIN)/") for line in rule.splitlines()]
    assert [hook["entry"] for hook in hooks] == [line.removesuffix(" .") for line in checks]
