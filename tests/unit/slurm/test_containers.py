from __future__ import annotations

import os
import subprocess
from pathlib import Path

import golden
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realsys.api.cluster import ContainerSpec
from realsys.api.errors import ConfigError
from realsys.slurm.containers import (
    FORWARDED,
    Mount,
    Wrapped,
    image_problems,
    image_warnings,
    missing_files,
    mount_problems,
    parse_mount,
    wrap,
)
from realsys.slurm.image_names import (
    apptainer_source,
    enroot_source,
    file_stem,
    is_mutable,
    parse_image,
)

COMMAND = ["python3", "-m", "realsys.worker.srun_task", "master"]
PYXIS = ContainerSpec(runtime="pyxis", mounts=("/models:/m:ro", "/data:/data"))
APPTAINER = ContainerSpec(runtime="apptainer", mounts=("/models:/m:ro", "/data:/data"))
FULL = {
    "workdir": "/w",
    "writable": True,
    "remap_root": True,
    "mount_home": True,
}


def test_without_an_image_or_a_runtime_the_command_stays() -> None:
    assert wrap(PYXIS, None, COMMAND, file_root="/f", gpu=True) == Wrapped((), tuple(COMMAND))
    none = ContainerSpec()
    assert wrap(none, "/x.sqsh", COMMAND, file_root="/f", gpu=True) == Wrapped((), tuple(COMMAND))


def test_pyxis_takes_options_of_srun() -> None:
    assert wrap(PYXIS, "/x.sqsh", COMMAND, file_root="/shared/realsys", gpu=True) == Wrapped(
        (
            "--container-image=/x.sqsh",
            "--container-mounts=/models:/m:ro,/data:/data,/shared/realsys:/shared/realsys",
            "--no-container-remap-root",
            "--no-container-mount-home",
            "--container-env=CUDA_VISIBLE_DEVICES,PYTHONPATH",
        ),
        tuple(COMMAND),
    )


def test_pyxis_with_everything() -> None:
    container = ContainerSpec(runtime="pyxis", name="kept", **FULL)  # type: ignore[arg-type]
    assert wrap(container, "a#b:1", COMMAND, file_root="/f", gpu=False).srun_options == (
        "--container-image=a#b:1",
        "--container-mounts=/f:/f",
        "--container-workdir=/w",
        "--container-name=kept",
        "--container-writable",
        "--container-remap-root",
        "--container-mount-home",
        "--container-env=CUDA_VISIBLE_DEVICES,PYTHONPATH",
    )


def test_apptainer_is_a_prefix_of_the_command() -> None:
    wrapped = wrap(APPTAINER, "/x.sif", COMMAND, file_root="/shared/realsys", gpu=True)
    assert wrapped.srun_options == ()
    assert wrapped.command[:2] == ("sh", "-c")
    assert wrapped.command[3:] == (
        "realsys-forward",
        "apptainer",
        "exec",
        "--cleanenv",
        "--no-mount=home,cwd",
        "--nv",
        "--bind=/models:/m:ro",
        "--bind=/data:/data",
        "--bind=/shared/realsys:/shared/realsys",
        "/x.sif",
        *COMMAND,
    )


def test_apptainer_with_everything_but_a_gpu() -> None:
    container = ContainerSpec(runtime="apptainer", **FULL)  # type: ignore[arg-type]
    assert wrap(container, "/x.sif", ["a"], file_root="/f", gpu=False).command[4:] == (
        "apptainer",
        "exec",
        "--cleanenv",
        "--no-mount=cwd",
        "--writable-tmpfs",
        "--fakeroot",
        "--bind=/f:/f",
        "--pwd=/w",
        "/x.sif",
        "a",
    )


@pytest.fixture(scope="session")
def fake_apptainer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prints its environment, and its arguments, NUL between them, as the real one would see them."""
    folder = tmp_path_factory.mktemp("bin")
    program = folder / "apptainer"
    program.write_text('#!/bin/sh\ncat /proc/$$/environ; printf "\\0\\0"; printf "%s\\0" "$@"\n')
    program.chmod(0o755)
    return folder


def run_wrapped(
    fake: Path, values: dict[str, str]
) -> tuple[dict[str, str], list[str], tuple[str, ...]]:
    """(environment that apptainer gets, its arguments, the whole argv)."""
    wrapped = wrap(APPTAINER, "/x.sif", COMMAND, file_root="/f", gpu=True)
    environment = {"PATH": f"{fake}:/usr/bin:/bin", **values}
    done = subprocess.run(
        wrapped.command, env=environment, capture_output=True, check=True, timeout=120
    )
    before, _, after = done.stdout.partition(b"\0\0\0")
    pairs = (os.fsdecode(entry).partition("=") for entry in before.split(b"\0") if entry)
    arguments = [os.fsdecode(a) for a in after.split(b"\0")[:-1]]
    return {n: v for n, _, v in pairs}, arguments, wrapped.command


def test_forwarded_variables_get_in_if_they_are_set(fake_apptainer: Path) -> None:
    values = {
        "SLURM_PROCID": "3",
        "CUDA_VISIBLE_DEVICES": "",
        "SECRET": "s3cret",
        "LD_PRELOAD_X": "1",
    }
    environment, arguments, _ = run_wrapped(fake_apptainer, values)
    inside = {n: v for n, v in environment.items() if n.startswith("APPTAINERENV_")}
    assert inside == {"APPTAINERENV_SLURM_PROCID": "3", "APPTAINERENV_CUDA_VISIBLE_DEVICES": ""}
    assert arguments[0] == "exec"
    assert arguments[-len(COMMAND) - 1 :] == ["/x.sif", *COMMAND]


VALUES = st.text(
    st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=40
)


@settings(max_examples=25, deadline=None)
@given(values=st.dictionaries(st.sampled_from(FORWARDED), VALUES, min_size=1))
def test_values_pass_unchanged_and_never_stand_on_a_command_line(
    fake_apptainer: Path, values: dict[str, str]
) -> None:
    environment, arguments, argv = run_wrapped(fake_apptainer, values)
    for name, value in values.items():
        assert environment[f"APPTAINERENV_{name}"] == value
    plain = run_wrapped(fake_apptainer, {})
    assert (arguments, argv) == (plain[1], plain[2])  # no value changes a word of it


@pytest.mark.parametrize(
    ("text", "mount"),
    [
        ("/a:/b", Mount("/a", "/b")),
        ("/a:/b:ro", Mount("/a", "/b", read_only=True)),
        ("/a:/b:rw", Mount("/a", "/b")),
        ("/a b:/c", Mount("/a b", "/c")),
    ],
)
def test_mounts(text: str, mount: Mount) -> None:
    assert parse_mount(text) == mount
    assert parse_mount(str(mount)) == mount


@pytest.mark.parametrize(
    "text", ["", "/a", "/a:", ":/a", "/a:b", "a:/b", "~/a:/b", "/a:ro", "/a:/b:rx", "/a:/b:ro:x",
             "/a,b:/c", "/a:/b,c", "/a\n:/b"]
)  # fmt: skip
def test_what_is_no_mount(text: str) -> None:
    with golden.raises(ConfigError) as caught:
        parse_mount(text)
    assert "src:dst:ro" in caught.value.fix


def test_a_lone_path_is_told_how_to_write_it() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_mount("/data")
    assert "/data:/data:ro" in caught.value.fix


@pytest.mark.parametrize("root", ["/a,b", "/a:b", "/a\nb"])
@pytest.mark.parametrize("container", [PYXIS, APPTAINER])
def test_a_file_root_that_no_runtime_can_mount(container: ContainerSpec, root: str) -> None:
    with golden.raises(ConfigError):
        wrap(container, "/x", COMMAND, file_root=root, gpu=False)


def test_mounts_that_clash() -> None:
    mounts = ("/a:/x", "/b:/x/", "/c:/f", "/d:/", "/e")
    problems = list(mount_problems(ContainerSpec(mounts=mounts), file_root="/f"))
    golden.check([p.what for p in problems])
    assert {p.where for p in problems} == {"container.mounts"}
    assert list(mount_problems(PYXIS, file_root="/f")) == []


@pytest.mark.parametrize(
    "image",
    [
        "/images/x.sqsh",
        "/images/x",
        "nvcr.io#nvidia/pytorch:24.05-py3",
        "docker://nvcr.io#nvidia/pytorch:24.05",
        "user@registry.site:5000#team/x:1",
        "ubuntu:22.04",
        "library/ubuntu",
        "nvidia/cuda@sha256:0123",
        "dockerd://built-on-the-node:1",
    ],
)
def test_images_that_pyxis_runs(image: str) -> None:
    assert list(image_problems(PYXIS, image, where="gpu_image")) == []


@pytest.mark.parametrize(
    ("image", "fix"),
    [
        ("nvcr.io/nvidia/pytorch:24.05", "write nvcr.io#nvidia/pytorch:24.05"),
        ("docker://ghcr.io/a/b", "write docker://ghcr.io#a/b"),
        ("localhost:5000/x:1", "write localhost:5000#x:1"),
        ("x.sqsh", "write its whole path, e.g. /shared/images/x.sqsh"),
        ("./x.sqsh", "write its whole path, e.g. /shared/images/x.sqsh"),
        ("~/x.sqsh", "write its whole path, e.g. /shared/images/x.sqsh"),
        (
            "/images/x.sif",
            "realsys image pull SOURCE makes one, or set container.runtime: apptainer",
        ),
        ("oras://a/b:1", "realsys image pull keeps it as a file"),
        ("", "give a file or a name in a registry"),
        ("a b", "give a file or a name in a registry"),
        ("--x", "give a file or a name in a registry"),
        ("nvcr.io#", "write REGISTRY#NAME:TAG"),
    ],
)
def test_images_that_pyxis_does_not_run(image: str, fix: str) -> None:
    (problem,) = image_problems(PYXIS, image, where="gpu_image")
    assert (problem.where, problem.fix) == ("gpu_image", fix)
    assert repr(image) in problem.what


@pytest.mark.parametrize(
    "image", ["/images/x.sif", "/images/x.sqsh", "/images/folder", "docker://a/b:1",
              "docker://nvcr.io/nvidia/pytorch:24.05", "oras://a/b:1", "library://a/b:1"]
)  # fmt: skip
def test_images_that_apptainer_runs(image: str) -> None:
    assert list(image_problems(APPTAINER, image, where="cpu_image")) == []


@pytest.mark.parametrize(
    ("image", "fix"),
    [
        ("nvcr.io#nvidia/pytorch:24.05", "write docker://nvcr.io/nvidia/pytorch:24.05"),
        ("nvcr.io/nvidia/pytorch:24.05", "write docker://nvcr.io/nvidia/pytorch:24.05"),
        ("ubuntu:22.04", "write docker://ubuntu:22.04"),
        ("x.sif", "write its whole path, e.g. /shared/images/x.sif"),
        ("dockerd://x:1", "realsys image pull keeps it as a file"),
    ],
)
def test_images_that_apptainer_does_not_run(image: str, fix: str) -> None:
    (problem,) = image_problems(APPTAINER, image, where="cpu_image")
    assert problem.fix == fix


def test_an_image_needs_a_runtime() -> None:
    (problem,) = image_problems(ContainerSpec(), "/x.sqsh", where="cpu_image")
    assert "no container runtime" in problem.what
    assert list(image_problems(ContainerSpec(), None, where="cpu_image")) == []
    assert list(image_problems(PYXIS, None, where="cpu_image")) == []


def test_an_image_file_that_is_not_there() -> None:
    (problem,) = missing_files(PYXIS, "/x.sqsh", where="cpu_image", exists=lambda path: False)
    golden.check(problem)
    asked: list[str] = []
    assert not list(missing_files(PYXIS, "/x", where="", exists=lambda p: not asked.append(p)))
    assert not list(missing_files(PYXIS, "a#b:1", where="", exists=lambda p: not asked.append(p)))
    assert asked == ["/x"]


@pytest.mark.parametrize(
    ("image", "mutable"),
    [
        ("ubuntu", True),
        ("ubuntu:latest", True),
        ("nvcr.io#nvidia/pytorch", True),
        ("docker://localhost:5000/x", True),
        ("ubuntu:22.04", False),
        ("ubuntu@sha256:0123", False),
        ("/images/latest", False),
    ],
)
def test_names_that_may_be_another_image_tomorrow(image: str, mutable: bool) -> None:
    assert is_mutable(image) is mutable
    (*warnings,) = image_warnings(PYXIS, image, where="gpu_image")
    assert len(warnings) == mutable


def test_a_kept_container_hides_a_changed_image() -> None:
    container = ContainerSpec(runtime="pyxis", name="kept")
    (warning,) = image_warnings(container, "/x.sqsh", where="gpu_image")
    golden.check(warning)


@pytest.mark.parametrize(
    ("text", "enroot", "apptainer", "stem"),
    [
        ("nvcr.io#nvidia/pytorch:24.05", "docker://nvcr.io#nvidia/pytorch:24.05",
         "docker://nvcr.io/nvidia/pytorch:24.05", "nvcr.io+nvidia+pytorch+24.05"),
        ("docker://nvcr.io/nvidia/pytorch:24.05", "docker://nvcr.io#nvidia/pytorch:24.05",
         "docker://nvcr.io/nvidia/pytorch:24.05", "nvcr.io+nvidia+pytorch+24.05"),
        ("ubuntu", "docker://ubuntu", "docker://ubuntu", "ubuntu"),
        ("me@host:5000#a/b@sha256:01", "docker://me@host:5000#a/b@sha256:01",
         "docker://host:5000/a/b@sha256:01", "host-5000+a+b+sha256-01"),
    ],
)  # fmt: skip
def test_either_spelling_names_the_same_image(
    text: str, enroot: str, apptainer: str, stem: str
) -> None:
    image = parse_image(text)
    assert (enroot_source(image), apptainer_source(image)) == (enroot, apptainer)
    assert file_stem(text) == stem
