"""Continuous batching: requests join and leave the batch at every decoding step.

For the generation server and, through engine.py, for generation inside a trainer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from torch import nn

from realsys.generation.requests import GenerationOutput, GenerationRequest


class ContinuousEngine:
    """Answers requests with the weights of ``module``, up to ``max_running`` at once.

    Not thread-safe: one thread calls it. It has no clock and does no I/O.

    Args:
        module: causal LM of transformers with whole weights; read in place, see ``set_version``.
        eos_token_ids: end every answer, beside a request's own ``stop_ids`` and
            ``gconfig.stop_token_ids``.
        pad_token_id: any token; stands where nothing is read.
        max_running: rows decoded together; more requests wait, first come first served.
        max_tokens: tokens that running requests may come to hold together; None: as many as there are.
        tokenizer: needed for ``stop_texts``.
        version: of the weights.
        quantize: ``int8`` keeps an int8 copy of the linear layers.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        eos_token_ids: Sequence[int] = (),
        pad_token_id: int = 0,
        max_running: int = 64,
        max_tokens: int | None = None,
        tokenizer: Any = None,
        version: int = 0,
        quantize: Literal["none", "int8"] = "none",
    ) -> None: ...

    # ---- requests -----------------------------------------------------------------------------

    def submit(self, request: GenerationRequest) -> None:
        """Puts a request behind those that wait. It gets its first token in a later ``step``.

        Raises:
            DataError: an empty prompt, a token outside the vocabulary, a rid that is there already, more
                tokens than the model or ``max_tokens`` has room for, stop texts without a tokenizer.
        """

    def step(self) -> list[GenerationOutput]:
        """Admits what fits, then makes one token for each running request.

        Returns the outputs of all requests that got a token, in the order of their admission. They are the
        engine's own objects, which grow in the next step: copy what outlives it (``output`` copies).
        One whose ``finish`` is set has ended; the engine has forgotten it. Empty when nothing runs.
        """

    def abort(self, rid: str) -> GenerationOutput | None:
        """Ends a request: what it has, with finish ``abort``. None if it is not (or no longer) here."""

    def abort_all(self) -> list[GenerationOutput]:
        """As ``abort`` for each, running ones first."""

    def retract_all(self) -> None:
        """Running requests wait again, in front, with their tokens kept: they'll be read anew."""

    def output(self, rid: str) -> GenerationOutput | None:
        """A copy of what a running or waiting request has so far; None if it is not here."""

    # ---- weights ------------------------------------------------------------------------------

    def set_version(self, version: int, *, recompute: bool = True) -> None:
        """Told after the module's weights were changed in place, between two steps.

        Args:
            recompute: running requests are read anew with the new weights (as after
                ``retract_all``); else they keep what the old weights cached.
        """

    def flush_prefixes(self) -> None:
        """Forgets cached prompts."""

    # ---- counters -----------------------------------------------------------------------------

    @property
    def num_running(self) -> int:
        """Requests that get a token in each step."""

    @property
    def num_waiting(self) -> int:
        """Requests that were not admitted yet, or were retracted."""

    @property
    def num_tokens(self) -> int:
        """Prompt and answer tokens held by running and waiting requests."""
