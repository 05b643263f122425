"""Runs a task in its container: srun options for pyxis, a command prefix for apptainer (pure).

Both have the same effect. ``file_root`` is mounted under its own path, every mount where requested, and
home and root only if the site says so, whatever the runtime's default. The variables in FORWARDED come
from the host, the rest of the environment from the image and from the trial's 0600 file, which the task
reads itself: no value ever appears on a command line. Options go on srun and never into the batch script,
which would itself run in the image and find no srun there.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from realsys.api.cluster import ContainerSpec
from realsys.api.errors import ConfigError
from realsys.slurm.image_names import is_mutable, parse_image, spelled_for

# What a task must know of Slurm and of its GPUs, and where the code of its trial is. A job's whole
# environment is not let in: paths, compilers and Python settings of the host break what the image has.
_WRITABLE = {None: [], True: ["--container-writable"], False: ["--container-readonly"]}
FORWARDED = tuple(
    "SLURM_PROCID SLURM_LOCALID SLURM_NODEID SLURM_NTASKS SLURM_NNODES SLURM_STEP_ID SLURM_STEP_NODELIST "
    "SLURM_STEP_NUM_TASKS SLURM_STEP_GPUS SLURM_GPUS_ON_NODE SLURM_CPUS_PER_TASK SLURMD_NODENAME "
    "SLURM_JOB_ID SLURM_JOB_NAME SLURM_JOB_NODELIST SLURM_JOB_NUM_NODES SLURM_JOB_PARTITION "
    "SLURM_JOB_START_TIME SLURM_JOB_END_TIME SLURM_RESTART_COUNT SLURM_CLUSTER_NAME SLURM_HET_SIZE "
    "SLURM_ARRAY_JOB_ID SLURM_ARRAY_TASK_ID CUDA_VISIBLE_DEVICES NVIDIA_VISIBLE_DEVICES "
    "ROCR_VISIBLE_DEVICES HIP_VISIBLE_DEVICES GPU_DEVICE_ORDINAL ZE_AFFINITY_MASK PYTHONPATH".split()
)
# pyxis lets the host's environment in where the image says nothing. What an image may well set, and
# must not decide: which GPUs are ours, and which code runs.
_HOST_WINS = ("CUDA_VISIBLE_DEVICES", "PYTHONPATH")
# `apptainer exec --cleanenv` takes APPTAINERENV_X as X. A variable that is not set stays so.
_FORWARD = (
    f"for name in {' '.join(FORWARDED)}; do "
    'if eval "[ \\"\\${$name+set}\\" ]"; then eval "export APPTAINERENV_$name=\\"\\$$name\\""; fi; '
    'done; exec "$@"'
)


@dataclass(frozen=True)
class Wrapped:
    """What a container adds to an srun: options of srun, and the command with its prefix."""

    srun_options: tuple[str, ...]
    command: tuple[str, ...]


@dataclass(frozen=True)
class Mount:
    """A folder of the node and its path inside the container."""

    source: str
    target: str
    read_only: bool = False

    def __str__(self) -> str:
        return f"{self.source}:{self.target}" + (":ro" if self.read_only else "")


def wrap(
    container: ContainerSpec,
    image: str | None,
    command: Sequence[str],
    *,
    file_root: str,
    gpu: bool,
) -> Wrapped:
    """Returns ``command`` as it runs in ``image``; unchanged without an image or a runtime.

    Args:
        gpu: the task uses GPUs of the node; apptainer needs an option for them.
    Raises:
        ConfigError: a mount, or the file root, that no runtime can express.
    """
    if image is None or container.runtime == "none":
        return Wrapped((), tuple(command))
    mounts = all_mounts(container, file_root)
    if container.runtime == "pyxis":
        return Wrapped(_pyxis_options(container, image, mounts), tuple(command))
    prefix = _apptainer_prefix(container, mounts, gpu=gpu)
    return Wrapped((), (*prefix, image, *command))


def all_mounts(container: ContainerSpec, file_root: str) -> tuple[Mount, ...]:
    """Returns the site's mounts, and last the file root: a mount above it must not hide it."""
    if not _mountable(file_root):
        raise _unmountable_root(file_root)
    return (*map(parse_mount, container.mounts), Mount(file_root, file_root))


def parse_mount(text: str) -> Mount:
    """Parses ``src:dst[:ro]``. Raises ConfigError."""
    source, *rest = text.split(":")
    target, flags = (rest[0] if rest else ""), rest[1:]
    if not all(map(_mountable, (source, target))) or flags not in ([], ["ro"], ["rw"]):
        hint = source if _mountable(source) else "/data"
        raise ConfigError(
            f"{text!r} is no mount",
            where="container.mounts",
            fix=f"write src:dst or src:dst:ro with absolute paths, e.g. {hint}:{hint}:ro; a path "
            "with a comma, a colon or a line break can't be given: make a link to it",
        )
    return Mount(source, target, read_only=flags == ["ro"])


def mount_problems(container: ContainerSpec, *, file_root: str) -> Iterator[ConfigError]:
    """Yields mounts that can't be parsed, that clash, or that replace the file root."""
    seen: dict[str, str] = {}
    for text in container.mounts:
        try:
            mount = parse_mount(text)
        except ConfigError as problem:
            yield problem
            continue
        target = mount.target.rstrip("/") or "/"
        if target in ("/", file_root.rstrip("/")):
            yield ConfigError(
                f"{text!r} puts something else in the place of {target}",
                where="container.mounts",
                fix="remove it; the file root is mounted by itself, writable, under its own path",
            )
        elif target in seen:
            yield ConfigError(
                f"{seen[target]!r} and {text!r} have the same place inside",
                where="container.mounts",
                fix="remove one of them",
            )
        seen.setdefault(target, text)
    if container.runtime != "none" and not _mountable(file_root):
        yield _unmountable_root(file_root)


def image_problems(
    container: ContainerSpec, image: str | None, *, where: str
) -> Iterator[ConfigError]:
    """Yields why ``image`` can't be run as written, with the right spelling. Accesses no file."""
    if image is None:
        return
    if container.runtime == "none":
        yield ConfigError(
            f"image {image!r} is named, and no container runtime is set",
            where=where,
            fix="set container.runtime to pyxis or apptainer in the cluster spec, or remove the image",
        )
        return
    wanted = spelled_for(container.runtime, image)
    if wanted.spelling != image or not image:
        yield ConfigError(
            f"{where} is {image!r}: {wanted.why}",
            where=where,
            fix=f"write {wanted.spelling}" if wanted.spelling else wanted.fix,
        )


def missing_files(
    container: ContainerSpec, image: str | None, *, where: str, exists: Callable[[str], bool]
) -> Iterator[ConfigError]:
    """Yields an error if the image is a missing file. ``exists`` checks, on the relevant host."""
    if image is None or container.runtime == "none":
        return
    path = parse_image(image).path
    if path.startswith("/") and not exists(path):
        yield ConfigError(
            f"the image {path} is not there",
            where=where,
            fix="correct the path, or make it once for all nodes: realsys image pull SOURCE",
        )


def image_warnings(container: ContainerSpec, image: str | None, *, where: str) -> Iterator[str]:
    """Yields warnings about settings that are allowed but surprising."""
    if image is None or container.runtime == "none":
        return
    if is_mutable(image):
        yield (
            f"{where}: {image} may change over time or between nodes; name a tag or a digest, "
            f"or keep it as a file: realsys image pull {shlex.quote(image)}"
        )
    if container.runtime == "pyxis" and container.name:
        yield (
            f"container.name {container.name}: a node that has this container reuses it and ignores "
            f"{where} and new mounts"
        )


def _pyxis_options(
    container: ContainerSpec, image: str, mounts: Sequence[Mount]
) -> tuple[str, ...]:
    return (
        f"--container-image={image}",
        f"--container-mounts={','.join(map(str, mounts))}",
        *([f"--container-workdir={container.workdir}"] if container.workdir else []),
        *([f"--container-name={container.name}"] if container.name else []),
        *_WRITABLE[container.writable],
        "--container-remap-root" if container.remap_root else "--no-container-remap-root",
        "--container-mount-home" if container.mount_home else "--no-container-mount-home",
        f"--container-env={','.join(_HOST_WINS)}",
    )


def _apptainer_prefix(
    container: ContainerSpec, mounts: Sequence[Mount], *, gpu: bool
) -> tuple[str, ...]:
    """Returns the command prefix: ``sh`` renames the variables and becomes apptainer, in the same
    process."""
    hidden = "cwd" if container.mount_home else "home,cwd"
    return (
        "sh",
        "-c",
        _FORWARD,
        "realsys-forward",
        "apptainer",
        "exec",
        "--cleanenv",
        f"--no-mount={hidden}",
        *(["--nv"] if gpu else []),
        *(["--writable-tmpfs"] if container.writable else []),
        *(["--fakeroot"] if container.remap_root else []),
        *(f"--bind={mount}" for mount in mounts),
        *([f"--pwd={container.workdir}"] if container.workdir else []),
    )


def _mountable(path: str) -> bool:
    return path.startswith("/") and not any(c in path for c in ",:\n\r\0")


def _unmountable_root(file_root: str) -> ConfigError:
    return ConfigError(
        f"file_root {file_root!r} can't be mounted into a container",
        where="file_root",
        fix="use a path without commas, colons and line breaks",
    )
