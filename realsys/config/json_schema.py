"""The settings of an experiment as a JSON Schema, with which an editor completes a YAML file.

For `realsys schema EXPERIMENT`. pydantic makes it from the same field metadata that `option` keeps:
meaning, range, choices, default. It describes nested tables; dotted names, which a file may have too, are
let through.
"""

from __future__ import annotations

import warnings
from typing import Any

from realsys.api.plain import to_plain


def json_schema(options: Any) -> dict[str, Any]:
    """The schema of a dataclass of settings.

    Args:
        options: an instance, of which single values are stated as defaults.
    """
    from pydantic import TypeAdapter

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of defaults that are no JSON: they are left out
        found: dict[str, Any] = TypeAdapter(type(options)).json_schema()
    for part in (found, *found.get("$defs", {}).values()):
        part.pop("required", None)
        for setting in part.get("properties", {}).values():
            setting.pop("title", None)
    for name, setting in found["properties"].items():
        if "default" in setting:
            setting["default"] = to_plain(getattr(options, name))
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **found}
