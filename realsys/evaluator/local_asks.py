"""The policy of episodes that are only evaluated: an engine in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from realsys.api.agent import Answer, AnswerSoFar
from realsys.api.errors import WorkerLost
from realsys.generation.engine.sampling import row_seed
from realsys.generation.http.served_engine import ServedEngine
from realsys.rollout.worker.chunks import AnswerSettings, PartialAnswer, next_request
from realsys.rollout.worker.policy_client import RequestStats
from realsys.transport.generation_messages import Finish, GenerateRequest, GenerateResult
from realsys.transport.rollout_messages import Ticket


@dataclass(frozen=True)
class LocalAsks:
    """What gives each episode its way to ``engine``. Seeds are those of a rollout worker."""

    engine: ServedEngine
    settings: AnswerSettings

    def ask_for(
        self, ticket: Ticket, index: int, *, own_prompt: bool = False, number: int = 0
    ) -> LocalAsk:
        """Makes the ``Ask`` of the ticket's episode ``index``; the others make no difference."""
        return LocalAsk(self, ticket, index)


class LocalAsk:
    """An ``Ask`` (realsys.api.agent) of one episode."""

    def __init__(self, asks: LocalAsks, ticket: Ticket, index: int) -> None:
        self._asks, self._ticket, self._index = asks, ticket, index
        self.request_stats = RequestStats()

    async def __call__(
        self,
        tokens: Sequence[int],
        limit: int | None = None,
        /,
        *,
        stop: Sequence[str] = (),
        on_tokens: Callable[[Sequence[int]], None] | None = None,
        grammar: str = "",
        answer_prefix: int = 0,
    ) -> Answer:
        """Generates the policy's answer to ``tokens``, or its rest.

        Raises:
            DataError: the grammar can't be completed. WorkerLost: the engine ends.
        """
        settings, turn = self._asks.settings, self.request_stats.requests
        self.request_stats.requests += 1
        part = PartialAnswer.to(
            tokens,
            answer_prefix=answer_prefix,
            limit=settings.limit(limit),
            seed=row_seed(settings.base_seed, self._ticket.id, self._index, turn),
            stop=tuple(stop),
            grammar=grammar,
        )
        name = f"{self._ticket.id}.{self._ticket.tries}.{self._index}.{turn}"
        request = next_request(part, settings, rid=name, whole=True)
        if not part.ended:
            part.take(await self._result(request, on_tokens), asked=request.sampling.max_new_tokens)
        return part.answer()

    async def _result(
        self, request: GenerateRequest, on_tokens: Callable[[Sequence[int]], None] | None
    ) -> GenerateResult:
        answers = self._asks.engine.generate(request, stream=on_tokens is not None)
        async with aclosing(answers) as growing:  # type: ignore[type-var]
            async for answer in growing:
                if answer.finish is Finish.ABORT:
                    break
                if on_tokens is not None:
                    on_tokens(
                        AnswerSoFar(
                            tokens=answer.output_ids,
                            logprobs=answer.logprobs,
                            versions=answer.versions,
                            kept=answer.kept,
                        )
                    )
                if answer.finish is not None:
                    return answer.result()
        raise WorkerLost("the engine ends", where=f"answer {request.rid}", fix="start it again")
