"""Loaded first in the environments of real servers that ``install`` makes: lets them start without CUDA.

``install`` puts it into them, with a ``.pth`` file that imports it. Modules named in the ``.txt`` file
beside it, one a line, import as empties: an attribute of theirs is a class, an attribute of that a text.
What torchvision registers for its compiled operators, which a CPU torch refuses, is left out.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar


class _Named(type):
    """Of the classes: takes whatever is asked of them for a name."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return f"{cls.__name__}.{name}"


class _Empty(ModuleType):
    """Has whatever is asked of it."""

    __version__ = "0"
    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = _Named(name, (), {"__init__": lambda self, *args, **kwargs: None})
        setattr(self, name, made)
        return made


class _Nothing(importlib.abc.Loader):
    """Runs no code; ``module_type`` None leaves the choice to the import system."""

    def __init__(self, module_type: type[ModuleType] | None) -> None:
        self._type = module_type

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._type(spec.name) if self._type else None

    def exec_module(self, module: ModuleType) -> None:
        pass


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, roots: Sequence[str]) -> None:
        self._roots = frozenset(roots)

    def find_spec(
        self, name: str, path: Any = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name == "torchvision._meta_registrations":
            return importlib.machinery.ModuleSpec(name, _Nothing(None))
        if name.partition(".")[0] in self._roots:
            return importlib.machinery.ModuleSpec(name, _Nothing(_Empty), is_package=True)
        return None


sys.meta_path.insert(0, _Finder(Path(__file__).with_suffix(".txt").read_text().split()))
