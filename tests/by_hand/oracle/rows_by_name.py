"""Rows of what is chosen by name: losses, advantages as the interface makes them, which tokens count.

Tokens, groups and reward parts go through the interface's own functions (realsys/interfaces/ppo), as in a
training step, so that what surrounds a formula is compared too. Kinds of docs/adding_an_algorithm.md are
read from the page.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import cache, partial
from types import ModuleType
from typing import Any

import torch
from doc_pages import DocPage
from oracle_rows import GRPO_LOSS, ITS_SCORES, Difference, Peer, Row, aggregated, policy
from peer_io import Batch, Form
from torch import Tensor
from widths import narrow

from realsys.algorithms.advantage.advantages import masked_whiten
from realsys.algorithms.advantage.estimators_by_name import answer_advantages
from realsys.algorithms.advantage.group_scores import GroupScores
from realsys.algorithms.advantage.kl import kl_loss
from realsys.algorithms.policy.correction import drifted_sequences
from realsys.algorithms.policy.entropy_control import EntropyControl
from realsys.algorithms.value.value_norm import RunningMoments
from realsys.api.basics.estimators import (
    AnswerEstimator,
    GDPOAdvantage,
    PassAtKAdvantage,
    ReinforcePPAdvantage,
    ReinforcePPBaselineAdvantage,
)
from realsys.api.basics.losses import (
    ClipCovLoss,
    CovarianceLoss,
    DPPOLoss,
    KLCovLoss,
    PPOLoss,
)
from realsys.api.basics.reward import PARTS
from realsys.backends.hf.data_parallel import DataParallel
from realsys.data.sequence_sample import SequenceSample
from realsys.interfaces.answers import INPUT, PROMPT_MASK, answer_mask
from realsys.interfaces.interface_arguments import PPOSettings
from realsys.interfaces.ppo.advantage_norm import normalised
from realsys.interfaces.ppo.batch_checks import BEHAVIOUR, REFERENCE
from realsys.interfaces.ppo.ppo_experience import prepare_experience
from realsys.interfaces.ppo.token_selection import CHOSEN, choose_by_covariance, largest_share

ALONE = DataParallel()
WEIGHTS = {"score_B": 1.0, "baseline_B": 0.5}  # of parts of a reward, by their names in a batch
SHIFT = 0.125  # of a policy that moved by the same for all tokens, exact in float32
NOT_READ = "Not checked against the paper: only its abstract was at hand"

NOT_RUN = {
    "MaxRL": "neither verl 0.9.1 nor trl 1.16.0 has it",
    "pass@k with k below the group's size": "verl's grpo_passk takes the whole group; trl has none",
    "value loss with Huber": "neither verl 0.9.1 nor trl 1.16.0 has it",
    "which tokens Clip-Cov draws": (
        "at random in both; compared where all tokens in the range are left out"
    ),
}


# --- ours


@cache
def of_the_page(name: str) -> Any:
    """A kind from the code of docs/adding_an_algorithm.md."""
    (code,) = [
        x for x in DocPage("adding_an_algorithm.md").blocks("python") if f"class {name}" in x
    ]
    module = ModuleType(f"page_of_{name}")
    sys.modules[module.__name__] = module  # where dataclasses look for the class's module
    exec(code, vars(module))
    return vars(module)[name]


def with_loss_of_the_page(name: str, mode: str, **how: Any) -> Form:
    """Read when it runs, so that importing the table registers nothing."""
    return lambda batch: policy(of_the_page(name)(), mode, **how)(batch)


def shifted(form: Form) -> Form:
    return lambda batch: form({**batch, "old_logprobs": batch["logprobs"].detach() - SHIFT})


def high_entropy(share: float) -> Form:
    def form(batch: Batch) -> Tensor:
        with narrow():
            return largest_share(batch["entropies"], batch["mask"], share, ALONE).to(
                batch["entropies"].dtype
            )

    return form


def not_drifted(batch: Batch) -> Tensor:
    mask = batch["mask"]
    drifted = torch.zeros_like(mask)
    drifted[mask] = drifted_sequences(
        batch["logprobs"][mask],
        batch["old_logprobs"][mask],
        batch["advantage_B"][:, None].expand_as(mask)[mask],
        lengths=mask.sum(1).tolist(),
        delta=0.1,
    )
    return (~drifted).to(batch["logprobs"].dtype)


def not_drifted_B(batch: Batch) -> Tensor:
    """Of whole answers, ``[B, 1]``."""
    return not_drifted(batch).amin(1, keepdim=True)


def chosen_by(loss: CovarianceLoss) -> Form:
    """As the interface chooses, of one answer an id."""

    def form(batch: Batch) -> Tensor:
        mask = batch["mask"]
        data = packed(batch, batch["advantages"], torch.arange(len(mask)))
        with narrow():
            made = choose_by_covariance(
                data, loss, data.data[BEHAVIOUR], answer_mask(data), ALONE
            ).data[CHOSEN]
        return made.unflatten(0, (len(mask), -1))[:, 1:]

    return form


def packed(
    batch: Batch,
    advantages: Tensor | None,
    groups: Tensor,
    score: str = "score_B",
    parts: tuple[str, ...] = (),
) -> SequenceSample:
    """A batch of the interface's: before each answer one token of a prompt; a group is an id, and they
    stand in order.
    """
    order = groups.argsort(stable=True)
    rows = groups.unique(return_counts=True)[1].tolist()
    num, width = batch["mask"].shape

    def tokens(x: Tensor) -> Tensor:
        return torch.cat([torch.zeros_like(x[:, :1]), x], 1)[order].flatten()

    per_token = {
        INPUT: torch.zeros(num * (width + 1), dtype=torch.long),
        PROMPT_MASK: ~tokens(batch["mask"]),
        BEHAVIOUR: tokens(batch["old_logprobs"]),
        REFERENCE: tokens(batch["ref_logprobs"]),
        **({} if advantages is None else {"advantages": tokens(advantages)}),
    }
    per_answer = {
        "rewards": batch[score][order],
        "seq_no_eos_mask": torch.zeros(num, dtype=torch.bool),
    }
    of_answers = [
        json.dumps([{name: float(batch[name][i]) for name in parts} for i in piece])
        for piece in order.split(rows)
    ]
    return SequenceSample.from_tensors(
        [str(i) for i in range(len(rows))],
        {
            **{key: [[width + 1] * n for n in rows] for key in per_token},
            **{key: [[1] * n for n in rows] for key in per_answer},
        },
        {**per_token, **per_answer},
        {PARTS: of_answers} if parts else None,
    )


def interface(
    estimator: AnswerEstimator,
    *,
    score: str = "score_B",
    groups: str = "groups",
    kl_coef: float = 0.0,
    parts: tuple[str, ...] = (),
) -> Form:
    """Advantages ``[B, T]`` as a training step makes them, with the estimator's own ``adv_norm``."""
    settings = PPOSettings(advantage=estimator)

    def form(batch: Batch) -> Tensor:
        data = packed(batch, None, batch[groups], score, parts)
        made = prepare_experience(data, settings, kl_coef=kl_coef, ranks=ALONE).batch
        made = normalised(made, settings, answer_mask(made), RunningMoments(), ALONE)
        in_order = made.data["advantages"].unflatten(0, (len(batch["mask"]), -1))[:, 1:]
        return torch.zeros_like(in_order).index_copy(
            0, batch[groups].argsort(stable=True), in_order
        )

    return form


def of_answers(estimator: Callable[[], AnswerEstimator]) -> Form:
    """``[B]``, the estimator alone."""

    def form(batch: Batch) -> Tensor:
        answers = GroupScores(batch["score_B"], batch["groups"], batch["mask"].sum(1))
        return answer_advantages(estimator(), answers)

    return form


def opo(batch: Batch) -> Tensor:
    return of_answers(of_the_page("OPOAdvantage"))(batch)[:, None] * batch["mask"]


def even_gdpo(*, missing: int | None = None) -> Form:
    """Of answers of one token each, whitened over them. Every ``missing``-th has no second part."""

    def form(batch: Batch) -> Tensor:
        scores, other = batch["even_scores"].flatten(), batch["even_other"].flatten().clone()
        if missing is not None:
            other[::missing] = torch.nan
        groups = torch.arange(len(scores)) // batch["even_scores"].shape[1]
        ones = torch.ones(len(scores), dtype=torch.long)
        parts = {"one": scores, "other": other}
        estimator = GDPOAdvantage(weights={"one": 1.0, "other": 0.5})
        made = answer_advantages(estimator, GroupScores(scores, groups, ones, parts=parts))
        return masked_whiten(made, ones.bool())

    return form


def kl_in_the_loss(batch: Batch) -> Tensor:
    per_token = kl_loss(
        batch["logprobs"], batch["ref_logprobs"], "k3", old_logprobs=batch["old_logprobs"]
    )
    return aggregated(per_token, batch["mask"], "token_mean")


def entropy_weights(*, first: int) -> Form:
    def form(batch: Batch) -> Tensor:
        control, found = EntropyControl(0.02, target=1.7, step=0.005), []
        for score in batch["score_B"].tolist():
            found.append(control.coef)
            control.update(1.0 + abs(score))
        return torch.tensor(found[first:], dtype=torch.float64)

    return form


# --- tokens that others choose


def _covariance(batch: Batch) -> Tensor:
    """Of the policy in training, over the micro-batch."""
    mask, logprobs = batch["mask"], batch["logprobs"].detach()
    parts = [x - x[mask].mean() for x in (batch["advantages"], logprobs)]
    return parts[0] * parts[1]


def _clip_cov_chosen(batch: Batch) -> Tensor:
    """All tokens in the range that PPO has not clipped."""
    advantages, ratio = batch["advantages"], _ratio(batch).detach()
    clipped = -advantages * ratio.clamp(0.8, 1.2) > -advantages * ratio
    together = _covariance(batch)
    return batch["mask"] & ~clipped & (together > 1.0) & (together < 5.0)


def _kl_cov_chosen(share: float) -> Form:
    """The largest, at least one."""

    def form(batch: Batch) -> Tensor:
        mask = batch["mask"]
        count = max(int(share * int(mask.sum())), 1)
        together = _covariance(batch).masked_fill(~mask, -torch.inf)
        chosen = torch.zeros_like(mask).flatten()
        chosen[together.flatten().topk(count).indices] = True
        return chosen.view_as(mask)

    return form


# --- what others are said to compute, where it is not ours


def _ratio(batch: Batch, old: str = "old_logprobs") -> Tensor:
    return (batch["logprobs"] - batch[old]).exp()


def _dppo_as_weight(batch: Batch) -> Tensor:
    old, logprobs = "proper_old_logprobs", batch["logprobs"]
    advantages, ratio = batch["advantages"], _ratio(batch, old).detach()
    moved = logprobs.detach().exp() - batch[old].exp()
    left = torch.where(advantages > 0, moved > 0.2, moved < -0.2)
    return aggregated(
        -advantages * ratio.clamp(max=20.0) * logprobs * ~left, batch["mask"], "token_mean"
    )


def _quantile(share: float) -> Form:
    """Those at or above the entropy that linear interpolation finds."""

    def form(batch: Batch) -> Tensor:
        entropies, mask = batch["entropies"], batch["mask"]
        ordered = entropies[mask].sort().values
        place = (len(ordered) - 1) * (1 - share)
        least = ordered[min(-int(-place // 1), len(ordered) - 1)]
        return ((entropies >= least) & mask).to(entropies.dtype)

    return form


def _discounted(batch: Batch) -> Tensor:
    mask = batch["mask"]
    after = mask.flip(1).cumsum(1).flip(1) - 1
    return _whitened(batch["baseline_B"][:, None] * 0.99**after, mask)


def _whitened(x: Tensor, mask: Tensor) -> Tensor:
    kept = x[mask]
    return (x - kept.mean()) / (kept.var() + 1e-8).sqrt() * mask


def _baseline_over_all(batch: Batch) -> Tensor:
    score, group = batch["score_B"], batch["groups"]
    centred = torch.stack([s - score[group == g].mean() for s, g in zip(score, group, strict=True)])
    return _whitened(centred[:, None].expand_as(batch["mask"]), batch["mask"])


def _best_over_deviation(batch: Batch) -> Tensor:
    score, group = batch["score_B"], batch["groups"]
    found = torch.zeros_like(score)
    for g in group.unique():
        best, second = (score[group == g]).topk(2).values
        mine = ((group == g) & (score == best)).nonzero()[0]
        found[mine] = (best - second) / (score[group == g].std() + 1e-6)
    return found


def _gdpo_of_answers(*, missing: int | None = None) -> Form:
    """Of each group and part, the answers that have it are compared with one another."""

    def form(batch: Batch) -> Tensor:
        total = torch.zeros_like(batch["even_scores"])
        for name, weight in (("even_scores", 1.0), ("even_other", 0.5)):
            part = batch[name].flatten().clone()
            if missing is not None and name == "even_other":
                part[::missing] = torch.nan
            for row, had in zip(total, part.view_as(total), strict=True):
                there = ~had.isnan()
                if int(there.sum()) > 1:
                    mine = had[there]
                    row[there] += weight * (mine - mine.mean()) / (mine.std() + 1e-4)
        found = total.flatten()
        return (found - found.mean()) / (found.std() + 1e-4)

    return form


# --- rows


def _loss_rows() -> list[Row]:
    row = partial(Row, group="policy loss", wrt="logprobs")
    proper = {"old": "proper_old_logprobs", "c": 20.0}
    unbounded = DPPOLoss(delta_low=2.0, delta_high=2.0)
    clip_all, kl_quarter = ClipCovLoss(share=1.0), KLCovLoss(share=0.25, coef=0.5)
    quarter = {"kl_cov_ratio": 0.25, "ppo_kl_coef": 0.5}
    dppo_kl = DPPOLoss(divergence="kl", delta_low=0.05, delta_high=0.05)
    answers = {"sequence_advantages": True, "low": 0.4, "high": 0.4}
    return [
        row(
            name="importance sampling (DPPO without bounds), token sum",
            ours=policy(unbounded, "token_sum"),
            peers={"tinker": Peer("importance_sampling")},
            batches="far",
        ),
        row(
            name="DPPO, total variation, its gradient",
            ours=policy(DPPOLoss(), old="proper_old_logprobs"),
            peers={"verl": Peer("dppo_tv", proper)},
            batches="near",
            only="gradient",
        ),
        row(
            name="DPPO, KL, its gradient",
            ours=policy(dppo_kl, old="proper_old_logprobs"),
            peers={"verl": Peer("dppo_kl", {**proper, "low": 0.05, "high": 0.05})},
            batches="near",
            only="gradient",
        ),
        row(
            name="DPPO, its value, and ratios above 20",
            ours=policy(DPPOLoss(), old="proper_old_logprobs"),
            peers={"verl": Peer("dppo_tv", proper)},
            batches="far",
            differs=Difference(
                "−A ρ inside of the trust region",
                "−A · sg(min(ρ, 20)) · log π there: another value with the same gradient up to ρ = 20, a "
                "smaller one above",
                "ours: the abstract's objective (arXiv:2602.04879) replaces PPO's clipping alone; verl's "
                "comment takes the bound from its sec. 5.4, which was not at hand",
                _dppo_as_weight,
            ),
        ),
        row(
            name="Clip-Cov, all tokens of the range, policy moved by a constant",
            ours=shifted(policy(clip_all, chosen=chosen_by(clip_all))),
            peers={"verl": Peer("clip_cov", {"settings": {"clip_cov_ratio": 1.0}, "shift": SHIFT})},
            batches="near",
        ),
        row(
            name="Clip-Cov, the same tokens given",
            ours=policy(clip_all, chosen=_clip_cov_chosen),
            peers={"verl": Peer("clip_cov", {"settings": {"clip_cov_ratio": 1.0}})},
            batches="near",
        ),
        row(
            name="KL-Cov, the same tokens given",
            ours=policy(kl_quarter, chosen=_kl_cov_chosen(0.25)),
            peers={"verl": Peer("kl_cov", {"settings": quarter})},
            batches="near",
        ),
        row(
            name="Clip-Cov, which tokens",
            ours=policy(clip_all, chosen=chosen_by(clip_all)),
            peers={"verl": Peer("clip_cov", {"settings": {"clip_cov_ratio": 1.0}})},
            batches="near",
            differs=Difference(
                "of (A − mean) · (log π_old − mean), over the batch and all ranks, once before the update; "
                "⌈share · n⌉ tokens",
                "of (A − mean) · (log π − mean), over the micro-batch as the policy is by then, without "
                "tokens that PPO clips; max(1, ⌊share · n⌋) tokens",
                "theirs is the authors' code, by its comment; ours does not change with the cut into "
                f"micro-batches. {NOT_READ}",
                policy(clip_all, chosen=_clip_cov_chosen),
            ),
        ),
        row(
            name="KL-Cov, which tokens",
            ours=policy(kl_quarter, chosen=chosen_by(kl_quarter)),
            peers={"verl": Peer("kl_cov", {"settings": quarter})},
            batches="near",
            differs=Difference(
                "the ⌈share · n⌉ largest (A − mean) · (log π_old − mean), over the batch and all ranks",
                "the max(1, ⌊share · n⌋) largest (A − mean) · (log π − mean), over the micro-batch",
                "as for Clip-Cov",
                policy(kl_quarter, chosen=_kl_cov_chosen(0.25)),
            ),
        ),
        row(
            name="GMPO 0.4, of the docs page",
            ours=with_loss_of_the_page("GMPOLoss", "seq_mean_token_mean", advantages="advantage_B"),
            peers={
                "verl": Peer("geo_mean", answers),
                "trl": Peer("GMPOTrainer._compute_loss", {"epsilon": 0.4}),
            },
            batches="near",
        ),
        row(
            name="PPO with the quarter of highest entropy",
            ours=policy(PPOLoss(), kept=high_entropy(0.25)),
            peers={"trl": Peer(GRPO_LOSS, {"loss_type": "bnpo", "top_entropy": 0.25})},
            batches="far",
        ),
        row(
            name="PPO with the off-policy sequence mask, δ 0.1",
            ours=policy(PPOLoss(), advantages="advantage_B", kept=not_drifted),
            peers={
                "trl": Peer(
                    GRPO_LOSS,
                    {"loss_type": "bnpo", "advantages": "advantage_B", "off_policy": 0.1},
                )
            },
            batches="far",
        ),
        Row(
            group="KL",
            name="k3 in the loss, weighted by the ratio",
            ours=kl_in_the_loss,
            peers={
                "trl": Peer(
                    GRPO_LOSS,
                    {"loss_type": "bnpo", "beta": 1.0, "advantages": "none", "kl_corrected": True},
                )
            },
            batches="near",
            wrt="logprobs",
        ),
    ]


def _token_rows() -> list[Row]:
    row = partial(Row, group="tokens")
    mask, adaptive = "GRPOTrainer.get_high_entropy_mask", f"{GRPO_LOSS}, adaptive entropy"
    entropy = {"coef": 0.02, "target": 1.7, "step": 0.005}
    return [
        row(
            name="the quarter of highest entropy, equal ones among them",
            ours=high_entropy(0.25),
            peers={"trl": Peer(mask, {"share": 0.25})},
        ),
        row(
            name="the 30 % of highest entropy",
            ours=high_entropy(0.3),
            peers={"trl": Peer(mask, {"share": 0.3})},
            differs=Difference(
                "the ⌈share · n⌉ highest and their equals, of the policy before the update",
                "those at or above the interpolated quantile 1 − share: 1 + ⌊share · (n − 1)⌋ and their "
                "equals, at times one fewer than ours (never if 1 / share is whole); of the policy in "
                "training",
                "neither: arXiv:2506.01939 keeps entropies at or above the threshold of a share, without a "
                f"word on rounding. {NOT_READ}",
                _quantile(0.3),
            ),
        ),
        row(
            name="off-policy sequence mask, δ 0.1",
            ours=not_drifted_B,
            peers={"trl": Peer("GRPOTrainer.get_off_policy_mask", {"threshold": 0.1})},
        ),
        row(
            name="weight of the entropy bonus, from the second batch on",
            ours=entropy_weights(first=1),
            peers={"trl": Peer(adaptive, entropy)},
        ),
    ]


def _advantage_rows() -> list[Row]:
    row = partial(Row, group="advantage")
    plus, baseline = "advantage reinforce_plus_plus", "advantage reinforce_plus_plus_baseline"
    # Scores that aren't nearly alike: verl's mean divides by n + 1e-8, seen where deviations are small.
    spread = {"per_token": True, "score": "baseline_B"}
    once = {**spread, "config": {"gamma": 1.0}, "kl_coef": 0.05}
    gdpo = GDPOAdvantage(weights=WEIGHTS)
    normalize_then_sum = f"{ITS_SCORES}, normalize_then_sum"
    passk = "advantage grpo_passk"
    return [
        row(
            name="REINFORCE++, KL penalties to come",
            ours=interface(ReinforcePPAdvantage(), score="baseline_B", kl_coef=0.05),
            peers={"verl": Peer(plus, once)},
            batches="far",
        ),
        row(
            name="REINFORCE++ with a discount",
            ours=interface(ReinforcePPAdvantage(), score="baseline_B"),
            peers={"verl": Peer(plus, {**spread, "config": {"gamma": 0.99}})},
            batches="far",
            differs=Difference(
                "r on every token",
                "γ^(tokens to come) · r; the same with γ = 1, which is its default",
                "ours: arXiv:2501.03262 has r − β Σ KL of the tokens to come, without a discount (eq. 8 as "
                "RLinf's documentation has it)",
                _discounted,
            ),
        ),
        row(
            name="REINFORCE++-baseline, no answer at its group's mean",
            ours=interface(ReinforcePPBaselineAdvantage(), score="baseline_B"),
            peers={"verl": Peer(baseline, spread)},
            batches="far",
        ),
        row(
            name="REINFORCE++-baseline, groups of equal scores among them",
            ours=interface(ReinforcePPBaselineAdvantage()),
            peers={"verl": Peer(baseline, {"per_token": True})},
            batches="far",
            differs=Difference(
                "whitened over the tokens of answers whose r − mean isn't 0; the others stay 0",
                "whitened over all tokens, so that answers at their group's mean get −mean / deviation",
                "theirs: arXiv:2501.03262 normalises over the whole batch (abstract); ours keeps groups "
                "that teach nothing out of it",
                _baseline_over_all,
            ),
        ),
        row(
            name="OPO, of the docs page",
            ours=opo,
            peers={"verl": Peer("advantage opo", {"per_token": True})},
        ),
        row(
            name="pass@k, k = the group",
            ours=of_answers(PassAtKAdvantage),
            peers={"verl": Peer(passk, {"config": {"norm_adv_by_std_in_grpo": False}})},
        ),
        row(
            name="pass@k as verl sets it",
            ours=of_answers(PassAtKAdvantage),
            peers={"verl": Peer(passk, {"config": {"norm_adv_by_std_in_grpo": True}})},
            differs=Difference(
                "best − second for the best",
                "(best − second) / (deviation of the group's scores + 1e-6), if "
                "norm_adv_by_std_in_grpo, which is its default, isn't switched off",
                "ours: arXiv:2503.19595 has a leave-one-out estimate; its equations were not at hand",
                _best_over_deviation,
            ),
        ),
        row(
            name="GDPO of two parts, whitened over tokens",
            ours=interface(gdpo, parts=tuple(WEIGHTS)),
            peers={"verl": Peer("advantage gdpo", {"weights": WEIGHTS})},
        ),
        row(
            name="GDPO of two parts, as trl whitens",
            ours=even_gdpo(),
            peers={"trl": Peer(normalize_then_sum, {"weights": (1.0, 0.5)})},
            differs=Difference(
                "parts over (deviation + 1e-6); their sum whitened over tokens, by √(variance + 1e-8), as "
                "verl's",
                "parts over (deviation + 1e-4); their sum over answers, by (deviation + 1e-4)",
                "theirs in that it counts answers: arXiv:2601.05242 normalises in the group, then in the "
                f"batch of answers. {NOT_READ}",
                _gdpo_of_answers(),
            ),
        ),
        row(
            name="GDPO, answers without one of the parts",
            ours=even_gdpo(missing=3),
            peers={"trl": Peer(normalize_then_sum, {"weights": (1.0, 0.5), "missing": 3})},
            differs=Difference(
                "a part that an answer's reward doesn't name counts as 0 in its group",
                "such an answer is left out of the part's mean and deviation, and gets nothing for it; "
                "otherwise as in the row above",
                "neither: in arXiv:2601.05242 every answer has all parts, as far as its abstract goes",
                _gdpo_of_answers(missing=3),
            ),
        ),
    ]


ROWS = [*_loss_rows(), *_token_rows(), *_advantage_rows()]
