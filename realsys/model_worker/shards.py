"""The models, interfaces and held-out data that one model worker holds.

``Shards`` makes them (modules first, engines once the run's length is known) and finds them by call.
An interface is shared by all calls of one model with equal settings, so that what it keeps (a KL
controller, running moments) is one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from realsys.api import registry
from realsys.api.dataflow import MFCDef
from realsys.api.errors import CheckpointError
from realsys.api.experiment import ModelShard, ModelWorker
from realsys.api.model import (
    FinetuneSpec,
    Model,
    ModelInterface,
    ModelName,
    ParallelGroups,
    StepInfo,
)
from realsys.api.plain import to_plain


class Shards:
    """What this worker holds, by model name."""

    def __init__(self, config: ModelWorker, *, device: str) -> None:
        self._config, self._device = config, device
        self._shards: dict[ModelName, ModelShard] = {s.id.model_name: s for s in config.shards}
        self._calls: dict[str, MFCDef] = {c.name: c for c in config.model_rpcs}
        self._interfaces: dict[tuple[ModelName, str], ModelInterface] = {}
        self.models: dict[ModelName, Model] = {}

    def make_models(self, groups: Mapping[ModelName, Any]) -> None:
        """Loads every module of this worker."""
        for name, shard in self._shards.items():
            if name not in self._config.instantiate:
                continue
            self.models[name] = registry.make_model(
                shard.model,
                name=name,
                device=self._device,
                topology=shard.id.topo,
                rank=shard.id.parallelism_rank,
                groups=groups.get(name, ParallelGroups()),
                base_seed=self._config.base_seed,
            )

    def initialize(self, spec: FinetuneSpec) -> None:
        """Lets each backend wrap its module."""
        for name, model in self.models.items():
            backend = registry.make_backend(self._shards[name].backend)
            self.models[name] = backend.initialize(model, spec)

    def call(self, name: str) -> tuple[MFCDef, Model, ModelInterface]:
        """Definition, model and interface of a call."""
        call = self._calls[name]
        return call, self.models[call.model_name], self._interface(call)

    def _interface(self, call: MFCDef) -> ModelInterface:
        settings = json.dumps(to_plain(call.interface_impl), sort_keys=True)
        key = (call.model_name, settings)
        if key not in self._interfaces:
            self._interfaces[key] = registry.make_interface(call.interface_impl)
        return self._interfaces[key]

    def role(self, role: str) -> tuple[Model, ModelInterface]:
        """The role's trained model (or its first) with the interface that trains it."""
        calls = [c for c in self._calls.values() if c.role == role and c.model_name in self.models]
        call = next((c for c in calls if c.is_train), calls[0])
        return self.models[call.model_name], self._interface(call)

    def evaluated(self) -> Iterator[tuple[ModelShard, Model, ModelInterface]]:
        """Models of this worker that have held-out data."""
        for name, shard in self._shards.items():
            if shard.eval_dataset is not None and name in self.models:
                yield shard, *self.role(name.role)

    # ---- recovery ---------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Engines, versions and interfaces of this worker: tensors and plain values only."""
        for call in self._calls.values():
            if call.model_name in self.models:
                self._interface(call)
        return {
            "models": {
                str(name): {
                    "engine": model.module.state_dict() if model.module is not None else {},
                    "version": vars(model.version),
                }
                for name, model in self.models.items()
            },
            "interfaces": {
                f"{name} {settings}": interface.state_dict()
                for (name, settings), interface in self._interfaces.items()
            },
        }

    def load_state_dict(self, state: Mapping[str, Any], *, where: str) -> None:
        """Takes back what ``state_dict`` gave.

        Raises:
            CheckpointError: it is of other models.
        """
        mine = sorted(str(name) for name in self.models)
        if sorted(state["models"]) != mine:
            raise CheckpointError(
                f"it holds models {sorted(state['models'])}, this worker has {mine}",
                where=where,
                fix="resume with the plan that wrote it",
            )
        for name, model in self.models.items():
            saved = state["models"][str(name)]
            if model.module is not None:
                model.module.load_state_dict(saved["engine"])
            model.version = StepInfo(**saved["version"])
        for call in self._calls.values():
            if call.model_name in self.models:
                self._interface(call)
        for (name, settings), interface in self._interfaces.items():
            interface.load_state_dict(state["interfaces"].get(f"{name} {settings}", {}))
