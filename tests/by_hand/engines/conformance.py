"""What every generation server must do, whichever engine is behind it: one function, one claim.

Each case gets a ``Served`` (a running server, the models that it may have, what it can't) and a client. Run
on the embedded engine by tests/process/test_generation_server.py, on SGLang and vLLM by
tests/by_hand/engines/real_engines.py.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import pytest
from engines.serve import HELD
from engines.small_models import BEFORE_NO_TEXT, TEXTLESS, SmallModel
from full_client import FullClient

from realsys.api.errors import DataError, RealsysError, RemoteError, WaitTimeout, WorkerLost
from realsys.generation.http.http_answers import read_answer
from realsys.generation.http.http_session import HttpSession
from realsys.models.hf import load_tokenizer
from realsys.transport.generation_messages import (
    Finish,
    GenerateRequest,
    GenerateResult,
    PauseMode,
    Sampling,
    WeightPart,
    WeightSource,
)

PROMPT = (5, 9, 17, 33, 8)
CLOSE = 1e-5  # log-probs: float32, summed in another order
S = 60.0
LONG = 3000  # tokens of an answer that is going to be interrupted


@dataclass(frozen=True)
class Served:
    """A running server.

    Attributes:
        first, second: the model that it started with (version 0), and another of its shape.
        exact: answers don't depend, bit for bit, on what else is decoded.
        position: an answer made in chunks is the one made at once.
        seeds: sampled answers can be repeated.
        stop_texts: it has a tokenizer.
        in_memory: new weights come from the memory of its trainers, which is that of engines/serve.py.
    """

    url: str
    key: str
    first: SmallModel
    second: SmallModel
    name: str = "generation_server/0"
    exact: bool = True
    position: bool = True
    seeds: bool = True
    stop_texts: bool = True
    in_memory: bool = False
    opened: list[HttpSession] = field(default_factory=list, compare=False, repr=False)

    def source(self, path: str, version: int) -> WeightSource:
        """The weights in a folder, which is read now or was when the server started."""
        if not self.in_memory:
            return WeightSource(version=version, path=path)
        return WeightSource(version=version, parts=(WeightPart(endpoint=HELD, name=path),))

    def client(self) -> FullClient:
        return FullClient(self.url, self.key, name=self.name)

    def http(self, key: str | None = None, *, url: str = "") -> HttpSession:
        """A bare session, closed when the case ends."""
        session = HttpSession(url or self.url, self.key if key is None else key, name=self.name)
        self.opened.append(session)
        return session


Case = Callable[[Served, FullClient], Awaitable[None]]
CASES: dict[str, Case] = {}


def case(function: Case) -> Case:
    """Adds a case to the suite."""
    CASES[function.__name__] = function
    return function


async def run_case(name: str, served: Served) -> None:
    """Runs one case; the server is as it was afterwards: first weights, not paused."""
    client = served.client()
    try:
        await CASES[name](served, client)
    finally:
        try:
            await client.resume()
            await client.abort(every=True)
            if (await client.info()).weight_version != 0:
                await _take(served, client, served.first, 0)
        finally:
            await client.close()
            while served.opened:
                await served.opened.pop().close()


def request(rid: str, prompt: tuple[int, ...] = PROMPT, **sampling: Any) -> GenerateRequest:
    """Ends by length only, unless told otherwise."""
    return GenerateRequest(
        rid=rid, input_ids=prompt, sampling=Sampling(**{"ignore_eos": True, **sampling})
    )


async def _take(served: Served, client: FullClient, model: SmallModel, version: int) -> None:
    source = served.source(str(model.path), version)
    taken = await client.update_weights(source, timeout_s=S)
    assert taken.version == version
    assert taken.seconds >= taken.paused_s >= 0


def assert_close(found: Any, expected: Any, tolerance: float = CLOSE) -> None:
    """Number by number."""
    assert len(found) == len(expected)
    worst = max((abs(a - b) for a, b in zip(found, expected, strict=True)), default=0.0)
    assert worst < tolerance, f"largest difference {worst:g}"


# ---- answers --------------------------------------------------------------------------------------


@case
async def logprobs_are_those_of_a_forward(served: Served, client: FullClient) -> None:
    for i, temperature in enumerate((1.0, 0.7)):
        asked = request(f"lp{i}", temperature=temperature, max_new_tokens=24, sampling_seed=i)
        result = await client.generate(asked, timeout_s=S)
        expected = served.first.logprobs(PROMPT, result.output_ids, temperature=temperature)
        assert_close(result.logprobs, expected)
        assert result.versions == (0,) * 24
        assert result.prompt_tokens == len(PROMPT)


@case
async def greedy_picks_the_best_token(served: Served, client: FullClient) -> None:
    result = await client.generate(request("greedy", temperature=0, max_new_tokens=32), timeout_s=S)
    assert served.first.lead(PROMPT, result.output_ids) < CLOSE
    assert_close(result.logprobs, served.first.logprobs(PROMPT, result.output_ids))


@case
async def ids_without_a_text_are_not_sampled(served: Served, client: FullClient) -> None:
    """Many of what this model would sample; log-probs stay those over all ids."""
    for i in range(4):
        asked = request(f"text{i}", max_new_tokens=48, sampling_seed=i)
        result = await client.generate(asked, timeout_s=S)
        assert len(result.output_ids) == len(result.versions) == 48
        assert not {*result.output_ids} & {*TEXTLESS}
        assert_close(result.logprobs, served.first.logprobs(PROMPT, result.output_ids))
    best = served.first.best_with_text(BEFORE_NO_TEXT)
    assert served.first.lead(BEFORE_NO_TEXT, [TEXTLESS.start]) == 0
    for temperature in (0, 0.01):  # the best of all would be drawn again and again
        asked = request(
            f"best{temperature}", BEFORE_NO_TEXT, temperature=temperature, max_new_tokens=9
        )
        ids = (await client.generate(asked, timeout_s=S)).output_ids
        assert (len(ids), ids[0]) == (9, best)
        assert not {*ids} & {*TEXTLESS}


@case
async def length_is_kept(served: Served, client: FullClient) -> None:
    for n in (1, 7):
        result = await client.generate(request(f"n{n}", max_new_tokens=n), timeout_s=S)
        assert len(result.output_ids) == len(result.logprobs) == len(result.versions) == n
        assert result.finish is Finish.LENGTH


@case
async def a_stop_token_ends_the_answer_and_is_in_it(served: Served, client: FullClient) -> None:
    free = await client.generate(request("free", temperature=0, max_new_tokens=16), timeout_s=S)
    stop = free.output_ids[5]
    length = free.output_ids.index(stop) + 1
    asked = request(
        "stop", temperature=0, max_new_tokens=16, stop_token_ids=(stop,), ignore_eos=False
    )
    result = await client.generate(asked, timeout_s=S)
    assert result.finish is Finish.STOP
    assert result.output_ids == free.output_ids[:length]
    assert_close(result.logprobs, free.logprobs[:length])


@case
async def a_stop_text_ends_the_answer(served: Served, client: FullClient) -> None:
    if not served.stop_texts:
        return
    tokenizer = load_tokenizer(served.first.path)
    free = await client.generate(request("free", temperature=0, max_new_tokens=16), timeout_s=S)
    words = [tokenizer.decode([token]) for token in free.output_ids]
    stop = words[4][-1:] + words[5][:1]  # straddles two tokens
    asked = request("stop", temperature=0, max_new_tokens=16, stop=(stop,))
    result = await client.generate(asked, timeout_s=S)
    text = tokenizer.decode(result.output_ids)
    assert result.finish is Finish.STOP
    assert stop in text
    assert stop not in tokenizer.decode(result.output_ids[:-1])
    assert result.output_ids == free.output_ids[: len(result.output_ids)]


@case
async def seeds_repeat_and_differ(served: Served, client: FullClient) -> None:
    async def sample(rid: str, seed: int) -> GenerateResult:
        return await client.generate(
            request(rid, max_new_tokens=12, sampling_seed=seed), timeout_s=S
        )

    answers = [await sample(f"a{seed}", seed) for seed in range(6)]
    assert len({a.output_ids for a in answers}) == 6
    if served.seeds:
        again = [await sample(f"b{seed}", seed) for seed in range(6)]
        assert [a.output_ids for a in again] == [a.output_ids for a in answers]
        if served.exact:
            assert [a.logprobs for a in again] == [a.logprobs for a in answers]


@case
async def pieces_of_an_answer_draw_their_own_numbers(served: Served, client: FullClient) -> None:
    async def sample(rid: str, position: int) -> GenerateResult:
        sampling = {"max_new_tokens": 12, "sampling_seed": 5, "position": position}
        return await client.generate(request(rid, PROMPT * 8, **sampling), timeout_s=S)

    # The same tokens as a prompt, and as a prompt with the first part of its answer
    pieces = [await sample(f"a{i}", position) for i, position in enumerate((0, 16, 32))]
    assert len({piece.output_ids for piece in pieces}) == 3
    if served.seeds:  # a request that is sent again
        assert (await sample("b1", 16)).output_ids == pieces[1].output_ids


@case
async def a_stream_is_the_answer_growing(served: Served, client: FullClient) -> None:
    asked = request("stream", temperature=0, max_new_tokens=20)
    parts = [p async for p in client.stream(asked, timeout_s=S)]
    whole = await client.generate(request("whole", temperature=0, max_new_tokens=20), timeout_s=S)
    assert tuple(parts[-1].output_ids) == whole.output_ids
    assert_close(parts[-1].logprobs, whole.logprobs)
    assert parts[-1].finish is Finish.LENGTH
    assert all(p.finish is None for p in parts[:-1])
    for part in parts:
        assert tuple(part.output_ids) == whole.output_ids[: len(part.output_ids)]
        assert len(part.logprobs) == len(part.versions) == len(part.output_ids)


@case
async def batches_and_n_come_in_order(served: Served, client: FullClient) -> None:
    http = served.http()
    params = {"max_new_tokens": 5, "temperature": 0, "ignore_eos": True}
    prompts = [list(PROMPT), [7, 7], [200, 3, 11]]
    body = {"input_ids": prompts, "rid": ["x", "y", "z"], "sampling_params": params}
    answers = json.loads(await http.call("POST", "/generate", body, timeout_s=S))
    assert [a["meta_info"]["id"] for a in answers] == ["x", "y", "z"]
    for prompt, answer in zip(prompts, answers, strict=True):
        assert served.first.lead(prompt, answer["output_ids"]) < CLOSE
        assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 5}
        assert answer["meta_info"]["completion_tokens"] == 5
    body = {"input_ids": list(PROMPT), "sampling_params": {"max_new_tokens": 8, "n": 3}}
    answers = json.loads(await http.call("POST", "/generate", body, timeout_s=S))
    assert len({tuple(a["output_ids"]) for a in answers}) == 3


@case
async def many_at_once_are_each_their_own(served: Served, client: FullClient) -> None:
    asked = [
        request(f"m{i}", (3 + i, 40, 5 + i % 7), max_new_tokens=4 + i % 9, sampling_seed=i)
        for i in range(48)
    ]
    together = await asyncio.gather(*(client.generate(r, timeout_s=S) for r in asked))
    for one, result in zip(asked, together, strict=True):
        assert len(result.output_ids) == one.sampling.max_new_tokens
        assert_close(result.logprobs, served.first.logprobs(one.input_ids, result.output_ids))
    if served.exact:
        for one, result in list(zip(asked, together, strict=True))[::12]:
            alone = await client.generate(
                GenerateRequest(rid="alone", input_ids=one.input_ids, sampling=one.sampling),
                timeout_s=S,
            )
            assert (alone.output_ids, alone.logprobs) == (result.output_ids, result.logprobs)


@case
async def an_answer_in_chunks_is_the_answer(served: Served, client: FullClient) -> None:
    if not served.position:
        return
    whole = await client.generate(request("w", max_new_tokens=20, sampling_seed=4), timeout_s=S)
    tokens: tuple[int, ...] = ()
    for length in (7, 1, 12):
        asked = request(
            "chunk",
            PROMPT + tokens,
            max_new_tokens=length,
            sampling_seed=4,
            position=len(tokens),
        )
        tokens += (await client.generate(asked, timeout_s=S)).output_ids
    assert tokens == whole.output_ids


# ---- interrupted ----------------------------------------------------------------------------------


class Long:
    """A long greedy answer under way, read as a stream."""

    def __init__(self, client: FullClient, rid: str, **sampling: Any) -> None:
        self.rid, self._client = rid, client
        self._asked = request(rid, **{"temperature": 0, "max_new_tokens": LONG, **sampling})
        self.count = 0

    async def __aenter__(self) -> Long:
        self._task = asyncio.create_task(self._read(), name=self.rid)
        await self.wait_for(5)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _read(self) -> GenerateResult:
        async with aclosing(self._client.stream(self._asked, timeout_s=S)) as parts:
            async for part in parts:
                self.count = len(part.output_ids)
        return part.result()

    @property
    def has_ended(self) -> bool:
        return self._task.done()

    async def wait_for(self, count: int) -> None:
        """Until it has so many tokens."""
        async with asyncio.timeout(S):
            while self.count < count:
                assert not self._task.done(), f"{self.rid} ended early: {self._task}"
                await asyncio.sleep(0.002)

    async def result(self) -> GenerateResult:
        async with asyncio.timeout(S):
            return await asyncio.shield(self._task)


@case
async def an_aborted_answer_keeps_its_tokens(served: Served, client: FullClient) -> None:
    async with Long(client, "long") as long, Long(client, "other") as other:
        await client.abort("long")
        result = await long.result()
        assert result.finish is Finish.ABORT
        assert 5 <= len(result.output_ids) < LONG
        assert len(result.logprobs) == len(result.versions) == len(result.output_ids)
        assert_close(result.logprobs, served.first.logprobs(PROMPT, result.output_ids), 1e-4)
        await other.wait_for(other.count + 5)  # goes on
        await client.abort(every=True)
        assert (await other.result()).finish is Finish.ABORT
    await client.abort("no such rid")
    assert len((await client.generate(request("r", max_new_tokens=3), timeout_s=S)).output_ids) == 3


async def _paused(served: Served, client: FullClient, mode: PauseMode) -> None:
    async with Long(client, f"long-{mode}") as long:
        await client.pause(mode)
        assert (await client.info()).paused
        new = asyncio.create_task(
            client.generate(request("new", max_new_tokens=3, temperature=0), timeout_s=S)
        )
        count = -1
        async with asyncio.timeout(S):
            while long.count != count:  # what was made before the pause arrives
                count = long.count
                await asyncio.sleep(0.3)
        assert long.has_ended == (mode is PauseMode.ABORT)
        assert not new.done()
        await client.resume()
        assert len((await new).output_ids) == 3
        if mode is PauseMode.ABORT:
            result = await long.result()
            assert len(result.output_ids) >= count
        else:
            await long.wait_for(count + 30)
            await client.abort(long.rid)
            result = await long.result()
            assert len(result.output_ids) >= count + 30
        assert result.finish is Finish.ABORT
        # As if nothing had happened: the tokens before the pause are there, and were read right.
        assert served.first.lead(PROMPT, result.output_ids) < 1e-3
        assert_close(result.logprobs, served.first.logprobs(PROMPT, result.output_ids), 1e-4)


@case
async def a_pause_that_aborts(served: Served, client: FullClient) -> None:
    await _paused(served, client, PauseMode.ABORT)


@case
async def a_pause_that_retracts(served: Served, client: FullClient) -> None:
    await _paused(served, client, PauseMode.RETRACT)


@case
async def a_pause_in_place(served: Served, client: FullClient) -> None:
    await _paused(served, client, PauseMode.IN_PLACE)


@case
async def a_late_answer_is_aborted(served: Served, client: FullClient) -> None:
    with pytest.raises(WaitTimeout, match=served.name):
        await client.generate(request("late", max_new_tokens=LONG), timeout_s=0.3)
    await _until_idle(client)


@case
async def who_hangs_up_is_aborted(served: Served, client: FullClient) -> None:
    http = served.http()
    body = {"input_ids": list(PROMPT), "sampling_params": {"max_new_tokens": LONG}}
    body["sampling_params"] |= {"ignore_eos": True}
    task = asyncio.create_task(http.call("POST", "/generate", body, timeout_s=S))
    while not (await client.info()).num_running:
        await asyncio.sleep(0.01)
        assert not task.done()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await _until_idle(client)


async def _until_idle(client: FullClient) -> None:
    async with asyncio.timeout(20):
        while (info := await client.info()).num_running + info.num_waiting:
            await asyncio.sleep(0.02)


# ---- weights --------------------------------------------------------------------------------------


@case
async def new_weights_are_used(served: Served, client: FullClient) -> None:
    # The prompt is cached: what the old weights made of it must not be used.
    await client.generate(request("before", temperature=0, max_new_tokens=12), timeout_s=S)
    await _take(served, client, served.second, 1)
    assert (await client.info()).weight_version == 1
    result = await client.generate(request("b", temperature=0, max_new_tokens=12), timeout_s=S)
    assert result.versions == (1,) * 12
    assert_close(result.logprobs, served.second.logprobs(PROMPT, result.output_ids))
    await _take(served, client, served.first, 2)
    result = await client.generate(request("c", temperature=0, max_new_tokens=12), timeout_s=S)
    assert result.versions == (2,) * 12
    assert_close(result.logprobs, served.first.logprobs(PROMPT, result.output_ids))


async def _switched(served: Served, client: FullClient, mode: PauseMode | None) -> None:
    async with Long(client, f"switched-{mode}") as long:
        if mode is not None:
            await client.pause(mode)
        await _take(served, client, served.second, 1)
        if mode is not None:
            await client.resume()
        await long.wait_for(long.count + 40)
        await client.abort(long.rid)
        result = await long.result()
    assert sorted(result.versions) == list(result.versions)
    old = result.versions.count(0)
    assert old >= 5
    assert result.versions.count(1) >= 30
    assert old + result.versions.count(1) == len(result.versions)
    assert_close(
        result.logprobs[:old], served.first.logprobs(PROMPT, result.output_ids[:old]), 1e-4
    )
    new = served.second.logprobs(PROMPT, result.output_ids)[old:]
    if mode is PauseMode.IN_PLACE:  # read by the old weights, gone on with by the new
        assert max(abs(a - b) for a, b in zip(result.logprobs[old:], new, strict=True)) > 1e-3
    else:
        assert_close(result.logprobs[old:], new, 1e-4)


@case
async def a_running_answer_goes_on_with_new_weights(served: Served, client: FullClient) -> None:
    await _switched(served, client, None)


@case
async def a_retracted_answer_goes_on_with_new_weights(served: Served, client: FullClient) -> None:
    await _switched(served, client, PauseMode.RETRACT)


@case
async def an_answer_in_place_keeps_its_cache(served: Served, client: FullClient) -> None:
    await _switched(served, client, PauseMode.IN_PLACE)


@case
async def a_prompt_in_place_is_read_anew(served: Served, client: FullClient) -> None:
    prompt = PROMPT * 16  # several blocks of a paged cache
    await client.generate(request("old", prompt, temperature=0, max_new_tokens=1), timeout_s=S)
    await _switched(served, client, PauseMode.IN_PLACE)
    result = await client.generate(
        request("new", prompt, temperature=0, max_new_tokens=8), timeout_s=S
    )
    assert_close(result.logprobs, served.second.logprobs(prompt, result.output_ids), 1e-4)


@case
async def weights_from_a_folder(served: Served, client: FullClient) -> None:
    http = served.http()
    body = {"model_path": str(served.second.path), "weight_version": "4"}
    told = json.loads(await http.call("POST", "/update_weights_from_disk", body, timeout_s=S))
    assert told["success"] is True
    info = json.loads(await http.call("GET", "/model_info", timeout_s=S))
    assert info["weight_version"] == "4"
    body = {"new_version": "7", "abort_all_requests": False}
    await http.call("POST", "/update_weight_version", body, timeout_s=S)
    data = await http.call(
        "POST",
        "/generate",
        {"input_ids": list(PROMPT), "sampling_params": {"max_new_tokens": 4}, "rid": "v"},
        timeout_s=S,
    )
    answer = read_answer(data, rid="v")
    assert answer.versions == [7] * len(answer.output_ids)
    assert_close(answer.logprobs, served.second.logprobs(PROMPT, answer.output_ids))


@case
async def weights_that_do_not_come_change_nothing(served: Served, client: FullClient) -> None:
    nowhere = served.source(str(served.first.path) + "-nowhere", 9)
    with pytest.raises(RealsysError, match=served.name):
        await client.update_weights(nowhere, timeout_s=S)
    assert (await client.info()).weight_version == 0
    result = await client.generate(request("r", temperature=0, max_new_tokens=8), timeout_s=S)
    assert_close(result.logprobs, served.first.logprobs(PROMPT, result.output_ids))


# ---- how it does, and who may ask -----------------------------------------------------------------


@case
async def it_says_how_it_does(served: Served, client: FullClient) -> None:
    assert await client.healthy(timeout_s=30)
    info = await client.info()
    assert (info.weight_version, info.paused, info.num_running) == (0, False, 0)
    await client.generate(request("r", max_new_tokens=4), timeout_s=S)
    text = await client.metrics()
    lines = dict(
        line.rpartition(" ")[::2] for line in text.splitlines() if not line.startswith("#")
    )
    assert float(lines[f'realsys_generated_tokens_total{{engine="{info.engine}"}}']) >= 4
    await client.flush_cache()
    http = served.http()
    loads = json.loads(await http.call("GET", "/v1/loads", timeout_s=S))
    assert loads["loads"][0]["num_running_reqs"] == 0
    await client.pause(PauseMode.IN_PLACE)
    assert await client.healthy(timeout_s=30)  # paused is not sick
    with pytest.raises(RemoteError, match="503"):
        await http.call("GET", "/ready", timeout_s=S)
    await client.resume()
    await http.call("GET", "/ready", timeout_s=S)


@case
async def a_full_server_is_well(served: Served, client: FullClient) -> None:
    """Its health check does not wait behind everybody until one of them has ended."""
    count = (await client.info(timeout_s=S)).max_running + 2
    asked = [request(f"full{i}", sampling_seed=i, max_new_tokens=LONG) for i in range(count)]
    # Filled while it is paused: else a fast one ends the first before the last has come
    await client.pause(PauseMode.IN_PLACE)
    running = [asyncio.create_task(client.generate(r, timeout_s=S)) for r in asked]
    async with asyncio.timeout(S):
        while (info := await client.info(timeout_s=S)).num_running + info.num_waiting < count:
            await asyncio.sleep(0.05)
    await client.resume()
    assert await client.healthy(timeout_s=15)
    assert not any(task.done() for task in running)
    await client.abort(every=True)
    results = await asyncio.gather(*running)
    assert {result.finish for result in results} == {Finish.ABORT}


@case
async def mistakes_are_told(served: Served, client: FullClient) -> None:
    http = served.http()
    good = {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 2}}
    wrong: list[tuple[dict[str, Any], str]] = [
        ({**good, "input_idz": [1]}, "input_ids"),
        ({"input_ids": [1], "sampling_params": {"max_new_token": 2}}, "max_new_tokens"),
        ({"input_ids": []}, "no token"),
        ({"input_ids": [1], "sampling_params": {"temperature": -1}}, "temperature"),
        ({"input_ids": "text"}, "input_ids"),
        ({"text": "hello", "input_ids": [1]}, "text"),
    ]
    for body, words in wrong:
        with pytest.raises(DataError, match=f"(?s)400.*{words}"):
            await http.call("POST", "/generate", body, timeout_s=S)
    # A conversation that outgrows the model ends, and nobody fails: some engines keep positions back.
    for length in (4095, 4096, 5000):
        full = await client.generate(request("l", (4,) * length, max_new_tokens=50), timeout_s=S)
        assert full.finish is Finish.LENGTH
        assert len(full.output_ids) <= max(0, 4096 - length)
    with pytest.raises(RemoteError, match="404"):
        await http.call("GET", "/generat", timeout_s=S)
    result = await client.generate(request("fine", max_new_tokens=2), timeout_s=S)
    assert all(math.isfinite(x) for x in result.logprobs)


@case
async def strangers_are_refused(served: Served, client: FullClient) -> None:
    for key in ("", "another key"):
        stranger = served.http(key)
        for method, path in (("GET", "/server_info"), ("POST", "/generate"), ("GET", "/metrics")):
            with pytest.raises(RemoteError, match="401"):
                await stranger.call(method, path, timeout_s=S)
        await stranger.call("GET", "/health", timeout_s=S)
    last = "1" if served.url.endswith("0") else "0"
    other = served.http(url=served.url[:-1] + last)
    with pytest.raises(WorkerLost, match="certificate"):
        await other.call("GET", "/server_info", timeout_s=S)
