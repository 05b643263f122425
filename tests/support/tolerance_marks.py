"""Finds the tests that compare what float32 has computed (near.py), without loading torch."""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any

MARK = "tolerance"
_NAMES = frozenset({"near", "assert_near"})
# The oldest kernels that torch, MKL and oneDNN have for this kind of processor: they add in another order.
OLDEST_KERNELS = {
    "ATEN_CPU_CAPABILITY": "default",
    "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
}


def holds_tolerance(test: Callable[..., Any]) -> bool:
    """True if a test, or a function that it calls, compares by ``near`` or ``assert_near``."""
    todo, seen = [test.__code__], set()
    while todo:
        code = todo.pop()
        if code in seen:
            continue
        seen.add(code)
        if _NAMES & set(code.co_names):
            return True
        todo += [inner for inner in code.co_consts if isinstance(inner, CodeType)]
        called = (test.__globals__.get(name) for name in code.co_names)
        todo += [f.__code__ for f in called if isinstance(f, FunctionType)]
    return False
