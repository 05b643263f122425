"""What rules read that compare an answer's final text: what stands behind its thoughts."""

from __future__ import annotations

from dataclasses import dataclass

from realsys.api.basics.thoughts import has_marks, text_behind_thoughts, without_marks
from realsys.api.options import option


@dataclass(kw_only=True)
class FinalTextRule:
    """Base of such rules. An answer with thoughts and nothing behind them scores 0, unread."""

    score_unfinished_thoughts: bool = option(
        False,
        "an answer with nothing behind its thoughts, such as one that was cut off within them, is scored "
        "by its thoughts; else 0",
    )

    def text_of(self, response: str, final: str | None = None) -> str | None:
        """Returns what is read of an answer; None: it scores 0.

        Args:
            final: the text behind the thoughts, as ``Completion`` has it; None: found in ``response``.
        """
        if final is None:
            final = text_behind_thoughts(response) or ""
        if final is response or final.strip() or final == response:
            return final
        if not self.score_unfinished_thoughts:
            return None
        return without_marks(response) if has_marks(response) else response
