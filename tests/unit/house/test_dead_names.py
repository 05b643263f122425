"""No function, class, method or field of the product is there for nobody."""

import ast
import re
from collections.abc import Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PARTS = ("realsys", "launcher", "experiments")

# Nothing of ours reads these names, for a reason. A name that is read again must leave the list.
KEPT = {
    # words of the seed documents, and what plug-ins call or implement
    *("controller_image", "worker_tag", "host_key", "epoch_step", "destroy", "cu_seqlens"),
    "max_head_offpolicyness",
    *("register_interface", "register_backend", "register_model", "register_dataset"),
    *("register_agent", "register_environment", "TableCosts"),
    *("register_filter", "register_transform", "python_argv"),
    # called by libraries: submitit, logging, megatron, typer
    *("affinity", "_num_tasks", "formatTime", "_is_in_embd_group", "list_commands"),
    # parts of messages of other programs, named so that they are checked or refused when wrong
    *("token_id", "torch_empty_cache", "keep_pause", "token_step"),
    # in what is written or printed for people as a whole
    *("known_at", "taken_at", "architecture"),
    # what a report says, which tests and benchmarks hold it to
    *("id_index", "bytes_copied", "new_bytes", "copy_s"),
    # how the tests look into what stands
    *("block_bytes", "full_weight", "all_free", "num_open", "spare_bytes"),
    # for the endpoint of agents, which serves the dialects
}


@pytest.mark.thorough
def test_every_name_is_used() -> None:
    defined, used = set[str](), set[str]()
    for path in (path for part in PARTS for path in (ROOT / part).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            used.update(_used(node))
            defined.update(_defined(node))
    unused = {name for name in defined - used if not name.startswith("__")}
    assert unused - KEPT == set(), "nobody uses these: remove them, or say in KEPT why they stay"
    assert KEPT - unused == set(), "these are used, or gone: take them out of KEPT"


def _used(node: ast.AST) -> Iterable[str]:
    """Names and attributes that are read, and words of short texts (plug-ins are named so)."""
    match node:
        case ast.Attribute(attr=name, ctx=ast.Load()) | ast.Name(id=name, ctx=ast.Load()):
            return (name,)
        case ast.MatchClass(kwd_attrs=names):
            return names
        case ast.Constant(value=str(text)) if len(text) < 80:
            return re.findall(r"\w+", text)
    return ()


def _defined(node: ast.AST) -> Iterable[str]:
    """Functions, classes, methods and fields."""
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
            return (name,)
        case ast.ClassDef(name=name, body=body):
            fields = [part.target for part in body if isinstance(part, ast.AnnAssign)]
            return (name, *(field.id for field in fields if isinstance(field, ast.Name)))
    return ()
