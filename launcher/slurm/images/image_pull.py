"""Fetches a container image from a registry into one file for all nodes, for `realsys image pull`.

A thousand tasks that each fetch an image hit the registry's rate limit, and each node unpacks it again.
The file is written beside its destination and linked into place atomically: an interrupted pull leaves no
image, and two concurrent pulls leave one.
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
from realsys.trial.temporary_names import temporary_beside

PROGRAMS = {"pyxis": "enroot", "apptainer": "apptainer"}
NOT_PULLED = (
    "check the image's name; for private registries ~/.config/enroot/.credentials, or "
    "`apptainer registry login`"
)
ENDINGS = {"pyxis": ".sqsh", "apptainer": ".sif"}


@dataclass(frozen=True, kw_only=True)
class ImageFile:
    """An image stored as a file."""

    path: Path
    already: bool  # the file existed; nothing was fetched


def image_file(spec: ClusterSpec, source: str) -> Path:
    """Returns where the image ``source`` is stored.

    Raises:
        ConfigError: the site has no container runtime, or ``source`` is not a registry's image name.
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
            f"{source!r} is not the name of an image in a registry",
            where="command line",
            fix="give e.g. nvcr.io#nvidia/pytorch:25.05-py3; a file can be named in the cluster spec",
        )
    ending = ENDINGS[spec.container.runtime]
    return Path(spec.file_root, "images", file_stem(source) + ending)


def pull(spec: ClusterSpec, source: str, *, timeout_s: float) -> ImageFile:
    """Fetches and converts the image unless its file exists. The program's output goes to stderr.

    Raises:
        ConfigError: see image_file.
        ClusterError: it failed, the runtime is not on this host, or another user could replace the image.
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

    return ensure_image_file(spec, target, commands, timeout_s=timeout_s, if_failed=NOT_PULLED)


def ensure_image_file(
    spec: ClusterSpec,
    target: Path,
    commands: Callable[[Path], Sequence[Sequence[str]]],
    *,
    timeout_s: float,
    if_failed: str,
    cwd: Path | None = None,
) -> ImageFile:
    """Creates ``target`` with the commands that write a given file, unless it exists.

    Args:
        timeout_s: of each command.
        if_failed: what to do if one exits with an error.
    Raises:
        ClusterError: a command failed, or another user could replace the image.
    """
    # Whoever can write there controls what runs in the image.
    check_folders(target.parent, root=Path(spec.file_root))
    if target.exists():
        return ImageFile(path=target, already=True)
    with _beside(target) as part:
        for argv in commands(part):
            _run(argv, timeout_s, cwd, if_failed)
        try:
            os.link(part, target)  # fails if a concurrent pull finished first; its file is as good
        except FileExistsError:
            return ImageFile(path=target, already=True)
    return ImageFile(path=target, already=False)


def pull_argv(runtime: str, image: Image, target: Path) -> list[str]:
    """Builds the command that writes ``image`` to ``target``, which must not exist yet (pure)."""
    if runtime == "pyxis":
        return ["enroot", "import", "--output", str(target), enroot_source(image)]
    return ["apptainer", "pull", str(target), apptainer_source(image)]


@contextmanager
def _beside(target: Path) -> Iterator[Path]:
    """Provides a temporary path in the folder of ``target``, unique to this process; removed afterwards."""
    unique = temporary_beside(target)
    part = unique.with_name(unique.name + target.suffix)  # by which some programs know its format
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


def _run(argv: Sequence[str], timeout_s: float, cwd: Path | None, if_failed: str) -> None:
    try:
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, stdout=2, timeout=timeout_s, check=False, cwd=cwd
        )
    except subprocess.TimeoutExpired as error:
        raise ClusterError(
            f"{argv[0]} did not finish within {timeout_s:g} s",
            where=" ".join(argv),
            fix="allow more time: --timeout",
        ) from error
    if done.returncode != 0:
        raise ClusterError(
            f"{argv[0]} failed with exit status {done.returncode}; its output is above",
            where=" ".join(argv),
            fix=if_failed,
        )
