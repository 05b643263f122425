"""A rollout worker between real sockets: what happens to its servers and its manager changes no answer.

The worker runs in a thread, as ``build.run`` runs it; master and manager are the test's handlers behind
real request servers, generation servers are doubles behind the real HTTPS front, tensors go to a real
tensor server.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from local_rules import trusted
from serving_double import DoubleEngine, ServerDouble

from realsys.api.basics import plugin_table
from realsys.api.errors import RemoteError, WaitTimeout
from realsys.api.model import DatasetAbstraction, GenerationHyperparameters
from realsys.api.worker_configs import RolloutWorker
from realsys.data.rollout_dump import RolloutDump
from realsys.data.sequence_sample import SequenceSample
from realsys.data.transfer.tensor_server import TensorServer
from realsys.data.transfer.tensor_store import TensorStore
from realsys.generation.http.secret import bearer_key
from realsys.name_resolve.key_table import TrialKeys
from realsys.name_resolve.memory_store import MemoryStore
from realsys.rollout.worker import build
from realsys.rollout.worker.episode_tries import EpisodeTries
from realsys.rollout.worker.rollout_log import rollouts_file
from realsys.runtime import worker_exit_codes
from realsys.transport import rollout_messages as rm
from realsys.transport.channel import RequestServer
from realsys.transport.curve_keys import TrialKeypairs
from realsys.transport.generation_messages import PauseMode
from realsys.trial.records import PhaseFiles, WorkerRecord, dumps

pytestmark = pytest.mark.process

WHO: dict[str, Any] = {"trial": "grpo/run1", "attempt": 1, "token": "ab" * 16}
NAMES = TrialKeys(cluster="local", user="me", experiment="grpo", trial="run1")
GROUP, NEW_TOKENS = 3, 24


def make_config(policy: Path, **changes: Any) -> RolloutWorker:
    data = {"split": "train", "train_size": 20}
    fields: dict[str, Any] = {
        "tokenizer_path": str(policy),
        "agent": "math_single_step",
        "env": "math_verify",
        "gconfig": GenerationHyperparameters(max_new_tokens=NEW_TOKENS),
        "group_size": GROUP,
        "rollout_request_timeout": 120.0,
        "max_concurrent_rollouts": 4,
        "datasets": (DatasetAbstraction("math_prompts", data),),
    }
    return RolloutWorker(**{**fields, **changes})


@dataclass
class Scene:
    """Everybody around one rollout worker.

    Attributes:
        min_version: of the tickets.
        lies: the manager names servers whatever weights they have.
        broken: requests reported as broken, by server.
    """

    folder: Path
    keys: TrialKeypairs
    num_tickets: int = 4
    min_version: int = 0
    lies: bool = False
    servers: list[ServerDouble] = field(default_factory=list)
    tensors: TensorStore = field(default_factory=TensorStore)
    names: MemoryStore = field(default_factory=MemoryStore)
    delivered: dict[str, rm.Deliver] = field(default_factory=dict)
    given_up: list[rm.GiveUp] = field(default_factory=list)
    asks: list[rm.AskServer] = field(default_factory=list)
    held: Counter[int] = field(default_factory=Counter)
    broken: Counter[int] = field(default_factory=Counter)
    rids: dict[str, int] = field(default_factory=dict)
    gone: set[int] = field(default_factory=set)

    def register(self, worker: str, endpoint: str) -> None:
        kind, _, index = worker.partition("/")
        record = WorkerRecord(
            worker=worker, host="h", pid=1, start=1, attempt=1, token=WHO["token"], control=endpoint
        )
        self.names.add(NAMES.worker(kind, int(index)), dumps(record), replace=True)

    # ---- master and manager -----------------------------------------------------------------------

    def _tickets(self) -> list[rm.Ticket]:
        return [
            rm.Ticket(id=f"0-{n}", index=n, tries=0, min_version=self.min_version)
            for n in range(self.num_tickets)
        ]

    async def master(self, request: Any) -> Any:
        if isinstance(request, rm.AskPlaces):
            self.left = self._tickets()
            assert request.dataset_size == 20
            return rm.Places(holders=(0,), endpoints=(self.tensor_server.endpoint,))
        if isinstance(request, rm.TakeWork):
            given, self.left = self.left[: request.room], self.left[request.room :]
            if not given and self.num_ended < self.num_tickets:
                await asyncio.sleep(0.02)
            return rm.Work(tickets=tuple(given), over=self.num_ended == self.num_tickets)
        if isinstance(request, rm.Deliver):
            self.delivered[request.id] = request
            return rm.Verdict(kept=True)
        self.given_up.append(request)
        return rm.GaveUp()

    @property
    def num_ended(self) -> int:
        return len(self.delivered) + len(self.given_up)

    async def manager(self, request: Any) -> Any:
        if isinstance(request, rm.DoneWith):
            if request.rid in self.rids:
                server = self.rids.pop(request.rid)
                self.held[server] -= 1
                self.broken[server] += request.broken
            return rm.Accepted()
        self.asks.append(request)
        fit = [
            server
            for server in self.servers
            if server.index not in self.gone
            and (self.lies or server.engine.version >= request.min_version)
        ]
        if not fit:
            await asyncio.sleep(min(0.05, request.wait_s))
            return rm.UseServer(why="generation_server/0: has older weights")
        chosen = min(fit, key=lambda s: (self.held[s.index], s.index))
        if self.lies:
            chosen = fit[len(self.asks) % len(fit)]
        self.held[chosen.index] += 1
        self.rids[request.rid] = chosen.index
        return rm.UseServer(server=chosen.index, url=chosen.url, version=chosen.engine.version)

    # ---- the worker ---------------------------------------------------------------------------------

    async def work(self, config: RolloutWorker) -> int:
        """Runs the worker to its end; its exit code."""
        return await asyncio.to_thread(build.run, self.runner(config))

    def runner(self, config: RolloutWorker) -> Any:
        """As far as the role uses a ``WorkerRunner``."""
        return SimpleNamespace(
            config=config,
            phase=SimpleNamespace(config=SimpleNamespace(reward_worker=[])),
            name="rollout_worker/0",
            index=0,
            host="127.0.0.1",
            ports=None,
            plan=SimpleNamespace(trial=WHO["trial"]),
            attempt=SimpleNamespace(number=WHO["attempt"], token=WHO["token"]),
            attempt_files=SimpleNamespace(curve_keys=self.folder / "curve.json"),
            phase_files=PhaseFiles(self.folder),
            keys=NAMES,
            store=self.names,
            register=lambda: None,
            peers=lambda kind, count, timeout_s: None,
            waiting_for=lambda text: nullcontext(),
            move=lambda event, **_: None,
        )

    @property
    def rows(self) -> list[dict[str, Any]]:
        path = rollouts_file(PhaseFiles(self.folder), attempt=1, index=0)
        return [json.loads(line) for line in path.read_text().splitlines()]

    def samples(self) -> dict[str, SequenceSample]:
        return {id_: self.tensors.get(d.meta) for id_, d in self.delivered.items()}


@asynccontextmanager
async def listening(
    name: str, type_: Any, handler: Callable[[Any], Any], keys: TrialKeypairs
) -> AsyncIterator[str]:
    async with RequestServer(name=name, request_type=type_, keypairs=keys, **WHO) as server:
        task = asyncio.create_task(server.serve(handler))
        try:
            yield server.endpoint
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task


@asynccontextmanager
async def scene_of(folder: Path, *engines: DoubleEngine, **changes: Any) -> AsyncIterator[Scene]:
    folder.mkdir(parents=True)
    keys = TrialKeypairs.create(folder / "curve.json")
    scene = Scene(folder, keys, **changes)
    async with AsyncExitStack() as stack:
        for index, engine in enumerate(engines or [DoubleEngine()]):
            server = ServerDouble(engine, index=index, key=bearer_key(keys))
            scene.servers.append(await stack.enter_async_context(server))
        scene.tensor_server = TensorServer(
            scene.tensors, name="model_worker/0", keypairs=keys, **WHO
        ).start()
        stack.callback(scene.tensor_server.stop)
        for name, type_, handler in (
            ("master_worker/0", rm.ToMaster, scene.master),
            ("gserver_manager/0", rm.ToManager, scene.manager),
        ):
            endpoint = await stack.enter_async_context(listening(name, type_, handler, keys))
            scene.register(name, endpoint)
        yield scene


def run_undisturbed(folder: Path, config: RolloutWorker, **changes: Any) -> Scene:
    async def main() -> Scene:
        async with scene_of(folder, **changes) as scene:
            assert await scene.work(config) == worker_exit_codes.DONE
            return scene

    return asyncio.run(main())


def assert_same_samples(found: Scene, expected: Scene) -> None:
    """Bit for bit; every prompt was delivered."""
    ours, theirs = found.samples(), expected.samples()
    assert sorted(ours) == sorted(theirs) == [f"0-{n}" for n in range(found.num_tickets)]
    for id_, sample in theirs.items():
        assert ours[id_].meta == sample.meta
        for key, x in sample.data.items():
            assert torch.equal(ours[id_].data[key], x), (id_, key)


@pytest.fixture(scope="module")
def undisturbed(tiny_policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Scene:
    folder = tmp_path_factory.mktemp("undisturbed") / "phase"
    return run_undisturbed(folder, make_config(tiny_policy))


def test_what_is_delivered_is_whole(undisturbed: Scene) -> None:
    sample = undisturbed.samples()["0-2"]
    assert sample.meta.seqlens["rewards"] == ((1,) * GROUP,)
    lengths = sample.piece_lengths("packed_input_ids")
    answers = [int((~m).sum()) for m in torch.split(sample.data["prompt_mask"], lengths)]
    assert max(answers) <= NEW_TOKENS
    assert len(set(answers)) >= 1
    assert undisturbed.given_up == []
    assert all(
        row["outcome"] == "kept" and len(row["rewards"]) == GROUP for row in undisturbed.rows
    )
    assert sum("texts" in row for row in undisturbed.rows) == 2
    assert set(undisturbed.held.values()) == {0}


@pytest.mark.parametrize("chunk", [1, 7])
def test_chunks_change_nothing(
    tiny_policy: Path, tmp_path: Path, undisturbed: Scene, chunk: int
) -> None:
    found = run_undisturbed(tmp_path / "p", make_config(tiny_policy, new_tokens_per_chunk=chunk))
    assert len(found.asks) > len(undisturbed.asks)
    assert_same_samples(found, undisturbed)


def test_what_is_delivered_is_kept_for_a_replay(
    tiny_policy: Path, tmp_path: Path, undisturbed: Scene
) -> None:
    found = run_undisturbed(tmp_path / "p", make_config(tiny_policy, dump=True))
    dump = RolloutDump((tmp_path / "p" / "rollout_dump").iterdir())
    assert len(dump) == found.num_tickets
    for id_, sample in undisturbed.samples().items():
        kept = dump.read([id_])
        assert kept.meta == sample.meta
        assert all(torch.equal(kept.data[key], x) for key, x in sample.data.items())


def test_interruptions_and_a_killed_server_change_nothing(
    tiny_policy: Path, tmp_path: Path, undisturbed: Scene
) -> None:
    async def main() -> Scene:
        failure = RemoteError("out of memory", where="here", fix="nothing")
        engines = [
            DoubleEngine(token_s=0.01),
            DoubleEngine(token_s=0.01, fail_next=1, failure=failure),
        ]
        async with scene_of(tmp_path / "p", *engines) as scene:
            work = asyncio.create_task(scene.work(make_config(tiny_policy)))
            await until(lambda: engines[0].running and engines[1].running)
            for _ in range(3):
                await asyncio.sleep(0.03)
                await engines[0].pause(PauseMode.ABORT)
                await engines[0].resume()
            await until(lambda: scene.broken[1] == 1)
            for engine in engines:  # nobody ends before a request meets the killed server
                engine.hang = True
            await until(lambda: scene.held[0] >= scene.held[1] > 0)
            await scene.servers[1].stop()
            await until(lambda: scene.broken[1] > 1)  # the manager does not know yet
            scene.gone.add(1)
            engines[0].hang = False
            assert await work == worker_exit_codes.DONE
            return scene

    found = asyncio.run(main())
    assert_same_samples(found, undisturbed)
    assert found.given_up == []
    assert sum(row["broken"] for row in found.rows) == found.broken.total() > 1
    assert len(found.asks) > len(undisturbed.asks)
    assert set(found.held.values()) == {0}


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(100):
        while not condition():
            await asyncio.sleep(0.002)


def test_a_manager_that_comes_back_elsewhere_is_found(
    tiny_policy: Path, tmp_path: Path, undisturbed: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("realsys.rollout.worker.policy_client.ASK_S", 0.2)
    monkeypatch.setattr("realsys.rollout.worker.policy_client.GRACE_S", 0.2)
    monkeypatch.setattr("realsys.rollout.worker.policy_client.DONE_S", 0.2)

    async def main() -> Scene:
        async with scene_of(tmp_path / "p", DoubleEngine(token_s=0.005)) as scene:
            async with AsyncExitStack() as first, AsyncExitStack() as second:

                async def start(stack: AsyncExitStack) -> str:
                    listen = listening("gserver_manager/0", rm.ToManager, scene.manager, scene.keys)
                    return await stack.enter_async_context(listen)

                scene.register("gserver_manager/0", await start(first))
                config = make_config(tiny_policy, new_tokens_per_chunk=4)
                work = asyncio.create_task(scene.work(config))
                await until(lambda: len(scene.asks) > 3)
                await first.aclose()  # without a word: its registration is still there
                scene.held.clear()
                await asyncio.sleep(0.3)
                scene.register("gserver_manager/0", await start(second))
                assert await work == worker_exit_codes.DONE
            return scene

    assert_same_samples(asyncio.run(main()), undisturbed)


def test_a_change_of_weights_within_an_answer_is_seen_in_its_versions(
    tiny_policy: Path, tmp_path: Path, undisturbed: Scene
) -> None:
    async def main() -> Scene:
        engine = DoubleEngine(token_s=0.01)
        async with scene_of(tmp_path / "p", engine, num_tickets=1) as scene:
            work = asyncio.create_task(scene.work(make_config(tiny_policy)))
            await until(lambda: any(len(a.output_ids) > 4 for a in engine.running.values()))
            engine.version = 1
            await engine.abort("", every=True)
            assert await work == worker_exit_codes.DONE
            return scene

    scene = asyncio.run(main())
    (delivered,) = scene.delivered.values()
    assert (delivered.oldest, delivered.newest) == (0, 1)
    sample, former = scene.samples()["0-0"], undisturbed.samples()["0-0"]
    assert torch.equal(sample.data["packed_input_ids"], former.data["packed_input_ids"])
    lengths = sample.piece_lengths("packed_input_ids")
    for versions, prompt in zip(
        torch.split(sample.data["packed_versions"], lengths),
        torch.split(sample.data["prompt_mask"], lengths),
        strict=True,
    ):
        assert set(versions[prompt].tolist()) == {-1}
        assert versions[~prompt].tolist() == sorted(versions[~prompt].tolist())


@pytest.fixture
def one_try(monkeypatch: pytest.MonkeyPatch) -> None:
    """Episodes that fail are not played again."""
    monkeypatch.setattr(build, "EpisodeTries", lambda: EpisodeTries(waits_s=()))


@pytest.mark.usefixtures("one_try")
def test_tokens_of_older_weights_than_the_ticket_allows_are_never_delivered(
    tiny_policy: Path, tmp_path: Path
) -> None:
    """A manager that errs: every second server is too old, and what it gives is thrown away."""

    async def main() -> Scene:
        engines = [DoubleEngine(version=1), DoubleEngine(version=2)]
        async with scene_of(tmp_path / "p", *engines, min_version=2, lies=True) as scene:
            assert await scene.work(make_config(tiny_policy)) == worker_exit_codes.DONE
            assert engines[0].seen
            return scene

    scene = asyncio.run(main())
    for delivered in scene.delivered.values():
        assert (delivered.oldest, delivered.newest) == (2, 2)
    for given_up in scene.given_up:  # five times in a row the wrong one
        assert "version 1, the" in given_up.why
    assert scene.delivered


@pytest.mark.parametrize(
    ("engine", "changes", "why"),
    [
        (
            DoubleEngine(hang=True),
            {},
            "before that: no answer from generation_server/0, and it fails a health check",
        ),
        (
            DoubleEngine(version=0),
            {"min_version": 5},
            "waited for a server from gserver_manager/0: generation_server/0: has older weights",
        ),
    ],
    ids=["hanging server", "old weights"],
)
@pytest.mark.usefixtures("one_try")
def test_a_ticket_that_can_not_be_answered_in_time_is_given_up_by_name(
    tiny_policy: Path, tmp_path: Path, engine: DoubleEngine, changes: dict[str, Any], why: str
) -> None:
    async def main() -> Scene:
        async with scene_of(tmp_path / "p", engine, num_tickets=1, **changes) as scene:
            config = make_config(tiny_policy, rollout_request_timeout=4.0)
            assert await scene.work(config) == worker_exit_codes.DONE
            await until(lambda: not engine.running)  # nothing is left running on the server
            return scene

    (given_up,) = asyncio.run(main()).given_up
    assert why in given_up.why
    assert "answer to 0-0" in given_up.why
    assert not given_up.filtered


@pytest.mark.usefixtures("one_try")
def test_a_reason_that_utf8_has_not_is_told(
    tiny_policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @trusted
    def broken(response: str, answer: str) -> float:
        raise ValueError("no judge for \ud800")

    monkeypatch.setitem(plugin_table.registered["reward"], "broken", broken)
    config = make_config(tiny_policy, env_args={"reward": "broken"})
    found = run_undisturbed(tmp_path / "p", config, num_tickets=2)
    assert [give_up.unscored for give_up in found.given_up] == [True, True]
    assert all("no judge for \\ud800" in give_up.why for give_up in found.given_up)


def test_a_silent_master_ends_the_worker_and_is_named(
    tiny_policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("realsys.rollout.worker.rollout_worker.SETUP_S", 0.5)

    async def main() -> None:
        async with scene_of(tmp_path / "p") as scene:

            async def silent(request: Any) -> Any:
                await asyncio.sleep(30)

            async with listening("master_worker/0", rm.ToMaster, silent, scene.keys) as endpoint:
                scene.register("master_worker/0", endpoint)
                with pytest.raises(WaitTimeout, match="master_worker/0"):
                    await scene.work(make_config(tiny_policy))

    asyncio.run(main())


@pytest.mark.parametrize(
    ("agent", "env", "env_args"),
    [
        ("math_multi_turn", "math_verify", {"turns": 3, "discount": 0.5}),
        ("tool_use", "calculator", {}),
    ],
)
def test_other_agents_deliver_as_well(
    tiny_policy: Path, tmp_path: Path, agent: str, env: str, env_args: dict[str, Any]
) -> None:
    config = make_config(tiny_policy, agent=agent, env=env, env_args=env_args)
    scene = run_undisturbed(tmp_path / "p", config, num_tickets=2)
    assert len(scene.delivered) == 2
    if agent == "math_multi_turn":  # the double is never right: three answers, two observations
        sample = scene.samples()["0-0"]
        first = torch.split(sample.data["prompt_mask"], sample.piece_lengths("packed_input_ids"))[0]
        assert int((first[1:] != first[:-1]).sum()) == 5
        assert scene.delivered["0-0"].stats["agent/turns"] == 3.0
