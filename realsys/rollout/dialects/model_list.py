"""Answers to GET /v1/models, in OpenAI's and in Anthropic's form (pure).

A client of either sends ``anthropic-version`` or not: by that header the endpoint chooses.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Any


def openai_model_list(names: Sequence[str], created: int) -> dict[str, Any]:
    """Returns the list of models. ``created``: seconds since the epoch."""
    return {"object": "list", "data": [openai_model(name, created) for name in names]}


def openai_model(name: str, created: int) -> dict[str, Any]:
    """Returns one model, also the answer to GET /v1/models/NAME."""
    return {"id": name, "object": "model", "created": created, "owned_by": "realsys"}


def anthropic_model_list(names: Sequence[str], created: int) -> dict[str, Any]:
    """Returns the one page that holds all models. ``created``: seconds since the epoch."""
    return {
        "data": [anthropic_model(name, created) for name in names],
        "has_more": False,
        "first_id": names[0] if names else None,
        "last_id": names[-1] if names else None,
    }


def anthropic_model(name: str, created: int) -> dict[str, Any]:
    """Returns one model, also the answer to GET /v1/models/NAME."""
    at = datetime.datetime.fromtimestamp(created, datetime.UTC)
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": at.strftime("%Y-%m-%dT%H:%M:%SZ"),
        "lifecycle": "active",
    }
