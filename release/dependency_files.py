#!/usr/bin/env python3
"""Writes constraints.txt and THIRD_PARTY_NOTICES.md from an environment in which `make test` passed.

    .venv/bin/python release/dependency_files.py

constraints.txt pins every package that pyproject.toml leads to, by version alone: no index, no hash (the
images' locks in containers/locks have hashes). THIRD_PARTY_NOTICES.md lists the same packages with the
licence that each one's metadata states. Packages of an extra that is not installed are named as not tried.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
CONTROL_PLANE = "control plane"
# Metadata that states no licence in words of its own.
KNOWN_LICENCES = {
    "cycler": "BSD-3-Clause",
    "etcd3": "Apache-2.0",
    "kiwisolver": "BSD-3-Clause",
    "openai-harmony": "Apache-2.0",
    "prime-pydantic-config": "Apache-2.0",
}

NOTICES = """# Third-party notices

realsys is under the Apache License 2.0 ([LICENSE](LICENSE)). Its source and its wheel contain no
code of others. When it is installed, package managers fetch the packages below from their own
publishers, under their own licences. An image built from [containers/](containers/README.md)
contains them: whoever passes such an image on keeps their licence files, which each package has in
its `*.dist-info` folder.

Made by `release/dependency_files.py` from the metadata of the tested environment; "for" names the
first part of `pyproject.toml` that leads there. Slurm, etcd, SGLang and vLLM are started as
programs of their own where a site has them; they are not distributed with realsys.

| package | tested version | licence | for |
|---|---|---|---|
"""


def main() -> None:
    """Writes both files."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    reached, missing = closure(project)
    rows = sorted((canonicalize_name(d.metadata["Name"]), d, part) for d, part in reached.values())
    pins = [f"{name}=={found.version.partition('+')[0]}" for name, found, _ in rows]
    head = [
        "# Versions with which `make test` passed, for pip install -c. Python 3.11, x86_64.",
        "# Made by release/dependency_files.py.",
        *(f"# not tried: {need} ([{part}])" for need, part in missing),
    ]
    (ROOT / "constraints.txt").write_text("\n".join([*head, *pins]) + "\n")
    table = [
        f"| {name} | {found.version.partition('+')[0]} | {licence(found)} | {part} |"
        for name, found, part in rows
    ]
    table += [f"| {need} | not installed | see its metadata | [{part}] |" for need, part in missing]
    (ROOT / "THIRD_PARTY_NOTICES.md").write_text(NOTICES + "\n".join(table) + "\n")


def closure(
    project: dict[str, object],
) -> tuple[dict[str, tuple[Distribution, str]], list[tuple[str, str]]]:
    """Installed packages that ``project`` leads to, each with the first part that needs it; and direct
    requirements that are not installed, with their part."""
    parts: dict[str, list[str]] = {CONTROL_PLANE: project["dependencies"]}  # type: ignore[dict-item]
    parts |= project["optional-dependencies"]  # type: ignore[operator]
    reached: dict[str, tuple[Distribution, str]] = {}
    missing: list[tuple[str, str]] = []
    for part, needs in parts.items():
        label = part if part == CONTROL_PLANE else f"[{part}]"
        queue = [need for need in map(Requirement, needs) if need.name != project["name"]]
        direct = {need.name for need in queue}
        while queue:
            need = queue.pop()
            name = canonicalize_name(need.name)
            if name in reached and not need.extras:
                continue
            try:
                found = distribution(need.name)
            except PackageNotFoundError:
                if need.name in direct:
                    missing.append((need.name, part))
                continue
            reached.setdefault(name, (found, label))
            queue += needs_of(found, need.extras)
    return reached, missing


def needs_of(found: Distribution, extras: set[str]) -> Iterator[Requirement]:
    """What an installed package asks for on this platform, with ``extras``."""
    for need in map(Requirement, found.requires or ()):
        asked = [{"extra": extra} for extra in ("", *extras)]
        if need.marker is None or any(need.marker.evaluate(environment) for environment in asked):
            yield need


def licence(found: Distribution) -> str:
    """As the package's metadata states it: an SPDX expression, a short text, or a classifier."""
    metadata = found.metadata
    if expression := metadata.get("License-Expression"):
        return expression
    if known := KNOWN_LICENCES.get(metadata["Name"]):
        return known
    classifiers = metadata.get_all("Classifier") or []
    named = [c.rpartition(" :: ")[2] for c in classifiers if c.startswith("License ::")]
    named = [name for name in named if name != "OSI Approved"]
    text = (metadata.get("License") or "").strip().splitlines()
    if text and len(text[0]) < 40 and text[0] != "UNKNOWN":
        return re.sub(r"\s+", " ", text[0])
    return " or ".join(named) or "see its files"


if __name__ == "__main__":
    main()
