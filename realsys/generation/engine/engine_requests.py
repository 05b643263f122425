"""Requests and outputs of the continuous engine (values)."""

from __future__ import annotations

from dataclasses import dataclass, field

from realsys.api.model import GenerationHyperparameters


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """Request to continue ``prompt``.

    Attributes:
        prompt: token ids, at least one, including the part of the answer generated so far.
        gconfig: ``n`` is ignored; ``max_new_tokens`` counts from here.
        seed: int64 seed of the answer (``sampling.row_seed``).
        position: index in the answer of the first token made here: its random number is that of
            (seed, position).
        stop_ids: tokens that end the answer.
        stop_texts: texts that end it; only where the engine has a tokenizer.
        return_kept: log-probs are of the renormalised kept sets (``top_p``, ``top_k``,
            ``min_new_tokens``), which are returned too; otherwise over the whole vocabulary. Greedy picks
            are of the whole vocabulary in any case.
        grammar: what the answer must be, from its beginning on (token_grammar.py); empty: anything.
            Tokens that it leaves out are not kept. ``min_new_tokens`` gives way to it.
    """

    rid: str
    prompt: tuple[int, ...]
    gconfig: GenerationHyperparameters
    seed: int
    position: int = 0
    stop_ids: frozenset[int] = frozenset()
    stop_texts: tuple[str, ...] = ()
    return_kept: bool = False
    grammar: str = ""


@dataclass
class GenerationOutput:
    """Output of a request so far; ``finish`` is ``stop``, ``length`` or ``abort`` once it has ended.

    One log-prob and one weight version for each token; ``cached_tokens`` of the prompt were not computed
    for this request. ``kept`` (if requested) has one kept set for each token, see
    ``sampling.encode_kept_sets``. ``fault`` says why it was aborted by its grammar; then
    its tokens are of no use.
    """

    rid: str
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish: str = ""
    cached_tokens: int = 0
    kept: list[bytes] = field(default_factory=list)
    fault: str = ""
