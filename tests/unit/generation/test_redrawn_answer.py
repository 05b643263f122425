"""Ids that stand for no text: SGLang and vLLM, which sample by themselves, give none to whoever asks."""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter
from collections.abc import AsyncIterator, Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from real_trials import make_policy

from realsys.api.worker_configs import GenerationServer
from realsys.generation.http.served_engine import EngineAnswer
from realsys.generation.served_engines.child import ChildServer
from realsys.generation.served_engines.fronted import FrontedEngine
from realsys.generation.served_engines.sglang import sglang_body
from realsys.generation.served_engines.textless_of_folder import textless_of_folder
from realsys.generation.served_engines.vllm import vllm_body
from realsys.models.hf import load_tokenizer
from realsys.transport.generation_messages import Finish, GenerateRequest, Sampling

VOCABULARY, TEXTLESS, END = 8, frozenset({5, 6, 7}), 4


class UniformChild(FrontedEngine):
    """Draws each id with the same probability, by the request's seed; greedily always ``best``.

    Attributes:
        asked: requests with the ids barred in each.
        aborted: ids of requests.
    """

    kind = "uniform"

    def __init__(self, model_path: str, *, best: int = 1, ends: bool = True) -> None:
        super().__init__(GenerationServer(model_path=model_path), lambda source: None)  # type: ignore[arg-type,return-value]
        self._child = cast(ChildServer, SimpleNamespace(check=dict))
        self._textless, self._best, self._ends = TEXTLESS, best, ends
        self.asked: list[tuple[GenerateRequest, set[int]]] = []
        self.aborted: list[str] = []

    async def _answers(
        self, request: GenerateRequest, *, stream: bool, barred: Collection[int]
    ) -> AsyncIterator[EngineAnswer]:
        self.asked.append((request, {*barred}))
        sampling, ids = request.sampling, list[int]()
        draw = random.Random(sampling.sampling_seed)
        choices = [i for i in range(VOCABULARY) if i not in barred]
        finish = None
        while finish is None:
            greedy = self._best if self._best in choices else choices[0]
            ids.append(draw.choice(choices) if sampling.temperature else greedy)
            if len(ids) == sampling.max_new_tokens:
                finish = Finish.LENGTH
            if self._ends and ids[-1] == END and len(ids) >= sampling.min_new_tokens:
                finish = Finish.STOP
            if stream or finish:
                await asyncio.sleep(0)
                yield EngineAnswer(
                    rid=request.rid,
                    output_ids=ids[:],
                    logprobs=[-math.log(len(choices))] * len(ids),
                    versions=[len(self.asked)] * len(ids),
                    finish=finish,
                    prompt_tokens=len(request.input_ids),
                    cached_tokens=len(request.input_ids) // 2,
                )

    async def _abort(self, rid: str, *, every: bool) -> None:
        self.aborted.append("*" if every else rid)

    async def _nothing(self, *args: Any, **more: Any) -> Any: ...

    _load = _pause = _resume = _name_version = flush = _healthy = _made_progress = _nothing  # type: ignore[assignment]


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_policy(tmp_path_factory.mktemp("policy") / "model"))


async def answers_to(
    engine: FrontedEngine, rid: str = "a", *, stream: bool = False, **sampling: Any
) -> list[EngineAnswer]:
    request = GenerateRequest(rid=rid, input_ids=(1, 2, 3), sampling=Sampling(**sampling))
    return [one async for one in engine.generate(request, stream=stream)]


@pytest.mark.parametrize("stream", [False, True])
def test_other_ids_are_drawn_as_often_as_each_other(policy: str, stream: bool) -> None:
    """3 of 8 ids have no text: the others are picked alike, with log-probs over all 8."""

    async def main() -> tuple[list[EngineAnswer], UniformChild]:
        engine = UniformChild(policy, ends=False)
        asked = {"max_new_tokens": 25, "stream": stream}
        each = [await answers_to(engine, f"{i}", sampling_seed=i, **asked) for i in range(40)]
        return [answers[-1] for answers in each], engine

    answers, engine = asyncio.run(main())
    ids = [i for answer in answers for i in answer.output_ids]
    counts = Counter(ids)
    assert {*counts} == {*range(VOCABULARY)} - TEXTLESS
    assert len(ids) == 40 * 25
    assert max(counts.values()) < 1.4 * min(counts.values())
    free = [a for a, (_, barred) in zip(answers, engine.asked, strict=False) if not barred]
    assert all(a.finish is Finish.LENGTH for a in answers)
    assert {a.prompt_tokens for a in answers} == {3}
    assert {a.cached_tokens for a in answers} == {1}
    assert free
    assert math.isclose(sorted(answers[0].logprobs)[12], -math.log(8))
    # No two requests of an answer draw the same numbers, and none is asked for twice.
    seeds = [request.sampling.sampling_seed for request, _ in engine.asked]
    assert len({*seeds}) == len(seeds) > 40
    assert len({request.rid for request, _ in engine.asked}) == len(seeds)


def test_a_request_sent_again_gets_the_same_answer(policy: str) -> None:
    async def main() -> list[list[int]]:
        engine = UniformChild(policy)
        sampling = {"max_new_tokens": 40, "sampling_seed": 3}
        both = [await answers_to(engine, **sampling) for _ in range(2)]
        return [answers[-1].output_ids for answers in both]

    first, second = asyncio.run(main())
    assert first == second
    assert first


def test_pieces_stay_within_the_answers_length(policy: str) -> None:
    async def main() -> tuple[EngineAnswer, UniformChild]:
        engine = UniformChild(policy)
        return (await answers_to(engine, max_new_tokens=30, min_new_tokens=12, sampling_seed=1))[
            -1
        ], engine

    answer, engine = asyncio.run(main())
    assert 12 <= len(answer.output_ids) <= 30
    assert len(engine.asked) > 2
    for request, _ in engine.asked:
        done = len(request.input_ids) - 3
        assert tuple(answer.output_ids[:done]) == request.input_ids[3:]
        assert request.sampling.max_new_tokens == 30 - done
        assert request.sampling.min_new_tokens == max(12 - done, 0)
    assert answer.versions == sorted(answer.versions)


def test_greedy_picks_the_best_id_with_a_text(policy: str) -> None:
    """The same would be picked again: such a token is drawn alone, with those ids barred."""

    async def main() -> tuple[EngineAnswer, UniformChild]:
        engine = UniformChild(policy, best=6)
        return (await answers_to(engine, max_new_tokens=3, temperature=0))[-1], engine

    answer, engine = asyncio.run(main())
    assert (answer.output_ids, answer.finish) == ([0, 0, 0], Finish.LENGTH)
    assert [barred for _, barred in engine.asked] == [set(), {*TEXTLESS}] * 3
    assert [r.sampling.max_new_tokens for r, _ in engine.asked] == [3, 1, 2, 1, 1, 1]


def test_a_stop_token_without_a_text_ends_the_answer(policy: str) -> None:
    async def main() -> EngineAnswer:
        engine = UniformChild(policy, ends=False)
        sampling = {"sampling_seed": 0, "stop_token_ids": tuple(TEXTLESS)}
        return (await answers_to(engine, max_new_tokens=20, **sampling))[-1]

    assert {*asyncio.run(main()).output_ids} & TEXTLESS


def test_a_stream_grows_and_ends_its_cut_requests(policy: str) -> None:
    async def main() -> tuple[list[EngineAnswer], UniformChild]:
        engine = UniformChild(policy, ends=False)
        return await answers_to(engine, stream=True, max_new_tokens=20, sampling_seed=5), engine

    answers, engine = asyncio.run(main())
    whole = answers[-1].output_ids
    assert all(one.output_ids == whole[: len(one.output_ids)] for one in answers)
    assert [one.finish for one in answers[:-1]] == [None] * (len(answers) - 1)
    assert len(whole) == 20
    assert not TEXTLESS & {*whole}
    assert engine.aborted == [request.rid for request, _ in engine.asked[:-1]]


@pytest.mark.parametrize("every", [False, True])
def test_an_abort_between_two_pieces_ends_the_answer(policy: str, every: bool) -> None:
    async def main() -> tuple[EngineAnswer, UniformChild]:
        engine = UniformChild(policy, ends=False)  # does not heed aborts
        request = GenerateRequest(
            rid="a", input_ids=(1,), sampling=Sampling(max_new_tokens=200, sampling_seed=2)
        )
        async for answer in engine.generate(request, stream=True):
            if len(answer.output_ids) == 9:
                await engine.abort("a", every=every)
        return answer, engine

    answer, engine = asyncio.run(main())
    assert answer.finish is Finish.ABORT
    assert 9 <= len(answer.output_ids) < 200
    assert "*" in engine.aborted if every else engine.asked[-1][0].rid in engine.aborted
    assert asyncio.run(engine.info()).num_running == 0


def test_the_ids_of_a_folder_are_those_above_its_tokenizer(policy: str, tmp_path: Path) -> None:
    size = len(load_tokenizer(policy))
    found = textless_of_folder(policy)
    assert all(i >= size for i in found)
    assert textless_of_folder(str(make_policy(tmp_path / "policy"))) == found


def test_barred_ids_are_told_to_both_engines() -> None:
    request = GenerateRequest(rid="a", input_ids=(1,))
    bodies = {
        "vllm": vllm_body(request, stream=False, barred=(5, 7)),
        "sglang": sglang_body(request, stream=False, barred=(5, 7)),
    }
    for body in bodies.values():
        bias = body["sampling_params"]["logit_bias"]
        assert {*bias} == {"5", "7"}
        assert max(bias.values()) <= -100
    assert "logit_bias" not in vllm_body(request, stream=False)["sampling_params"]
