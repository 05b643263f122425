"""Builds a site's images from `containers/` and `locks/`, for `realsys image build`.

An image is named after a digest of what decides its packages: the definition and the lock. An existing
image is therefore not built again, and a changed lock gives a new file beside it without affecting
running trials. The realsys code inside serves commands only: a trial brings its own copy.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path

from launcher.slurm.images.image_pull import ENDINGS, ImageFile, ensure_image_file
from realsys.api.cluster import ClusterSpec
from realsys.api.errors import ClusterError, ConfigError, did_you_mean
from realsys.trial.snapshot import code_root

DOCKERFILE, APPTAINER_FILE = "Dockerfile", "realsys.def"
BUILDERS = ("docker", "podman")  # enroot cannot build images, but imports theirs
URI = {"docker": "dockerd://", "podman": "podman://"}
# What to do when a program has failed, by runtime.
NOT_BUILT = {
    "pyxis": "read its output. Does the program reach its service (docker info, podman info), which must "
    "run here and let you use it? Does that reach the registry of the base image and the package index, "
    "and has its disk room for the image (20 GB)?",
    "apptainer": "read its output. May you build images here (user namespaces or --fakeroot: apptainer "
    "buildcfg)? Are the registry of the base image and the package index reachable, and has "
    "APPTAINER_TMPDIR room for the image (20 GB)?",
}
# Kind → its lock, and which of that lock's Pythons it has.
KINDS = {
    "control": ("realsys", "3.11"),
    "train": ("realsys", "3.11"),
    "sglang": ("sglang", "3.12"),
    "vllm": ("vllm", "3.12"),
}
# Where else pip looks. Passed on as it is set here: locks name no place.
INDEX_VARIABLE = "PIP_EXTRA_INDEX_URL"


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The inputs of an image.

    Attributes:
        root: the checkout, which builders copy from.
        python: the version that the image has, one that its lock was resolved for.
        index: address of a further package index, "" for none. It shows in the image's history.
    """

    kind: str
    root: Path
    python: str
    digest: str
    index: str = ""

    @property
    def name(self) -> str:
        """Name of the image: its kind and digest."""
        return f"realsys-{self.kind}-{self.digest}"


def recipe_of(kind: str, root: Path | None = None) -> Recipe:
    """Finds the inputs of the image ``kind``.

    Raises:
        ConfigError: there is no such kind, or no `containers/` beside this installation.
    """
    root = code_root() if root is None else root
    folder = root / "containers"
    if not (folder / "install").exists():
        raise ConfigError(
            "the definitions of images are not part of an installed package",
            where=str(folder),
            fix="run this in a checkout of realsys, with its own `pip install -e .`",
        )
    if kind not in KINDS:
        raise ConfigError(
            f"there is no image of kind {kind!r}",
            where="command line",
            fix=did_you_mean(kind, KINDS),
        )
    lock, python = KINDS[kind]
    parts = [folder / name for name in (DOCKERFILE, APPTAINER_FILE, "install")]
    parts += [root / name for name in ("locks/select", f"locks/{lock}.txt", "pyproject.toml")]
    texts = [path.read_text() for path in parts]
    digest = hashlib.sha256("\0".join(texts).encode()).hexdigest()[:12]
    index = os.environ.get(INDEX_VARIABLE, "")
    index = "" if "@" in index else index  # with a password it would be seen
    return Recipe(kind=kind, root=root, python=python, digest=digest, index=index)


def build(spec: ClusterSpec, recipe: Recipe, *, timeout_s: float) -> ImageFile:
    """Builds the image unless its file exists. The programs' output goes to stderr.

    Raises:
        ConfigError: the site has no container runtime.
        ClusterError: a program failed, took too long, or is not on this host.
    """
    runtime = spec.container.runtime
    if runtime == "none":
        raise ConfigError(
            f"cluster {spec.name!r} has no container runtime",
            where="container.runtime in the cluster spec",
            fix="name a site that runs images (--cluster; `realsys clusters` lists them), or set it to "
            "pyxis or apptainer",
        )
    target = Path(spec.file_root, "images", recipe.name + ENDINGS[runtime])

    def commands(part: Path) -> list[list[str]]:
        return build_argvs(runtime, recipe, part, builder=_builder(runtime, recipe, target))

    return ensure_image_file(
        spec,
        target,
        commands,
        timeout_s=timeout_s,
        if_failed=NOT_BUILT[runtime],
        cwd=recipe.root,
    )


def build_argvs(runtime: str, recipe: Recipe, target: Path, *, builder: str) -> list[list[str]]:
    """Builds the commands that write the image to ``target``, run in the checkout (pure)."""
    values = [f"KIND={recipe.kind}", f"PYTHON={recipe.python}"]
    values += [f"{INDEX_VARIABLE}={recipe.index}"] if recipe.index else []
    arguments = [word for value in values for word in ("--build-arg", value)]
    if runtime == "apptainer":
        return [["apptainer", "build", *arguments, str(target), f"containers/{APPTAINER_FILE}"]]
    tag = f"realsys-{recipe.kind}:{recipe.digest}"
    made = [builder, "build", *arguments, "--tag", tag, "--file", f"containers/{DOCKERFILE}", "."]
    return [made, ["enroot", "import", "--output", str(target), URI[builder] + tag]]


def _builder(runtime: str, recipe: Recipe, target: Path) -> str:
    """Finds the program that builds images for ``runtime``; raises ClusterError if there is none here."""
    wanted = ["apptainer"] if runtime == "apptainer" else list(BUILDERS)
    found = [name for name in wanted if shutil.which(name)]
    missing = [] if found else [" or ".join(wanted)]
    if runtime != "apptainer" and shutil.which("enroot") is None:
        missing.append("enroot")
    if missing:
        commands = build_argvs(runtime, recipe, Path(target.name), builder=wanted[0])
        by_hand = " && ".join(shlex.join(argv) for argv in commands)
        raise ClusterError(
            f"an image for {runtime} can't be built here: no {' and no '.join(missing)} on PATH",
            where="PATH",
            fix=f"load the module that has {'it' if len(missing) == 1 else 'them'}, or run this on a host "
            "of the site that does (compute nodes may). Elsewhere, in a checkout of the same revision: "
            f"{by_hand}; then copy the file to {target}",
        )
    return found[0]
