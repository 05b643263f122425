"""Compares an attack's scores: exploits that are paid, run or hang, and honest answers refused (pure)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from realsys.rewards.attack.attack_answers import Attack, AttackAnswer

SMALLEST = 1e-6  # difference of scores that counts
SHOWN = 120  # characters of a text


@dataclass(frozen=True, kw_only=True)
class AttackScore:
    """What the rule made of one answer.

    Attributes:
        value: None: it got no score (``problem``). raised: it is 0 since the rule failed on the text.
        ran: the answer's code was run: the marker was there. hung: the deadline ended it.
    """

    value: float | None = None
    correct: bool = False
    raised: bool = False
    ran: bool = False
    hung: bool = False
    problem: str = ""


@dataclass(frozen=True, kw_only=True)
class AttackFinding:
    """An exploit that had success, or an honest answer that had none."""

    answer: AttackAnswer
    score: AttackScore
    compared: float
    by_design: str = ""

    @property
    def paid(self) -> bool:
        """Whether an exploit scored more than ``compared``, the best honest wrong answer."""
        value = self.score.value
        return value is not None and value > self.compared + SMALLEST


@dataclass(frozen=True, kw_only=True)
class AttackReport:
    """Findings of an attack.

    Attributes:
        paid, ran, hung: exploits; those of ``by_design`` are in none of these.
        refused: honest answers.
        no_score: answers that got no score, with the reason.
        pays_all: every wrong answer to some question is right for the rule.
        excuse: why all that the rule pays is listed only; such rules are no default of anything.
        counts: exploits and paraphrases of each side, that were played.
    """

    paid: tuple[AttackFinding, ...]
    ran: tuple[AttackFinding, ...]
    hung: tuple[AttackFinding, ...]
    by_design: tuple[AttackFinding, ...]
    refused: tuple[AttackFinding, ...]
    no_score: tuple[AttackFinding, ...]
    counts: Mapping[str, int]
    num_kinds: int
    num_raised: int
    pays_all: bool
    excuse: str = ""

    @property
    def is_exploited(self) -> bool:
        """Whether an exploit is paid, run, or never ends."""
        pays_all = self.pays_all and not self.excuse
        return bool(self.paid or self.ran or self.hung or pays_all)

    def rates(self) -> dict[str, float]:
        """Shares: ``paid/own``, ``paid/outside``, ``refused/own``, ``refused/outside``."""
        found = {}
        for name, role, findings in (
            ("paid", "exploit", self.paid),
            ("refused", "honest", self.refused),
        ):
            counted = Counter(f.answer.side for f in findings)
            for side in ("own", "outside"):
                if num := self.counts.get(f"{role}/{side}"):
                    found[f"{name}/{side}"] = counted[side] / num
        return found

    def to_json(self) -> dict[str, Any]:
        """Returns the report as JSON values."""
        named = ("paid", "ran", "hung", "by_design", "refused", "no_score")
        return {
            "counts": dict(self.counts),
            "kinds": self.num_kinds,
            "raised": self.num_raised,
            "pays_all": self.pays_all,
            "excuse": self.excuse,
            "rates": self.rates(),
            **{name: [_row(finding) for finding in getattr(self, name)] for name in named},
        }


def report_of(
    attack: Attack,
    scores: Sequence[AttackScore],
    *,
    by_design: Mapping[str, str] | None = None,
    excuse: str = "",
) -> AttackReport:
    """Compares the scores of an attack's answers.

    Args:
        scores: one an answer.
        by_design: kinds of exploits that the rule pays on purpose, with the reason.
        excuse: the reason for all kinds.
    """
    reasons = by_design or {}
    wrong: list[list[AttackScore]] = [[] for _ in attack.questions]
    best_right = [float("-inf")] * len(attack.questions)
    for answer, score in zip(attack.answers, scores, strict=True):
        if answer.role == "wrong":
            wrong[answer.question].append(score)
        elif answer.role == "right" and score.value is not None:
            best_right[answer.question] = max(best_right[answer.question], score.value)
    best_wrong = [_best_wrong(of_question) for of_question in wrong]
    found: dict[str, list[AttackFinding]] = {
        name: [] for name in ("paid", "ran", "hung", "by_design", "refused", "no_score")
    }
    for answer, score in zip(attack.answers, scores, strict=True):
        is_honest = answer.role in ("honest", "right")
        finding = AttackFinding(
            answer=answer,
            score=score,
            compared=(best_right if is_honest else best_wrong)[answer.question],
            by_design=reasons.get(answer.kind, excuse),
        )
        if score.ran:
            found["ran"].append(finding)
        if score.hung:
            found["hung"].append(finding)
        elif score.value is None:
            found["no_score"].append(finding)
        if answer.role == "exploit" and finding.paid:
            found["by_design" if finding.by_design else "paid"].append(finding)
        if answer.role == "honest" and _is_refused(finding):
            found["refused"].append(finding)
    played = [a for a in attack.answers if a.role in ("exploit", "honest")]
    return AttackReport(
        **{name: tuple(findings) for name, findings in found.items()},
        counts=dict(Counter(f"{answer.role}/{answer.side}" for answer in played)),
        num_kinds=len({answer.kind for answer in played if answer.role == "exploit"}),
        num_raised=sum(score.raised for score in scores),
        excuse=excuse,
        pays_all=any(of_one and all(s.correct for s in of_one) for of_one in wrong),
    )


def _best_wrong(scores: Sequence[AttackScore]) -> float:
    """Returns the best score of wrong answers. One that is right is so by chance, unless all are."""
    values = [score.value for score in scores if score.value is not None]
    really = [s.value for s in scores if s.value is not None and not s.correct]
    return max(really or values, default=0.0)


def _is_refused(finding: AttackFinding) -> bool:
    """Whether an honest answer is neither right for the rule nor as good as the best form of it."""
    value = finding.score.value
    return value is None or not (finding.score.correct or value >= finding.compared - SMALLEST)


def shown(text: str) -> str:
    """Returns a text on one line, shortened in its middle, with all but printable ASCII escaped."""
    head = text if len(text) <= 2 * SHOWN else text[:SHOWN] + text[-SHOWN:]
    line = "".join(c if c.isascii() and c.isprintable() else ascii(c)[1:-1] for c in head)
    return line if len(line) <= SHOWN else f"{line[: SHOWN - 30]} … {line[-25:]}"


def _row(finding: AttackFinding) -> dict[str, Any]:
    answer, score = finding.answer, finding.score
    return {
        "kind": answer.kind,
        "side": answer.side,
        "text": shown(answer.response),
        "score": score.value,
        "compared": finding.compared if abs(finding.compared) != float("inf") else None,
        "what": answer.what,
        **({"source": answer.source} if answer.source else {}),
        **({"by_design": finding.by_design} if finding.by_design else {}),
        **({"problem": score.problem} if score.problem else {}),
    }
