"""JSON as aiohttp responses."""

from __future__ import annotations

from typing import Any

import msgspec
from aiohttp import web


def json_response(body: Any, *, status: int = 200) -> web.Response:
    """``body`` as JSON."""
    return web.Response(
        body=msgspec.json.encode(body), status=status, content_type="application/json"
    )


def refused(what: str, *, kind: str, status: int, fix: str) -> web.Response:
    """A refusal that no error of ours stands for, in the shape of those that one does."""
    error = {"message": what, "type": kind, "code": status, "fix": fix}
    return json_response({"error": error}, status=status)
