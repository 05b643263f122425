"""Images made from `containers/`: what is built, by which commands, and what the definitions hold.

Nothing here makes an image: builders are stood in for. What was tried by hand: containers/README.md.
"""

from __future__ import annotations

import os
import re
import stat
import subprocess
from dataclasses import replace
from pathlib import Path

import golden
import pytest

from launcher.slurm.images.image_build import Recipe, build, build_argvs, recipe_of
from realsys.api.cluster import ClusterSpec, ContainerSpec
from realsys.api.errors import ClusterError, ConfigError
from realsys.trial.snapshot import code_root

KINDS = ("control", "sglang", "train", "vllm")
FOLDER = code_root() / "containers"
PIN = re.compile(r"[a-z0-9-]+==[0-9][^ ]* --hash=sha256:[0-9a-f]{64}")


def site(root: Path, runtime: str) -> ClusterSpec:
    return ClusterSpec(
        name="s", scheduler="slurm", file_root=str(root), container=ContainerSpec(runtime=runtime)
    )


@pytest.mark.parametrize("kind", KINDS)
def test_every_package_of_a_lock_is_pinned_by_version_and_hash(kind):
    first, *pins = (FOLDER / "locks" / f"{kind}.txt").read_text().splitlines()
    pins = [pin for pin in pins if not pin.startswith("--extra-index-url ")]
    assert first.startswith(f"# Image {kind}, Python 3.1")
    assert not [pin for pin in pins if not PIN.fullmatch(pin)]
    names = {pin.partition("==")[0] for pin in pins}
    assert len(names) == len(pins)
    assert {"torch", "transformers", "pyzmq", "etcd3", "typer"} <= names
    assert (kind in names) == (kind in ("sglang", "vllm"))
    assert any(name.startswith("nvidia-") for name in names) == (kind != "control")


def test_a_lock_holds_every_package_that_realsys_asks_for():
    import tomllib

    project = tomllib.loads((code_root() / "pyproject.toml").read_text())["project"]
    extras = [project["optional-dependencies"][part] for part in ("train", "megatron", "report")]
    needs = [n for part in (project["dependencies"], *extras) for n in part if "realsys[" not in n]
    wanted = {re.split(r"[<>=\[]", need)[0].lower() for need in needs}
    for kind in KINDS:
        lock = (FOLDER / "locks" / f"{kind}.txt").read_text()
        missing = sorted(name for name in wanted if f"\n{name}==" not in lock)
        assert not missing, f"{kind}.txt lacks {missing}: make it anew with containers/lock"


def test_definitions_copy_what_is_installed_and_pass_kind_and_python_on():
    docker = (FOLDER / "Dockerfile").read_text()
    apptainer = (FOLDER / "realsys.def").read_text()
    copied = [n for names in re.findall(r"^COPY (.+) \S+$", docker, re.M) for n in names.split()]
    assert {"pyproject.toml", "containers", "launcher", "realsys", "experiments"} <= set(copied)
    listed = re.findall(r"^    (\S+) /usr/src/realsys/\1$", apptainer, re.M)
    assert sorted(listed) == sorted(copied)
    assert all((code_root() / name).exists() for name in copied)
    base = "docker.io/library/python:{}-slim-bookworm"
    assert f"FROM {base.format('${PYTHON}')}" in docker
    assert f"From: {base.format('{{ PYTHON }}')}" in apptainer


def test_install_refuses_an_unknown_kind_before_it_changes_anything():
    done = subprocess.run(
        [FOLDER / "install", "trane"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2
    golden.check(done.stderr)
    assert "train.txt" in done.stderr


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


def test_the_name_changes_with_the_lock(tmp_path):
    for name in ("Dockerfile", "realsys.def", "install", "locks/train.txt"):
        path = tmp_path / "containers" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text((FOLDER / name).read_text())
    (tmp_path / "pyproject.toml").write_text("")
    before = recipe_of("train", tmp_path)
    assert before.python == "3.11"
    assert recipe_of("train", tmp_path) == before
    lock = tmp_path / "containers" / "locks" / "train.txt"
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
