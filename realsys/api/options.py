"""Settings that experiments share: each field with its default, unit, meaning and range, once.

An experiment is a frozen dataclass made of these. ``option`` keeps help, unit and limits beside the
default, so that ``realsys show --config`` can print them and ``range_problems`` can check them all
before anything starts.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from realsys.api.basics.estimators import GAE, AdvantageEstimator
from realsys.api.basics.losses import ClipCovLoss, PolicyLoss, PPOLoss
from realsys.api.basics.option_fields import option as option
from realsys.api.errors import ConfigError
from realsys.api.model import GenerationHyperparameters

_SCALARS = frozenset({str, int, float, bool})


def range_problems(options: Any, *, path: str = "") -> Iterator[ConfigError]:
    """Every value of ``options`` (nested, in tables too) outside the range that its field declares."""
    kind: type = type(options)
    values = {name: getattr(options, name) for name in _rules_of(kind)}
    yield from value_range_problems(kind, values, path=path)


def value_range_problems(
    kind: type, values: Mapping[str, Any], *, path: str = ""
) -> Iterator[ConfigError]:
    """The same of ``values`` for some fields of ``kind``, which need not make one."""
    for field_name, rules in _rules_of(kind).items():
        value = values.get(field_name)
        if value is None:
            continue
        if type(value) not in _SCALARS:  # a plan asks of thousands of values
            where = f"{path}{field_name}"
            if dataclasses.is_dataclass(value):
                yield from range_problems(value, path=f"{where}.")
            elif isinstance(value, Mapping):
                for name, entry in value.items():
                    if dataclasses.is_dataclass(entry):
                        yield from range_problems(entry, path=f"{where}.{name}.")
        for is_broken, rule in rules:
            if is_broken(value):
                where = f"{path}{field_name}"
                yield ConfigError(f"{where} is {value!r}", where=where, fix=f"use {rule}")


@functools.cache
def _rules_of(kind: type) -> dict[str, list[tuple[Callable[[Any], bool], str]]]:
    """Returns the rules that each field's values are to keep: (whether one breaks it, what to use)."""
    return {f.name: list(_rules(f.metadata)) for f in dataclasses.fields(kind)}


def _rules(limits: Mapping[str, Any]) -> Iterator[tuple[Callable[[Any], bool], str]]:
    yield lambda value: isinstance(value, float) and not math.isfinite(value), "a finite number"
    if (ge := limits.get("ge")) is not None:
        yield lambda value: value < ge, f"{ge} or more"
    if (gt := limits.get("gt")) is not None:
        yield lambda value: value <= gt, f"more than {gt}"
    if (le := limits.get("le")) is not None:
        yield lambda value: value > le, f"{le} or less"
    if (lt := limits.get("lt")) is not None:
        yield lambda value: value >= lt, f"less than {lt}"
    if choices := limits.get("choices"):
        yield lambda value: value not in choices, "one of " + ", ".join(choices)


def with_defaults_out_of_range(options: Any) -> Any:
    """Returns the options with its default for each field outside its range, which was reported: what
    else is found wrong has then another cause. A field without a default stays as it is.
    """
    changed: dict[str, Any] = {}
    broken = {p.where for p in range_problems(options)}
    for f in dataclasses.fields(options) if broken else ():
        value = getattr(options, f.name)
        if f.name in broken and f.default is not dataclasses.MISSING:
            changed[f.name] = f.default
        elif dataclasses.is_dataclass(value):
            changed[f.name] = with_defaults_out_of_range(value)
    return dataclasses.replace(options, **changed) if changed else options


MOST_WORKERS = 20_000  # of one kind
LARGEST_SEED = 2**31 - 1  # torch, NumPy and the generation servers take it, whatever is added to it


@dataclass(frozen=True, kw_only=True)
class OptimizerOptions:
    """AdamW and its learning-rate schedule."""

    lr: float = option(1e-5, "peak learning rate", gt=0)
    weight_decay: float = option(0.01, "decoupled weight decay", ge=0)
    beta1: float = option(0.9, "decay of the first moment", ge=0, lt=1)
    beta2: float = option(0.95, "decay of the second moment", ge=0, lt=1)
    eps: float = option(1e-8, "added to the denominator", gt=0)
    lr_schedule: str = option(
        "constant", "shape after the warm-up", choices=("constant", "linear", "cosine")
    )
    warmup_steps_proportion: float = option(
        0.0, "share of all steps with a rising learning rate", ge=0, le=1
    )
    min_lr_ratio: float = option(0.0, "final learning rate over the peak", ge=0, le=1)
    gradient_clipping: float = option(1.0, "largest norm of the gradient; 0 is off", ge=0)
    max_skipped_steps: int = option(
        5,
        "a step whose gradient is not finite is left out; so many in a row end the run, at 1 the first one",
        ge=1,
    )


ALL_LINEAR = "all-linear"
LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, kw_only=True)
class LoRAOptions:
    """Low-rank adapters (arXiv:2106.09685): ``W + alpha / rank · B · A``, where only A and B train."""

    rank: int = option(0, "rank of the adapters; 0 trains the whole model", ge=0)
    alpha: float = option(16.0, "scale of the adapters, times their rank", gt=0)
    target_modules: tuple[str, ...] = option(
        LORA_TARGETS,
        "linear layers that get an adapter, by the last part of their name; all-linear: every one but "
        "the head",
    )


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """One role's model: where it comes from, how it is held and trained."""

    path: str | None = option(None, "Hugging Face directory; none takes the experiment's default")
    dtype: str | None = option(
        None,
        "what it computes in; what trains is held in float32 where that is bfloat16. None: as the actor, "
        "and the actor in bfloat16 on GPUs, in float32 on CPUs",
        choices=("float32", "bfloat16", "float64"),
    )
    backend: str = option("fsdp", "registered training backend")
    parallel: str | None = option(
        None,
        "data, tensor and pipeline degrees, e.g. d2t1p1; none: d1t1p1, and where workers are given, "
        "all of them along the data axis",
    )
    pool: str | None = option(None, "pool of model workers; none: the experiment's placement says")
    optimizer: OptimizerOptions = option(OptimizerOptions(), "AdamW and its schedule")
    lora: LoRAOptions = option(LoRAOptions(), "adapters alone train (backend fsdp)")
    max_tokens_per_mb: int | None = option(
        16384,
        "largest micro-batch; answers to one question are parted where they don't fit, an answer never; "
        "none for no limit",
        unit="tokens",
        ge=1,
    )
    max_cache_tokens: int | None = option(
        None,
        "tokens kept while answers are made, in evaluations too; none: on a GPU what its free memory "
        "holds, on a CPU max_tokens_per_mb",
        unit="tokens",
        ge=1,
    )
    recompute: bool = option(False, "compute activations again in the backward pass")
    cpu_offload: bool = option(
        False, "keep shards and optimizer in CPU memory while training (backend fsdp)"
    )
    offload: bool = option(False, "move the model to CPU memory after each of its calls")


@dataclass(frozen=True, kw_only=True)
class PolicyHyperparameters:
    """Settings of a policy update with a KL penalty (arXiv:1909.08593)."""

    ppo_n_minibatches: int = option(4, "optimizer steps a pass over the batch", ge=1)
    ppo_epochs: int = option(1, "passes over the batch", ge=1)
    loss: PolicyLoss = option(PPOLoss(), "how the policy is pulled towards better answers")
    entropy_coef: float = option(0.0, "weight of the entropy bonus", ge=0)
    entropy_target: float | None = option(
        None,
        "entropy aimed at: entropy_coef is where the weight starts, and it moves by entropy_step after "
        "each batch; above it there is no bonus (arXiv:2505.22312); none: the weight is constant",
        unit="nats a token",
        gt=0,
    )
    entropy_step: float = option(0.005, "see entropy_target", gt=0)
    top_entropy_share: float = option(
        1.0,
        "only this share of a batch's tokens, those of the highest entropy, pull the policy "
        "(arXiv:2506.01939 takes 0.2); needs recompute_logprob or use_decoupled_loss",
        gt=0,
        le=1,
    )
    nll_coef: float = option(
        0.0, "weight of −log π of answers with a reward above 0 (VAPO, arXiv:2504.05118)", ge=0
    )
    adv_norm: str | None = option(
        None,
        "what advantages are divided by: nothing; the deviation over the whole batch (whitening); over the "
        "group; over all batches so far. None: what `advantage` was published with",
        choices=("none", "batch", "group", "running"),
    )
    kl_ctl: float = option(
        0.01, "weight of the KL to the reference; 0: there is no reference model", ge=0
    )
    kl_in: str = option(
        "reward",
        "the KL is a penalty in the reward, or a term of the loss",
        choices=("reward", "loss"),
    )
    kl_estimator: str | None = option(
        None,
        "how the KL of a token is estimated (docs/algorithms.md); k1+ and k3+ have the gradient of k2. "
        "None: k1 in the reward, k3+ in the loss",
        choices=("k1", "k2", "k3", "abs", "k1+", "k3+"),
    )
    kl_unbiased: bool = option(
        False,
        "of kl_in=loss: times the ratio of the policy to the one before the update, which makes value and "
        "gradient right for answers of that one (arXiv:2512.02556)",
    )
    use_adaptive_kl_ctl: bool = option(False, "adapt kl_ctl to adaptive_kl_target")
    adaptive_kl_target: float = option(6.0, "KL per sequence aimed at", unit="nats", gt=0)
    adaptive_kl_horizon: float = option(10000.0, "how slowly kl_ctl adapts", unit="sequences", gt=0)
    max_reward_clip: float = option(5.0, "scores are clipped to ± this", gt=0)
    reward_output_scaling: float = option(1.0, "score ← scaling · (score − bias)")
    reward_output_bias: float = option(0.0, "see reward_output_scaling")
    score_on_truncated: bool = option(True, "give an answer that was cut its score")
    early_stop_imp_ratio: float | None = option(
        5.0, "skip the rest of a batch when the mean ratio exceeds this; none is off", gt=1
    )
    early_stop_kl: float | None = option(
        None,
        "skip the rest of a batch when the KL to the policy before the update exceeds this",
        gt=0,
    )
    loss_aggregation: str = option(
        "token_mean",
        "how the losses of tokens add up: every token alike; every sequence alike, by the mean or the "
        "sum of its tokens; or by the sum over max_new_tokens (dr_grpo as in its paper)",
        choices=(
            "token_mean",
            "seq_mean_token_mean",
            "seq_mean_token_sum",
            "seq_mean_token_sum_norm",
        ),
    )
    mask_truncated: bool = option(
        False, "the policy learns nothing from answers that were cut (overlong filtering)"
    )
    overlong_buffer_len: int | None = option(
        None,
        "before max_new_tokens the score falls over so many tokens (arXiv:2503.14476); none is off",
        unit="tokens",
        ge=1,
    )
    overlong_penalty_factor: float = option(
        1.0, "what the score has lost at max_new_tokens, see overlong_buffer_len", ge=0
    )

    # ---- answers of another policy than the one that trains ------------------------------------
    recompute_logprob: bool = option(
        False, "ratios are to log-probs that the trainer computes before the update (proximal ones)"
    )
    use_decoupled_loss: bool = option(
        False,
        "as recompute_logprob, and each token's loss is weighted by the importance weight, proximal "
        "over sampling policy (arXiv:2505.24298)",
    )
    correction: str = option(
        "none",
        "bounds that weight: cap, see behav_imp_weight_cap; tis (truncated importance sampling), see "
        "tis_imp_ratio_cap; icepop (arXiv:2510.18855) and sequence_mask leave out what is outside "
        "their range; needs recompute_logprob or use_decoupled_loss",
        choices=("none", "cap", "tis", "icepop", "sequence_mask"),
    )
    correction_level: str = option(
        "token",
        "of cap, tis and icepop: a token's own weight, or the product over its sequence",
        choices=("token", "sequence"),
    )
    behav_imp_weight_cap: float = option(5.0, "of cap: largest weight", gt=0)
    behav_imp_weight_mode: str = option(
        "mask",
        "of cap: what has a larger weight is left out, or held at the cap",
        choices=("mask", "clamp"),
    )
    tis_imp_ratio_cap: float = option(2.0, "of tis: weights are held at this", gt=0)
    icepop_low: float = option(0.5, "of icepop: smallest weight", ge=0)
    icepop_high: float = option(5.0, "of icepop: largest weight", gt=0)
    sequence_mask_low: float = option(
        0.5, "of sequence_mask: smallest geometric mean of a sequence's weights", ge=0
    )
    sequence_mask_high: float = option(2.0, "of sequence_mask: largest one", gt=0)
    opsm_delta: float | None = option(
        None,
        "answers of negative advantage teach nothing once the policy has moved from the sampling one by "
        "more than this (k1, mean over the answer; off-policy sequence mask, arXiv:2512.02556); none: off",
        unit="nats a token",
        ge=0,
    )
    mismatch_kl_max: float | None = option(
        None,
        "largest mean KL of sampling to proximal policy (k3) that is trained on; none is off",
        unit="nats a token",
        gt=0,
    )
    on_mismatch: str = option(
        "warn",
        "what to do with a batch past mismatch_kl_max: warn; skip its update; stop the run",
        choices=("warn", "skip", "stop"),
    )

    @property
    def needs_ref_logprobs(self) -> bool:
        """Whether a reference policy has a part in the update."""
        return self.kl_ctl > 0

    @property
    def kl_estimate_by(self) -> str:
        """``kl_estimator``, or what suits the place of the KL."""
        return self.kl_estimator or ("k1" if self.kl_in == "reward" else "k3+")

    @property
    def needs_prox_logprobs(self) -> bool:
        """Whether the update reads ``packed_prox_logprobs``, which a call of the actor must make."""
        return self.recompute_logprob or self.use_decoupled_loss


@dataclass(frozen=True, kw_only=True)
class ValueHyperparameters:
    """Settings of a critic, and of the advantages by its values."""

    value_eps_clip: float | None = option(0.2, "clip range of the value; none is off", gt=0)
    value_huber_delta: float | None = option(
        None, "an error of the value beyond this counts linearly (Huber); none: squared", gt=0
    )
    discount: float = option(1.0, "gamma", ge=0, le=1)
    gae_lambda: float = option(1.0, "lambda of generalised advantage estimation", ge=0, le=1)
    gae_length_alpha: float | None = option(
        None,
        "the policy's lambda is 1 − 1 / (alpha · tokens of the answer) (VAPO, arXiv:2504.05118, takes "
        "0.05); returns keep gae_lambda; none is off",
        gt=0,
    )
    truncation: str = option(
        "terminal",
        "what follows an answer cut at max_new_tokens: nothing, or the critic's last value",
        choices=("terminal", "bootstrap"),
    )
    value_norm: bool = option(False, "train the critic on normalised returns")
    value_norm_beta: float = option(0.99995, "decay of the running moments", gt=0, lt=1)
    value_norm_eps: float = option(1e-5, "least variance", gt=0)
    critic_warmup_steps: int = option(0, "first steps that update the critic only", ge=0)


@dataclass(frozen=True, kw_only=True)
class PPOHyperparameters(PolicyHyperparameters, ValueHyperparameters):
    """What the policy's and the critic's interface need, with a critic or without."""

    gen: GenerationHyperparameters = option(
        GenerationHyperparameters(max_new_tokens=32), "how the actor samples"
    )
    advantage: AdvantageEstimator = option(
        GAE(), "how scores become advantages; gae needs a critic"
    )

    @property
    def norm(self) -> str:
        """What advantages are divided by: ``adv_norm``, or the estimator's own."""
        return self.advantage.norm if self.adv_norm is None else self.adv_norm


def ppo_problems(
    ppo: PolicyHyperparameters, *, longest: int, path: str = "algorithm."
) -> Iterator[ConfigError]:
    """Settings of PPO that don't go together; each one's range is ``range_problems``' business."""
    proximal = f"{path}recompute_logprob=true or {path}use_decoupled_loss=true"
    if ppo.correction != "none" and not ppo.needs_prox_logprobs:
        yield ConfigError(
            f"{path}correction={ppo.correction} bounds a weight that nobody computes",
            where=f"{path}correction",
            fix=f"set {proximal}, or correction=none",
        )
    if ppo.mismatch_kl_max is not None and not ppo.needs_prox_logprobs:
        yield ConfigError(
            f"{path}mismatch_kl_max={ppo.mismatch_kl_max} limits a figure that nobody measures",
            where=f"{path}mismatch_kl_max",
            fix=f"set {proximal}, or mismatch_kl_max=none",
        )
    if ppo.top_entropy_share < 1 and not ppo.needs_prox_logprobs:
        yield ConfigError(
            f"{path}top_entropy_share={ppo.top_entropy_share} compares entropies that nobody computes "
            "before the update",
            where=f"{path}top_entropy_share",
            fix=f"set {proximal}, or top_entropy_share=1",
        )
    yield from _kl_problems(ppo, path)
    if isinstance(ppo.loss, ClipCovLoss) and not ppo.loss.cov_low < ppo.loss.cov_high:
        yield ConfigError(
            f"{path}loss.cov_low is {ppo.loss.cov_low}, {path}loss.cov_high {ppo.loss.cov_high}: no token "
            "would be chosen",
            where=f"{path}loss.cov_low and {path}loss.cov_high",
            fix="use low < high; 1 and 5 are common",
        )
    for name in ("icepop", "sequence_mask"):
        low, high = getattr(ppo, f"{name}_low"), getattr(ppo, f"{name}_high")
        if ppo.correction == name and not low < high:
            yield ConfigError(
                f"{path}{name}_low is {low}, {path}{name}_high {high}",
                where=f"{path}{name}_low and {path}{name}_high",
                fix="use low < high; 1 is the weight of an unchanged policy",
            )
    buffer = ppo.overlong_buffer_len
    if buffer is not None and buffer > longest:
        yield ConfigError(
            f"{path}overlong_buffer_len is {buffer}, gen.max_new_tokens {longest}",
            where=f"{path}overlong_buffer_len",
            fix=f"use 1 … {longest}, or none",
        )


def _kl_problems(ppo: PolicyHyperparameters, path: str) -> Iterator[ConfigError]:
    """Estimators that say nothing where the KL stands."""
    if ppo.kl_in == "reward" and ppo.kl_unbiased:
        yield ConfigError(
            f"{path}kl_unbiased weighs a term of the loss, and the KL is in the reward",
            where=f"{path}kl_unbiased",
            fix=f"set {path}kl_in=loss, or leave kl_unbiased out",
        )
    if ppo.kl_in == "reward" and ppo.kl_estimate_by in ("k1+", "k3+"):
        plain = ppo.kl_estimate_by.rstrip("+")
        yield ConfigError(
            f"{path}kl_estimator={ppo.kl_estimate_by} differs from {plain} in its gradient alone, and a "
            "reward has none",
            where=f"{path}kl_estimator",
            fix=f"use {plain}, or {path}kl_in=loss",
        )
    if ppo.kl_in == "loss" and ppo.kl_estimate_by == "k1" and not ppo.kl_unbiased:
        yield ConfigError(
            f"{path}kl_estimator=k1 as a term of the loss has a gradient of 0 on average",
            where=f"{path}kl_estimator",
            fix=f"use k1+, k2 or k3+, or {path}kl_unbiased=true",
        )


@dataclass(frozen=True, kw_only=True)
class WandbOptions:
    """Weights & Biases; needs the extra ``realsys[wandb]``."""

    mode: str = option("disabled", "where to log", choices=("disabled", "offline", "online"))
    project: str | None = option(None, "none: the experiment's name")
    entity: str | None = option(None, "none: your default")
