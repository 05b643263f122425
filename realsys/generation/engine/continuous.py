"""Continuous batching: requests join and leave the batch at every decoding step.

For the generation server, and through embedded_engine.py for generation inside a trainer. This
module decides which requests run and when an answer ends; slots.py computes, sampling.py samples.

    submit → waiting ──admitted, read──▶ running ──a token a step──▶ ended, forgotten
              ▲  ▲ └─▶ long_texts.py: read in pieces ─▶ waiting again │
              │  └────────────────────────────────────────────────────┘ retract_all
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, NoReturn

import torch
from torch import nn

from realsys.api.errors import DataError, InternalError
from realsys.generation.decoding.decoder import (
    LARGEST_GRANULE,
    FastForward,
    fast_path_obstacle,
    rounded,
)
from realsys.generation.decoding.generic_decoder import GenericSlots
from realsys.generation.decoding.slots import FastSlots, Slots
from realsys.generation.engine.banned_tokens import BannedTokens, find_banned
from realsys.generation.engine.engine_requests import GenerationOutput, GenerationRequest
from realsys.generation.engine.long_texts import LongTexts
from realsys.generation.engine.row import WHERE, Rooms, Row, check_request, within
from realsys.generation.engine.sampling import Picking, SlotSampler
from realsys.generation.engine.stop_texts import StopTexts
from realsys.generation.engine.token_grammar import GrammarReader, TokenGrammar

# Rows move to lower slots when this small a share of the computed ones is in use: it copies the cache.
_COMPACT_BELOW = 0.75


class ContinuousEngine:
    """Generates for requests with the weights of ``module``, up to ``max_running`` at once.

    Not thread-safe: one thread calls it. It has no clock and does no I/O. A model without a fast path
    (decoder.py) is computed row by row, which is slow. With one, in float32 on a CPU, tokens and log-probs
    of a request are the same, bit for bit, whatever other requests run at the same time, whether an
    answer is made in one request or in several, however often it is retracted, and in whatever pieces its
    text is read.

    Args:
        module: causal LM of transformers with whole weights; read in place, see ``set_version``.
        eos_token_ids: end every answer, in addition to a request's own ``stop_ids`` and
            ``gconfig.stop_token_ids``.
        pad_token_id: any token, used as padding.
        max_running: maximum number of rows decoded together; further requests wait in order.
        max_tokens: most cells of the cache, rows times tokens of the longest of them, which bounds prompt
            and answer of each request too; None: no bound. Requests are admitted by what they hold and a
            good part more (``Row.expected``). Where answers get longer, the newest wait again, to be read
            anew later.
        tokenizer: needed for ``stop_texts`` and grammars.
        textless: ids that are never sampled, see textless_ids.py.
        version: version of the weights.
        quantize: ``int8`` or ``fp8`` keeps such a copy of the linear layers; only with a fast path.
        prefix_bytes: bound of what is remembered of prompts; 0 remembers nothing.
        read_tokens: new texts are read up to so many tokens a step, and longer ones in pieces between the
            steps (long_texts.py), so that who waits for that does not hold up others. None: all at once,
            which is quickest to the last answer.
        keep_answers: also cache answers that ended with ``length``, since they may be continued.
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
        textless: Sequence[int] = (),
        version: int = 0,
        quantize: Literal["none", "int8", "fp8"] = "none",
        prefix_bytes: int = 1 << 28,
        read_tokens: int | None = None,
        keep_answers: bool = True,
    ) -> None:
        self.module: Any = module
        self.device = next(module.parameters()).device
        self.version = version
        self.max_running, self.max_tokens = max_running, max_tokens
        self.read_tokens = read_tokens
        self.tokenizer, self.keep_answers = tokenizer, keep_answers
        self._grammars: GrammarReader | None = None  # once there was a grammar
        self._eos = frozenset(eos_token_ids)
        self._vocabulary: int = module.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
        with torch.inference_mode():
            self.slots: Slots = self._make_slots(quantize, prefix_bytes)
            size = rounded(max_running, LARGEST_GRANULE)
            self._tokens = torch.full((size,), pad_token_id, device=self.device)
        self._sampler = SlotSampler(self.device, textless)
        self._banned = BannedTokens()
        self._waiting: deque[Row] = deque()
        self._long = LongTexts(self.slots, read_tokens)
        self._running: dict[int, Row] = {}  # by slot, in the order of their admission
        self._free = list(range(max_running))  # a heap: low slots first
        self._rows: dict[str, Row] = {}
        self._num_kept = 0  # running rows whose kept sets are returned
        self._crowded = False  # running rows may grow beyond the available space

    def _make_slots(self, quantize: Literal["none", "int8", "fp8"], prefix_bytes: int) -> Slots:
        if (obstacle := fast_path_obstacle(self.module)) is None:
            forward = FastForward(self.module, quantize=quantize)
            return FastSlots(
                forward,
                max_rows=self.max_running,
                prefix_bytes=prefix_bytes,
                max_cells=self.max_tokens,
            )
        if quantize != "none":
            raise DataError(
                f"{quantize} weights need a fast path, which this model lacks: {obstacle}",
                where="ContinuousEngine",
                fix='use quantize="none", or a Llama, Qwen2 or Qwen3',
            )
        return GenericSlots(self.module)

    # ---- requests -----------------------------------------------------------------------------

    def submit(self, request: GenerationRequest) -> None:
        """Queues a request. It gets its first token in a later ``step``.

        ``min_new_tokens``, like ``max_new_tokens``, counts from here. If the model or ``max_tokens`` allows
        fewer than ``max_new_tokens``, the answer ends there with finish ``length``.

        Raises:
            DataError: an empty prompt, a token outside the vocabulary, a rid that is there already, no
                room for a single token, stop texts or a grammar without a tokenizer, a grammar that is no
                grammar or does not allow the answer so far. ConfigError: there is no package for grammars.
        """
        self._check(request)
        request = within(request, self.rooms)
        stops = StopTexts(request.stop_texts, self.tokenizer) if request.stop_texts else None
        stop_ids = self._eos | request.stop_ids | frozenset(request.gconfig.stop_token_ids)
        row = Row(
            request=request,
            output=GenerationOutput(rid=request.rid),
            stop_ids=stop_ids,
            stop_texts=stops,
            grammar=self._grammar_of(request, stop_ids) if request.grammar else None,
        )
        self._rows[request.rid] = row
        self._waiting.append(row)

    def _grammar_of(self, request: GenerationRequest, stop_ids: frozenset[int]) -> TokenGrammar:
        if self._grammars is None:
            self._grammars = GrammarReader(self.tokenizer, vocabulary=self._vocabulary)
        grammar = self._grammars.read(request.grammar, stop_ids=stop_ids)
        grammar.take(request.prompt[len(request.prompt) - request.position :])
        return grammar

    @torch.inference_mode()
    def step(self) -> list[GenerationOutput]:
        """Admits requests that fit, then generates one token for each running request.

        Returns the outputs of all requests that got a token, in the order of their admission. They are the
        engine's own objects, which grow in the next step: copy what outlives it (``output`` copies).
        A request whose ``finish`` is set has ended and is removed. Empty if nothing runs, and after a step
        that read a piece of a long text instead, as every other one does while there are such texts.
        """
        others = bool(self._running or self._waiting)
        if self._long.is_due(others=others):
            return self._read_piece()
        if not others:
            return []
        self._long.note_step()
        logits = None
        if self._running:
            self._make_room()
            logits = self.slots.step(self._tokens, max(self._running) + 1)
        if admitted := self._admit():
            logits = self._read(admitted, logits)
        if logits is None:  # those that waited all have long texts
            return self._read_piece()
        num_slots = max(self._running) + 1
        if self._banned.steps_left == 0:
            self._banned = find_banned(self._running, self._vocabulary, self.device)
        self._banned.steps_left -= 1
        tokens, logprobs, kept = self._sampler.pick_kept(logits[:num_slots], self._banned.mask)
        self._tokens[:num_slots] = tokens
        # Together, because each is a wait for a GPU. float64 holds both exactly.
        picked = torch.stack([tokens.double(), logprobs.double()]).tolist()
        rows = list(self._running.values())
        if self._num_kept:
            self._append_kept(rows, kept)
        self._remove(self._append(rows, *picked))
        self._arrange()
        return [row.output for row in rows]

    @torch.inference_mode()
    def abort(self, rid: str) -> GenerationOutput | None:
        """Ends a request; returns its output with finish ``abort``, None if it is unknown or has ended."""
        if (row := self._rows.get(rid)) is None:
            return None
        row.output.finish = "abort"
        if row.slot < 0:
            if not self._long.remove(row):
                self._waiting.remove(row)
            del self._rows[rid]
        else:
            self._remove([row])
        return row.output

    @torch.inference_mode()
    def abort_all(self) -> list[GenerationOutput]:
        """Aborts all requests, running ones first."""
        rows = [*self._running.values(), *self._long.clear(), *self._waiting]
        self._remove(list(self._running.values()))
        self._waiting.clear()
        self._rows.clear()
        for row in rows:
            row.output.finish = "abort"
        return [row.output for row in rows]

    @torch.inference_mode()
    def retract_all(self) -> None:
        """Moves running requests back to the front of the queue; they keep their tokens and are
        prefilled again.
        """
        rows = list(self._running.values())
        self._vacate(rows)
        self._waiting.extendleft(reversed([*rows, *self._long.clear()]))

    def output(self, rid: str) -> GenerationOutput | None:
        """Copies what a running or waiting request has so far; None if it is unknown."""
        if (row := self._rows.get(rid)) is None:
            return None
        o = row.output
        return replace(
            o,
            tokens=list(o.tokens),
            logprobs=list(o.logprobs),
            versions=list(o.versions),
            kept=list(o.kept),
        )

    # ---- weights ------------------------------------------------------------------------------

    @torch.inference_mode()
    def set_version(self, version: int, *, recompute: bool = True) -> None:
        """Must be called after the module's weights were changed in place, between two steps.

        Args:
            recompute: running requests are prefilled again with the new weights (as after
                ``retract_all``); otherwise they keep the old weights' cache.
        """
        if recompute:
            self.retract_all()
        for row in self._running.values():
            row.version = -1
        self._long.note_version()
        self.version = version
        self.flush_prefixes()
        self.slots.reload()

    def flush_prefixes(self) -> None:
        """Drops cached prompts."""
        self.slots.forget_prefixes()

    # ---- counters -----------------------------------------------------------------------------

    @property
    def rooms(self) -> Rooms:
        """Limits on the length of prompt and answer together."""
        limit = getattr(self.module.config, "max_position_embeddings", None)
        return (("max_position_embeddings", limit), ("max_tokens", self.max_tokens))

    @property
    def num_running(self) -> int:
        """Number of requests that get a token in each step."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Number of requests not admitted yet, or retracted."""
        return len(self._waiting) + len(self._long.rows)

    @property
    def num_long(self) -> int:
        """Number of those waiting whose texts are read in pieces."""
        return len(self._long.rows)

    @property
    def num_tokens(self) -> int:
        """Prompt and answer tokens held by running and waiting requests."""
        return sum(row.length for row in self._rows.values())

    # ---- within a step ------------------------------------------------------------------------

    def _admit(self) -> list[Row]:
        """Admits requests from the front of the queue, without overtaking."""
        if not self._waiting:
            return []
        admitted: list[Row] = []
        to_read = 0
        read: set[tuple[int, ...]] = set()  # equal texts are prefilled once
        longest = max((row.expected for row in self._running.values()), default=0)
        highest = max(self._running, default=-1)
        while self._waiting and self._free:
            needed = max(longest, self._waiting[0].expected), max(highest, self._free[0])
            if self._running and not self._fit(needed[1] + 1, needed[0]):
                break
            if self._long.takes(self._waiting[0]):
                self._long.rows.append(self._waiting.popleft())
                continue
            longest, highest = needed
            if self.read_tokens is not None and (text := self._waiting[0].text) not in read:
                is_read = self._waiting[0] in self._long.finished
                to_read += 0 if is_read else self.slots.num_new(text)
                if admitted and to_read > self.read_tokens:
                    break
                read.add(text)
            row = self._waiting.popleft()
            row.slot, row.version = (
                heapq.heappop(self._free),
                self._long.version_of(row, self.version),
            )
            self._running[row.slot] = row
            request = row.request
            picking = Picking.of(request.gconfig, kept=request.return_kept)
            self._num_kept += request.return_kept
            self._sampler.add(row.slot, picking, seed=request.seed, position=row.number)
            admitted.append(row)
            self._banned = BannedTokens()
        if admitted and self.max_tokens is not None:
            most = max(row.most for row in self._running.values())
            self._crowded = not self._fit(max(self._running) + 1, most)
        return admitted

    def _read_piece(self) -> list[GenerationOutput]:
        self._waiting.extendleft(reversed(self._long.read_piece(self.version)))
        return []

    def _fit(self, num_rows: int, longest: int) -> bool:
        """True if so many rows of so many tokens each fit."""
        return self.max_tokens is None or num_rows * longest <= self.max_tokens

    def _make_room(self) -> None:
        """Retracts the newest rows if the cache can't hold one more token of each row."""
        if not self._crowded:
            return
        rows = list(self._running.values())
        if self._fit(max(self._running) + 1, max(row.length for row in rows)):
            return
        kept = len(rows)
        while kept > 1 and not self._fit(kept, max(row.expected for row in rows[:kept])):
            kept -= 1
        self._vacate(rows[kept:])
        self._waiting.extendleft(reversed(rows[kept:]))
        self._compact()

    def _read(self, rows: Sequence[Row], logits: torch.Tensor | None) -> torch.Tensor:
        """Prefills the texts of ``rows``; returns the logits by slot with theirs included."""
        slots = [row.slot for row in rows]
        new, cached = self.slots.read([row.text for row in rows], slots)
        self._long.note_read(rows)
        for row, num in zip(rows, cached, strict=True):
            if not row.output.tokens:  # otherwise it was retracted and prefilled before
                row.output.cached_tokens = num
        num_slots = max(self._running) + 1
        if logits is None or len(logits) < num_slots:
            more = new.new_zeros(num_slots, new.shape[1])
            if logits is not None:
                more[: len(logits)] = logits
            logits = more
        logits[torch.tensor(slots, device=self.device)] = new
        return logits

    def _append(
        self, rows: Sequence[Row], tokens: Sequence[float], logprobs: Sequence[float]
    ) -> list[Row]:
        """Appends the sampled tokens to their rows; returns rows that have ended."""
        version, ended = self.version, []
        for row in rows:  # runs at each step: this loop is kept short
            output, token, logprob = row.output, int(tokens[row.slot]), logprobs[row.slot]
            if logprob != logprob:
                _refuse_nan(row.request.rid, version)
            output.tokens.append(token)
            output.logprobs.append(logprob)
            output.versions.append(version)
            if row.grammar is not None:
                row.grammar.advance(token)
                output.fault = row.grammar.fault
            if finish := "abort" if output.fault else row.ending(token):
                output.finish = finish
                ended.append(row)
        return ended

    @staticmethod
    def _append_kept(rows: Sequence[Row], kept: Sequence[bytes] | None) -> None:
        """Appends the kept sets of this step's tokens to rows that return them."""
        for row in rows:
            if row.request.return_kept:
                row.output.kept.append(b"" if kept is None else kept[row.slot])

    def _remove(self, rows: Sequence[Row]) -> None:
        """Removes running rows that have ended."""
        for row in rows:
            del self._rows[row.request.rid]
        # Not if keys and values are of older weights, nor for an answer that will not be continued.
        kept = [r for r in rows if r.version == self.version and r.output.finish != "stop"]
        if kept and self.keep_answers:
            texts = [row.text[:-1] for row in kept]  # the last token is not in the cache
            self.slots.keep([row.slot for row in kept], texts)
        self._vacate(rows)

    def _vacate(self, rows: Sequence[Row]) -> None:
        if not rows:
            return
        self.slots.free([row.slot for row in rows])
        for row in rows:
            self._sampler.free(row.slot)
            self._num_kept -= row.request.return_kept
            del self._running[row.slot]
            heapq.heappush(self._free, row.slot)
            row.slot = -1
        self._banned = BannedTokens()

    def _arrange(self) -> None:
        """Sorts rows by length, longest first, if that saves more than it costs."""
        num = len(self._running)
        if not num:
            return
        highest = max(self._running)
        sparse = not self._waiting and num <= _COMPACT_BELOW * (highest + 1)
        scattered = highest >= num and self.max_tokens is not None and self._too_wide(highest)
        if sparse or scattered or self.slots.out_of_order():
            self._compact()

    def _too_wide(self, highest: int) -> bool:
        """True if free slots between rows limit what the cache can hold."""
        rows = [*self._running.values(), *itertools.islice(self._waiting, 1)]
        return not self._fit(highest + 1, max(row.expected for row in rows))

    def _compact(self) -> None:
        """Moves all rows to the lowest slots, longest first."""
        num = len(self._running)
        rows = list(self._running.values())
        by_length = sorted(rows, key=lambda row: -row.length)
        order = [row.slot for row in by_length]
        self.slots.arrange(order)
        self._sampler.arrange(order)
        self._tokens[:num] = self._tokens[order]
        for slot, row in enumerate(by_length):
            row.slot = slot
        self._running = {row.slot: row for row in rows}
        self._banned = BannedTokens()
        self._free = list(range(num, self.max_running))

    def _check(self, request: GenerationRequest) -> None:
        check_request(request, vocabulary=self._vocabulary, rooms=self.rooms)
        where = f"{WHERE} {request.rid}"
        if request.rid in self._rows:
            raise DataError("another request has this rid", where=where, fix="choose another rid")
        if request.stop_texts and self.tokenizer is None:
            raise DataError(
                "stop texts, but the engine has no tokenizer",
                where=where,
                fix="use stop token ids",
            )
        if request.grammar and self.tokenizer is None:
            raise DataError(
                "a grammar, but the engine has no tokenizer",
                where=where,
                fix="leave it out",
            )


def _refuse_nan(rid: str, version: int) -> NoReturn:
    raise InternalError(
        "the model's probabilities are not finite",
        where=f"{WHERE} {rid}, weights of version {version}",
        fix="these weights hold NaN or infinity: check the loss and the gradient norm of training",
    )
