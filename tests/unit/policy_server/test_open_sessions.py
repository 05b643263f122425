"""Sessions of a served model: one a request, behind one key, not too many at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import golden
import pytest
from chat_families import FAMILIES
from fuzzed_history import session_of

from realsys.api.errors import WorkerLost
from realsys.generation.http.served_engine import EngineAnswer
from realsys.policy_server.client_policy import ClientPolicy
from realsys.policy_server.open_sessions import OpenSessions
from realsys.rollout.conversation.answer_forms import form_of_template
from realsys.rollout.conversation.full_context import ContextFull
from realsys.rollout.conversation.session_settings import SessionSettings
from realsys.rollout.dialects.error_bodies import openai_error
from realsys.rollout.endpoint.endpoint_app import answering_app
from realsys.rollout.endpoint.session_registry import NoRoom, UnknownKey
from realsys.transport.generation_messages import Finish, GenerateRequest
from realsys.transport.http_listener import HttpListener


class ScriptedEngine:
    """Answers with three tokens, one at a time; remembers what it was asked, and whether it was left."""

    def __init__(self, finish: Finish = Finish.STOP) -> None:
        self.asked: list[GenerateRequest] = []
        self.num_left = 0
        self._finish = finish

    async def generate(
        self, request: GenerateRequest, *, stream: bool
    ) -> AsyncIterator[EngineAnswer]:
        self.asked.append(request)
        done = False
        try:
            for count in (1, 2, 3):
                await asyncio.sleep(0)
                finish = self._finish if count == 3 else None
                done = finish is not None
                if stream or done:
                    yield EngineAnswer(
                        rid=request.rid,
                        output_ids=[7, 8, 9][:count],
                        logprobs=[-1.0] * count,
                        versions=[0] * count,
                        finish=finish,
                    )
        finally:
            self.num_left += not done


def policy(engine: Any, **options: Any) -> ClientPolicy:
    return ClientPolicy(engine, **options)


def sample(of: ClientPolicy, **changes: Any) -> Any:
    asked: dict[str, Any] = {"limit": None, "stop": (), "sampling": {}, "on_tokens": None}
    return of.sample([1, 2], **{**asked, **changes})


def test_tokens_come_as_they_are_sampled_and_the_answer_is_whole() -> None:
    seen: list[list[int]] = []
    engine = ScriptedEngine()
    answer = asyncio.run(sample(policy(engine), on_tokens=lambda t: seen.append(list(t))))
    assert seen == [[7], [7, 8]]
    assert (answer.tokens, answer.stopped) == ((7, 8, 9), True)


def test_answers_of_one_request_are_reproducible_by_its_seed_and_differ() -> None:
    async def both(engine: ScriptedEngine) -> None:
        of = policy(engine)
        await sample(of, sampling={"seed": 3})
        await sample(of, sampling={"seed": 3})

    first, second = ScriptedEngine(), ScriptedEngine()
    asyncio.run(both(first))
    asyncio.run(both(second))
    seeds = [[r.sampling.sampling_seed for r in e.asked] for e in (first, second)]
    assert seeds[0] == seeds[1]
    assert seeds[0][0] == 3 != seeds[0][1]
    assert len({r.rid for r in [*first.asked, *second.asked]}) == 4


def test_a_request_without_a_limit_has_the_servers() -> None:
    engine = ScriptedEngine()
    asyncio.run(sample(policy(engine, max_new_tokens=11)))
    asyncio.run(sample(policy(engine, max_new_tokens=11), limit=5))
    assert [r.sampling.max_new_tokens for r in engine.asked] == [11, 5]


def test_an_answer_that_the_servers_end_cut_off_is_an_error() -> None:
    with golden.raises(WorkerLost):
        asyncio.run(sample(policy(ScriptedEngine(Finish.ABORT))))


def sessions(engine: Any, *, max_requests: int = 2) -> OpenSessions:
    settings = SessionSettings(
        renderer=None,  # type: ignore[arg-type]
        form=form_of_template(""),
        decode=str,
        end_ids=frozenset(),
    )
    return OpenSessions(settings, lambda: policy(engine), key="sk-1", max_requests=max_requests)


def test_each_request_has_a_session_of_its_own_and_places_are_given_back() -> None:
    async def main() -> None:
        opened = sessions(ScriptedEngine())
        for _ in range(3):  # one more than there are places
            async with opened.lent("sk-1") as first, opened.lent("sk-1") as second:
                assert first is not second
                assert first.id != second.id
        assert first.is_over

    asyncio.run(main())


def test_a_request_too_many_is_refused_for_the_moment() -> None:
    async def main() -> None:
        opened = sessions(ScriptedEngine(), max_requests=1)
        async with opened.lent("sk-1"):
            with pytest.raises(NoRoom):
                async with opened.lent("sk-1"):
                    pass
        async with opened.lent("sk-1"):
            pass

    asyncio.run(main())


@pytest.mark.parametrize("key", ["", "sk-2", "sk-1 ", "sk-é", "\udcff"])
def test_another_key_finds_nothing(key: str) -> None:
    with pytest.raises(UnknownKey):
        sessions(ScriptedEngine()).settings_of(key)


def test_a_full_context_has_the_code_that_clients_look_for() -> None:
    error = ContextFull("full", where="messages", fix="send less")
    told = openai_error(error, 400)["error"]
    assert (told["code"], told["type"], told["param"]) == (
        *("context_length_exceeded", "invalid_request_error", "messages"),
    )


class EndlessEngine(ScriptedEngine):
    """Never ends an answer."""

    async def generate(
        self, request: GenerateRequest, *, stream: bool
    ) -> AsyncIterator[EngineAnswer]:
        self.asked.append(request)
        count = 0
        try:
            while True:
                await asyncio.sleep(0.001)
                count += 1
                if stream:
                    ids = list(range(count))
                    yield EngineAnswer(
                        rid=request.rid, output_ids=ids, logprobs=[-1.0] * count, versions=ids
                    )
        finally:
            self.num_left += 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "1"}]}),
        ("/v1/responses", {"input": "1"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "1"}], "max_tokens": 9}),
        ("/v1/completions", {"prompt": "1"}),
        ("/openai/deployments/any/completions", {"prompt": "1"}),
    ],
)
def test_a_client_that_leaves_ends_its_answer_and_gives_its_place_back(
    path: str, body: dict[str, Any], stream: bool
) -> None:
    async def main() -> None:
        engine = EndlessEngine()
        family = FAMILIES["chatml"]
        settings = session_of(family, None).settings  # type: ignore[arg-type]
        opened = OpenSessions(settings, lambda: policy(engine), key="sk-1", max_requests=1)
        app = answering_app(opened)
        listener = await HttpListener(app, name="test", tls=False).start()
        try:
            async with aiohttp.ClientSession() as http:
                asked = {"json": {**body, "stream": stream}, "headers": {"api-key": "sk-1"}}
                waiting = asyncio.create_task(http.post(listener.url + path, **asked))
                while not engine.asked:
                    await asyncio.sleep(0.001)
                if stream:
                    got = await waiting
                    await got.content.readany()
                    got.close()
                waiting.cancel()
                await asyncio.gather(waiting, return_exceptions=True)
                while not engine.num_left:
                    await asyncio.sleep(0.001)
                with opened.place("sk-1"):
                    pass
        finally:
            await listener.stop()

    asyncio.run(asyncio.wait_for(main(), 120))
