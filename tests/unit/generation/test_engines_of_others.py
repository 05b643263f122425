"""What SGLang and vLLM are asked for: prefixes of the weights in use, and random numbers that differ."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from realsys.api.errors import RealsysError, WaitTimeout
from realsys.api.model import GenerationHyperparameters
from realsys.api.worker_configs import GenerationServer
from realsys.generation.http.http_json import generate_body, seed_of_piece
from realsys.generation.http.http_session import HttpSession
from realsys.generation.http.served_engine import EngineAnswer, FetchedWeights
from realsys.generation.served_engines.child import ChildServer
from realsys.generation.served_engines.fronted import FrontedEngine
from realsys.generation.served_engines.sglang import SGLangEngine, sglang_body
from realsys.generation.served_engines.vllm import VLLMEngine, vllm_body
from realsys.rollout.worker.chunks import AnswerSettings, PartialAnswer, next_request
from realsys.transport.generation_messages import (
    GenerateRequest,
    PauseMode,
    Sampling,
    WeightSource,
)

KINDS = ("sglang", "vllm")
PROMPT = (5, 9, 17, 33)


class PrefixDouble:
    """A child's side of HTTP. It caches prefixes as paged engines do: by tokens and the request's name.

    Attributes:
        cached: prefix with its name → version of the weights that computed it.
        hits: of the newest request, the version of each token that came from the cache.
        fails: paths that are not answered, once each.
    """

    def __init__(self, kind: str) -> None:
        self.kind, self.version = kind, 0
        self.cached: dict[tuple[str, tuple[int, ...]], int] = {}
        self.hits: list[int] = []
        self.fails: list[str] = []

    async def call(self, verb: str, path: str, body: Any = None, *, timeout_s: float) -> bytes:
        path, _, query = path.partition("?")
        if path in self.fails:
            self.fails.remove(path)
            raise WaitTimeout(f"no answer to {path}", where="a test", fix="wait")
        if path in ("/generate", "/inference/v1/generate"):
            return self._answer(body)
        if path == "/update_weights_from_disk":
            self.version = int(body["weight_version"])
            self._drop(if_=body["flush_cache"])
        elif path == "/update_weight_version":
            self.version = int(body["new_version"])
        self._drop(if_=path == "/reset_prefix_cache" and "true" in query)
        return b'{"success": true}'

    def _drop(self, *, if_: bool) -> None:
        if if_:
            self.cached.clear()

    def _answer(self, body: dict[str, Any]) -> bytes:
        tokens = tuple(body["token_ids" if self.kind == "vllm" else "input_ids"])
        name = body.get("cache_salt" if self.kind == "vllm" else "extra_key") or ""
        prefixes = [(name, tokens[:end]) for end in range(1, len(tokens) + 1)]
        self.hits = [self.cached[one] for one in prefixes if one in self.cached]
        for one in prefixes:
            self.cached.setdefault(one, self.version)
        if self.kind == "vllm":
            token = {
                "token_ids": [7],
                "logprobs": {"content": [{"token_id": 7, "logprob": -1.0}]},
                "finish_reason": "length",
            }
            details = {"prompt_tokens_details": {"cached_tokens": len(self.hits)}}
            return json.dumps({"choices": [token], "usage": details}).encode()
        meta = {
            "finish_reason": {"type": "length"},
            "cached_tokens": len(self.hits),
            "weight_version": str(self.version),
            "output_token_logprobs": [[-1.0, 7, None]],
        }
        return json.dumps({"output_ids": [7], "meta_info": meta}).encode()


def _nobody(source: WeightSource) -> FetchedWeights:
    raise AssertionError("nothing is fetched for a folder")


class MakeEngine:
    """Makes engines of one model whose children are not started; they leave nothing behind."""

    def __init__(self, policy: str, scratch: Path) -> None:
        self.policy, self._scratch = policy, scratch
        self.folders: list[Any] = []

    def __call__(
        self, kind: str, *, name: str = "generation_server/0", start: str = "", **args: Any
    ) -> Any:
        config = GenerationServer(backend_type=kind, model_path=self.policy, backend_args=args)
        more: dict[str, Any] = {"name": name, "log": self._scratch / "log", "start": start}
        more["guard"] = lambda argv: argv
        if kind == "vllm":
            engine = VLLMEngine(config, _nobody, **more)
            self.folders.append(engine._folder)
            return engine
        return SGLangEngine(config, _nobody, scratch=self._scratch, **more)


@pytest.fixture
def make(tiny_policy: Path, tmp_path: Path) -> Iterator[MakeEngine]:
    makes = MakeEngine(str(tiny_policy), tmp_path)
    yield makes
    for folder in makes.folders:
        folder.cleanup()


def on_double(engine: FrontedEngine, kind: str) -> PrefixDouble:
    double = PrefixDouble(kind)
    engine._http = engine._control = cast(HttpSession, double)
    engine._child = cast(ChildServer, SimpleNamespace(check=dict))  # it runs
    return double


async def asked(engine: FrontedEngine, rid: str) -> EngineAnswer:
    request = GenerateRequest(rid=rid, input_ids=PROMPT, sampling=Sampling(max_new_tokens=1))
    (answer,) = [answer async for answer in engine.generate(request, stream=False)]
    return answer


@pytest.mark.parametrize("kept_by", ["setting", "pause", "nobody"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_of_old_weights_is_read_anew_by_new_ones(
    kind: str, kept_by: str, make: MakeEngine
) -> None:
    """Caches of version 0 served new requests for ever: above all those of a shared system prompt."""
    args = {"kv_on_update": "keep"} if kept_by == "setting" else {}
    engine, policy = make(kind, **args), make.policy

    async def main() -> None:
        double = on_double(engine, kind)
        assert [(await asked(engine, f"0-{i}")).cached_tokens for i in range(2)] == [0, len(PROMPT)]
        for version in (1, 2):
            if kept_by == "pause":
                await engine.pause(PauseMode.IN_PLACE)
            await engine.update_weights(WeightSource(version=version, path=policy))
            if kept_by == "pause":
                await engine.resume()
            first, second = [await asked(engine, f"{version}-{i}") for i in range(2)]
            assert (first.cached_tokens, second.cached_tokens) == (0, len(PROMPT))
            assert set(double.hits) == {version}
            assert first.versions == [version]
        # The caches of what runs are kept, and only where that is asked for.
        assert (0 in double.cached.values()) == (kept_by != "nobody")

    asyncio.run(main())


@pytest.mark.parametrize("kind", KINDS)
def test_an_update_that_is_tried_again_has_no_prefix_of_before(kind: str, make: MakeEngine) -> None:
    engine, policy = make(kind, kv_on_update="keep"), make.policy

    async def main() -> None:
        double = on_double(engine, kind)
        double.fails = ["/pause" if kind == "vllm" else "/pause_generation"]
        with pytest.raises(RealsysError):
            await engine.update_weights(WeightSource(version=1, path=policy))
        await asked(engine, "still of version 0")
        await engine.update_weights(WeightSource(version=1, path=policy))
        assert (await asked(engine, "of version 1")).cached_tokens == 0

    asyncio.run(main())


# ---- random numbers -----------------------------------------------------------------------------


def seeds_of_bodies(seed: int | None, positions: tuple[int, ...]) -> list[list[int | None]]:
    found = []
    for position in positions:
        sampling = Sampling(sampling_seed=seed, position=position)
        request = GenerateRequest(rid="r", input_ids=PROMPT, sampling=sampling)
        ours = generate_body(request)["sampling_params"]
        theirs = sglang_body(request, stream=False)["sampling_params"]
        assert ours.get("position", 0) == position
        assert "position" not in theirs
        vllm = vllm_body(request, stream=False)["sampling_params"]
        found.append([ours["sampling_seed"], theirs["sampling_seed"], vllm.get("seed")])
    return found


def test_pieces_of_an_answer_draw_their_own_random_numbers() -> None:
    """Where an engine knows no ``position``, token k of each piece had the numbers of the first's."""
    (first, *later) = seeds_of_bodies(-77, (0, 16, 32))
    assert first == [-77] * 3, "of a whole answer: as ever"
    assert [ours for ours, *_ in later] == [-77] * 2, "the embedded engine knows positions"
    theirs = [body[1] for body in (first, *later)]
    assert theirs == [body[2] for body in (first, *later)]
    assert len(set(theirs)) == 3
    assert later == seeds_of_bodies(-77, (16, 32)), "a request that is sent again draws the same"
    assert all(0 <= seed < 1 << 63 for seed in theirs[1:] if seed is not None)
    assert seeds_of_bodies(None, (0, 16)) == [[None] * 3] * 2
    assert seed_of_piece(Sampling(sampling_seed=-76, position=16)) != theirs[1]


def test_a_continued_answer_has_a_seed_a_request() -> None:
    settings = AnswerSettings(
        gconfig=GenerationHyperparameters(max_new_tokens=64),
        end_ids=frozenset({2}),
        base_seed=1,
        chunk=16,
    )
    part, seeds = PartialAnswer(prompt=PROMPT, limit=64, seed=5), []
    for done in (0, 16, 21):  # the third after an interruption
        part.tokens = list(range(done))
        seeds.append(seed_of_piece(next_request(part, settings, rid="r").sampling))
    assert seeds[0] == 5
    assert len(set(seeds)) == 3


@pytest.mark.parametrize(("kind", "option"), [("sglang", "--random-seed"), ("vllm", "--seed")])
def test_servers_of_a_fleet_draw_different_numbers_and_so_does_one_that_is_started_again(
    kind: str, option: str, make: MakeEngine
) -> None:
    """With one seed for all, one question in the same place got one answer from each."""

    def seed(server: int, start: str = "", **args: Any) -> int:
        engine = make(kind, name=f"generation_server/{server}", start=start, **args)
        argv = engine._child._argv
        return int(argv[argv.index(option) + 1])

    name = option.removeprefix("--").replace("-", "_")
    fleet = [seed(server) for server in range(4)]
    again = [seed(0, "second"), seed(0, "third"), seed(0, **{name: 9}), seed(1, **{name: 9})]
    assert len({*fleet, *again}) == 8
    assert all(0 <= one < 1 << 32 for one in (*fleet, *again)), "NumPy takes no more"
    assert seed(2) == fleet[2]
