"""Samples one request's answers from an engine, as the client wishes: a ``SessionPolicy``."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from realsys.api.agent import Answer
from realsys.api.errors import WorkerLost
from realsys.generation.http.served_engine import EngineAnswer, ServedEngine
from realsys.policy_server.client_sampling import answer_seed, engine_sampling
from realsys.transport.generation_messages import Finish, GenerateRequest


class ClientPolicy:
    """Samples the answers of one request.

    Args:
        max_new_tokens: of an answer whose request names no limit; None: as many as the context holds.
    """

    def __init__(self, engine: ServedEngine, *, max_new_tokens: int | None = None) -> None:
        self._engine, self._max_new_tokens = engine, max_new_tokens
        self._name = secrets.token_hex(8)
        self._drawn_seed = secrets.randbits(63)  # where the client sends none
        self._num_answers = 0

    async def sample(
        self,
        tokens: Sequence[int],
        *,
        limit: int | None,
        stop: Sequence[str],
        sampling: Mapping[str, Any],
        on_tokens: Callable[[Sequence[int]], None] | None,
        grammar: str = "",
        answer_prefix: int = 0,
    ) -> Answer:
        """Samples an answer to ``tokens``. Answers of a request have different seeds: its own, and others
        that follow from it.

        Args:
            answer_prefix: none here: who comes again has another conversation.
        Raises:
            DataError: the client's settings can't be served. WorkerLost: the engine ends.
        """
        assert not answer_prefix
        number = self._num_answers
        self._num_answers += 1
        seed = answer_seed(sampling.get("seed", self._drawn_seed), number)
        request = GenerateRequest(
            rid=f"{self._name}-{number}",
            input_ids=tuple(tokens),
            sampling=engine_sampling(
                sampling,
                limit=self._max_new_tokens if limit is None else limit,
                stop=stop,
                seed=seed,
                grammar=grammar,
            ),
        )
        answers = self._engine.generate(request, stream=on_tokens is not None)
        async with aclosing(answers) as growing:  # type: ignore[type-var]
            async for answer in growing:
                if answer.finish is None and on_tokens is not None:
                    on_tokens(answer.output_ids)
                elif answer.finish is not None:
                    return _answer(answer)
        raise _ended()


def _answer(answer: EngineAnswer) -> Answer:
    """Converts a finished answer. Raises WorkerLost: it was cut off by the server's end."""
    if answer.finish is Finish.ABORT:
        raise _ended()
    return Answer(
        tokens=tuple(answer.output_ids),
        logprobs=tuple(answer.logprobs),
        versions=tuple(answer.versions),
        stopped=answer.finish is Finish.STOP,
        context_length=answer.context_length,
    )


def _ended() -> WorkerLost:
    return WorkerLost("the server is ending", where="realsys serve", fix="start it again")
