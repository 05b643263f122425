"""How an answer's score becomes an advantage, chosen by name: ``algorithm.advantage=rloo``. No torch:
formulas are in realsys/algorithms/advantage/estimators_by_name.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from realsys.api.basics.choice import Choice
from realsys.api.basics.option_fields import option

if TYPE_CHECKING:
    import torch

    from realsys.algorithms.advantage.group_scores import GroupScores


@dataclass(frozen=True, kw_only=True)
class AdvantageEstimator(Choice):
    """Base.

    Attributes:
        by_critic: advantages are made from a critic's values.
        compares: an answer is compared with the others of its group.
        norm: ``algorithm.adv_norm`` where the user says nothing.
    """

    choice = "advantage"
    by_critic: ClassVar[bool] = False
    compares: ClassVar[bool] = False
    norm: ClassVar[str] = "none"


@dataclass(frozen=True, kw_only=True)
class GAE(AdvantageEstimator):
    """Generalised advantage estimation (arXiv:1506.02438) by the values of a critic."""

    kind = "gae"
    by_critic = True
    norm = "batch"


@dataclass(frozen=True, kw_only=True)
class AnswerEstimator(AdvantageEstimator):
    """Base: without a critic, one advantage an answer. A user's kind has ``answer_advantages``.

    Its KL penalty is compared with those of its group likewise; where ``compares`` is False, each token
    bears the penalty of the tokens from it on.

    Attributes:
        reads_parts: it looks at the parts of a reward.
    """

    compares = True
    reads_parts: ClassVar[bool] = False

    def answer_advantages(self, answers: GroupScores) -> torch.Tensor:
        """Returns float32 ``[B]``: the advantage of each answer, by its score; 0 for a group of one."""
        raise NotImplementedError(f"{type(self).__name__} has no answer_advantages(answers)")


@dataclass(frozen=True, kw_only=True)
class GRPOAdvantage(AnswerEstimator):
    """GRPO (arXiv:2402.03300, sec. 4.1): (r − mean) / (deviation + 1e-6), of the group."""

    kind = "grpo"


@dataclass(frozen=True, kw_only=True)
class DrGRPOAdvantage(AnswerEstimator):
    """Dr. GRPO (arXiv:2503.20783, sec. 3.2): r − mean of the group."""

    kind = "dr_grpo"


@dataclass(frozen=True, kw_only=True)
class RLOOAdvantage(AnswerEstimator):
    """RLOO (arXiv:2402.14740): r − mean of the group's other answers."""

    kind = "rloo"


@dataclass(frozen=True, kw_only=True)
class NoAdvantage(AnswerEstimator):
    """0: the score teaches nothing, and what is left is what teachers and penalties teach."""

    kind = "none"
    compares = False


@dataclass(frozen=True, kw_only=True)
class ReinforcePPAdvantage(AnswerEstimator):
    """REINFORCE++ (arXiv:2501.03262): r itself; the batch's mean and deviation are the baseline."""

    kind = "reinforce_pp"
    compares = False
    norm = "batch"


@dataclass(frozen=True, kw_only=True)
class ReinforcePPBaselineAdvantage(AnswerEstimator):
    """REINFORCE++-baseline (arXiv:2501.03262): r − mean of the group, then over the batch's deviation."""

    kind = "reinforce_pp_baseline"
    norm = "batch"


@dataclass(frozen=True, kw_only=True)
class MaxRLAdvantage(AnswerEstimator):
    """MaxRL (arXiv:2602.02710): (r − mean) / mean of the group, so that a success counts the more the rarer
    it is. For rewards of 0 or more; a group whose mean is 0 or less teaches nothing.
    """

    kind = "maxrl"


@dataclass(frozen=True, kw_only=True)
class PassAtKAdvantage(AnswerEstimator):
    """pass@k (arXiv:2503.19595, sec. 3; for k below the group's size arXiv:2505.15201, sec. 4): what an
    answer adds to the best of k, on average over the k-subsets of its group that it is in.
    """

    kind = "pass_at_k"
    k: int | None = option(None, "answers of which the best counts; none: the whole group", ge=2)


@dataclass(frozen=True, kw_only=True)
class GDPOAdvantage(AnswerEstimator):
    """GDPO (arXiv:2601.05242): each part of a reward is compared within the group by itself, as by GRPO;
    then they are added up, by weight.
    """

    kind = "gdpo"
    norm = "batch"
    reads_parts = True
    weights: Mapping[str, float] = option(
        {}, "weight of each part of the reward; none given: every part but `correct` counts 1"
    )
