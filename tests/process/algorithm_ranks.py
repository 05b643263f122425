"""Updates by every algorithm on several ranks: cases of test_algorithms_alike.py, as a rank runs them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import megatron_world as world
import torch
from estimators_named import estimator

from realsys.api.basics.choice import kinds_of
from realsys.api.basics.estimators import AnswerEstimator
from realsys.api.basics.losses import CovarianceLoss, PolicyLoss
from realsys.api.model import GenerationHyperparameters, Model
from realsys.backends.fsdp import FSDPBackend
from realsys.backends.megatron_backend import MegatronBackend
from realsys.data.sequence_sample import SequenceSample
from realsys.interfaces.answers import INPUT
from realsys.interfaces.ppo.ppo_actor import PPOActorInterface
from realsys.interfaces.ppo.teacher import TOP_IDS, TOP_LOGPROBS, TeacherInterface

TEACHER = "packed_teacher_logprobs_big"
VERSION, STALENESS = 5, 2
COMMON: dict[str, Any] = {
    "gen": GenerationHyperparameters(max_new_tokens=20),
    "advantage": estimator("dr_grpo"),
    "ppo_n_minibatches": 1,
    "ppo_epochs": 1,
    "kl_ctl": 0.1,
    "early_stop_imp_ratio": None,
    "max_reward_clip": 100.0,
}


def _losses() -> dict[str, dict[str, Any]]:
    """Every loss that is built in, as published where that says how tokens add up."""
    found: dict[str, dict[str, Any]] = {}
    for name, kind in sorted(kinds_of(PolicyLoss).items()):
        made = kind(share=0.2) if issubclass(kind, CovarianceLoss) else kind()
        found[f"loss={name}"] = {"loss": made}
    found["loss=gspo"]["loss_aggregation"] = "seq_mean_token_mean"
    return found


ALGORITHMS: dict[str, dict[str, Any]] = {
    "ppo": {"advantage": estimator("gae"), "gae_lambda": 0.9, "ppo_epochs": 2},
    "ppo with lambda by length": {"advantage": estimator("gae"), "gae_length_alpha": 0.3},
    **{
        f"advantage={name}": {"advantage": estimator(name)}
        for name in sorted(kinds_of(AnswerEstimator))
        if name != "gdpo"  # its parts of rewards: a unit test
    },
    **_losses(),
    "adv_norm=running": {"adv_norm": "running"},
    "kl in the loss": {"kl_in": "loss"},
    "kl in the loss, unbiased": {"kl_in": "loss", "kl_estimator": "k3", "kl_unbiased": True},
    "entropy": {"entropy_coef": 0.05, "entropy_target": 3.0},
    "nll": {"nll_coef": 0.3},
    "drifted answers": {"opsm_delta": 0.01},
    "dapo": {"mask_truncated": True, "overlong_buffer_len": 4},
    "teacher": {"advantage": estimator("none"), "teachers": {TEACHER: 1.0}, "kl_ctl": 0.0},
    "teacher's top tokens": {"advantage": estimator("none"), "forward_teachers": {"big": 0.5}},
    "top entropy": {"recompute_logprob": True, "top_entropy_share": 0.4},
}
# For answers of older weights: decoupled PPO and bounds.
OFF_POLICY: dict[str, dict[str, Any]] = {
    "sync": {},
    "async": {"use_decoupled_loss": True, "correction": "cap", "max_staleness": STALENESS},
}
# Backend and layout → who holds it, in the world of megatron_world.py.
PLACES = {
    "fsdp, two ranks": ("fsdp", "d2t1p1"),
    "megatron, tensor": ("megatron", "d1t2p1"),
    "megatron, data and stages": ("megatron", "d2t1p2"),
}


def experience() -> SequenceSample:
    """Answers of a policy that is near the models' own, with everything that any algorithm reads."""
    base, rng = world.batch(), torch.Generator().manual_seed(1)
    num = sum(base.piece_lengths(INPUT))
    start = -math.log(world.VOCABULARY)
    keys = ("packed_logprobs", "packed_prox_logprobs", "packed_ref_logprobs", TEACHER, "values")
    per_token = {key: start + 0.3 * torch.randn(num, generator=rng) for key in keys}
    per_token["packed_prox_entropy"] = torch.rand(num, generator=rng)
    per_token["packed_versions"] = VERSION - torch.randint(0, STALENESS + 1, (num,), generator=rng)
    top = torch.randn(num, world.VOCABULARY, generator=rng).log_softmax(1).topk(4)
    per_token |= {TOP_IDS + "big": top.indices.int(), TOP_LOGPROBS + "big": top.values}
    data = {
        **per_token,
        "rewards": torch.tensor([1.0, 0.0, 1.0, 0.0, 0.5, 2.0, 0.0]),
        "seq_no_eos_mask": torch.tensor([False, False, True, False, False, False, True]),
    }
    sequences = [[1] * len(pieces) for pieces in world.LENGTHS]
    lengths = {key: world.LENGTHS if key in per_token else sequences for key in data}
    return base.update(SequenceSample.from_tensors("abcd", lengths, data))


def read_by(settings: Mapping[str, Any], data: SequenceSample) -> SequenceSample:
    """Without keys that a run with these settings has not."""
    off_policy = settings.get("use_decoupled_loss") or settings.get("recompute_logprob")
    gone = () if off_policy else ("packed_prox_logprobs", "packed_prox_entropy")
    versions = () if settings.get("max_staleness") else ("packed_versions",)
    return data.select(data.keys - {*gone, *versions})


def cases() -> dict[str, dict[str, Any]]:
    """All settings by name: losses with answers of older weights, what comes before them without."""
    found = {}
    for name, changes in ALGORITHMS.items():
        with_both = name in ("ppo", "loss=ppo", "drifted answers")
        one = "async" if name.startswith("loss=") else "sync"
        for schedule in OFF_POLICY if with_both else (one,):
            found[f"{name}, {schedule}"] = {**COMMON, **changes, **OFF_POLICY[schedule]}
    return found


def updated(model: Model, settings: Mapping[str, Any], data: SequenceSample) -> dict[str, float]:
    """Makes an update; returns its figures."""
    model.version.global_step = VERSION
    found: dict[str, float] = PPOActorInterface(**settings).train_step(
        model, read_by(settings, data), world.MicroBatchSpec(max_tokens_per_mb=25)
    )
    return found


def trained(model: Model, backend: str) -> Model:
    """The model in a training engine."""
    kind = {"fsdp": FSDPBackend, "megatron": MegatronBackend}[backend]
    return kind(optimizer=world.OPTIMIZER).initialize(model, world.SPEC)


def rank_main(index: int, folder: str) -> None:
    """Runs in each of the world's processes. The cases of a place share a model, which begins each anew."""
    rank, every = world.Rank(index, folder), experience()
    for place, (backend, layout) in PLACES.items():
        model = rank.model("llama", layout)
        if model is None:
            continue
        engine = trained(model, backend).module
        start = engine.state_dict()
        rank.found[f"{place}: said"] = said(model, every)
        _, data, _ = model.topology.coordinate(model.rank)
        share = every.take(world.SHARES[model.topology.data][data])
        for name, settings in cases().items():
            engine.load_state_dict(start)
            rank.found[f"{place}: {name}"] = updated(model, settings, share)
    rank.done()


def said(model: Model, data: SequenceSample) -> dict[str, list[float]]:
    """What calls before an update say of answers: a teacher's top tokens, and entropies."""
    spec, gen = world.MicroBatchSpec(max_tokens_per_mb=25), COMMON["gen"]
    data = data.select([INPUT])
    top = TeacherInterface(gen=gen, top_k=3).inference(model, data, spec)
    own = PPOActorInterface(gen=gen, with_entropy=True).inference(model, data, spec)
    followed = torch.ones(len(data.data[INPUT]), dtype=torch.bool)
    ends = torch.tensor([0, *data.piece_lengths(INPUT)]).cumsum(0)
    followed[ends[:-1]] = False
    found = {**top.data, **own.data}
    return {name: x[followed].flatten().tolist() for name, x in found.items()}
