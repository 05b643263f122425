"""Images made from `containers/`: what is built, by which commands, and what the definitions hold.

Nothing here makes an image: builders are stood in for. What was tried by hand: containers/README.md.
"""

from __future__ import annotations

import os
import re
import stat
import subprocess
import tomllib
from dataclasses import replace
from pathlib import Path

import golden
import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from launcher.slurm.images.image_build import (
    INDEX_VARIABLE,
    KINDS,
    Recipe,
    build,
    build_argvs,
    recipe_of,
)
from realsys.api.cluster import ClusterSpec, ContainerSpec
from realsys.api.errors import ClusterError, ConfigError
from realsys.trial.snapshot import code_root

FOLDER = code_root() / "containers"
INSTALL = (FOLDER / "install").read_text()


def site(root: Path, runtime: str) -> ClusterSpec:
    return ClusterSpec(
        name="s", scheduler="slurm", file_root=str(root), container=ContainerSpec(runtime=runtime)
    )


def packages_of(kind: str) -> dict[str, str]:
    """Name → version of what `containers/install` installs into an image."""
    (words,) = re.findall(rf"^.*\b{kind}\b.*\) locked=\((.+)\) ;;$", INSTALL, re.M)
    argv = [word.strip('"').replace("$kind", kind) for word in words.split()]
    listed = subprocess.check_output([code_root() / "locks" / "select", *argv], text=True)
    return dict(re.findall(r"^([a-z0-9-]+)==(\S+) ", listed, re.M))


@pytest.mark.parametrize("kind", KINDS)
def test_an_image_holds_every_package_of_every_runtime_extra(kind):
    project = tomllib.loads((code_root() / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    runtime = [needs for part, needs in extras.items() if part not in ("dev", "unit", "check")]
    needs = [need for part in (project["dependencies"], *runtime) for need in part]
    wanted = {re.split(r"[<>=\[]", need)[0].lower() for need in needs} - {"realsys"}
    packages = packages_of(kind)
    assert {"torch", "pyarrow", "reasoning-gym", "llguidance", "renderers", "httpx"} <= wanted
    assert wanted <= set(packages)
    assert (kind in packages) == (kind in ("sglang", "vllm"))
    assert any(name.startswith("nvidia-") for name in packages) == (kind != "control")
    assert packages["torch"].endswith("+cpu") == (kind == "control")
    assert "pytest" not in packages or kind == "sglang"  # that engine asks for it


@pytest.mark.parametrize("kind", KINDS)
def test_an_images_python_is_one_of_its_lock(kind):
    lock, python = KINDS[kind]
    first = (code_root() / "locks" / f"{lock}.txt").read_text().partition("\n")[0]
    assert Version(python) in SpecifierSet(first.removeprefix("# Python ").partition(", Linux")[0])


def test_definitions_copy_what_is_installed_and_pass_kind_and_python_on():
    docker = (FOLDER / "Dockerfile").read_text()
    apptainer = (FOLDER / "realsys.def").read_text()
    copied = [n for names in re.findall(r"^COPY (.+) \S+$", docker, re.M) for n in names.split()]
    assert {"pyproject.toml", "containers", "locks", "launcher", "realsys"} <= set(copied)
    listed = re.findall(r"^    (\S+) /usr/src/realsys/\1$", apptainer, re.M)
    assert sorted(listed) == sorted(copied)
    assert all((code_root() / name).exists() for name in copied)
    base = "docker.io/library/python:{}-slim-bookworm"
    assert f"FROM {base.format('${PYTHON}')}" in docker
    assert f"From: {base.format('{{ PYTHON }}')}" in apptainer
    for name in ("KIND", "PYTHON", INDEX_VARIABLE):
        assert re.search(rf"^ARG {name}\b", docker, re.M)
        assert f"{{{{ {name} }}}}" in apptainer


def test_install_refuses_an_unknown_kind_before_it_changes_anything():
    done = subprocess.run(
        [FOLDER / "install", "trane"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2
    assert "'trane'" in done.stderr
    assert set(KINDS) <= set(re.findall(r"\w+", done.stderr))


def test_commands_of_both_runtimes():
    recipe = Recipe(kind="vllm", root=Path("/src"), python="3.12", digest="abc")
    values = ["--build-arg", "KIND=vllm", "--build-arg", "PYTHON=3.12"]
    target = Path("/i/x")
    assert build_argvs("apptainer", recipe, target, builder="apptainer") == [
        ["apptainer", "build", *values, "/i/x", "containers/realsys.def"]
    ]
    assert build_argvs("pyxis", recipe, target, builder="podman") == [
        [
            *("podman", "build", *values, "--tag", "realsys-vllm:abc"),
            *("--file", "containers/Dockerfile", "."),
        ],
        ["enroot", "import", "--output", "/i/x", "podman://realsys-vllm:abc"],
    ]


@pytest.mark.parametrize(
    ("address", "passed_on"), [("", ""), ("file:///i", "file:///i"), ("http://me:key@i", "")]
)
def test_a_further_index_is_passed_on_without_a_password(monkeypatch, address, passed_on):
    monkeypatch.setenv(INDEX_VARIABLE, address)
    recipe = recipe_of("control")
    assert recipe.index == passed_on
    (argv,) = build_argvs("apptainer", recipe, Path("/i/x"), builder="apptainer")
    given = [word for word in argv if word.startswith(INDEX_VARIABLE)]
    assert given == ([f"{INDEX_VARIABLE}={passed_on}"] if passed_on else [])


def test_the_name_changes_with_the_lock(tmp_path):
    definition = [f"containers/{name}" for name in ("Dockerfile", "realsys.def", "install")]
    for name in (*definition, "locks/realsys.txt", "locks/select", "pyproject.toml"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text((code_root() / name).read_text())
    before = recipe_of("train", tmp_path)
    assert before.python == "3.11"
    assert recipe_of("train", tmp_path) == before
    lock = tmp_path / "locks" / "realsys.txt"
    lock.write_text(lock.read_text().replace("==", "==9", 1))
    assert recipe_of("train", tmp_path).name != before.name


def test_mistakes_are_told(tmp_path, monkeypatch):
    with golden.raises(ConfigError) as error:
        recipe_of("trian")
    assert "train" in error.value.fix
    with golden.raises(ConfigError):
        recipe_of("train", tmp_path)
    with golden.raises(ConfigError):
        build(site(tmp_path, "none"), recipe_of("train"), timeout_s=60)
    monkeypatch.setenv("PATH", str(tmp_path))
    recipe = recipe_of("train")
    for runtime, ending in (("apptainer", "sif"), ("pyxis", "sqsh")):
        with golden.raises(ClusterError) as refused:
            build(site(tmp_path, runtime), recipe, timeout_s=60)
        golden.check(refused.value)
        assert refused.value.fix.endswith(f"{tmp_path}/images/{recipe.name}.{ending}")


def test_only_what_is_missing_is_told_and_the_builder_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "docker").write_text("#!/bin/sh\n")
    (tmp_path / "docker").chmod(0o755)
    with golden.raises(ClusterError) as refused:
        build(site(tmp_path, "pyxis"), recipe_of("train"), timeout_s=60)
    assert "docker build" in refused.value.fix
    assert "enroot import" in refused.value.fix


def test_an_image_is_made_once_and_a_failed_one_leaves_nothing(tmp_path, monkeypatch):
    programs = tmp_path / "bin"
    programs.mkdir()
    fake = programs / "apptainer"
    log = tmp_path / "log"
    fake.write_text(f'#!/bin/sh\necho "$PWD $*" >> {log}\nshift 5\necho image > "$1"\nexit $FAIL\n')
    fake.chmod(fake.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.delenv(INDEX_VARIABLE, raising=False)
    spec, recipe = site(tmp_path / "root", "apptainer"), recipe_of("train")
    (tmp_path / "root").mkdir()
    monkeypatch.setenv("FAIL", "3")
    with golden.raises(ClusterError) as refused:
        build(spec, recipe, timeout_s=100)
    assert "apptainer buildcfg" in refused.value.fix
    assert "registry login" not in refused.value.fix  # nothing was pulled by name
    assert not list((tmp_path / "root").rglob("*.sif"))
    monkeypatch.setenv("FAIL", "0")
    made = build(spec, recipe, timeout_s=100)
    assert made == replace(build(spec, recipe, timeout_s=100), already=False)
    assert made.path.name == recipe.name + ".sif"
    assert made.path.read_text() == "image\n"
    assert len(log.read_text().splitlines()) == 2
    assert log.read_text().startswith(f"{code_root()} build --build-arg KIND=train ")
