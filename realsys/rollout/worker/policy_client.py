"""Generates answers for agents: requests them from the servers that the manager assigns.

Chunks, interruptions by weight updates, and failed or outdated servers are handled here: generated tokens
are kept, and another server continues. chunks.py makes the requests.

No clock ends an answer that grows. Its limit is one of silence: a server that is at one request for so long
is asked for the tokens that it has; if there are some, the answer goes on with these, and the time begins
anew. So it does while the answer stands in the line of servers that work, but ``LINE_S`` without a token
end it in any case.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from msgspec import structs

from realsys.api.agent import Answer
from realsys.api.errors import RealsysError, RemoteError, WaitTimeout, WorkerLost
from realsys.generation.engine.sampling import row_seed
from realsys.rollout.worker.chunks import AnswerSettings, PartialAnswer, next_request, result_fault
from realsys.rollout.worker.peers import Peer
from realsys.rollout.worker.servers import CHECK_S, ServerClients, server_name
from realsys.runtime.progress import tick
from realsys.transport.generation_messages import (
    Finish,
    GenerateRequest,
    GenerateResult,
    GenerationClient,
)
from realsys.transport.rollout_messages import AskServer, DoneWith, Ticket, UseServer

logger = logging.getLogger(__name__)

ASK_S = 5.0  # time for which the manager holds a request
# Extra time without reply after which it is looked up again: it may have been restarted.
GRACE_S = 3.0
DONE_S = 2.0
CALL_BACK_S = 5.0  # time limit for a server's tokens after it was asked to stop
LINE_S = 4 * 3600.0  # longest time without a token for an answer in the line of healthy servers
INFO_S = 5.0
MAX_REFUSALS = 10  # in a row for one answer; the pauses between them add up to about 11 s
_PAUSES_S = (0.1, 2.0)  # first and longest pause after a server without result


@dataclass(kw_only=True)
class RequestStats:
    """Statistics of the requests for the answers of one episode."""

    requests: int = 0
    broken: int = 0
    servers: set[int] = field(default_factory=set)
    at: UseServer | None = None  # of the newest request; None: it waits for a server


class PolicyCaller:
    """State shared by all episodes of a worker. ``worker`` is its name."""

    def __init__(
        self, *, worker: str, manager: Peer, clients: ServerClients, settings: AnswerSettings
    ) -> None:
        self.worker, self.manager, self.clients = worker, manager, clients
        self.settings = settings
        self._told_of_room = False

    def log_early_end(self, server: int, prompt: int, count: int, asked: int) -> None:
        """Logs, once, that an episode's first answer filled the context below ``max_new_tokens``."""
        if not self._told_of_room:
            self._told_of_room = True
            logger.warning(
                "answers end early: %s had room for %d tokens behind a prompt of %d, not for %d; "
                "lower gen.max_new_tokens, or give the server more",
                server_name(server),
                count,
                prompt,
                asked,
            )

    def ask_for(
        self, ticket: Ticket, index: int, *, own_prompt: bool = False, number: int = 0
    ) -> EpisodeAsk:
        """Makes the ``Ask`` of the ticket's episode ``index`` (from 0 in its group).

        Args:
            own_prompt: the agent begins with other tokens than the question's, which may not fit.
            number: of the try, which has seeds of its own; 0: the first.
        """
        return EpisodeAsk(self, ticket, index, own_prompt=own_prompt, number=number)


class EpisodeAsk:
    """An ``Ask`` (realsys.api.agent).

    The t-th request of an episode has its own seed; that of the first equals the synchronous
    path's, so that both paths give the same answer.
    """

    def __init__(
        self,
        caller: PolicyCaller,
        ticket: Ticket,
        index: int,
        *,
        own_prompt: bool = False,
        number: int = 0,
    ) -> None:
        self._caller, self._ticket, self._index = caller, ticket, index
        self._own_prompt, self._number = own_prompt, number
        self._turn = 0
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
            WaitTimeout: it got no token in ``timeout_s``; names what it waited for.
            RemoteError: servers refused ``MAX_REFUSALS`` times in a row. DataError: it can't be answered.
        """
        settings = self._caller.settings
        turn, self._turn = self._turn, self._turn + 1
        id_ = seed_id(self._ticket.id, self._number)
        part = PartialAnswer.to(
            tokens,
            answer_prefix=answer_prefix,
            limit=settings.limit(limit),
            seed=row_seed(settings.base_seed, id_, self._index, turn),
            stop=tuple(stop),
            grammar=grammar,
        )
        answering = _AnswerRequests(
            self._caller,
            self._ticket,
            part,
            self.request_stats,
            must_fit=not turn and not self._own_prompt,
        )
        name = f"{id_}.{self._ticket.tries}.{self._index}.{turn}"
        number = 0
        while not part.ended:
            # A new rid for each request: a former one may still run on a failed server.
            await answering.once(next_request(part, settings, rid=f"{name}.{number}"))
            number += 1
            tick()
            if on_tokens is not None:
                on_tokens(part.so_far())
        return part.answer()

    async def trouble(self) -> str:
        """Returns why the newest request got no answer if that is the servers' fault; empty if one is well
        and at it."""
        if (use := self.request_stats.at) is None:
            return f"no server took the request for an answer to {self._ticket.id}"
        clients = self._caller.clients
        async with clients.using(use) as client:
            is_well = await clients.is_well(use, client, within_s=CHECK_S)
        return "" if is_well else f"{server_name(use.server)} fails a health check"


def seed_id(id: str, number: int) -> str:
    """Returns what the seeds of an episode's try are made from; of the first, the datapoint's id (pure)."""
    return f"{id}~{number}" if number else id


def next_check_s(left_s: float, *, whole_s: float) -> float:
    """Returns the time to wait for a server before its health is checked (pure).

    Half of the remaining time, so that a hanging server leaves time for another; all of it if
    little is left.

    >>> [next_check_s(left_s, whole_s=600) for left_s in (600, 300, 40, 30)]
    [300.0, 150.0, 20.0, 30]
    """
    return left_s / 2 if left_s > whole_s / 16 else left_s


class _AnswerRequests:
    """The requests of one answer, one after the other, and its failure counts.

    Args:
        must_fit: True for an answer to the question alone, which the data set checked for its length.
    """

    def __init__(
        self,
        caller: PolicyCaller,
        ticket: Ticket,
        part: PartialAnswer,
        request_stats: RequestStats,
        *,
        must_fit: bool,
    ) -> None:
        self._caller, self._ticket, self._part, self._took = caller, ticket, part, request_stats
        self._must_fit = must_fit
        self._clock = asyncio.get_running_loop().time
        self._grew_s = self._silent_from_s = self._clock()  # the latter also while in a line
        self._former = -1
        self._refusals = self._fruitless = 0
        self._trouble = ""
        self._is_well = True  # server of the newest request

    @property
    def _left_s(self) -> float:
        timeout_s = self._caller.settings.timeout_s
        ends_s = min(self._silent_from_s + timeout_s, self._grew_s + max(LINE_S, timeout_s))
        return ends_s - self._clock()

    def _in_line(self) -> None:
        """Notes that servers are at work, and will come to this answer."""
        self._silent_from_s = self._clock()

    async def once(self, request: GenerateRequest) -> None:
        """Has a server carry out ``request`` and keeps its result."""
        self._took.at = None
        self._took.at = use = await self._server(request)
        self._took.requests += 1
        self._took.servers.add(use.server)
        done = DoneWith(rid=request.rid, server=use.server)
        try:
            result = await self._result(request, use)
            done = structs.replace(done, num_new_tokens=len(result.output_ids))
        except (WaitTimeout, WorkerLost, RemoteError) as error:
            # Reaching the own deadline is no evidence against the server.
            late = isinstance(error, WaitTimeout) and self._left_s <= 0
            done = structs.replace(done, broken=not late, why=error.what)
            self._count_failure(error)
            self._former = -1
        else:
            must_fit = self._must_fit and not self._part.tokens
            asked, count = request.sampling.max_new_tokens, len(result.output_ids)
            self._part.take(result, asked=asked)
            if must_fit and result.finish is Finish.LENGTH and count < asked:
                self._caller.log_early_end(use.server, len(request.input_ids), count, asked)
            self._former, self._refusals = (use.server if self._is_well else -1), 0
            if result.output_ids:
                self._grew_s = self._silent_from_s = self._clock()
            self._fruitless = 0 if result.output_ids else self._fruitless + 1
        finally:  # also if this episode is cancelled: the manager counts each server's requests
            await self._report_done(done)
        if self._left_s <= 0 and not self._part.ended:
            raise self._timeout_error(f"{server_name(use.server)} was still at it")
        if self._fruitless and not self._part.ended:
            first, longest = _PAUSES_S
            pause_s = min(longest, first * 2 ** (self._fruitless - 1))
            await asyncio.sleep(max(0.0, min(pause_s, self._left_s)))

    async def _result(self, request: GenerateRequest, use: UseServer) -> GenerateResult:
        async with self._caller.clients.using(use) as client:
            result = await self._run_on_server(client, request, use)
        # A later answer, or an agent's own prompt, may legitimately fill the context
        fits = self._must_fit and not self._part.tokens
        if fault := result_fault(
            result, request, min_version=self._ticket.min_version, must_answer=fits
        ):
            raise RemoteError(
                f"{server_name(use.server)} returned an unusable result: {fault}",
                where=use.url,
                fix=f"see the log of {server_name(use.server)}",
            )
        return result

    async def _run_on_server(
        self, client: GenerationClient, request: GenerateRequest, use: UseServer
    ) -> GenerateResult:
        """Sends ``request`` to a server, which may take all remaining time while it is healthy.

        An unhealthy server, or any at the limit of silence, is asked to stop, and its tokens so far are
        used.

        Raises:
            WaitTimeout: the server does not return its tokens.
        """
        settings, clients, self._is_well = self._caller.settings, self._caller.clients, True
        call = asyncio.create_task(
            client.generate(request, timeout_s=self._left_s + CALL_BACK_S), name=request.rid
        )
        try:
            while True:
                look_s = max(next_check_s(self._left_s, whole_s=settings.timeout_s), 0.0)
                await asyncio.wait({call}, timeout=look_s)
                if call.done():
                    return call.result()
                if (left_s := self._left_s) <= 0:
                    break
                self._is_well = await clients.is_well(use, client, within_s=left_s / 2)
                if not self._is_well:
                    break
            with suppress(TimeoutError, RealsysError):
                async with asyncio.timeout(CALL_BACK_S):
                    await client.abort(request.rid)
                    await asyncio.wait({call})
            if call.done() and (self._is_well or call.result().output_ids):
                if self._is_well and not call.result().output_ids and await _comes_later(client):
                    self._in_line()
                return call.result()
            name = server_name(use.server)
            why = "it does not say what it has" if self._is_well else "it fails a health check"
            raise WaitTimeout(
                f"no answer from {name}, and {why}", where=use.url, fix=f"see the log of {name}"
            )
        finally:
            if not call.done():
                call.cancel()
                await asyncio.gather(call, return_exceptions=True)

    def _count_failure(self, error: RealsysError) -> None:
        self._took.broken += 1
        self._fruitless += 1
        self._trouble = error.what
        logger.warning("request failed id=%s error=%s", self._ticket.id, error.what)
        if isinstance(error, RemoteError):
            self._refusals += 1
            if self._refusals >= MAX_REFUSALS:
                raise error

    async def _server(self, request: GenerateRequest) -> UseServer:
        """Requests the server for ``request`` from the manager."""
        try:
            why = "it did not say why"
            while (left_s := self._left_s) > 0:
                use = await self._request_server(request, left_s)
                if use.url:
                    return use
                if use.in_line:
                    self._in_line()
                why = use.why or why
                tick()
            raise self._timeout_error(
                f"waited for a server from {self._caller.manager.name}: {why}"
            )
        except BaseException:  # abandoned or cancelled: a server assigned now would be leaked
            await self._report_done(DoneWith(rid=request.rid, server=-1))
            raise

    async def _request_server(self, request: GenerateRequest, left_s: float) -> UseServer:
        ask = AskServer(
            worker=self._caller.worker,
            rid=request.rid,
            group=self._ticket.id,
            num_tokens=len(request.input_ids) + request.sampling.max_new_tokens,
            min_version=self._ticket.min_version,
            server=self._former,
            wait_s=min(ASK_S, left_s),
            continues=bool(self._part.tokens),
        )
        try:
            use: UseServer = await self._caller.manager.call(
                ask,
                what="a question for a server",
                timeout_s=left_s + GRACE_S,  # keeps the description of the wait for the final error
                try_s=ASK_S + GRACE_S,
            )
        except WaitTimeout as error:
            raise self._timeout_error(error.what) from error
        return use

    async def _report_done(self, done: DoneWith) -> None:
        """Reports a finished request to the manager. Lost reports are corrected when the manager
        restarts.
        """
        try:
            await self._caller.manager.call(done, what="the end of a request", timeout_s=DONE_S)
        except RealsysError as error:
            logger.info("report to manager failed rid=%s error=%s", done.rid, error.what)

    def _timeout_error(self, why: str) -> WaitTimeout:
        part = self._part
        before = f"; before that: {self._trouble}" if self._trouble else ""
        return WaitTimeout(
            f"no token of an answer to {self._ticket.id} came in {self._clock() - self._grew_s:g} s, after "
            f"{len(part.tokens)} of at most {part.limit}; {why}{before}",
            where=self._caller.worker,
            fix="see the logs of those named; raise schedule.rollout_request_timeout if they are only slow",
        )


async def _comes_later(client: GenerationClient) -> bool:
    """True if the server says that requests wait: it stands still for weights, or has as many as it decodes
    at once."""
    try:
        info = await client.info(timeout_s=INFO_S)
    except RealsysError:
        return False
    if info.paused or info.updating:
        return True
    # One that does not say how many it decodes at once may have a line whenever it has requests.
    return info.num_waiting > 0 or info.num_running >= max(1, info.max_running)
