"""PPO with given costs: the six calls of ``ppo-math``, each of which sleeps so long as it is told.

``realsys launch cost-ppo --import tests/support/cost_plugin.py costs.actor_gen=1.0`` runs the real
master, workers, transfers and files; only the computing is left out, so that what scheduling makes of a
step can be measured. Layouts and places are the settings of ``ppo-math``. Answers are a function of the
question's id, so that two runs of any placement make the same.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch

from experiments.compose import RLExperiment
from experiments.parts.call_placement import RolePlacement
from experiments.ppo_math import ppo_math
from realsys.api import registry
from realsys.api.data import MicroBatchSpec
from realsys.api.dataflow import MFCDef
from realsys.api.errors import ConfigError
from realsys.api.experiment import ExperimentConfig, Preparation
from realsys.api.model import (
    DatasetAbstraction,
    Model,
    ModelAbstraction,
    ModelBackend,
    ModelBackendAbstraction,
    ModelInterface,
    ModelInterfaceAbstraction,
)
from realsys.api.options import option
from realsys.data.sequence_sample import SequenceSample

PROMPT_LEN, LONGEST_ANSWER = 4, 12
PROMPTS = "packed_prompts"
PER_SEQUENCE = {"rewards", "seq_no_eos_mask"}  # the others have a value a token
DTYPES = {
    "packed_input_ids": torch.int64,
    "prompt_mask": torch.bool,
    "seq_no_eos_mask": torch.bool,
}


def answer_lengths(name: str, group_size: int) -> list[int]:
    """Tokens of prompt and answer of a question's answers."""
    draws = [zlib.crc32(f"{name} {i}".encode()) for i in range(group_size)]
    return [PROMPT_LEN + 1 + draw % LONGEST_ANSWER for draw in draws]


def made_up(name: str, key: str, num_rows: int) -> torch.Tensor:
    """Rows of ``key`` of a question: numbers that belong to it."""
    start = zlib.crc32(f"{name} {key}".encode()) % 1000
    rows = torch.arange(start, start + num_rows)
    return (rows % 2 if DTYPES.get(key) is torch.bool else rows).to(DTYPES.get(key, torch.float32))


@dataclass
class CostInterface(ModelInterface):
    """Sleeps, then says what it was asked to say.

    Args:
        seconds: kind of call → how long it takes on each of its data-parallel ranks.
        makes: keys of its answer.
        group_size: answers a question.
    """

    seconds: Mapping[str, float]
    makes: Sequence[str] = ()
    group_size: int = 1

    def generate(
        self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec
    ) -> SequenceSample:
        """Answers whose lengths belong to the question."""
        self._spend("generate")
        return self._sample(data)

    def inference(
        self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec
    ) -> SequenceSample:
        """A value a token or a sequence."""
        self._spend("inference")
        for name, pieces in zip(data.ids, data.meta.seqlens["packed_input_ids"], strict=True):
            assert list(pieces) == answer_lengths(name, self.group_size), (
                "another question's answer"
            )
        return self._sample(data)

    def train_step(
        self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec
    ) -> dict[str, float]:
        """Checks that every row is the one that was made for its question."""
        self._spend("train_step")
        for key in sorted(data.keys):
            rows = torch.split(data.data[key], list(data.meta.rows_per_id(key)))
            for name, row in zip(data.ids, rows, strict=True):
                assert torch.equal(row, made_up(name, key, len(row))), (key, name)
        model.inc_version()
        return {"loss": 1.0 / model.version.global_step, "datapoints": float(data.batch_size)}

    def save(self, model: Model, save_dir: str) -> None:
        """There is nothing to keep but that it was asked for."""
        Path(save_dir).mkdir(parents=True, exist_ok=True)
        (Path(save_dir) / "version").write_text(str(model.version.global_step))

    def _spend(self, kind: str) -> None:
        time.sleep(self.seconds[kind])

    def _sample(self, data: SequenceSample) -> SequenceSample:
        lengths = [answer_lengths(name, self.group_size) for name in data.ids]
        of_key = {
            key: [[1] * len(pieces) for pieces in lengths] if key in PER_SEQUENCE else lengths
            for key in self.makes
        }
        tensors = {
            key: torch.cat(
                [made_up(n, key, sum(p)) for n, p in zip(data.ids, pieces_of, strict=True)]
            )
            for key, pieces_of in of_key.items()
        }
        return SequenceSample.from_tensors(data.ids, of_key, tensors)


class CostBackend(ModelBackend):
    """Makes nothing out of nothing, in every layout."""

    def _initialize(self, model: Model) -> Model:
        return model


def cost_model(**context: Any) -> Model:
    """No weights; the tokenizer is there only because a worker asks for one."""
    return Model(module=None, tokenizer=object(), dtype="float32", **context)


@dataclass
class CostPrompts:
    """``size`` questions of ``PROMPT_LEN`` tokens."""

    _: KW_ONLY
    tokenizer: Any
    seed: int
    size: int
    keys: frozenset[str] = field(init=False, default=frozenset({PROMPTS}))

    def __len__(self) -> int:
        return self.size

    def batch(self, indices: Sequence[int], ids: Sequence[str]) -> SequenceSample:
        """The questions at ``indices``, under the names ``ids``."""
        tokens = torch.tensor(indices).repeat_interleave(PROMPT_LEN)
        return SequenceSample.from_tensors(
            ids, {PROMPTS: [[PROMPT_LEN]] * len(ids)}, {PROMPTS: tokens}
        )


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Seconds of each call on each of its data-parallel ranks."""

    actor_gen: float = option(0.5, "answers", unit="seconds", ge=0)
    rew_inf: float = option(0.05, "scores", unit="seconds", ge=0)
    ref_inf: float = option(0.2, "the reference's log-probabilities", unit="seconds", ge=0)
    critic_inf: float = option(0.2, "values", unit="seconds", ge=0)
    actor_train: float = option(0.4, "the policy's update", unit="seconds", ge=0)
    critic_train: float = option(0.4, "the critic's update", unit="seconds", ge=0)

    @property
    def critical_path_s(self) -> float:
        """A step in which nothing waits but for its inputs."""
        inference = max(self.rew_inf, self.ref_inf, self.critic_inf)
        return self.actor_gen + inference + max(self.actor_train, self.critic_train)

    @property
    def serial_s(self) -> float:
        """A step in which one call follows another."""
        return sum(getattr(self, f.name) for f in fields(self))


@dataclass(frozen=True, kw_only=True)
class CostPPOExperiment(RLExperiment):
    """``ppo-math`` without its computing."""

    costs: Costs = option(Costs(), "how long each call takes")

    def problems(self) -> Iterator[ConfigError]:
        """There are no files, rules or models, and calls that sleep take any batch."""
        yield from ()

    def preparations(self) -> tuple[Preparation, ...]:
        """Nothing to start from."""
        return ()

    def initial_setup(self) -> ExperimentConfig:
        """That of ``ppo-math``, on other questions."""
        config = super().initial_setup()
        questions = DatasetAbstraction("cost_prompts", {"size": self.task.num_questions})
        workers = tuple(replace(w, datasets=(questions,)) for w in config.model_worker)
        return replace(config, model_worker=workers)

    def _model(self, role: str) -> RolePlacement:
        return RolePlacement(
            model=ModelAbstraction("cost_model"), backend=ModelBackendAbstraction("cost")
        )

    def _call(
        self, name: str, role: str, kind: str, interface: ModelInterfaceAbstraction, **more: Any
    ) -> MFCDef:
        cost = ModelInterfaceAbstraction(
            "cost",
            {
                "seconds": {kind: getattr(self.costs, name)},
                "makes": list(more.get("output_keys", ())),
                "group_size": self.group_size,
            },
        )
        more.pop("output_key_remap", None)
        return super()._call(name, role, kind, cost, **more)


registry.register_interface("cost", CostInterface)
registry.register_backend("cost", CostBackend)
registry.register_model("cost_model", cost_model)
registry.register_dataset("cost_prompts", CostPrompts)


def cost_ppo() -> CostPPOExperiment:
    """With the settings of ``ppo-math``."""
    base = ppo_math()
    return CostPPOExperiment(**{f.name: getattr(base, f.name) for f in fields(base)})


registry.register_experiment("cost-ppo", cost_ppo)
