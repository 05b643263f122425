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
from realsys.models.shape import ModelShape
from realsys.planner.allocation import CallAllocation
from realsys.planner.gpu_models import Device, Efficiency
from realsys.planner.placed import RoleModel, Workload
from realsys.planner.time.costs import Allocation
from realsys.planner.time.simulated_timeline import Overheads
from realsys.weights.layouts.holdings import FSDP_WHOLE_BYTES

RULE_S = 2e-4  # a rule on one answer
OPTIMIZER_BYTES = 28  # a weight: master, two moments and gradient are read, three written
OPTIMIZER_STATE_BYTES = 12
GRADIENT_BYTES = 4
KEY_BYTES = 8  # a token of a key that another call made


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


# ---- Floating-point operations and bytes of a decoder-only model (pure).
#
# A multiplication and an addition count as two. Counted are matrix products only (arXiv:2001.08361,
# section 2.1; arXiv:2104.04473, appendix): 2 a weight and token forward, twice that backward; attention
# scores and their use, ``2 · s · q`` each for a token that looks at ``s`` others, half of them on average.


def matmul_weights(shape: ModelShape) -> tuple[int, int]:
    """Number of weights by which a token is multiplied: (of one layer, of the head)."""
    hidden = shape.hidden_size
    attention = hidden * (2 * shape.q_size + 2 * shape.kv_size)
    layer = attention + 3 * hidden * shape.intermediate_size
    return layer, hidden * (1 if shape.critic else shape.vocab_size)


def forward_flops(shape: ModelShape, *, tokens: float, length: float) -> float:
    """Operations of a forward pass over ``tokens`` tokens in sequences of ``length`` tokens."""
    layer, head = matmul_weights(shape)
    products = 2.0 * tokens * (shape.num_layers * layer + head)
    scores = 4.0 * tokens * (length / 2) * shape.q_size * shape.num_layers
    return products + scores


def decode_flops(shape: ModelShape, *, sequences: float, length: float) -> float:
    """Operations of decoding one more token for each of ``sequences`` sequences of ``length`` tokens."""
    # The new token looks at all others, those of a forward pass at half of them on average.
    return forward_flops(shape, tokens=sequences, length=2 * length)


def cache_bytes_per_token(shape: ModelShape, *, item_bytes: int) -> int:
    """Bytes of keys and values that generation keeps per token."""
    return 2 * shape.num_layers * shape.kv_size * item_bytes


# ---- Bytes of a weight movement between two topologies, computed without boxes (pure).


def bytes_to_receive(
    weight_bytes: float, source: CallAllocation, target: CallAllocation, *, sharded: bool
) -> dict[int, float]:
    """Bytes that each worker of the target receives from others, assuming evenly split weights.

    On the same workers the parts that a worker holds before and after are compared; elsewhere a worker
    of both copies is taken to hold of its new part what it holds of any other. realloc_plan.py counts
    exactly; this is for comparing many layouts.

    Args:
        sharded: the source cuts weights along its data axis too (backend fsdp).
    """
    found = {}
    for rank, worker in enumerate(target.workers):
        new = _part(target.topology, rank, sharded=False)
        here = 0.0
        if worker in source.workers:
            old = _part(source.topology, source.workers.index(worker), sharded=sharded)
            alike = source.workers == target.workers
            here = _overlap(new, old) if alike else _size(new) * _size(old)
        found[worker] = weight_bytes * (_size(new) - here)
    return found


_Part = tuple[tuple[float, float], ...]  # of the layers, of a layer, of that: begin and end


def _part(topo: ProcessTopology, rank: int, *, sharded: bool) -> _Part:
    """Part of the weights that a process holds, as a box in the unit cube."""
    pipeline, data, tensor = topo.coordinate(rank)
    degrees = ((pipeline, topo.pipeline), (tensor, topo.tensor), (data, topo.data * sharded or 1))
    return tuple((i / n, (i + 1) / n) if n > 1 else (0.0, 1.0) for i, n in degrees)


def _size(part: _Part) -> float:
    return math.prod(end - begin for begin, end in part)


def _overlap(one: _Part, other: _Part) -> float:
    return math.prod(
        max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a, b in zip(one, other, strict=True)
    )
