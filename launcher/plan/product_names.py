"""Names of a preparation's product: equal only if all that makes it is equal, so it can be used again.

    <what the settings say>-<what it is made with>

The first part is a hash of the configuration and of the input files. The second is of code and of small
files that the settings only name: realsys' own rooms that compute, ``--import`` files with the user's
modules that they import, plug-ins that are installed, and the tokenizer, templates and configuration of
a starting model. A resume with changed settings keeps the product of its trial while the first part is
equal: the product may be there, made with the code of then.

Not seen are the versions of torch and other packages, which the nodes may have others of, and files that a
user's code opens itself.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from realsys.api import registry
from realsys.api.experiment import ExperimentConfig
from realsys.api.plain import to_plain
from realsys.trial.snapshot import PACKAGES, sources_digest

# Rooms whose code decides what a fine-tuned model is, given its configuration.
COMPUTING_ROOMS = (
    *("api", "algorithms", "backends", "data", "interfaces", "master", "model_worker", "models"),
)
MODEL_SUFFIXES = (".json", ".jinja", ".model", ".txt", ".tiktoken")
TEMPLATES = "additional_chat_templates"  # a tokenizer's further templates
_HEX_DIGITS = 16


def product_name(
    config: ExperimentConfig,
    input_files: Iterable[str] = (),
    *,
    imports: Sequence[str] = (),
    products: Collection[str] = (),
    former: str | None = None,
) -> str:
    """Returns the name of the folder that keeps what ``config`` produces.

    Args:
        input_files: files that the product depends on by name and content.
        imports: files (absolute) and modules that were imported here and that every worker imports.
        products: folders of other products, which the configuration may name: named by what makes them.
        former: name that the product had when its trial was launched.
    """
    settings = content_hash(config, input_files)
    if former is not None and former.partition("-")[0] == settings:
        return former
    rooms = tuple(f"realsys/{room}" for room in COMPUTING_ROOMS)
    digest = sources_digest((*rooms, "experiments"))
    for path in (*imported_sources(imports), *_model_files(config, products)):
        with suppress(OSError):  # reported elsewhere
            digest.update(f"{path.name}\0".encode() + _digest_of(path))
    return f"{settings}-{digest.hexdigest()[:_HEX_DIGITS]}"


def content_hash(config: ExperimentConfig, input_files: Iterable[str] = ()) -> str:
    """Hashes the settings of a product: equal configuration and equal files give an equal name.

    16 hex digits. An unreadable file counts by its name; it is reported elsewhere.
    """
    digest = hashlib.sha256(
        json.dumps(to_plain(config), sort_keys=True, ensure_ascii=False).encode()
    )
    for path in input_files:
        digest.update(path.encode())
        with suppress(OSError):
            digest.update(_digest_of(Path(path)))
    return digest.hexdigest()[:_HEX_DIGITS]


def imported_sources(imports: Iterable[str]) -> list[Path]:
    """Returns the files of imported plug-ins and of the user's modules that they import, each once.

    In an order that depends on what the files say. What belongs to Python, to realsys or, beside the
    plug-ins themselves, to an installed package is left out.
    """
    found: dict[Path, str] = {}
    for name in (*registry.entry_point_modules(), *imports):
        is_file = name.endswith(".py")
        file = Path(name) if is_file else _file_of(name)
        waiting = [] if file is None else [(file, "" if is_file else name)]
        top = "" if is_file else name.partition(".")[0]
        while waiting:
            path, module = waiting.pop(0)
            if path in found:
                continue
            found[path] = module
            for other in _with_packages(_imports_of(path, module)):
                of_other = _file_of(other)
                if of_other is not None and (
                    other.partition(".")[0] == top or _is_users(other, of_other)
                ):
                    waiting.append((of_other, other))
    return list(found)


def _imports_of(path: Path, module: str) -> Iterator[str]:
    """Yields the full names of all that a file's import statements may mean, wherever they stand."""
    import ast

    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, ValueError, SyntaxError):
        return
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: -(node.level - 1) or None] if node.level else []
            base = ".".join(filter(None, (*above, node.module)))
            yield from filter(None, (base, *(f"{base}.{alias.name}" for alias in node.names)))


def _with_packages(modules: Iterable[str]) -> Iterator[str]:
    """Yields each name after those of the packages that it is in, whose code runs first."""
    for module in modules:
        parts = module.split(".")
        yield from (".".join(parts[: n + 1]) for n in range(len(parts)))


def _file_of(module: str) -> Path | None:
    """Returns the source of a module that is loaded or can be found; None if it has none."""
    file = getattr(sys.modules.get(module), "__file__", None)
    top = module.partition(".")[0]
    if file is None and module not in sys.modules and top not in PACKAGES:
        with suppress(ImportError, AttributeError, ValueError):
            file, _ = (None, []) if top in sys.stdlib_module_names else _places_of(module)
    return Path(file).resolve() if file is not None and file.endswith(".py") else None


def _places_of(module: str) -> tuple[str | None, list[str]]:
    """Returns the source of a module that is not loaded and, of a package, the folders of its modules.

    Runs no code of its packages: modules of one that isn't loaded are found in its folders.
    """
    above, _, name = module.rpartition(".")
    if not above or above in sys.modules:
        spec = importlib.util.find_spec(module)
        return (spec.origin, list(spec.submodule_search_locations or ())) if spec else (None, [])
    folders: list[str] = []
    for folder in _places_of(above)[1]:
        inner = Path(folder, name)
        if (file := inner / "__init__.py").is_file():
            return str(file), [str(inner)]
        if (file := Path(folder, f"{name}.py")).is_file():
            return str(file), []
        folders += [str(inner)] if inner.is_dir() else []  # several may make one package
    return None, folders


def _is_users(module: str, file: Path) -> bool:
    """Whether a module is neither Python's, nor realsys', nor of an installed package."""
    top = module.partition(".")[0]
    is_installed = bool({"site-packages", "dist-packages"} & set(file.parts))
    return not (is_installed or top in PACKAGES or top in sys.stdlib_module_names)


def _model_files(config: ExperimentConfig, products: Collection[str]) -> Iterator[Path]:
    """Yields the small files of the model folders that a configuration names, in order.

    Their weights are input files of the experiments that start from them.
    """
    named = [str(worker.tokenizer_name_or_path or "") for worker in config.model_worker]
    named += [
        str(shard.model.args.get("path") or "")
        for worker in config.model_worker
        for shard in worker.shards
    ]
    for folder in dict.fromkeys(named):
        if os.path.isabs(folder) and folder not in products:
            for place in (Path(folder), Path(folder, TEMPLATES)):
                with suppress(OSError):
                    entries = sorted(place.iterdir())
                    yield from (p for p in entries if p.suffix in MODEL_SUFFIXES and p.is_file())


def _digest_of(path: Path) -> bytes:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").digest()
