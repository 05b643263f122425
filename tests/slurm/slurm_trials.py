"""Trials on a Slurm cluster of the tests: the same commands, a cluster spec that names its partitions."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import other_site
import yaml
from real_trials import Trials
from slurm_cluster import SlurmCluster

from realsys.worker.device import STAND_IN

NAME = "lab"


@dataclass
class SlurmTrials(Trials):
    """Launches trials on ``cluster``, which every command takes by default."""

    cluster: SlurmCluster

    @property
    def outside(self) -> dict[str, str]:
        """With the way to this cluster, and to no other."""
        return {**self.cluster.environment, "REALSYS_CLUSTER": NAME}

    def write_spec(self, **changes: Any) -> Path:
        """Writes the cluster spec: the cluster as it is, with the given fields.

        Fields of a section are put beside those that it has: ``write_spec(slurm={"requeue": True})``.
        """
        spec = {**self._spec(), "env_vars": {STAND_IN: "1"}}  # its GPUs have no driver
        for name, value in changes.items():
            spec[name] = {**spec.get(name, {}), **value} if isinstance(value, dict) else value
        path = self.file_root / "config/realsys/clusters" / f"{NAME}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(yaml.safe_dump(spec, sort_keys=False))
        return path

    def _spec(self) -> dict[str, Any]:
        if self.cluster.shape.kinds == other_site.KINDS:
            return other_site.spec(NAME, self.file_root)
        shape, nodes = self.cluster.shape, self.cluster.nodes
        (kind,) = shape.kinds
        node = {"cpus": kind.cpus, "memory_mib": kind.memory_mib, "gpus": kind.gpus}
        if kind.gpus:
            node["gpu_type"] = kind.gpu_type
        return {
            "name": NAME,
            "scheduler": "slurm",
            "file_root": str(self.file_root),
            "partitions": {
                "main": {
                    **node,
                    "nodes": len(nodes),
                    "nodelist": f"n[1-{len(nodes)}]",
                    "features": [*nodes, "rack1", "rack2"],
                },
                "small": {**node, "nodes": 1, "nodelist": nodes[0], "max_time": "5"},
            },
            "slurm": {
                "partition": "main",
                "time_limit": "10",
                "accounting": shape.accounting,
            },
        }
