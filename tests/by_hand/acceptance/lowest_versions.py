"""Do the lower bounds of pyproject.toml hold? The unit tier's rooms with the lowest versions. By hand.

    python tests/by_hand/acceptance/lowest_versions.py [FOLDER …]  writes results/lowest_versions.json; half
        an hour; of named folders (of tests/unit) it renews the outcome

An environment holds the lowest version of each direct requirement (as ``uv pip compile --resolution
lowest-direct`` chooses them), before the packages of this environment on the path: torch, the tools of the
tests and what stands in no requirement of ours stay as they are here. The folders' tests must pass there.
Needs a network. Run it when a bound changes, and before a release.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
sys.path[:0] = [str(ROOT / "tests" / "support")]

from by_hand import HandCheck  # noqa: E402

FOLDERS = (
    "backends",
    "config",
    "data",
    "generation",
    "launcher",
    "models",
    "name_resolve",
    "policy_server",
    "rollout",
    "transport",
)
EXTRAS = ("train", "megatron", "data", "gym", "renderers", "schemas")
# As it is here: it is too large to fetch again, and its lowest version has no build for these processors.
KEPT = ("torch",)
FOLDER_LIMIT_S = 3600
RESULT = HERE / "results" / "lowest_versions.json"
# Is the committed help page what the locked typer draws? Other ones draw other lines.
NOT_OF_BOUNDS = ("tests/unit/launcher/cli/test_cli.py::test_the_help_page_is_what_typer_draws",)


def main() -> int:
    """Returns 0 if all tests of the folders passed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="*", default=FOLDERS, help="of tests/unit")
    options = parser.parse_args()
    check = HandCheck(__file__)
    found: dict[str, dict[str, object]] = {}
    if options.folders != FOLDERS and RESULT.exists():
        found = json.loads(RESULT.read_text())["folders"]
    with tempfile.TemporaryDirectory(prefix="lowest-versions-") as scratch:
        lowered = lowest_versions(Path(scratch))
        python = make_environment(Path(scratch), lowered)
        for folder in options.folders:
            outcome, failed = run_tests(python, folder, Path(scratch))
            found[folder] = {"outcome": outcome, "failed": failed, "revision": check.revision}
            sys.stdout.write(f"{folder}: {outcome}\n")
            sys.stdout.flush()
    kept = {name: version(name) for name in KEPT}
    return check.write(
        "tests pass with the lowest versions that pyproject.toml allows",
        [str(problem) for one in found.values() for problem in one["failed"]],  # type: ignore[attr-defined]
        lowest=lowered,
        kept=kept,
        folders=found,
    )


def lowest_versions(scratch: Path) -> dict[str, str]:
    """Returns name → lowest version, for each requirement whose lowest version is not the one here."""
    tool = scratch / "uv"
    pip = [sys.executable, "-m", "pip", "install", "--quiet"]
    subprocess.run([*pip, "--target", str(tool), "uv"], check=True)
    held = scratch / "held.txt"
    held.write_text("".join(f"{name}=={version(name)}\n" for name in KEPT))
    compiled = subprocess.run(
        [str(tool / "bin" / "uv"), "pip", "compile", "--quiet", "--no-header", "--no-annotate"]
        + ["--resolution", "lowest-direct", "--override", str(held)]
        + ["--python-version", f"{sys.version_info[0]}.{sys.version_info[1]}"]
        + ["--find-links", os.environ.get("PIP_FIND_LINKS", "/nonexistent")]
        + [word for name in EXTRAS for word in ("--extra", name)]
        + ["pyproject.toml"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if compiled.returncode:
        raise SystemExit(f"no set of lowest versions: {compiled.stderr}")
    chosen = dict(re.findall(r"^([A-Za-z0-9._-]+)==([^\s+;]+)", compiled.stdout, re.M))
    direct = direct_requirements()
    # What a lowered package holds to one version (pydantic its core) comes with it.
    wanted = {name: at for name, at in chosen.items() if name in direct or name == "pydantic-core"}
    return {
        name: at for name, at in sorted(wanted.items()) if name not in KEPT and at != here(name)
    }


def direct_requirements() -> set[str]:
    """Returns the names, as an index spells them, of what pyproject.toml asks for at run time."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needs = [*project["dependencies"]]
    for extra, listed in project["optional-dependencies"].items():
        needs += listed if extra not in ("dev", "unit", "check") else []
    return {re.split(r"[<>=\[ ]", need)[0].lower() for need in needs} - {"realsys"}


def here(name: str) -> str | None:
    """Returns the version of a package in this environment."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def make_environment(scratch: Path, lowered: dict[str, str]) -> Path:
    """Makes an environment with ``lowered`` before all that this one has; returns its Python."""
    environment = scratch / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    python = environment / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps"]
    subprocess.run([*pip, *(f"{name}=={at}" for name, at in lowered.items())], check=True)
    shared = [path for path in sys.path if path.endswith("site-packages")]
    assert shared, sysconfig.get_paths()
    (packages,) = environment.glob("lib/python*/site-packages")
    (packages / "shared.pth").write_text("\n".join([str(ROOT), *shared]) + "\n")
    return python


def run_tests(python: Path, folder: str, scratch: Path) -> tuple[str, list[str]]:
    """Runs a folder of the unit tier; returns pytest's last line and what failed."""
    root = scratch / "root"
    root.mkdir(exist_ok=True)
    done = subprocess.run(
        [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", f"tests/unit/{folder}"]
        + ["-W", "ignore::DeprecationWarning"]  # of old packages at newer ones of others
        + [f"--deselect={name}" for name in NOT_OF_BOUNDS],
        cwd=ROOT,
        env={**os.environ, "REALSYS_FILE_ROOT": str(root), "PATH": path_with(python)},
        capture_output=True,
        text=True,
        timeout=FOLDER_LIMIT_S,
        check=False,
    )
    failed = re.findall(r"^((?:FAILED|ERROR) .*)$", done.stdout, re.M)
    last = next((x for x in reversed(done.stdout.splitlines()) if " in " in x), "nothing ran")
    if done.returncode and not failed:
        failed = [f"{folder}: pytest ended with {done.returncode}: {done.stdout[-2000:]}"]
    return last.strip("= "), failed


def path_with(python: Path) -> str:
    """Returns PATH with the environment's programs first."""
    return f"{python.parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"


if __name__ == "__main__":
    sys.exit(main())
