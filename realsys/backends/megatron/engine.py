"""Engines over a model that several processes hold together along tensor, pipeline and data axes.

All processes of a slot get the same data and call together; results are equal on all of them.
Weights of other shapes (Hugging Face's) exist whole only for generation and saving.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from realsys.api.data import MicroBatchSpec
from realsys.api.errors import CheckpointError, ConfigError, InternalError
from realsys.api.model import (
    GenerationHyperparameters,
    LossFn,
    LossWeightFn,
    Model,
    ModuleSource,
    PipelinableEngine,
    ProcessTopology,
)
from realsys.api.options import OptimizerOptions
from realsys.backends.data_parallel import DataParallel
from realsys.backends.engine import INPUT, PostHook, answer_prompts, weights_of
from realsys.backends.lr_schedule import learning_rate
from realsys.backends.megatron import compat
from realsys.backends.megatron.company import Company
from realsys.backends.megatron.modules import (
    has_transformer_engine,
    make_stage,
    transformer_config,
)
from realsys.backends.megatron.optimizer import StageOptimizer
from realsys.backends.megatron.schedule import (
    figures_from_last_stage,
    run_microbatches,
    tensor_from_last_stage,
)
from realsys.backends.megatron.slot_generation import generate_dealt
from realsys.backends.megatron.weights import Slice, load, stage_slices, views_of
from realsys.backends.megatron.whole_model import gathered, skeleton_of
from realsys.backends.offload import HostMemory
from realsys.backends.weighted_means import WeightedMeans
from realsys.data_plane.sequence_sample import SequenceSample
from realsys.models.hf import save_hf
from realsys.models.shape import ModelShape
from realsys.models.source import source_of
from realsys.param_realloc.boxes import Box
from realsys.param_realloc.layouts import layout_problems


@dataclass(frozen=True, kw_only=True)
class Part:
    """This process's part of a model: its stage with weights, and all that stands around it."""

    source: ModuleSource
    shape: ModelShape
    company: Company
    stage: nn.Module
    holdings: Sequence[Sequence[Slice]]  # by rank of the copy

    @staticmethod
    def of(model: Model, *, recompute: bool = False, sequence_parallel: bool = False) -> Part:
        """Builds the stage; fills it from the model's source unless another copy will.

        Raises:
            ConfigError: the model can't be cut so, or does what Megatron's layers don't.
        """
        source = source_of(model)
        shape, topo = source.shape(), model.topology
        if problems := layout_problems(shape, topo, "megatron"):
            raise problems[0]
        compat.prepare_process()
        company = Company.of(model)
        dtype: torch.dtype = getattr(torch, source.dtype)
        config = transformer_config(
            shape,
            source.config(),
            topo,
            dtype=dtype,
            recompute=recompute,
            sequence_parallel=sequence_parallel and topo.tensor > 1,
        )
        fused = has_transformer_engine()
        holdings = [stage_slices(shape, topo, r, fused_norms=fused) for r in range(topo.world_size)]
        with company.active():
            stage = make_stage(shape, source.config(), topo, config, stage=company.coordinate[0])
        if model.filled:
            load(views_of(stage, holdings[model.rank]), source)
        return Part(source=source, shape=shape, company=company, stage=stage, holdings=holdings)


class MegatronInferenceEngine(PipelinableEngine):
    """``forward``, ``eval_batch``, ``generate``, ``save_to_hf``; ``train_batch`` is refused."""

    def __init__(self, model: Model, part: Part) -> None:
        self.module: nn.Module = part.stage
        self.part, self.company = part, part.company
        self.device = torch.device(model.device)
        self.base_seed, self.rank = model.base_seed, model.rank
        self.ranks = DataParallel.of(model)
        self._config: Any = part.stage.config
        self._replica: nn.Module | None = None
        self._replica_is_old = True
        self._host_memory: HostMemory | None = None  # where the weights are while offloaded
        self._prepare(training=False)

    def _prepare(self, *, training: bool) -> None:
        self.module.train(training)
        self.module.requires_grad_(training)

    def train_batch(
        self,
        input_: SequenceSample,
        *,
        loss_fn: LossFn,
        loss_weight_fn: LossWeightFn,
        token_normalize_scope: Literal["global", "dp"] = "global",
        mb_spec: MicroBatchSpec | None = None,
        version_steps: int = 0,
    ) -> dict[str, float]:
        raise ConfigError(
            "a model with the inference backend can't be trained",
            where="MegatronInferenceEngine.train_batch",
            fix="give this role a training backend, e.g. backend=megatron",
        )

    @torch.no_grad()
    def eval_batch(
        self,
        input_: SequenceSample,
        *,
        loss_fn: LossFn,
        loss_weight_fn: LossWeightFn,
        mb_spec: MicroBatchSpec | None = None,
    ) -> dict[str, float]:
        pieces = self.microbatches(input_, mb_spec)
        means = WeightedMeans(self.ranks, weights_of(pieces, loss_weight_fn), "global")

        def count(output: Tensor, i: int) -> None:
            means.add(loss_fn(output, pieces[i][1]), means.scales[i])

        self._run(pieces, count)
        return self._figures(means)

    @torch.no_grad()
    def forward(
        self,
        input_: SequenceSample,
        *,
        mb_spec: MicroBatchSpec | None = None,
        post_hook: PostHook | None = None,
    ) -> Tensor:
        pieces = self.microbatches(input_, mb_spec)
        per_id: list[Tensor] = [torch.empty(0)] * input_.batch_size

        def keep(output: Tensor, i: int) -> None:
            indices, mb = pieces[i]
            if post_hook is not None:
                output = post_hook(output, mb)
            rows = torch.split(output, list(mb.meta.rows_per_id(INPUT)))
            for k, x in zip(indices, rows, strict=True):
                per_id[k] = x

        self._run(pieces, keep)
        joined = torch.cat(per_id) if self.company.is_last_stage else None
        return tensor_from_last_stage(joined, self.company, self.device)

    def microbatches(
        self, input_: SequenceSample, mb_spec: MicroBatchSpec | None
    ) -> list[tuple[list[int], SequenceSample]]:
        """Indices and micro-batches of ``input_`` on this engine's device.

        Equal on all processes of a slot. Those of other data-parallel ranks may be more or fewer:
        they meet at the end of a step only.
        """
        self._must_be_here("a pass")
        return input_.to(self.device).microbatches(mb_spec or MicroBatchSpec())

    def _run(
        self,
        pieces: Sequence[tuple[list[int], SequenceSample]],
        use_output: Any,
        *,
        module: nn.Module | None = None,
    ) -> None:
        """All micro-batches through all stages; ``use_output`` is called on the last."""
        with self.company.active():
            run_microbatches(
                module or self.module,
                [mb for _, mb in pieces],
                use_output,
                self.company,
                backward=module is not None,
                width_multiple=self.company.topology.tensor
                if self._config.sequence_parallel
                else 1,
            )

    def _figures(self, means: WeightedMeans) -> dict[str, float]:
        figures = means.result() if self.company.is_last_stage else None
        return figures_from_last_stage(figures, self.company)

    # ---- weights ------------------------------------------------------------------------------

    def held_weights(self) -> Mapping[str, Sequence[tuple[Box, Tensor]]]:
        self._must_be_here("held_weights")
        return views_of(self.module, self.part.holdings[self.rank])

    def weights_changed(self) -> None:
        self._replica_is_old = True

    def whole_module(self) -> nn.Module:
        """A Hugging Face module, refreshed when weights have changed (collective over the slot)."""
        self._must_be_here("generate")
        if self._replica is None:
            self._replica = self.part.source.empty().eval().requires_grad_(False)
        if self._replica_is_old:
            own = dict(self._replica.named_parameters())
            for name, weight in self._gathered():
                own[name].data.copy_(weight)
            self._replica_is_old = False
        return self._replica

    def _gathered(self, *, wanted: bool = True) -> Any:
        topo: ProcessTopology = self.company.topology
        slot = [self.part.holdings[rank] for rank in topo.slot(self.company.coordinate[1])]
        weights = self.part.shape.weights()
        return gathered(self.held_weights(), weights, slot, self.company.slot, wanted=wanted)

    def generate(
        self,
        input_: SequenceSample,
        *,
        tokenizer: Any,
        gconfig: GenerationHyperparameters,
        mb_spec: MicroBatchSpec | None = None,
        seed: int = 0,
    ) -> SequenceSample:
        """As in the base class. Each process of the slot makes a share of the answers."""
        return answer_prompts(
            self.whole_module(),
            input_,
            tokenizer=tokenizer,
            gconfig=gconfig,
            mb_spec=mb_spec,
            base_seed=self.base_seed ^ seed,
            generate=partial(generate_dealt, group=self.company.slot),
        )

    def save_to_hf(self, *, tokenizer: Any, save_dir: str) -> None:
        if self.company.coordinate[1] == 0:  # one slot has the whole model
            state = {}
            for name, weight in self._gathered(wanted=self.rank == 0):
                if self.rank == 0:
                    state[name] = weight.cpu()
            if self.rank == 0:
                save_hf(skeleton_of(self.part.source), tokenizer, save_dir, state_dict=state)
        # Nobody goes on before the directory is whole.
        dist.all_reduce(torch.zeros(1, device=self.device), group=self.company.copy)

    # ---- memory -------------------------------------------------------------------------------

    def offload(self) -> None:
        if self._host_memory is not None:
            return
        self._replica, self._replica_is_old = None, True
        self._host_memory = HostMemory()
        if self.device.type == "cuda":
            self._host_memory.take(x for x in self._own_memory() if x.is_cuda)
            torch.cuda.empty_cache()

    def onload(self) -> None:
        if self._host_memory is not None:
            self._host_memory.give_back()
            self._host_memory = None

    def _must_be_here(self, what: str) -> None:
        """Refuses to touch weights that are parked."""
        if self._host_memory is not None:
            raise InternalError(f"{what} on an offloaded model", where=type(self).__name__)

    def _own_memory(self) -> list[Tensor]:
        """All tensors that this engine keeps between two calls."""
        return [p.data for p in self.module.parameters()]


class MegatronEngine(MegatronInferenceEngine):
    """Trains its part with AdamW; see StageOptimizer for what is sharded how."""

    def __init__(
        self,
        model: Model,
        part: Part,
        options: OptimizerOptions,
        *,
        distributed_optimizer: bool,
        grads_in_float32: bool,
    ) -> None:
        super().__init__(model, part)
        self.options = options
        self.total_steps = model.ft_spec.total_train_steps if model.ft_spec else 0
        self._prepare(training=True)
        with self.company.active():
            self.optimizer = StageOptimizer(
                part.stage,
                part.company,
                options,
                distributed=distributed_optimizer,
                grads_in_float32=grads_in_float32,
            )

    def train_batch(
        self,
        input_: SequenceSample,
        *,
        loss_fn: LossFn,
        loss_weight_fn: LossWeightFn,
        token_normalize_scope: Literal["global", "dp"] = "global",
        mb_spec: MicroBatchSpec | None = None,
        version_steps: int = 0,
    ) -> dict[str, float]:
        pieces = self.microbatches(input_, mb_spec)
        weights = weights_of(pieces, loss_weight_fn)
        means = WeightedMeans(self.ranks, weights, token_normalize_scope)

        def loss(output: Tensor, i: int) -> tuple[Tensor]:
            scale = means.scales[i]
            scaled = means.add(loss_fn(output, pieces[i][1]), scale)
            # Gradients are summed over ranks; the scales are for a mean.
            return (scaled / self.ranks.size if scale else output.sum() * 0.0,)

        self.optimizer.zero_grad()
        self._run(pieces, loss, module=self.optimizer.ddp)
        stats = self._figures(means)
        lr = learning_rate(self.options, step=version_steps, total_steps=self.total_steps)
        with self.company.active():
            stats["grad_norm"] = self.optimizer.step(lr)
        self._replica_is_old = True
        return {**stats, "lr": lr}

    def weights_changed(self) -> None:
        super().weights_changed()
        with self.company.active():
            self.optimizer.take_weights()

    # ---- recovery -----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Copies of this rank's ``weights`` and its shares of the ``optimizer``."""
        weights = {n: p.detach().to("cpu", copy=True) for n, p in self.module.named_parameters()}
        return {"weights": weights, "optimizer": self.optimizer.state_dict()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes back what ``state_dict`` gave on the same rank of the same layout, bit for bit.

        Raises:
            CheckpointError: names or shapes are those of another model or layout.
        """
        own = dict(self.module.named_parameters())
        saved = {n: tuple(x.shape) for n, x in state["weights"].items()}
        if saved != (here := {n: tuple(p.shape) for n, p in own.items()}):
            differing = sorted(n for n in {*saved, *here} if saved.get(n) != here.get(n))
            first = differing[0]
            raise CheckpointError(
                f"{len(differing)} weights differ, e.g. {first}: {saved.get(first)}, "
                f"{here.get(first)} here",
                where="MegatronEngine.load_state_dict",
                fix="resume with the model and the parallel layout that wrote the checkpoint",
            )
        for name, parameter in own.items():
            parameter.data.copy_(state["weights"][name])
        self.optimizer.load_state_dict(state["optimizer"])
        self._replica_is_old = True

    # ---- memory -------------------------------------------------------------------------------

    def _own_memory(self) -> list[Tensor]:
        return [*super()._own_memory(), *self.optimizer.tensors()]
