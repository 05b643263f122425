"""Turns a container image from a registry into one file that all nodes use: `realsys image pull`.

A thousand tasks that each fetch an image meet the registry's rate limit, and each node unpacks it anew.
The file is written beside its place and put there in one step, so a pull that was cut off leaves no
image, and two pulls at a time one.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from realsys.api.cluster import ClusterSpec
from realsys.api.errors import ClusterError, ConfigError
from realsys.slurm.image_names import Image, apptainer_source, enroot_source, file_stem, parse_image
from realsys.trial.folders import check_folders

PROGRAMS = {"pyxis": "enroot", "apptainer": "apptainer"}
ENDINGS = {"pyxis": ".sqsh", "apptainer": ".sif"}


@dataclass(frozen=True, kw_only=True)
class Pulled:
    """An image as a file."""

    path: Path
    already: bool  # it was there; nothing was fetched


def image_file(spec: ClusterSpec, source: str) -> Path:
    """Where the image ``source`` is kept.

    Raises:
        ConfigError: the site runs no images, or ``source`` is no name in a registry.
    """
    if spec.container.runtime == "none":
        raise ConfigError(
            f"cluster {spec.name!r} has no container runtime",
            where="container.runtime in the cluster spec",
            fix="set it to pyxis or apptainer",
        )
    image = parse_image(source)
    if image.path or not image.name or any(c.isspace() for c in source):
        raise ConfigError(
            f"{source!r} is no image in a registry",
            where="command line",
            fix="give e.g. nvcr.io#nvidia/pytorch:25.05-py3; a file can be named in the spec as it is",
        )
    ending = ENDINGS[spec.container.runtime]
    return Path(spec.file_root, "images", file_stem(source) + ending)


def pull(spec: ClusterSpec, source: str, *, timeout_s: float) -> Pulled:
    """Fetches and converts the image unless it is there. The program's own words go to stderr.

    Raises:
        ConfigError: see image_file. ClusterError: it failed, the runtime is not on this host, or another
            user could exchange the image.
    """
    target, image = image_file(spec, source), parse_image(source)
    program = PROGRAMS[spec.container.runtime]

    def commands(part: Path) -> list[list[str]]:
        if shutil.which(program) is None:
            raise ClusterError(
                f"the program {program} is not on PATH here",
                where="PATH",
                fix=f"load its module, or pull on a compute node: srun realsys image pull {source!r}",
            )
        return [pull_argv(spec.container.runtime, image, part)]

    return made_file(spec, target, commands, timeout_s=timeout_s)


def made_file(
    spec: ClusterSpec,
    target: Path,
    commands: Callable[[Path], Sequence[Sequence[str]]],
    *,
    timeout_s: float,
    cwd: Path | None = None,
) -> Pulled:
    """``target``, by the commands that make the file they are asked for, unless it is there.

    Args:
        timeout_s: of each command.
    Raises:
        ClusterError: one failed, or another user could exchange the image.
    """
    check_folders(
        target.parent, root=Path(spec.file_root)
    )  # what runs in it is of who writes there
    if target.exists():
        return Pulled(path=target, already=True)
    with _beside(target) as part:
        for argv in commands(part):
            _run(argv, timeout_s, cwd)
        try:
            os.link(part, target)  # fails where somebody else was quicker: theirs is as good
        except FileExistsError:
            return Pulled(path=target, already=True)
    return Pulled(path=target, already=False)


def pull_argv(runtime: str, image: Image, target: Path) -> list[str]:
    """The command that writes ``image`` to ``target``, which is not there yet (pure)."""
    if runtime == "pyxis":
        return ["enroot", "import", "--output", str(target), enroot_source(image)]
    return ["apptainer", "pull", str(target), apptainer_source(image)]


@contextmanager
def _beside(target: Path) -> Iterator[Path]:
    """A path in the folder of ``target`` that is nobody else's, gone afterwards."""
    part = target.with_name(f".{os.uname().nodename}-{os.getpid()}.{target.name}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        yield part
    except OSError as error:
        raise ClusterError(
            f"the image can't be written: {error.strerror}",
            where=str(target.parent),
            fix="check permission and space in the file root",
        ) from error
    finally:
        with suppress(OSError):
            part.unlink()


def _run(argv: Sequence[str], timeout_s: float, cwd: Path | None) -> None:
    try:
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, stdout=2, timeout=timeout_s, check=False, cwd=cwd
        )
    except subprocess.TimeoutExpired as error:
        raise ClusterError(
            f"{argv[0]} was not done after {timeout_s:g} s",
            where=" ".join(argv),
            fix="give it longer: --timeout",
        ) from error
    if done.returncode != 0:
        raise ClusterError(
            f"{argv[0]} failed with exit status {done.returncode}; its words are above",
            where=" ".join(argv),
            fix="check the image's name; for private registries ~/.config/enroot/.credentials, or "
            "`apptainer registry login`",
        )
