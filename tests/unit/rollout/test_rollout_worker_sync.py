"""A prompt gets the same answer on both paths: an engine's ``generate``, and a rollout worker's group."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from near import assert_near

from realsys.api.data import MicroBatchSpec
from realsys.api.model import (
    GenerationHyperparameters,
    Model,
    ModelName,
    ParallelGroups,
    ProcessTopology,
)
from realsys.backends.hf.local_engine import answer_prompts
from realsys.data.sequence_sample import SequenceSample
from realsys.data.sources.math_questions import MathPrompts
from realsys.generation.engine.continuous import ContinuousEngine
from realsys.generation.engine.engine_requests import GenerationRequest
from realsys.interfaces.math_reward import MathRewardInterface
from realsys.models.factories import tiny_llama
from realsys.models.hf import end_token_ids, load_causal_lm, load_generation_config, save_hf
from realsys.rollout.agents.math_single_step import MathSingleStep
from realsys.rollout.environments.math_question import MathVerify
from realsys.rollout.worker.chunks import AnswerSettings
from realsys.rollout.worker.group import GroupRunner
from realsys.rollout.worker.policy_client import PolicyCaller
from realsys.rollout.worker.servers import ServerClients
from realsys.transport.generation_messages import Finish, GenerateRequest, GenerateResult
from realsys.transport.rollout_messages import AskServer, Ticket, UseServer

torch.set_num_threads(1)
SEED, GROUP, INDICES = 11, 4, (3, 0, 8)
COMPANY: dict[str, Any] = {
    "name": ModelName("actor"),
    "device": "cpu",
    "topology": ProcessTopology(),
    "rank": 0,
    "groups": ParallelGroups(),
    "base_seed": SEED,
}


@pytest.fixture(scope="module")
def model() -> Model:
    return tiny_llama(hidden_size=32, num_layers=2, num_heads=2, num_kv_heads=1, **COMPANY)


@pytest.fixture(scope="module")
def dataset(model: Model) -> MathPrompts:
    return MathPrompts(tokenizer=model.tokenizer, seed=SEED, split="train", train_size=10)


class OneServer:
    """A manager with one server, whose engine answers each request by itself."""

    name = "gserver_manager/0"

    def __init__(self, model: Model, gconfig: GenerationHyperparameters) -> None:
        self.engine = ContinuousEngine(model.module, max_running=8)
        self._gconfig = gconfig

    async def call(self, body: Any, **_: Any) -> Any:
        return UseServer(server=0, url="https://h") if isinstance(body, AskServer) else None

    async def generate(self, request: GenerateRequest, *, timeout_s: float) -> GenerateResult:
        s = request.sampling
        assert (s.temperature, s.top_p) == (self._gconfig.temperature, self._gconfig.top_p)
        self.engine.submit(
            GenerationRequest(
                rid=request.rid,
                prompt=request.input_ids,
                gconfig=GenerationHyperparameters(
                    max_new_tokens=s.max_new_tokens,
                    min_new_tokens=s.min_new_tokens,
                    temperature=s.temperature,
                    top_p=s.top_p,
                    top_k=max(s.top_k, 0),
                ),
                seed=s.sampling_seed,
                position=s.position,
                stop_ids=frozenset(s.stop_token_ids),
                return_kept=s.return_kept,
            )
        )
        while not (ended := [o for o in self.engine.step() if o.finish]):
            pass
        return GenerateResult(
            output_ids=tuple(ended[0].tokens),
            logprobs=tuple(ended[0].logprobs),
            versions=tuple(ended[0].versions),
            finish=Finish(ended[0].finish),
            kept=tuple(ended[0].kept),
        )


def synchronous(model: Model, dataset: MathPrompts, gconfig: Any) -> SequenceSample:
    """As actor_gen and rew_inf make it."""
    prompts = dataset.batch(INDICES, [f"0-{i}" for i in INDICES])
    answers = answer_prompts(
        model.module,
        prompts,
        tokenizer=model.tokenizer,
        gconfig=gconfig,
        mb_spec=None,
        base_seed=SEED,
    )
    scored = MathRewardInterface().inference(model, answers, MicroBatchSpec())
    return answers.update(scored)


def by_rollouts(
    model: Model, dataset: MathPrompts, gconfig: Any, chunk: int | None
) -> SequenceSample:
    server = OneServer(model, gconfig)
    ends = end_token_ids(model.tokenizer, model.module.generation_config)
    settings = AnswerSettings(
        gconfig=gconfig,
        end_ids=frozenset(ends),
        base_seed=SEED,
        chunk=chunk,
        timeout_s=60.0,
        kept_sets=gconfig.restricts,
    )
    groups = GroupRunner(
        dataset=dataset,
        tokenizer=model.tokenizer,
        agent=MathSingleStep(),
        make_environment=MathVerify,
        caller=PolicyCaller(
            worker="rollout_worker/0",
            manager=server,
            clients=ServerClients(lambda url, name: server),
            settings=settings,
        ),
        group_size=GROUP,
    )

    async def run() -> SequenceSample:
        tickets = [Ticket(id=f"0-{i}", index=i, tries=0, min_version=0) for i in INDICES]
        return SequenceSample.gather([(await groups.run(t)).sample for t in tickets])

    return asyncio.run(run())


@pytest.mark.thorough
@pytest.mark.parametrize("chunk", [None, 5])
def test_both_paths_give_the_same_datapoints(
    model: Model, dataset: MathPrompts, chunk: int | None
) -> None:
    gconfig = GenerationHyperparameters(
        n=GROUP, max_new_tokens=16, min_new_tokens=2, temperature=0.8, top_p=0.95
    )
    expected = synchronous(model, dataset, gconfig)
    found = by_rollouts(model, dataset, gconfig, chunk)
    assert found.select(expected.keys).meta == expected.meta
    for key, x in expected.data.items():
        if key == "packed_logprobs" and chunk is not None:
            assert_near(found.data[key], x)  # the rest of a prompt is read anew
        else:
            assert torch.equal(found.data[key], x), key
    versions = found.data["packed_versions"]
    assert (versions == -1).tolist() == found.data["prompt_mask"].tolist()


def test_ends_are_found_without_the_model(
    model: Model, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rollout worker has the folder; an engine asks the module that was loaded from it."""
    folder = tmp_path / "policy"
    monkeypatch.setattr(model.module.generation_config, "eos_token_id", [5, 7])
    save_hf(model.module, model.tokenizer, folder)
    for has_file in (True, False):
        own = load_causal_lm(folder).generation_config
        assert load_generation_config(folder).eos_token_id == own.eos_token_id
        ids = end_token_ids(model.tokenizer, load_generation_config(folder))
        assert model.tokenizer.eos_token_id in ids
        assert (ids == sorted({5, 7, model.tokenizer.eos_token_id})) == has_file
        (folder / "generation_config.json").unlink(missing_ok=True)
