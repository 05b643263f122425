"""What ``make oracle`` compares: a row is one formula of ours and the forms of it that others have.

To add one: an entry in ``ROWS``. ``ours`` is a function of a batch (oracle_batches.py has the names of its
tensors); each peer names a form of its runner (verl_runner.py, trl_runner.py, tinker_forms.py) and options.
rows_by_name.py and rows_of_preferences.py have more rows, oracle_table.py all of them. Where definitions
differ, on purpose or by fact, ``differs`` has both formulas, who follows the source, and what they are said
to compute, in code: oracle.py shows that this is what they return.
``ours=None`` is a formula that others have and we don't: two peers are compared with one another, one runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from peer_io import Batch, Form
from torch import Tensor

from realsys.algorithms.advantage.advantages import (
    gae_advantages,
    group_advantages,
    masked_whiten,
)
from realsys.algorithms.advantage.kl import (
    AdaptiveKLController,
    KLEstimator,
    kl_estimate,
    kl_penalised_rewards,
)
from realsys.algorithms.advantage.overlong import overlong_penalty
from realsys.algorithms.aggregation import Aggregation, aggregate, aggregation_weight
from realsys.algorithms.logprobs import entropy, gather_logprobs
from realsys.algorithms.policy.correction import correction_weights
from realsys.algorithms.policy.policy_loss import policy_loss
from realsys.algorithms.value.value_loss import clipped_value_loss
from realsys.api.basics.losses import CISPOLoss, GSPOLoss, PolicyLoss, PPOLoss, SAPOLoss

MAX_LENGTH = 24  # the constant of seq_mean_token_sum_norm
GRPO_LOSS, ITS_SCORES = "GRPOTrainer._compute_loss", "GRPOTrainer._generate_and_score_completions"


@dataclass(frozen=True)
class Peer:
    """One peer's form of a row. ``batches``: a set that suits its bounds, if not the row's."""

    form: str
    options: Mapping[str, Any] = field(default_factory=dict)
    batches: str | None = None


@dataclass(frozen=True)
class Difference:
    """Two formulas. ``claimed`` is theirs: its outputs must be the peer's, and must not be ours."""

    ours: str
    theirs: str
    source: str
    claimed: Form


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table. ``wrt``: the input whose gradient is compared too, of the sum of values;
    ``only``: the one output that is compared, such as ``gradient``, if it isn't all of them.
    """

    group: str
    name: str
    ours: Form | None
    peers: Mapping[str, Peer]
    batches: str = "past"
    wrt: str | None = None
    only: str | None = None
    differs: Difference | None = None
    dtype: str = "float64"


# What was asked for and isn't compared.
NOT_RUN = {
    "GAE, value loss, whitening of PPO in trl": "trl 1.16.0 has no PPO trainer any more",
    "overlong shaping in verl": (
        "its reward manager computes it inside of a loop over decoded answers; no function has it alone"
    ),
    "IcePop in verl where a whole batch is left out": (
        "its compute_is_metrics raises ZeroDivisionError then (seen with bounds [0.5, 2] by sequence); "
        "ours gives weights of 0"
    ),
    "losses of Tinker as its servers run them": (
        "they aren't public: the rows of tinker are its documented formulas, written anew"
    ),
}


# --- forms of ours


def policy(
    loss: PolicyLoss,
    mode: str = "token_mean",
    *,
    advantages: str = "advantages",
    old: str = "old_logprobs",
    weights: bool = False,
    kept: Form | None = None,
    chosen: Form | None = None,
) -> Form:
    """The aggregated loss; ``mode`` is one of ours, or ``token_sum``.

    Args:
        kept: which tokens have weight 1, the others having 0.
        chosen: which a loss by covariance treats in another way.
    """

    def form(batch: Batch) -> Tensor:
        mask = batch["mask"]
        advantage = batch[advantages]
        if advantage.dim() == 1:
            advantage = advantage[:, None].expand_as(mask)
        per_token, _ = policy_loss(
            loss,
            batch["logprobs"],
            batch[old],
            advantage,
            mask,
            weights=batch["weights"] if weights else None if kept is None else kept(batch),
            chosen=None if chosen is None else chosen(batch),
        )
        return aggregated(per_token, mask, mode)

    return form


def aggregated(per_token: Tensor, mask: Tensor, mode: str) -> Tensor:
    if mode == "token_sum":
        return aggregate(per_token, mask, "token_mean", denominator=1.0)
    known = cast(Aggregation, mode)
    weight = aggregation_weight(mask, known, norm_length=MAX_LENGTH)
    return aggregate(per_token, mask, known, denominator=weight)


def aggregation(mode: str) -> Form:
    return lambda batch: aggregated(batch["losses"], batch["mask"], mode)


def negative_log_likelihood(batch: Batch) -> Tensor:
    return aggregated(-batch["logprobs"] * batch["weights"], batch["mask"], "token_sum")


def kl(estimator: KLEstimator) -> Form:
    def form(batch: Batch) -> Tensor:
        return kl_estimate(batch["logprobs"], batch["ref_logprobs"], estimator) * batch["mask"]

    return form


def kl_mean(estimator: KLEstimator) -> Form:
    def form(batch: Batch) -> Tensor:
        return aggregated(kl(estimator)(batch), batch["mask"], "token_mean")

    return form


def whitened_gae(batch: Batch, *, gamma: float, lam: float) -> dict[str, Tensor]:
    advantages, returns = gae_advantages(
        batch["rewards"], batch["values"], batch["mask"], gamma=gamma, lam=lam
    )
    return {"value": masked_whiten(advantages, batch["mask"]), "returns": returns}


def groups(which: str = "groups", **settings: Any) -> Form:
    return lambda batch: group_advantages(batch["score_B"], batch[which], **settings)


def even_groups(**settings: Any) -> Form:
    def form(batch: Batch) -> Tensor:
        scores = batch["even_scores"]
        return group_advantages(scores.flatten(), scores.shape[1], **settings)

    return form


def correction(**settings: Any) -> Form:
    def form(batch: Batch) -> Tensor:
        weights, _ = correction_weights(
            batch["old_logprobs"], batch["behaviour_logprobs"], batch["mask"], **settings
        )
        return weights

    return form


def value_loss(eps_clip: float | None) -> Form:
    def form(batch: Batch) -> Tensor:
        per_token, _ = clipped_value_loss(
            batch["values"],
            batch["old_values"],
            batch["returns"],
            batch["mask"],
            eps_clip=eps_clip,
        )
        return aggregated(per_token, batch["mask"], "token_mean")

    return form


def penalised(batch: Batch) -> Tensor:
    return kl_penalised_rewards(
        batch["score_B"], batch["old_logprobs"], batch["ref_logprobs"], batch["mask"], kl_coef=0.05
    )


def controller(horizon: float) -> Form:
    def form(batch: Batch) -> Tensor:
        ours, found = AdaptiveKLController(0.1, target=2.0, horizon=horizon), []
        for score in batch["score_B"].tolist():
            ours.update(2.0 + score, 10)
            found.append(ours.coef)
        return torch.tensor(found, dtype=torch.float64)

    return form


def overlong(batch: Batch) -> Tensor:
    return overlong_penalty(batch["length_B"], max_length=80, buffer_length=20)


# --- what others are said to compute, where it is not ours


def _ratio(batch: Batch) -> Tensor:
    return (batch["logprobs"] - batch["old_logprobs"]).exp()


def _token_mean(per_token: Tensor, batch: Batch) -> Tensor:
    return per_token[batch["mask"]].mean()


def _sequence_means(per_token: Tensor, batch: Batch) -> Tensor:
    mask = batch["mask"]
    return (per_token * mask).sum(1) / mask.sum(1).clamp(min=1)


def _unbounded_ppo(batch: Batch) -> Tensor:
    ratio, advantages = _ratio(batch), batch["advantages"]
    gain = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    return _token_mean(-gain, batch)


def _gspo_below_ten(batch: Batch) -> Tensor:
    mask, logprobs = batch["mask"], batch["logprobs"]
    mean = _sequence_means((logprobs - batch["old_logprobs"]).detach(), batch)[:, None]
    ratio = (mean + logprobs - logprobs.detach()).clamp(max=10.0).exp()
    advantages = batch["advantage_B"][:, None]
    gain = torch.minimum(ratio * advantages, ratio.clamp(1 - 3e-4, 1 + 4e-4) * advantages)
    return _sequence_means(-gain, batch)[mask.any(1)].mean()


def _cispo(low: float, high: float) -> Form:
    def form(batch: Batch) -> Tensor:
        weight = _ratio(batch).detach().clamp(low, high)
        return _token_mean(-weight * batch["advantages"] * batch["logprobs"], batch)

    return form


def _sapo_by_sequences(batch: Batch) -> Tensor:
    tau = torch.where(batch["advantages"] > 0, 1.0, 1.05)
    gate = torch.sigmoid(tau * (_ratio(batch) - 1)) * 4 / tau
    means = _sequence_means(-gate * batch["advantages"], batch)
    return means[batch["mask"].any(1)].mean()


def _kl3_unbounded(batch: Batch) -> Tensor:
    d = batch["logprobs"] - batch["ref_logprobs"]
    return _token_mean((-d).exp() - 1 + d, batch)


def _all_answers_count(batch: Batch) -> Tensor:
    return _sequence_means(batch["losses"], batch).mean()


def _sum_over_all_answers(batch: Batch) -> Tensor:
    mask = batch["mask"]
    return (batch["losses"] * mask).sum() / (len(mask) * MAX_LENGTH)


def _padded_width(batch: Batch) -> Tensor:
    mask = batch["mask"]
    return (batch["losses"] * mask).sum() / mask.any(1).sum() / mask.shape[1]


def _grouped(
    batch: Batch, alone: Callable[[Tensor], Tensor], several: Callable[[Tensor], Tensor]
) -> Tensor:
    """Each score by its group: ``alone`` of a group of one, ``several`` of the others."""
    score, group = batch["score_B"], batch["groups_with_ones"]
    found = torch.zeros_like(score)
    for g in group.unique():
        mine = group == g
        found[mine] = (alone if int(mine.sum()) == 1 else several)(score[mine])
    return found


def _grpo_raw_alone(batch: Batch) -> Tensor:
    return _grouped(batch, lambda r: r / (1 + 1e-6), lambda r: (r - r.mean()) / (r.std() + 1e-6))


def _grpo_rounded(batch: Batch) -> Tensor:
    score, group = batch["score_B"], batch["groups"]
    found = torch.zeros_like(score)
    for g in group.unique():
        mine = group == g
        found[mine] = (score[mine] - score[mine].mean()) / (score[mine].std() + 1e-6)
    return found


def _rloo_raw_alone(batch: Batch) -> Tensor:
    return _grouped(batch, lambda r: r, lambda r: (r - r.mean()) * len(r) / (len(r) - 1))


def _grpo_eps(batch: Batch) -> Tensor:
    scores = batch["even_scores"]
    centred = scores - scores.mean(1, keepdim=True)
    return (centred / (scores.std(1, keepdim=True) + 1e-4)).flatten()


def _inverse_within(low: float, high: float) -> Form:
    def form(batch: Batch) -> Tensor:
        log_ratio = (batch["old_logprobs"] - batch["behaviour_logprobs"]).clamp(-20, 20)
        inverse = _sequence_means(-log_ratio, batch).exp()
        kept = (inverse >= low) & (inverse <= high)
        return log_ratio.exp() * kept[:, None] * batch["mask"]

    return form


def _product_mask(batch: Batch) -> Tensor:
    log_ratio = (batch["old_logprobs"] - batch["behaviour_logprobs"]) * batch["mask"]
    product = log_ratio.sum(1, keepdim=True).exp()
    return product * (product <= 3.0) * batch["mask"]


def _no_bound_of_batch(batch: Batch) -> Tensor:
    coef, found = 0.1, []
    for score in batch["score_B"].tolist():
        coef *= 1 + min(max((2.0 + score) / 2.0 - 1, -0.2), 0.2) * 10 / 4.0
        found.append(coef)
    return torch.tensor(found, dtype=torch.float64)


# --- the table


def _tinker_clip(name: str, low: float, high: float) -> Peer:
    return Peer(name, {"clip_low_threshold": low, "clip_high_threshold": high}, "far")


def _policy_rows() -> list[Row]:
    row = partial(Row, group="policy loss", wrt="logprobs")
    sequences = {"sequence_advantages": True, "aggregation": "seq-mean-token-mean"}
    gspo_verl = {**sequences, "low": 3e-4, "high": 4e-4}
    gspo_trl = {"loss_type": "grpo", "level": "sequence", "low": 3e-4, "high": 4e-4}
    gspo = policy(GSPOLoss(), "seq_mean_token_mean", advantages="advantage_B")
    return [
        row(
            name="PPO clip 0.2, token mean",
            ours=policy(PPOLoss(eps_clip=0.2)),
            peers={
                "verl": Peer("vanilla", {"low": 0.2, "high": 0.2}),
                "trl": Peer(GRPO_LOSS, {"loss_type": "bnpo"}, "far"),
            },
        ),
        row(
            name="PPO clip 0.2, token sum",
            ours=policy(PPOLoss(eps_clip=0.2), "token_sum"),
            peers={
                "tinker": _tinker_clip("ppo", 0.8, 1.2),
                "verl": Peer("vanilla", {"aggregation": "token-sum"}),
            },
        ),
        row(
            name="PPO clip-higher 0.2 / 0.28",
            ours=policy(PPOLoss(eps_clip=0.2, eps_clip_higher=0.28)),
            peers={
                "verl": Peer("vanilla", {"low": 0.2, "high": 0.28}),
                "trl": Peer(GRPO_LOSS, {"loss_type": "dapo", "high": 0.28}, "far"),
            },
        ),
        row(
            name="PPO dual clip, c = 3",
            ours=policy(PPOLoss(eps_clip=0.2, c_clip=3.0)),
            peers={
                "verl": Peer("vanilla", {"c": 3.0}),
                "trl": Peer(GRPO_LOSS, {"loss_type": "bnpo", "delta": 3.0}, "far"),
            },
        ),
        row(
            name="PPO with weights of rollout correction",
            ours=policy(PPOLoss(eps_clip=0.2), weights=True),
            peers={
                "verl": Peer("vanilla", {"weights": True}),
                "trl": Peer(GRPO_LOSS, {"loss_type": "bnpo", "weights": True}, "far"),
            },
        ),
        row(
            name="GRPO, advantage of the answer, seq_mean_token_mean",
            ours=policy(PPOLoss(eps_clip=0.2), "seq_mean_token_mean", advantages="advantage_B"),
            peers={
                "verl": Peer("vanilla", sequences),
                "trl": Peer(GRPO_LOSS, {"loss_type": "grpo", "advantages": "advantage_B"}, "far"),
            },
        ),
        row(
            name="GSPO 3e-4 / 4e-4",
            ours=gspo,
            peers={
                "verl": Peer("gspo", gspo_verl),
                "trl": Peer(GRPO_LOSS, {**gspo_trl, "advantages": "advantage_B"}, "far"),
            },
            batches="near",
        ),
        row(
            name="CISPO, weight in [0, 5]",
            ours=policy(CISPOLoss(ratio_low=0.0, ratio_high=5.0)),
            peers={
                "verl": Peer("cispo", {"low": 1.0, "high": 4.0}),
                "trl": Peer(GRPO_LOSS, {"loss_type": "cispo", "high": 5.0}, "far"),
            },
        ),
        row(
            name="CISPO, weight in [0.8, 1.2], token sum",
            ours=policy(CISPOLoss(ratio_low=0.8, ratio_high=1.2), "token_sum"),
            peers={
                "tinker": _tinker_clip("cispo", 0.8, 1.2),
                "verl": Peer("cispo", {"aggregation": "token-sum"}),
            },
        ),
        row(
            name="SAPO τ 1.0 / 1.05, seq_mean_token_mean",
            ours=policy(SAPOLoss(), "seq_mean_token_mean"),
            peers={
                "verl": Peer("sapo"),
                "trl": Peer(GRPO_LOSS, {"loss_type": "sapo"}, "far"),
            },
        ),
        row(
            name="cross entropy, token sum",
            ours=negative_log_likelihood,
            peers={"tinker": Peer("cross_entropy")},
        ),
    ]


def _other_rows() -> list[Row]:
    rows = [
        Row(
            group="KL",
            name=name,
            ours=kl(cast(KLEstimator, name)),
            peers={"verl": Peer("kl_penalty", {"kind": name})},
            wrt="logprobs",
        )
        for name in ("k1", "k2", "k3", "abs", "k1+", "k3+")
    ]
    rows += [
        Row(
            group="KL",
            name="k3 in the loss, coefficient 1",
            ours=kl_mean("k3"),
            peers={
                "trl": Peer(GRPO_LOSS, {"loss_type": "bnpo", "beta": 1.0, "advantages": "none"}),
            },
            batches="near",
            wrt="logprobs",
        ),
        Row(
            group="KL",
            name="k1 in the reward",
            ours=penalised,
            peers={"verl": Peer("compute_rewards", {"coef": 0.05})},
            batches="far",
        ),
        Row(
            group="KL",
            name="adaptive coefficient, batch below horizon",
            ours=controller(100.0),
            peers={"verl": Peer("AdaptiveKLController", {"horizon": 100.0})},
        ),
    ]
    trl_modes = {
        "token_mean": "bnpo",
        "seq_mean_token_sum": "luspo",
        "seq_mean_token_mean": "grpo",
        "seq_mean_token_sum_norm": "dr_grpo",
    }
    for mode, loss_type in trl_modes.items():
        length = {"norm_length": MAX_LENGTH} if mode.endswith("norm") else {}
        options = {"loss_type": loss_type, "max_length": MAX_LENGTH}
        rows.append(
            Row(
                group="aggregation",
                name=mode,
                ours=aggregation(mode),
                peers={
                    "verl": Peer("agg_loss", {"mode": mode.replace("_", "-"), **length}),
                    "trl": Peer(f"{GRPO_LOSS}, at r = 1", options, "far"),
                },
                wrt="losses",
            )
        )
    for gamma, lam in ((1.0, 1.0), (0.99, 0.95)):
        rows.append(
            Row(
                group="advantage",
                name=f"GAE γ {gamma:g} λ {lam:g}, whitened; returns",
                ours=partial(whitened_gae, gamma=gamma, lam=lam),
                peers={"verl": Peer("compute_gae_advantage_return", {"gamma": gamma, "lam": lam})},
            )
        )
    rows += [
        Row(
            group="advantage",
            name="GRPO, ε 1e-6",
            ours=groups(normalise_std=True),
            peers={"verl": Peer("advantage grpo")},
        ),
        Row(
            group="advantage",
            name="GRPO, ε 1e-4",
            ours=even_groups(normalise_std=True, eps=1e-4),
            peers={"trl": Peer(ITS_SCORES, {"scale": "group"})},
        ),
        Row(
            group="advantage",
            name="Dr. GRPO",
            ours=groups(normalise_std=False),
            peers={"verl": Peer("advantage grpo", {"norm_adv_by_std_in_grpo": False})},
        ),
        Row(
            group="advantage",
            name="Dr. GRPO, groups of one size",
            ours=even_groups(normalise_std=False),
            peers={"trl": Peer(ITS_SCORES, {"scale": "none"})},
        ),
        Row(
            group="advantage",
            name="RLOO",
            ours=groups(normalise_std=False, leave_one_out=True),
            peers={"verl": Peer("advantage rloo")},
        ),
        Row(
            group="advantage",
            name="RLOO, groups of one among them",
            ours=groups("groups_with_ones", normalise_std=False, leave_one_out=True),
            peers={"verl": Peer("advantage rloo_vectorized", {"groups": "groups_with_ones"})},
        ),
        Row(
            group="advantage",
            name="RLOO, groups of one size",
            ours=even_groups(normalise_std=False, leave_one_out=True),
            peers={"trl": Peer("RLOOTrainer._generate_and_score_completions")},
        ),
        Row(
            group="advantage",
            name="whitening",
            ours=lambda batch: masked_whiten(batch["values"], batch["mask"]),
            peers={"verl": Peer("masked_whiten")},
        ),
        Row(
            group="advantage",
            name="overlong penalty, 20 of 80 tokens",
            ours=overlong,
            peers={"trl": Peer("get_soft_overlong_punishment", {"max_length": 80, "buffer": 20})},
        ),
        Row(
            group="value loss",
            name="clipped, 0.2",
            ours=value_loss(0.2),
            peers={"verl": Peer("compute_value_loss", {"clip": 0.2})},
            wrt="values",
        ),
        Row(
            group="value loss",
            name="not clipped",
            ours=value_loss(None),
            peers={"verl": Peer("compute_value_loss", {"clip": 1e30})},
            wrt="values",
        ),
        Row(
            group="log-probs",
            name="log p at temperature 0.7",
            ours=lambda b: gather_logprobs(b["logits"], b["labels"], temperature=0.7),
            peers={
                "verl": Peer("logprobs_from_logits_v2", {"temperature": 0.7}),
                "trl": Peer("selective_log_softmax", {"temperature": 0.7}),
            },
            wrt="logits",
        ),
        Row(
            group="log-probs",
            name="entropy",
            ours=lambda b: entropy(b["logits"]),
            peers={"verl": Peer("entropy_from_logits"), "trl": Peer("entropy_from_logits")},
            wrt="logits",
        ),
    ]
    return rows


def _correction_rows() -> list[Row]:
    row = partial(Row, group="correction")
    verl, trl = "compute_rollout_correction_weights", f"{ITS_SCORES}, vLLM weights"
    sequence = {"level": "sequence"}
    return [
        row(
            name="TIS by token, C = 2",
            ours=correction(method="tis", high=2.0),
            peers={
                "verl": Peer(verl, {"level": "token", "threshold": 2.0}),
                "trl": Peer(trl, {"mode": "token_truncate", "high": 2.0}, "far"),
            },
        ),
        row(
            name="TIS by sequence, C = 5",
            ours=correction(method="tis", high=5.0, **sequence),
            peers={
                "verl": Peer(verl, {**sequence, "threshold": 5.0}),
                "trl": Peer(trl, {"mode": "sequence_truncate", "high": 5.0}, "near"),
            },
        ),
        row(
            name="IcePop by token, [0.5, 5]",
            ours=correction(method="icepop", low=0.5, high=5.0),
            peers={
                "verl": Peer(verl, {"level": "token", "threshold": "0.5_5.0"}),
                "trl": Peer(trl, {"mode": "token_mask", "low": 0.5, "high": 5.0}),
            },
        ),
        row(
            name="IcePop by sequence, [0.1, 10]",
            ours=correction(method="icepop", low=0.1, high=10.0, **sequence),
            peers={
                "verl": Peer(verl, {**sequence, "threshold": "0.1_10.0"}, "near"),
                "trl": Peer(trl, {"mode": "sequence_mask", "low": 0.1, "high": 10.0}),
            },
        ),
        row(
            name="cap by masking, 3 (decoupled PPO)",
            ours=correction(method="cap", high=3.0, cap_mode="mask"),
            peers={"trl": Peer(trl, {"mode": "token_mask", "high": 3.0}, "far")},
        ),
        row(
            name="sequence mask by the geometric mean, [0.5, 2]",
            ours=correction(method="sequence_mask", low=0.5, high=2.0),
            peers={
                "verl": Peer(
                    "compute_rollout_rejection_mask",
                    {"kind": "seq_mean_k1", "low": 0.5, "high": 2.0},
                )
            },
            batches="far",
        ),
    ]


def _rows_that_differ() -> list[Row]:
    loss = partial(Row, group="policy loss", wrt="logprobs")
    aggregations = partial(Row, group="aggregation", wrt="losses")
    advantage = partial(Row, group="advantage")
    trl_aggregation = f"{GRPO_LOSS}, at r = 1"
    return [
        loss(
            name="CISPO as verl sets it",
            ours=policy(CISPOLoss()),
            peers={"verl": Peer("cispo")},
            batches="far",
            differs=Difference(
                "weight = clip(r, 0, 5)",
                "weight = clip(r, 1 − 0.2, 1 + 0.2), the defaults of PPO's clip_ratio",
                "ours: MiniMax-M1 (arXiv:2506.13585) puts no lower bound and tunes the upper one; "
                "5 is ScaleRL's (arXiv:2510.13786)",
                _cispo(0.8, 1.2),
            ),
        ),
        loss(
            name="CISPO as trl sets it",
            ours=policy(CISPOLoss()),
            peers={"trl": Peer(GRPO_LOSS, {"loss_type": "cispo"})},
            batches="far",
            differs=Difference(
                "weight = min(r, 5)",
                "weight = min(r, epsilon_high), which is epsilon = 0.2 unless it is set: the bound is on "
                "r, not on r − 1",
                "ours: by the paper weights are near 1; trl's own help says to set 5.0",
                _cispo(0.0, 0.2),
            ),
        ),
        loss(
            name="SAPO where the token mean is asked for",
            ours=policy(SAPOLoss(), "token_mean"),
            peers={"verl": Peer("sapo", {"aggregation": "token-mean"})},
            batches="far",
            differs=Difference(
                "mean over tokens, as asked for",
                "mean over answers of the mean over tokens, whatever loss_agg_mode says",
                "theirs: the paper (arXiv:2511.20347) has the mean of means; with us that is "
                "loss_aggregation=seq_mean_token_mean",
                _sapo_by_sequences,
            ),
        ),
        loss(
            name="GSPO, ratios beyond e^10",
            ours=policy(GSPOLoss(), "seq_mean_token_mean", advantages="advantage_B"),
            peers={
                "verl": Peer(
                    "gspo",
                    {
                        "sequence_advantages": True,
                        "aggregation": "seq-mean-token-mean",
                        "low": 3e-4,
                        "high": 4e-4,
                    },
                )
            },
            differs=Difference(
                "log-ratios of tokens within ±20, then their mean",
                "mean of log-ratios, at most 10",
                "neither: the paper (arXiv:2507.18071) has no bound; both only keep exp finite",
                _gspo_below_ten,
            ),
        ),
        loss(
            name="PPO, ratios beyond e^20",
            ours=policy(PPOLoss(eps_clip=0.2)),
            peers={"trl": Peer(GRPO_LOSS, {"loss_type": "bnpo"})},
            differs=Difference(
                "log-ratios within ±20, as verl's; past it no gradient",
                "no bound",
                "theirs: the paper (arXiv:1707.06347) has no bound; ours keeps exp finite in float32",
                _unbounded_ppo,
            ),
        ),
        Row(
            group="KL",
            name="k3 of policies far apart",
            ours=kl_mean("k3"),
            peers={
                "trl": Peer(GRPO_LOSS, {"loss_type": "bnpo", "beta": 1.0, "advantages": "none"})
            },
            batches="far",
            wrt="logprobs",
            differs=Difference(
                "min(exp(−d) − 1 + d, 10), d within ±20, as verl's",
                "exp(−d) − 1 + d",
                "theirs: the source (joschu.net/blog/kl-approx) has no bound",
                _kl3_unbounded,
            ),
        ),
        Row(
            group="KL",
            name="adaptive coefficient, batch above horizon",
            ours=controller(4.0),
            peers={"verl": Peer("AdaptiveKLController", {"horizon": 4.0})},
            differs=Difference(
                "coef · (1 + e · min(n / horizon, 1))",
                "coef · (1 + e · n / horizon)",
                "theirs: arXiv:1909.08593, sec. 2.2, has no bound; past five horizons the coefficient "
                "would be negative",
                _no_bound_of_batch,
            ),
        ),
        aggregations(
            name="seq_mean_token_mean, answers without a token that counts",
            ours=aggregation("seq_mean_token_mean"),
            peers={"trl": Peer(trl_aggregation, {"loss_type": "grpo"})},
            differs=Difference(
                "mean over answers with a token in the mask, as verl's",
                "mean over all answers",
                "not in the paper (arXiv:2402.03300, eq. 3), in which every answer has tokens",
                _all_answers_count,
            ),
        ),
        aggregations(
            name="seq_mean_token_sum_norm, answers without a token that counts",
            ours=aggregation("seq_mean_token_sum_norm"),
            peers={
                "trl": Peer(trl_aggregation, {"loss_type": "dr_grpo", "max_length": MAX_LENGTH})
            },
            differs=Difference(
                "sum / (answers with a token in the mask · constant), as verl's",
                "sum / (all answers · constant)",
                "not in the paper (arXiv:2503.20783), in which every answer has tokens",
                _sum_over_all_answers,
            ),
        ),
        aggregations(
            name="seq_mean_token_sum_norm without a constant",
            ours=aggregation("seq_mean_token_sum_norm"),
            peers={"verl": Peer("agg_loss", {"mode": "seq-mean-token-sum-norm"})},
            differs=Difference(
                "sum / (answers · constant): the constant must be given",
                "sum / (answers · width of the padded batch), if loss_scale_factor isn't set",
                "ours: Dr. GRPO (arXiv:2503.20783) divides by a constant; a width changes with the batch",
                _padded_width,
            ),
        ),
        advantage(
            name="GRPO, a group of one",
            ours=groups("groups_with_ones", normalise_std=True),
            peers={"verl": Peer("advantage grpo", {"groups": "groups_with_ones"})},
            differs=Difference(
                "0",
                "its score / (1 + ε): mean 0 and deviation 1 stand in",
                "neither: (arXiv:2402.03300, sec. 4.1) a deviation of one score is not defined; without a "
                "baseline the gradient is that of the raw score",
                _grpo_raw_alone,
            ),
        ),
        advantage(
            name="RLOO, a group of one",
            ours=groups("groups_with_ones", normalise_std=False, leave_one_out=True),
            peers={"verl": Peer("advantage rloo", {"groups": "groups_with_ones"})},
            differs=Difference(
                "0, as verl's rloo_vectorized",
                "its score",
                "neither: (arXiv:2402.14740) there are no others to average",
                _rloo_raw_alone,
            ),
        ),
        advantage(
            name="GRPO, equal scores, in float32",
            ours=groups(normalise_std=True),
            peers={"verl": Peer("advantage grpo")},
            dtype="float32",
            differs=Difference(
                "0 exactly in a group of equal scores; sums in float64",
                "(r − mean) / (std + 1e-6) in float32, in which the mean of equal scores isn't always the "
                "score: 3 of 81 such groups get advantages, up to 0.1",
                "ours: by arXiv:2402.03300, sec. 4.1, r − mean is 0",
                _grpo_rounded,
            ),
        ),
        advantage(
            name="GRPO as trl sets it",
            ours=even_groups(normalise_std=True),
            peers={"trl": Peer(ITS_SCORES, {"scale": "group"})},
            differs=Difference(
                "(r − mean) / (std + 1e-6), as verl's",
                "(r − mean) / (std + 1e-4)",
                "neither: (arXiv:2402.03300, sec. 4.1) has no ε",
                _grpo_eps,
            ),
        ),
        Row(
            group="correction",
            name="sequence mask, bounds [0.8, 2]",
            ours=correction(method="sequence_mask", low=0.8, high=2.0),
            peers={
                "verl": Peer(
                    "compute_rollout_rejection_mask",
                    {"kind": "seq_mean_k1", "low": 0.8, "high": 2.0},
                )
            },
            differs=Difference(
                "low ≤ geometric mean of π_train / π_rollout ≤ high",
                "low ≤ geometric mean of π_rollout / π_train ≤ high; the same only if low = 1 / high",
                "a convention; GSPO's ratio (arXiv:2507.18071) and IcePop's bounds (arXiv:2510.18855) are "
                "on train / rollout, as ours",
                _inverse_within(0.8, 2.0),
            ),
        ),
        Row(
            group="correction",
            name="sequence mask, ratios beyond e^20",
            ours=correction(method="sequence_mask", low=0.5, high=2.0),
            peers={
                "verl": Peer(
                    "compute_rollout_rejection_mask",
                    {"kind": "seq_mean_k1", "low": 0.5, "high": 2.0},
                )
            },
            differs=Difference(
                "mean of log-ratios",
                "mean of log-ratios that are first held within ±20",
                "ours: a geometric mean has no bound; theirs keeps exp finite",
                _inverse_within(0.5, 2.0),
            ),
        ),
        Row(
            group="correction",
            name="what is called sequence mask, at most 3",
            ours=correction(method="sequence_mask", high=3.0),
            peers={
                "trl": Peer(f"{ITS_SCORES}, vLLM weights", {"mode": "sequence_mask", "high": 3.0})
            },
            differs=Difference(
                "geometric mean is judged, tokens weigh by their own ratio",
                "product of ratios is judged, and is every token's weight: our icepop with level=sequence",
                "two methods of one name: masked sequence importance sampling is by the product, geometric "
                "masking by the mean",
                _product_mask,
            ),
        ),
    ]


def _rows_of_others() -> list[Row]:
    """Formulas that we don't have (yet): ``ours`` goes in when we do."""
    loss = partial(Row, group="policy loss", ours=None, wrt="logprobs")
    advantage = partial(Row, group="advantage", ours=None)
    dro = {"aggregation": "token-sum", "settings": {"dro_beta": 0.05}}
    return [
        loss(
            name="DRO β 0.05, token sum",
            peers={"verl": Peer("dro", dro), "tinker": Peer("dro", {"beta": 0.05})},
            batches="far",
        ),
        loss(name="GPG", peers={"verl": Peer("gpg")}),
        loss(
            name="RLOO with the product of ratios",
            peers={"trl": Peer("RLOOTrainer._compute_loss", {"low": 0.2, "high": 0.2})},
            batches="near",
        ),
        advantage(
            name="ReMax", peers={"verl": Peer("advantage remax", {"per_token": True}, "far")}
        ),
        advantage(name="GPG", peers={"verl": Peer("advantage gpg")}),
    ]


ROWS = [
    *_policy_rows(),
    *_other_rows(),
    *_correction_rows(),
    *_rows_that_differ(),
    *_rows_of_others(),
]
