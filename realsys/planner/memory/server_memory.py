"""Bytes of generation servers and of evaluators: on their GPUs, and on their hosts (pure).

An embedded server holds the weights, new ones beside them during an update (or in host memory, see
``EmbeddedSettings.staging``), the prefix cache, and a key-value cache in the remaining memory.
SGLang and vLLM
manage their GPUs themselves: only the weights' size is checked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from realsys.api.experiment import ExperimentConfig
from realsys.api.model import ModelInterfaceType, ProcessTopology
from realsys.api.worker_configs import Evaluator, GenerationServer
from realsys.generation.embedded_settings import EmbeddedSettings, stages_on_gpu
from realsys.models.shape import DTYPE_BYTES, ModelShape
from realsys.planner.memory.copy_memory import (
    HeldModel,
    StepSizes,
    Terms,
    bytes_of_generation,
    call_terms,
)
from realsys.planner.memory.host_memory import PROCESS_BYTES
from realsys.planner.memory.memory_of_workers import longest_prompt, model_shapes, step_sizes
from realsys.planner.placed import shape_at

_ONE = ProcessTopology()


@dataclass(frozen=True, kw_only=True)
class ServerMemory:
    """Memory needs of one server or evaluator.

    Attributes:
        what: short description.
        terms: bytes of each of its GPUs, with the minimum cache.
        cache_token: bytes of one token in the cache; 0: the engine divides its GPU itself.
        longest: tokens of the longest prompt and answer.
        host: bytes of host memory.
    """

    what: str
    terms: Terms
    cache_token: float = 0.0
    longest: int = 0
    host: Terms = field(default_factory=dict)

    @property
    def bytes(self) -> float:
        """Minimum bytes per GPU."""
        return sum(self.terms.values())

    def tokens_beside(self, usable: float) -> int:
        """Number of tokens that fit into the cache on a GPU."""
        rest = usable - self.bytes + self.terms.get("cache", 0.0)
        return int(max(0.0, rest) / self.cache_token) if self.cache_token else 0


def memory_of_server(
    config: ExperimentConfig, usable: float | None = None, made_before: ModelShape | None = None
) -> ServerMemory | None:
    """Computes the needs of each generation server with a GPU; None if there is none or sizes are
    unknown.

    Args:
        usable: usable bytes of a GPU; None: unknown.
        made_before: sizes of the model that an earlier phase makes.
    """
    if not config.generation_server:
        return None
    server = config.generation_server[0]
    shape = shape_at(server.model_path, made_before)
    if shape is None:
        return None
    sizes = step_sizes(config)
    if server.backend_type != "embedded":
        return _fronted(server, shape)
    return _embedded(server.backend_args, shape, sizes, usable)


def _fronted(server: GenerationServer, shape: ModelShape) -> ServerMemory:
    weights = shape.num_params * 2.0
    return ServerMemory(
        what=server.backend_type,
        terms={"weights": weights / server.tp_size},
        host={"process": float(server.tp_size * PROCESS_BYTES), "new weights": weights},
    )


def _embedded(
    args: Mapping[str, Any], shape: ModelShape, sizes: StepSizes, usable: float | None
) -> ServerMemory:
    settings = EmbeddedSettings.from_args({"dtype": "bfloat16", **args})
    model = HeldModel(
        shape=shape, dtype=settings.dtype, backend="inference", max_cache_tokens=sizes.length
    )
    weights = float(shape.num_params * model.item_bytes)
    needs = bytes_of_generation(shape, model.item_bytes)
    call = call_terms(model, _ONE, 0, ModelInterfaceType.GENERATE, sizes)
    token = needs.cached_token
    terms = {
        "weights": weights,
        "prefixes": float(settings.prefix_bytes),
        "reading prompts": call["reading prompts"],
        "logits": float(needs.logits(settings.max_running)),
        "cache": token * max(sizes.length, settings.max_tokens or 0),
    }
    if settings.quantize != "none":
        terms["weights of eight bits"] = weights / model.item_bytes
    server = ServerMemory(
        what="embedded",
        terms=terms,
        cache_token=token,
        longest=sizes.length,
        host={"process": float(PROCESS_BYTES), "new weights": weights},
    )
    staging = settings.staging
    if staging == "auto" and usable is not None:
        beside = server.tokens_beside(usable - weights)
        staging = "gpu" if stages_on_gpu(beside, settings.max_tokens or sizes.length) else "host"
    if staging == "host":
        return replace(server, what="embedded, new weights in host memory")
    return replace(server, terms={**terms, "new weights": weights})


def memory_of_evaluator(
    config: ExperimentConfig, made_before: ModelShape | None = None
) -> ServerMemory | None:
    """Computes the needs of the checkpoint evaluator, if it has a GPU; as ``memory_of_server``."""
    if not config.evaluator:
        return None
    evaluator: Evaluator = config.evaluator[0]
    shape = model_shapes(config, made_before).get(evaluator.role)
    if shape is None:
        return None
    prompts = [longest_prompt(asked.dataset.args) for asked in evaluator.benchmarks.values()]
    sizes = step_sizes(config)
    sizes = replace(sizes, prompt_tokens=max([sizes.prompt_tokens, *prompts]))
    bound = evaluator.mb_spec
    model = HeldModel(
        shape=shape,
        dtype=evaluator.dtype,
        backend="inference",
        max_cache_tokens=bound.max_cache_tokens or sizes.length,
    )
    call = call_terms(model, _ONE, 0, ModelInterfaceType.GENERATE, sizes)
    weights = float(shape.num_params * model.item_bytes)
    largest = max(weight.numel for weight in shape.weights())
    return ServerMemory(
        what="saved model",
        terms={"weights": weights, **call},
        cache_token=bytes_of_generation(shape, model.item_bytes).cached_token,
        longest=sizes.length,
        host={"process": float(PROCESS_BYTES), "loading": 2.0 * largest * DTYPE_BYTES["float32"]},
    )
