"""A site: where files live, which scheduler starts tasks, which images they run in. Data, not code.

Read from ``cluster_specs/*.yaml`` (and the user's own folder) by launcher/clusters.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from realsys.api.options import option


@dataclass(frozen=True, kw_only=True)
class ClusterSpec:
    """What realsys must know of a site before it can place and start tasks."""

    name: str = option("local", "name of the site; part of every name-resolution key")
    scheduler: str = option("local", "what starts tasks", choices=("local",))
    file_root: str = option(
        "~/.local/share/realsys", "folder that every task can read and write; holds all trials"
    )
    name_resolve: str | None = option(
        None, "URL of the store; none: file://<file_root>/name_resolve"
    )
    cpu_image: str | None = option(None, "container image of workers without a GPU")
    gpu_image: str | None = option(None, "container image of workers with a GPU")
    gpu_infer_image: str | None = option(None, "container image of generation servers")
    env_vars: Mapping[str, str] = field(
        default_factory=dict, metadata={"meaning": "environment of every task; no secrets"}
    )
