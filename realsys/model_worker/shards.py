"""Models, interfaces and held-out data of one model worker.

``Shards`` makes them (modules first, engines once the run's length is known) and finds them by call.
Calls of one model with equal settings share an interface, and so its state (a KL controller, running
moments).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from realsys.api import registry
from realsys.api.data import MicroBatchSpec
from realsys.api.dataflow import MFCDef, averaged_models
from realsys.api.errors import CheckpointError
from realsys.api.model import (
    FinetuneSpec,
    Model,
    ModelInterface,
    ModelInterfaceType,
    ModelName,
    ModuleSource,
    ParallelGroups,
    StepInfo,
)
from realsys.api.plain import to_plain
from realsys.api.worker_configs import ModelShard, ModelWorker
from realsys.model_worker.move_weights import copy_weights, restore_weights
from realsys.models.source import source_of


class Shards:
    """Models that this worker holds a shard of, by name."""

    def __init__(self, config: ModelWorker, *, device: str) -> None:
        self._config, self._device = config, device
        self._shards: dict[ModelName, ModelShard] = {s.id.model_name: s for s in config.shards}
        self._calls: dict[str, MFCDef] = {c.name: c for c in config.model_rpcs}
        self._interfaces: dict[tuple[ModelName, str], ModelInterface] = {}
        self._averaged = averaged_models(config.model_rpcs)
        self._vocabularies: dict[ModelName, str] = {}
        self._trained = {c.model_name for c in config.model_rpcs if c.is_train}
        self.models: dict[ModelName, Model] = {}
        self.sources: dict[ModelName, ModuleSource] = {}

    def make_models(self, groups: Mapping[ModelName, ParallelGroups]) -> None:
        """Makes every model of this worker; models filled from another copy stay empty."""
        for name, shard in self._shards.items():
            model = registry.make_model(
                shard.model,
                name=name,
                device=self._device,
                topology=shard.id.topo,
                rank=shard.id.parallelism_rank,
                groups=groups[name],
                base_seed=self._config.base_seed,
            )
            model.filled = name in self._config.instantiate
            model.trains, model.averaged = name in self._trained, name in self._averaged
            self.models[name] = model
            if model.module is not None:
                self.sources[name] = source_of(model)

    def initialize(self, spec: FinetuneSpec) -> None:
        """Lets each model's backend make its engine."""
        for name, model in self.models.items():
            backend = registry.make_backend(self._shards[name].backend)
            self.models[name] = backend.initialize(model, spec)

    def call(self, name: str) -> tuple[MFCDef, Model, ModelInterface]:
        """Returns definition, model and interface of a call."""
        call = self._calls[name]
        return call, self.models[call.model_name], self._interface(call, call.model_name)

    def _interface(self, call: MFCDef, name: ModelName) -> ModelInterface:
        key = (name, _settings(call))
        if key not in self._interfaces:
            self._interfaces[key] = registry.make_interface(call.interface_impl)
        return self._interfaces[key]

    def model(self, name: str) -> tuple[Model, ModelInterface]:
        """Returns the model ``role@replica`` with the interface that trains it, or else its first one.

        A copy that only generates has no training call; then its role's calls are used.
        """
        found = self.find(name)
        own = self._calls_of(found)
        call = next((c for c in own if c.is_train), own[0])
        return self.models[found], self._interface(call, found)

    def _calls_of(self, name: ModelName) -> list[MFCDef]:
        """Lists the calls of a copy, or of its role if the copy has none."""
        calls = [c for c in self._calls.values() if c.role == name.role]
        return [c for c in calls if c.model_name == name] or calls

    def find(self, name: str) -> ModelName:
        """Returns the name of the model ``role@replica``, which must be on this worker."""
        (found,) = (n for n in self.models if str(n) == name)
        return found

    def evaluated(self) -> Iterator[tuple[ModelShard, Model, ModelInterface, MicroBatchSpec]]:
        """Yields models that have held-out data, with the micro-batch limits of their calls."""
        for name, shard in self._shards.items():
            if shard.eval_dataset is not None:
                yield shard, *self.model(str(name)), self._calls_of(name)[0].mb_spec

    def generates(self, name: ModelName) -> bool:
        """True if a call generates with this copy."""
        kinds = [c.interface_type for c in self._calls.values() if c.model_name == name]
        return ModelInterfaceType.GENERATE in kinds

    def held_dtype(self, shard: ModelShard, weight: str) -> str:
        """Returns the dtype in which the workers of a copy hold a weight."""
        name = shard.id.model_name
        return registry.make_backend(shard.backend).held_dtype(
            str(shard.model.args.get("dtype", "float32")),
            trained=name in self._trained,
            averaged=name in self._averaged,
            weight=weight,
        )

    # ---- recovery ---------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """State of this worker's engines, versions and interfaces: tensors and plain values only."""
        for call in self._calls.values():
            if call.model_name in self.models:
                self._interface(call, call.model_name)
        return {
            "models": {
                str(name): {
                    "engine": self._engine_state(model),
                    "version": vars(model.version),
                    "vocabulary": self._vocabulary(model),
                }
                for name, model in self.models.items()
            },
            "interfaces": {
                self._checkpoint_name(name, settings): interface.state_dict()
                for (name, settings), interface in self._interfaces.items()
            },
        }

    def _checkpoint_name(self, name: ModelName, settings: str) -> str:
        """Returns an interface's name in a checkpoint: that of its first call, since a resume may
        change settings.
        """
        return f"{name} {next(c.name for c in self._calls_of(name) if _settings(c) == settings)}"

    def _vocabulary(self, model: Model) -> str:
        """Hash of what its tokens stand for, computed once."""
        if model.name not in self._vocabularies:
            self._vocabularies[model.name] = _vocabulary_hash(model.tokenizer)
        return self._vocabularies[model.name]

    def _engine_state(self, model: Model) -> dict[str, Any]:
        if model.module is not None:
            model.module.onload()  # a hook may have offloaded it
        if model.name in self._averaged:  # its moving average exists nowhere else
            return copy_weights(model.module)
        return model.module.state_dict() if model.module is not None else {}

    def load_state_dict(self, state: Mapping[str, Any], *, where: str) -> None:
        """Restores what ``state_dict`` returned.

        Raises:
            CheckpointError: it belongs to other models, another tokenizer or other interfaces.
        """
        models = sorted(str(name) for name in self.models)
        if sorted(state["models"]) != models:
            raise CheckpointError(
                f"the checkpoint has models {sorted(state['models'])}, this worker has {models}",
                where=where,
                fix="resume with the plan that wrote the checkpoint",
            )
        for name, model in self.models.items():
            saved = state["models"][str(name)]
            if saved.get("vocabulary", mine := self._vocabulary(model)) != mine:
                raise CheckpointError(
                    f"the tokens of {name} now stand for other texts than when the checkpoint was written",
                    where=where,
                    fix="restore the tokenizer's files, or the data file it was trained on, then resume",
                )
            if name in self._averaged:
                restore_weights(model.module, saved["engine"])
            elif model.module is not None:
                model.module.load_state_dict(saved["engine"])
            model.version = StepInfo(**saved["version"])
        for call in self._calls.values():
            if call.model_name in self.models:
                self._interface(call, call.model_name)
        saved_interfaces = state["interfaces"]
        for (name, settings), interface in self._interfaces.items():
            former = f"{name} {settings}"  # name used by older checkpoints
            found = saved_interfaces.get(
                self._checkpoint_name(name, settings), saved_interfaces.get(former)
            )
            if found is None:
                raise CheckpointError(
                    f"it has no state of the interface of {self._checkpoint_name(name, settings)}",
                    where=where,
                    fix="resume with the settings and code that wrote the checkpoint",
                )
            interface.load_state_dict(found)


def _settings(call: MFCDef) -> str:
    """Serialises the settings that determine a call's interface."""
    return json.dumps(to_plain(call.interface_impl), sort_keys=True)


def _vocabulary_hash(tokenizer: Any) -> str:
    """Returns the SHA-256 of which token each id stands for; empty without a tokenizer.

    It takes a fraction of a second for a vocabulary of 150,000.
    """
    if tokenizer is None:
        return ""
    by_id = sorted((i, token) for token, i in tokenizer.get_vocab().items())
    return hashlib.sha256(json.dumps(by_id).encode()).hexdigest()
