"""Seconds of calls from formulas: operations and bytes divided by the device's rates (pure).

Good for comparing plans of one model on one kind of GPU; seconds to rely on come from an earlier run
(profiled.py), which uses the ratios of these. Sources: time of tensor parallelism from its four
all-reduces a layer (arXiv:1909.08053, section 3), the bubble of a pipeline (p − 1) / m
(arXiv:2104.04473, section 2.2), a ring's (n − 1) / n, generation bound by reading weights and cache
(arXiv:2211.05102, section 2).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from realsys.api.dataflow import MFCDef
from realsys.api.errors import ConfigError
from realsys.api.model import ModelInterfaceType, ProcessTopology
from realsys.models.shape import DTYPE_BYTES, ModelShape
from realsys.planner.allocation import CallAllocation
from realsys.planner.gpu_models import Device, Efficiency
from realsys.planner.time.costs import Allocation
from realsys.planner.time.flops import cache_bytes_per_token, decode_flops, forward_flops
from realsys.planner.time.realloc_bytes import bytes_to_receive
from realsys.planner.time.simulated_timeline import Overheads
from realsys.weights.layouts.holdings import FSDP_WHOLE_BYTES

RULE_S = 2e-4  # a rule on one answer
OPTIMIZER_BYTES = 28  # a weight: master, two moments and gradient are read, three written
OPTIMIZER_STATE_BYTES = 12
GRADIENT_BYTES = 4
KEY_BYTES = 8  # a token of a key that another call made


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Workload of a step.

    ``updates`` are optimizer steps of a training call, ``epochs`` its passes over the batch.
    """

    sequences: int
    prompt_tokens: float
    answer_tokens: float
    updates: int = 1
    epochs: int = 1

    @property
    def length(self) -> float:
        """Tokens of a sequence."""
        return self.prompt_tokens + self.answer_tokens

    @property
    def tokens(self) -> float:
        """Tokens of a step."""
        return self.sequences * self.length


@dataclass(frozen=True, kw_only=True)
class RoleModel:
    """A role's model as the formulas need it. ``shape`` None: a rule without weights."""

    shape: ModelShape | None
    dtype: str = "bfloat16"
    backend: str = "fsdp"
    recompute: bool = False
    adapters: bool = False
    max_tokens_per_mb: int | None = None

    @property
    def item_bytes(self) -> int:
        """Bytes of a weight."""
        return DTYPE_BYTES[self.dtype]

    @property
    def weight_bytes(self) -> float:
        """Bytes of all weights."""
        return float(self.shape.num_params * self.item_bytes) if self.shape else 0.0


@dataclass(frozen=True, kw_only=True)
class AnalyticCosts:
    """Cost formulas for the roles of one experiment."""

    roles: Mapping[str, RoleModel]
    workload: Workload
    device: Device
    trained: frozenset[str] = frozenset()  # roles
    gpus_per_node: int = 8
    efficiency: Efficiency = field(default_factory=Efficiency)
    overheads: Overheads = field(default_factory=lambda: Overheads(call_s=0.01, step_s=0.05))

    # ---- Costs interface ----------------------------------------------------------------------

    def call_s(self, call: MFCDef, place: CallAllocation) -> float:
        """Seconds of the call on each of its workers."""
        model = self._role(call.role)
        if model.shape is None:
            return RULE_S * self.workload.sequences / place.topology.data
        if call.interface_type is ModelInterfaceType.GENERATE:
            return self._generation_s(model, model.shape, place)
        if call.is_train:
            return self._training_s(model, model.shape, place)
        return self._passes_s(model, model.shape, place, passes=1, tokens=self.workload.tokens)

    def served_s(
        self, model: RoleModel, *, servers: int, gpus: int, most_rows: int | None
    ) -> float:
        """Seconds in which so many generation servers make a step's answers.

        Args:
            gpus: of a server, which share its work evenly.
            most_rows: answers that a server makes at once; None: all.
        """
        assert model.shape is not None
        place = CallAllocation(
            workers=tuple(range(servers)), topology=ProcessTopology(data=servers)
        )
        rows = self.workload.sequences / servers
        waves = max(1.0, rows / most_rows) if most_rows else 1.0
        at_once = replace(self.workload, sequences=math.ceil(self.workload.sequences / waves))
        one = replace(self, workload=at_once)._generation_s(model, model.shape, place)
        return waves * one / max(1, gpus)

    def fetch_s(self, call: MFCDef, place: CallAllocation, sources: Allocation) -> float:
        """Seconds to fetch one key of every other call, each worker its part of the batch."""
        rows = self.workload.tokens / place.topology.data * KEY_BYTES * len(sources)
        far = [w for source in sources.values() for w in source.workers]
        return len(sources) * self.device.latency_s + rows / self._bandwidth((*place.workers, *far))

    def realloc_s(self, role: str, source: CallAllocation, target: CallAllocation) -> float:
        """Seconds by the larger of what one worker must receive and what one must send."""
        model = self._role(role)
        received = bytes_to_receive(
            model.weight_bytes, source, target, sharded=model.backend == "fsdp"
        )
        sent = sum(received.values()) / len(source.workers)
        workers = (*source.workers, *target.workers)
        most = max(sent, *received.values())
        return self.device.latency_s + most / self._bandwidth(workers) if most else 0.0

    def offload_s(self, role: str, place: CallAllocation) -> float:
        """Seconds to move weights, and a trained role's optimizer state, once over the bus."""
        model = self._role(role)
        trained = OPTIMIZER_STATE_BYTES if model.shape and role in self.trained else 0
        numbers = model.shape.num_params if model.shape else 0
        held = numbers * (model.item_bytes + trained) / place.topology.world_size
        return held / self.device.host_bandwidth

    def together(self, call: MFCDef, place: CallAllocation) -> bool:
        """False for copies that are whole on every worker, which compute independently."""
        model, topo = self._role(call.role), place.topology
        if topo.world_size == 1 or model.shape is None:
            return False
        return call.is_train or model.backend != "inference" or topo.tensor * topo.pipeline > 1

    def _role(self, role: str) -> RoleModel:
        if role in self.roles:
            return self.roles[role]
        raise ConfigError(
            f"the sizes of {role}'s model are not known", where="plan search", fix="give its path"
        )

    # ---- formulas -----------------------------------------------------------------------------

    def _bandwidth(self, workers: tuple[int, ...]) -> float:
        nodes = {worker // self.gpus_per_node for worker in workers}
        device = self.device
        link = device.link_bandwidth if len(nodes) == 1 else device.network_bandwidth
        return link * self.efficiency.network

    def _compute_s(self, model: RoleModel, flops: float) -> float:
        return flops / (self.device.flops(model.dtype) * self.efficiency.matmul)

    def _memory_s(self, num_bytes: float) -> float:
        return num_bytes / (self.device.memory_bandwidth * self.efficiency.memory)

    def _passes_s(
        self,
        model: RoleModel,
        shape: ModelShape,
        place: CallAllocation,
        *,
        passes: int,
        tokens: float,
    ) -> float:
        """Seconds of ``passes`` times the work of a forward pass over ``tokens`` tokens of the batch."""
        topo, device = place.topology, self.device
        mine = tokens / topo.data
        flops = forward_flops(shape, tokens=mine, length=self.workload.length)
        micro_batches = self._micro_batches(model, mine)
        layers = shape.num_layers / topo.pipeline
        activations = mine * shape.hidden_size * model.item_bytes
        bandwidth = self._bandwidth(place.workers)
        ring = 2 * (topo.tensor - 1) / topo.tensor
        tensor_s = 2 * layers * (ring * activations / bandwidth)
        if topo.tensor > 1:
            tensor_s += 2 * layers * micro_batches * device.latency_s
        launch_s = micro_batches * layers * device.launch_s
        stage_s = self._compute_s(model, flops / topo.tensor / topo.pipeline) + tensor_s + launch_s
        bubble = (topo.pipeline - 1) / micro_batches
        hops_s = (topo.pipeline > 1) * (activations / bandwidth + micro_batches * device.latency_s)
        gather_s = 0.0
        if model.backend == "fsdp" and topo.data > 1:
            part = model.weight_bytes / topo.tensor * (topo.data - 1) / topo.data
            pieces = 1 if model.weight_bytes <= FSDP_WHOLE_BYTES else layers
            gather_s = micro_batches * (part / bandwidth + device.latency_s * pieces)
        return passes * (stage_s * (1 + bubble) + hops_s + gather_s)

    @staticmethod
    def _micro_batches(model: RoleModel, tokens: float) -> int:
        limit = model.max_tokens_per_mb
        return max(1, math.ceil(tokens / limit)) if limit else 1

    def _training_s(self, model: RoleModel, shape: ModelShape, place: CallAllocation) -> float:
        work, topo = self.workload, place.topology
        passes = 4 if model.recompute else 3
        tokens = work.tokens * work.epochs / work.updates
        update_s = self._passes_s(model, shape, place, passes=passes, tokens=tokens)
        held = shape.num_params / topo.tensor / topo.pipeline
        if topo.data > 1:
            in_layers = model.backend == "fsdp" and model.weight_bytes > FSDP_WHOLE_BYTES
            reduced = self._micro_batches(model, tokens / topo.data) if in_layers else 1
            number_bytes = reduced * GRADIENT_BYTES + model.item_bytes
            moved = held * number_bytes * (topo.data - 1) / topo.data
            update_s += moved / self._bandwidth(place.workers) + 2 * self.device.latency_s
        update_s += self._memory_s(held / topo.data * OPTIMIZER_BYTES)
        return work.updates * update_s

    def _generation_s(self, model: RoleModel, shape: ModelShape, place: CallAllocation) -> float:
        """Seconds of generation: every worker has the whole weights and answers its part of the prompts.

        Backend fsdp answers a slot's prompts on each of its processes, the others deal them.
        """
        work, world = self.workload, place.topology.world_size
        ranks = place.topology.data if model.backend == "fsdp" else world
        sequences = math.ceil(work.sequences / ranks)
        prefill = forward_flops(
            shape, tokens=sequences * work.prompt_tokens, length=work.prompt_tokens
        )
        middle = work.prompt_tokens + work.answer_tokens / 2
        cache = cache_bytes_per_token(shape, item_bytes=model.item_bytes) * sequences * middle
        one = max(
            self._memory_s(model.weight_bytes + cache),
            self._compute_s(model, decode_flops(shape, sequences=sequences, length=middle)),
        )
        steps = max(work.answer_tokens, 1.0)
        seconds = self._compute_s(model, prefill) + steps * (
            one + shape.num_layers * self.device.launch_s
        )
        if world > 1 and model.backend != "inference":
            missing = model.weight_bytes * (world - 1) / world
            seconds += missing / self._bandwidth(place.workers)
        return seconds
