"""Container image names in the spellings of pyxis and apptainer (pure).

For containers.py, which checks, and for `realsys image pull`, which accepts either spelling. enroot, used
by pyxis, separates registry and image by ``#`` and looks everything else up on Docker Hub; apptainer
requires a scheme. pyxis takes a name for a file only if it contains a slash.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_FILE_ENDINGS = (".sif", ".sqsh", ".squashfs", ".img")
_OTHER_SCHEMES = {  # than docker://
    "pyxis": ("dockerd",),
    "apptainer": ("library", "oras", "shub", "docker-daemon", "docker-archive"),
}
_SCHEME = re.compile(r"([a-z][a-z0-9+.-]*)://(.*)", re.S)


@dataclass(frozen=True, kw_only=True)
class Image:
    """A parsed image name: a file (``path``), or a name in a registry.

    Attributes:
        scheme: as written, without ``://``; may be empty.
        version: ``:tag``, ``@sha256:…`` or both; empty if neither was given.
    """

    path: str = ""
    scheme: str = ""
    user: str = ""
    registry: str = ""
    name: str = ""
    version: str = ""


@dataclass(frozen=True)
class Spelling:
    """The spelling a runtime requires, why, and the fix if it can't run the image at all."""

    spelling: str
    why: str = ""
    fix: str = ""


def parse_image(text: str) -> Image:
    """Parses an image name in any of the spellings. Never fails."""
    found = _SCHEME.fullmatch(text)
    scheme, rest = (found[1], found[2]) if found else ("", text)
    if not scheme and (rest.startswith(("/", ".", "~")) or rest.endswith(_FILE_ENDINGS)):
        return Image(path=rest)
    user, at, after = rest.partition("@")
    if not at or after.startswith("sha256:") or "/" in user:
        user, after = "", rest
    registry, mark, name = after.partition("#")
    if not mark:
        registry, name = _docker_registry(after)
    cut = re.search(r"(:[^:/@]+)?(@sha256:.*)?$", name)
    start = cut.start() if cut else len(name)
    return Image(
        scheme=scheme, user=user, registry=registry, name=name[:start], version=name[start:]
    )


def spelled_for(runtime: str, text: str) -> Spelling:
    """Returns ``text`` as ``runtime`` (pyxis or apptainer) requires it, or no spelling and the fix."""
    image = parse_image(text)
    if not text.strip() or re.search(r"\s|[\x00-\x1f]", text) or text.startswith("-"):
        return Spelling("", "that is no name of an image", "give a file or a name in a registry")
    if image.path:
        return _file(runtime, image.path)
    if image.scheme in _OTHER_SCHEMES[runtime]:
        return Spelling(text)
    if image.scheme not in ("", "docker"):
        return Spelling(
            "", f"{runtime} knows no {image.scheme}://", "realsys image pull keeps it as a file"
        )
    if not image.name:
        return Spelling("", "it names no image", "write REGISTRY#NAME:TAG")
    if runtime == "pyxis":
        right = text if "#" in text or not image.registry else _with_hash(image)
        return Spelling(right, "pyxis would look that up on Docker Hub; '#' ends the registry")
    return Spelling(apptainer_source(image), "apptainer takes names in a registry as docker://")


def enroot_source(image: Image) -> str:
    """Returns the name for ``enroot import``."""
    user = f"{image.user}@" if image.user else ""
    registry = f"{image.registry}#" if image.registry else ""
    return f"{image.scheme or 'docker'}://{user}{registry}{image.name}{image.version}"


def apptainer_source(image: Image) -> str:
    """Returns the name for ``apptainer pull`` and ``exec``."""
    registry = f"{image.registry}/" if image.registry else ""
    return f"{image.scheme or 'docker'}://{registry}{image.name}{image.version}"


def is_mutable(text: str) -> bool:
    """Returns whether the name may refer to another image later: no tag and no digest, or ``latest``."""
    image = parse_image(text)
    return not image.path and image.version in ("", ":latest")


def file_stem(text: str) -> str:
    """Returns a file name, without suffix, that identifies the image."""
    image = parse_image(text)
    parts = (image.registry, *image.name.split("/"), image.version.lstrip(":@").replace(":", "-"))
    return "+".join(re.sub(r"[^\w.-]", "-", part) for part in parts if part)


def _docker_registry(text: str) -> tuple[str, str]:
    """Splits by Docker's rule: the first part is a registry if it has a dot or a port, or is localhost."""
    first, slash, rest = text.partition("/")
    if slash and ("." in first or ":" in first or first == "localhost"):
        return first, rest
    return "", text


def _with_hash(image: Image) -> str:
    scheme = f"{image.scheme}://" if image.scheme else ""
    return f"{scheme}{image.registry}#{image.name}{image.version}"


def _file(runtime: str, path: str) -> Spelling:
    if not path.startswith("/"):
        why = "a file is named by its absolute path, the same on all nodes"
        if "/" not in path and runtime == "pyxis":
            why = "without a slash pyxis looks it up on Docker Hub"
        return Spelling("", why, f"write its whole path, e.g. /shared/images/{path.split('/')[-1]}")
    if runtime == "pyxis" and path.endswith(".sif"):
        return Spelling(
            "",
            "that is apptainer's format, pyxis runs .sqsh",
            "realsys image pull SOURCE makes one, or set container.runtime: apptainer",
        )
    return Spelling(path)
