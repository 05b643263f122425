"""JSON as aiohttp responses."""

from __future__ import annotations

from typing import Any

import msgspec
from aiohttp import web


def json_response(body: Any, *, status: int = 200) -> web.Response:
    """Makes a response with ``body`` as JSON."""
    return web.Response(
        body=msgspec.json.encode(body), status=status, content_type="application/json"
    )


def refused(what: str, *, kind: str, status: int, fix: str) -> web.Response:
    """Makes a refusal without an error class, in the shape of the others."""
    error = {"message": what, "type": kind, "code": status, "fix": fix}
    return json_response({"error": error}, status=status)
