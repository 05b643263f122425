"""What pyproject.toml declares is what the code imports, part by part; files made from it hold it."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType, SimpleNamespace

import pytest
import yaml
from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

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
NOT_IMPORTED = {"etcd3", "httpx"}  # its messages are read as files; renderers imports it
DEVELOPMENT = {"dev", "unit", "check"}
ENGINES = ("sglang", "vllm")
LOCKS = ("realsys", *ENGINES)
# A lock's line: package and version, for which Pythons if not all, its files' hashes, who needs it.
LOCKED = re.compile(
    r"(?P<name>[a-z0-9-]+)==(?P<version>[0-9][a-z0-9.+]*)"
    r"( ; (?P<marker>python_full_version [<>=]+ '[0-9.]+'[^#@:/]*))?"
    r"(?P<hashes>( --hash=sha256:[0-9a-f]{64})+) # (?P<parts>[a-z]+( [a-z]+)*)"
)


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


@pytest.mark.thorough
def test_what_is_imported_is_declared_and_what_is_declared_is_imported() -> None:
    parts = declared()
    runtime = set().union(*(names for part, names in parts.items() if part not in DEVELOPMENT))
    assert {DISTRIBUTIONS.get(name, name) for name in others()} == runtime - NOT_IMPORTED


def test_the_table_of_extras_agrees_with_pyproject() -> None:
    parts = declared()
    listed: dict[str, set[str]] = {}
    for name, extra in EXTRA_OF.items():
        listed.setdefault(extra, set()).add(DISTRIBUTIONS.get(name, name))
    named = {part: names for part, names in parts.items() if part and part not in DEVELOPMENT}
    assert listed == {part: names for part, names in named.items() if part != "all"}
    whole = project()["optional-dependencies"]
    assert isinstance(whole, dict)
    assert whole["all"] == [f"realsys[{','.join(listed)}]"]


def locked(lock: str) -> list[re.Match[str]]:
    """The packages of a lock, whose every line must be one."""
    first, *lines = (ROOT / "locks" / f"{lock}.txt").read_text().splitlines()
    found = [LOCKED.fullmatch(line) for line in lines]
    assert first.startswith("# Python ")
    assert [line for line, one in zip(lines, found, strict=True) if one is None] == []
    return [one for one in found if one is not None]


def parts_of(one: re.Match[str]) -> set[str]:
    return set(one["parts"].split())


@pytest.mark.parametrize("lock", LOCKS)
def test_a_lock_has_versions_and_hashes_and_names_no_place(lock: str) -> None:
    names = [(one["name"], one["marker"], "cpu" in parts_of(one)) for one in locked(lock)]
    assert len(names) > 150
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("lock", LOCKS)
@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13"])
def test_a_lock_holds_what_every_part_asks_for(lock: str, python: str) -> None:
    if lock in ENGINES and python != "3.12":
        return  # an engine has one Python
    environment = {"python_full_version": f"{python}.0"}
    here = [
        one
        for one in locked(lock)
        if one["marker"] is None or Marker(one["marker"]).evaluate(environment)
    ]
    found = project()
    extras = found["optional-dependencies"]
    assert isinstance(extras, dict)
    for part, needs in {"base": found["dependencies"], **extras}.items():
        if lock in ENGINES and part in DEVELOPMENT:
            continue
        assert isinstance(needs, list)
        holding = {"base", part, "gpu"}
        versions = {one["name"]: one["version"] for one in here if parts_of(one) & holding}
        for need in map(Requirement, needs):
            if need.name != "realsys":
                version = versions[canonicalize_name(need.name)]
                assert need.specifier.contains(version, prereleases=True), (need, version, part)


def test_torch_is_held_where_it_is_installed() -> None:
    builds = {one["parts"]: one["version"] for one in locked("realsys") if one["name"] == "torch"}
    assert builds == {"gpu": "2.13.0", "cpu": "2.13.0+cpu"}
    assert "$(PIP_INSTALL) torch==2.13.0\n" in (ROOT / "Makefile").read_text()


def selected(*parts: str) -> set[str]:
    """Names of the packages that `locks/select` prints."""
    listed = subprocess.check_output([ROOT / "locks" / "select", "realsys", *parts], text=True)
    return {line.partition("==")[0] for line in listed.splitlines()}


def test_parts_of_the_lock_are_what_they_are_installed_for() -> None:
    """No part brings torch or its CUDA: that is the machine's, or an image's."""
    base, check, unit, everything = (
        selected(*words) for words in ((), ("check",), ("unit",), ("dev",))
    )
    assert {"pyzmq", "etcd3", "typer"} <= base
    assert base < check < everything
    assert base < unit < everything
    assert {"mypy", "ruff"} <= check - unit
    assert {"pytest", "mcp", "openai", "transformers"} <= unit - check
    assert "openai-agents" in everything - unit - check
    assert not [name for name in everything if name.startswith(("torch", "nvidia-", "triton"))]
    done = subprocess.run(
        [ROOT / "locks" / "select", "realsys", "trian"], capture_output=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, b"")


def test_notices_list_the_lock() -> None:
    text = (ROOT / "THIRD_PARTY_NOTICES.md").read_text()
    rows = re.findall(r"^\| ([a-z0-9-]+) \| ([0-9]\S*) \|", text, re.M)
    assert rows == [(x["name"], x["version"]) for x in locked("realsys") if x["parts"] != "cpu"], (
        "make it anew: release/notices"
    )


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
    env: str = "",
):
    """As much of a LaunchPlan as is looked at."""
    one = SimpleNamespace
    groups = [one(scheduling=one(container_image=image)) for image in images]
    shard = one(backend=one(type_=backend))
    phase = one(
        scheduling=one(groups=lambda: dict(enumerate(groups))),
        config=one(
            model_worker=[one(shards=[shard])],
            rollout_worker=[one(agent_args=agent_args, env=env)] * 2,
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


@pytest.mark.parametrize(("env", "is_missing"), [("scored", False), ("mcp", True)])
def test_a_run_needs_the_package_of_its_environment(
    monkeypatch: pytest.MonkeyPatch, env: str, is_missing: bool
) -> None:
    here = {"torch", "transformers", "httpx2", "anyio"}
    monkeypatch.setattr(extras, "find_spec", lambda name: object() if name in here else None)
    plan = plan_of(venv=None, images=(), slurm=False, backend="fsdp", env=env)
    found = [e.fix for e in packages_missing_here(plan)]
    assert found == (["pip install 'realsys[mcp]'"] if is_missing else [])


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


def workflow(name: str) -> dict[str, object]:
    found: dict[str, object] = yaml.safe_load((ROOT / f".github/workflows/{name}.yml").read_text())
    return found


def steps_of(name: str, job: str) -> list[str]:
    """The commands of a job."""
    jobs = workflow(name)["jobs"]
    assert isinstance(jobs, dict)
    return [step["run"] for step in jobs[job]["steps"] if "run" in step]


@pytest.mark.parametrize(("name", "job"), [("release", "test"), ("tests", "unit")])
def test_workflows_try_every_python_that_is_declared(name: str, job: str) -> None:
    classifiers = project()["classifiers"]
    assert isinstance(classifiers, list)
    declared_pythons = re.findall(r"Python :: (3\.\d+)", "\n".join(classifiers))
    jobs = workflow(name)["jobs"]
    assert isinstance(jobs, dict)
    assert jobs[job]["strategy"]["matrix"]["python"] == declared_pythons


def test_workflows_run_what_the_makefile_has() -> None:
    assert steps_of("tests", "check") == ["make check EXTRAS=check"]
    assert steps_of("tests", "unit") == ["make test-unit EXTRAS=unit"]
    assert "release/lock --sbom dist/realsys-sbom.cdx.json" in steps_of("release", "build")[-1]
    assert (
        "realsys-sbom.cdx.json" in steps_of("release", "publish")[0]
    )  # no archive: not for an index
    assert all(
        (ROOT / f"release/{x}").stat().st_mode & 0o111 for x in ("build", "lock", "try_wheel")
    )


@pytest.mark.parametrize("name", ["release", "tests"])
def test_workflows_name_actions_by_commit_and_may_write_only_where_said(name: str) -> None:
    text = (ROOT / f".github/workflows/{name}.yml").read_text()
    used = re.findall(r"uses: (.*)", text)
    assert used
    assert not [
        x for x in used if not re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v\d+(\.\d+)*", x)
    ]
    assert workflow(name)["permissions"] == {"contents": "read"}


def test_pre_commit_runs_what_make_check_runs() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    (rule,) = re.findall(r"^check: install\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.M)
    checks = [line.strip().removeprefix("$(BIN)/") for line in rule.splitlines()]
    assert [hook["entry"] for hook in hooks] == [line.removesuffix(" .") for line in checks]
