"""Rows of the losses of pairs of answers, with respect to the log-probs of the policy's tokens.

Batches have ``pair_logprobs``, ``pair_ref_logprobs`` and ``pair_mask`` ``[2 P, T]``: first answers of all
pairs, then second ones. The first is the chosen one, but for KTO: there ``pair_label`` says which one is.
"""

from __future__ import annotations

from functools import partial

import torch
from oracle_rows import Difference, Peer, Row
from peer_io import Batch, Form
from torch import Tensor
from torch.nn.functional import softplus

from realsys.algorithms.preference.pair_losses import (
    PairLogprobs,
    kl_estimate_of,
    mean_log_ratio,
    pair_logprobs,
    pair_losses,
)
from realsys.api.basics.preference_losses import DPOLoss, IPOLoss, KTOLoss, PairLoss, SimPOLoss

ITS_DPO, ITS_KTO = "DPOTrainer._compute_loss", "KTOTrainer._compute_loss"
ITS_CPO = "CPOTrainer.cpo_loss"

NOT_RUN = {
    "the losses of pairs in verl": "verl 0.9.1 has none",
    "SimPO in trl with the term that it adds": (
        "cpo_alpha, 1 unless it is set, times the mean −log π of the chosen answers' tokens, made from "
        "logits; the paper (arXiv:2405.14734) has no such term. Compared without, as with cpo_alpha=0"
    ),
    "how trl's KTO pairs prompts with other answers": (
        "while it prepares the data set: each prompt of a micro-batch with the answer before it. The rows "
        "hand it log-probs of such answers"
    ),
}


# --- ours


def packed_pairs(
    batch: Batch, loss: PairLoss, *, labelled: bool = False, kl_estimate: float = 0.0
) -> PairLogprobs:
    """As the interface packs them: chosen and rejected answer of a pair one after the other.

    Args:
        labelled: the chosen one is that with the label.
    """
    mask = batch["pair_mask"]
    order = torch.arange(len(mask)).view(2, -1).T
    if labelled:
        swapped = ~batch["pair_label"][order[:, 0]]
        order = torch.where(swapped[:, None], order.flip(1), order)
    rows = order.flatten()
    kept = mask[rows]
    return pair_logprobs(
        batch["pair_logprobs"][rows][kept],
        batch["pair_ref_logprobs"][rows][kept] if loss.needs_reference else None,
        kept.sum(1).tolist(),
        kl_estimate=kl_estimate,
    )


def of_pairs(loss: PairLoss) -> Form:
    """The mean over pairs."""
    return lambda batch: pair_losses(loss, packed_pairs(batch, loss)).losses.mean()


def kto(loss: KTOLoss, *, of_others: bool) -> Form:
    """The mean over pairs.

    Args:
        of_others: z₀ is that of the mismatched answers, as trl's; otherwise that of the batch, as a step's.
    """

    def form(batch: Batch) -> Tensor:
        mean = (
            _mean_of_mismatched(batch)
            if of_others
            else mean_log_ratio(packed_pairs(batch, loss, labelled=True))
        )
        z0 = kl_estimate_of(float(mean))
        pairs = packed_pairs(batch, loss, labelled=True, kl_estimate=z0)
        return pair_losses(loss, pairs).losses.mean()

    return form


# --- what others are said to compute, where it is not ours


def _log_ratios(batch: Batch) -> Tensor:
    return ((batch["pair_logprobs"] - batch["pair_ref_logprobs"]) * batch["pair_mask"]).sum(1)


def _mean_of_mismatched(batch: Batch) -> Tensor:
    apart = (batch["pair_mismatched"] - batch["pair_ref_mismatched"]) * batch["pair_mask"]
    return apart.sum(1).mean()


def _apart(batch: Batch) -> Tensor:
    chosen, rejected = _log_ratios(batch).chunk(2)
    return chosen - rejected


def _dpo_unsmoothed(beta: float) -> Form:
    return lambda batch: softplus(-beta * _apart(batch)).mean()


def _robust_dpo(beta: float, share: float) -> Form:
    def form(batch: Batch) -> Tensor:
        h = beta * _apart(batch)
        unbiased = (1 - share) * softplus(-h) - share * softplus(h)
        return unbiased.mean() / (1 - 2 * share)

    return form


def _ipo_of_means(beta: float) -> Form:
    def form(batch: Batch) -> Tensor:
        chosen, rejected = (_log_ratios(batch) / batch["pair_mask"].sum(1)).chunk(2)
        return (chosen - rejected - 0.5 / beta).square().mean()

    return form


def _kto_of_mismatched(loss: KTOLoss) -> Form:
    def form(batch: Batch) -> Tensor:
        good = batch["pair_label"]
        gain = loss.beta * (_log_ratios(batch) - _mean_of_mismatched(batch).clamp(min=0))
        weight = torch.where(good, loss.desirable_weight, loss.undesirable_weight)
        return (weight * (1 - torch.where(good, gain, -gain).sigmoid())).mean()

    return form


# --- rows


def _rows() -> list[Row]:
    row = partial(Row, group="preference", wrt="pair_logprobs")
    unequal = KTOLoss(beta=0.1, desirable_weight=1.0, undesirable_weight=1.5)
    its_unequal = Peer(ITS_KTO, {"beta": 0.1, "desirable": 1.0, "undesirable": 1.5})
    smooth = {"beta": 0.5, "label_smoothing": 0.1}
    conservative = of_pairs(DPOLoss(beta=0.5, label_smoothing=0.1))
    ipo = {"loss_type": "ipo", "beta": 0.1}
    return [
        row(
            name="DPO β 0.1",
            ours=of_pairs(DPOLoss(beta=0.1)),
            peers={"trl": Peer(ITS_DPO, {"loss_type": "sigmoid", "beta": 0.1})},
        ),
        row(
            name="DPO β 0.5, label smoothing 0.1, of log-ratios",
            ours=conservative,
            peers={"trl": Peer(f"{ITS_CPO}, of log-ratios", smooth)},
        ),
        row(
            name="IPO τ 0.1, of sums",
            ours=of_pairs(IPOLoss(tau=0.1)),
            peers={"trl": Peer(ITS_DPO, {**ipo, "times_length": True})},
        ),
        row(
            name="KTO β 0.1, weights 1 and 1.5, z₀ of answers to other prompts",
            ours=kto(unequal, of_others=True),
            peers={"trl": its_unequal},
        ),
        row(
            name="SimPO β 2, γ 0.5",
            ours=of_pairs(SimPOLoss(beta=2.0, gamma=0.5)),
            peers={"trl": Peer(ITS_CPO, {"beta": 2.0, "gamma": 0.5})},
        ),
        row(
            name="DPO where label smoothing is asked for",
            ours=conservative,
            peers={"trl": Peer(ITS_DPO, {"loss_type": "sigmoid", **smooth})},
            differs=Difference(
                "−(1 − ε) log σ(h) − ε log σ(−h)",
                "−log σ(h): loss_type sigmoid, its default, leaves label_smoothing out",
                "ours: it is conservative DPO (Mitchell 2023). By trl's help the setting is that of its "
                "robust and exo_pair losses; its CPOTrainer smooths as ours does",
                _dpo_unsmoothed(0.5),
            ),
        ),
        row(
            name="DPO with label smoothing, trl's robust",
            ours=conservative,
            peers={"trl": Peer(ITS_DPO, {"loss_type": "robust", **smooth})},
            differs=Difference(
                "−(1 − ε) log σ(h) − ε log σ(−h)",
                "(−(1 − ε) log σ(h) + ε log σ(−h)) / (1 − 2 ε), which has no smallest value",
                "two methods: ours is conservative DPO (Mitchell 2023), theirs robust DPO "
                "(arXiv:2403.00409)",
                _robust_dpo(0.5, 0.1),
            ),
        ),
        row(
            name="IPO as trl has it",
            ours=of_pairs(IPOLoss(tau=0.1)),
            peers={"trl": Peer(ITS_DPO, ipo)},
            differs=Difference(
                "(r_w − r_l − 1 / (2 τ))², r the sum of an answer's log-ratios",
                "(r_w / n_w − r_l / n_l − 1 / (2 β))², n the answer's tokens",
                "ours: in arXiv:2310.12036, eq. 17, log-ratios are those of whole answers. By a comment of "
                "trl's the authors confirmed the division, and the paper's results are with it, without a "
                "word of it there",
                _ipo_of_means(0.1),
            ),
        ),
        row(
            name="KTO, which z₀",
            ours=kto(unequal, of_others=False),
            peers={"trl": its_unequal},
            differs=Difference(
                "max(0, mean log-ratio of the batch's own answers), over all micro-batches and ranks",
                "max(0, mean log-ratio of answers to other prompts), over one micro-batch of each rank",
                "theirs: the authors' program (ContextualAI/HALOs) pairs so too, for arXiv:2402.01306, "
                "sec. 4.1, whose text was not at hand. Ours takes no pass of the reference for it, and "
                "does not change with the cut into micro-batches",
                _kto_of_mismatched(unequal),
            ),
        ),
    ]


ROWS = _rows()
