"""The manager among servers that fail, come anew and take weights: in virtual time, no sockets."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

import golden
import msgspec
import pytest
from virtual_time import run_virtually

from realsys.api.errors import ConfigError, RemoteError, WorkerLost
from realsys.api.model import ModelName
from realsys.api.worker_configs import GserverManager
from realsys.generation.manager.build import make_manager
from realsys.generation.manager.fleet import RegisteredServer
from realsys.generation.manager.manager import Manager
from realsys.generation.manager.manager_record import GenerationRecord
from realsys.generation.manager.registrations import Registrations
from realsys.generation.manager.updates import UpdateMode, waves
from realsys.observability.jsonl import read_jsonl
from realsys.transport import rollout_messages as rm
from realsys.transport.codec import ProtocolError
from realsys.transport.generation_messages import (
    ServerAddress,
    ServerInfo,
    WeightPart,
    WeightSource,
    WeightsTaken,
)
from realsys.worker.live_scaling import Scaling

# ---- servers that do as they are told -----------------------------------------------------------


class Process:
    """A generation server's process: what is behind a URL."""

    def __init__(self, version: int = 0, *, max_running: int = 0) -> None:
        self.version, self.max_running = version, max_running
        self.answers = True  # else: no connection
        self.generates = True
        self.takes_s = 1.0  # for an update
        self.thinks_s = 0.01  # over a question
        self.refuses = 0  # so many updates
        self.busy = 0  # requests it says that it holds
        self.updates: list[int] = []  # versions asked for
        self.sources: list[WeightSource] = []
        self.aborted = self.closed = 0
        self.updating_now = 0
        self.checks_now = self.most_checks = 0


class Client:
    """GenerationClient of one process."""

    def __init__(self, process: Process) -> None:
        self.process = process

    def _reach(self) -> None:
        if not self.process.answers:
            raise WorkerLost("no connection", where="here", fix="none")

    async def info(self, *, timeout_s: float = 5.0) -> ServerInfo:
        self._reach()
        info = ServerInfo(
            engine="embedded",
            model_path="",
            weight_version=self.process.version,
            max_running=self.process.max_running,
            num_running=self.process.busy,
        )
        await asyncio.sleep(self.process.thinks_s)
        return info

    async def healthy(self, *, timeout_s: float = 5.0) -> bool:
        self.process.checks_now += 1
        self.process.most_checks = max(self.process.most_checks, self.process.checks_now)
        await asyncio.sleep(self.process.thinks_s)
        self.process.checks_now -= 1
        if self.process.updating_now and self.process.takes_s > timeout_s:
            await asyncio.sleep(timeout_s)
            return False
        return self.process.answers and self.process.generates

    async def update_weights(self, source: WeightSource, *, timeout_s: float) -> WeightsTaken:
        process = self.process
        self._reach()
        process.updates.append(source.version)
        process.sources.append(source)
        process.updating_now += 1
        assert process.updating_now == 1, "two updates of one server at a time"
        try:
            await asyncio.sleep(process.takes_s)
        finally:
            process.updating_now -= 1
        self._reach()
        if process.refuses:
            process.refuses -= 1
            raise RemoteError("checksum of bucket 3", where="there", fix="none")
        process.version = source.version
        return WeightsTaken(version=source.version, paused_s=process.takes_s / 10, num_bytes=100)

    async def abort(self, rid: str = "", *, every: bool = False) -> None:
        self._reach()
        self.process.aborted += 1

    async def close(self) -> None:
        self.process.closed += 1


class Cluster:
    """A manager and its servers."""

    def __init__(self, tmp_path: Any, num_servers: int = 2, **config: Any) -> None:
        self.path = tmp_path / "generation.jsonl"
        self.record = GenerationRecord(self.path, attempt=1)
        self.config = GserverManager(model_name=ModelName("actor"), n_servers=num_servers, **config)
        self.processes = {i: Process() for i in range(num_servers)}
        self.by_url: dict[str, Process] = {}
        self.pids = dict.fromkeys(self.processes, 1)
        self.workers = {"rollout_worker/0": "h:1:1"}
        self.scaling: Scaling | None = None
        self.dismissed: list[int] = []

    async def __aenter__(self) -> "Cluster":
        self.start_manager()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.manager.leave()
        await self.task
        self.record.close()

    def start_manager(self) -> None:
        self.manager: Manager = make_manager(
            self.config,
            make_client=lambda address: Client(self.by_url[address.url]),  # type: ignore[arg-type,return-value]
            record=self.record,
            dismiss=self.dismiss,
        )
        self.task = asyncio.get_running_loop().create_task(self.manager.run())
        self.register()

    async def dismiss(self, server: int) -> None:
        self.dismissed.append(server)

    def register(self) -> None:
        """What registrations.py would tell: the processes as they are now."""
        servers = {}
        for i, process in self.processes.items():
            url = f"https://s{i}:{self.pids[i]}"
            self.by_url[url] = process
            address = ServerAddress(index=i, url=url)
            servers[i] = RegisteredServer(address=address, incarnation=f"h:{self.pids[i]}:1")
        self.manager.registered(
            Registrations(servers=servers, rollout_workers=self.workers, scaling=self.scaling)
        )

    def restart(self, server: int, version: int = 0) -> None:
        self.processes[server].answers = False
        self.processes[server] = Process(version, max_running=self.processes[server].max_running)
        self.pids[server] += 1
        self.register()

    async def ask(self, rid: str, **fields: Any) -> rm.UseServer:
        worker = fields.pop("worker", "rollout_worker/0")
        defaults = {"group": rid, "num_tokens": 10, "min_version": 0, "worker": worker}
        reply = await self.manager.handle(rm.AskServer(rid=rid, **{**defaults, **fields}))
        assert isinstance(reply, rm.UseServer)
        return reply

    async def done(self, rid: str, server: int, **fields: Any) -> None:
        await self.manager.handle(rm.DoneWith(rid=rid, server=server, **fields))

    async def new_weights(self, version: int, **source: Any) -> rm.ServersAt:
        data = msgspec.msgpack.encode(WeightSource(version=version, **source))
        reply = await self.manager.handle(rm.NewWeights(source=data))
        assert isinstance(reply, rm.ServersAt)
        return reply

    def events(self, *kinds: str) -> list[tuple[Any, ...]]:
        return [(r["event"], r.get("server")) for r in read_jsonl(self.path) if r["event"] in kinds]


@pytest.fixture
def run(tmp_path):
    """Runs a test's coroutine, which gets a cluster, in virtual time."""

    def runs(test: Callable[[Cluster], Awaitable[None]], **config: Any) -> None:
        async def all_of_it() -> None:
            async with Cluster(tmp_path, **config) as cluster:
                await asyncio.sleep(0.1)  # servers are checked
                await test(cluster)

        run_virtually(all_of_it())

    return runs


# ---- asking -------------------------------------------------------------------------------------


def test_servers_are_used_once_they_were_checked(tmp_path):
    async def test() -> None:
        async with Cluster(tmp_path) as cluster:
            early = await cluster.ask("r0", wait_s=0.0)
            assert early.server == -1
            golden.check(early.why)
            reply = await cluster.ask("r0", wait_s=1.0)
            assert (reply.server, reply.url, reply.version) == (0, "https://s0:1", 0)
            assert cluster.events("server_up") == [("server_up", 0), ("server_up", 1)]

    run_virtually(test())


def test_a_wait_ends_at_its_deadline_and_names_everybody(tmp_path):
    async def test() -> None:
        cluster = Cluster(tmp_path, 2)
        del cluster.processes[1]
        async with cluster:
            await asyncio.sleep(0.1)
            began_s = asyncio.get_running_loop().time()
            reply = await cluster.ask("r0", min_version=4, wait_s=30.0)
            assert asyncio.get_running_loop().time() - began_s == pytest.approx(30.0)
            golden.check(reply.why)
            assert not reply.in_line
            assert cluster.manager.view().waiting == 0

    run_virtually(test())


def test_who_waits_hears_as_soon_as_a_server_is_free(run):
    async def test(cluster: Cluster) -> None:
        assert (await cluster.ask("a")).server == 0
        waiting = asyncio.create_task(cluster.ask("b", wait_s=30.0))
        await asyncio.sleep(1.0)
        assert cluster.manager.view().waiting == 1
        await cluster.done("a", 0)
        assert (await waiting).server == 0

    run(test, num_servers=1, server_limit=1)


def test_the_limit_follows_from_what_a_server_runs_at_a_time(tmp_path):
    async def test() -> None:
        cluster = Cluster(tmp_path, 1)
        cluster.processes[0].max_running = 2
        async with cluster:
            replies = [await cluster.ask(f"r{i}", wait_s=1.0) for i in range(5)]
            assert [reply.server for reply in replies] == [0, 0, 0, 0, -1]
            assert [reply.in_line for reply in replies] == [False, False, False, False, True]
            golden.check(replies[4].why)

    run_virtually(test())


def test_asking_again_ends_the_former_wait(run):
    async def test(cluster: Cluster) -> None:
        await cluster.ask("a")
        former = asyncio.create_task(cluster.ask("b", wait_s=30.0))
        await asyncio.sleep(0.1)
        again = asyncio.create_task(cluster.ask("b", wait_s=30.0))
        await asyncio.sleep(0.1)
        golden.check((await former).why)
        await cluster.done("a", 0)
        assert (await again).server == 0
        assert cluster.manager.view().running == {0: 1}

    run(test, num_servers=1, server_limit=1)


def test_giving_up_ends_a_wait_and_frees_a_server(run):
    async def test(cluster: Cluster) -> None:
        await cluster.ask("a")
        waiting = asyncio.create_task(cluster.ask("b", wait_s=30.0))
        await asyncio.sleep(0.1)
        await cluster.done("b", -1)
        golden.check((await waiting).why)
        await cluster.done("a", -1)
        assert cluster.manager.view().running == {0: 0}

    run(test, num_servers=1, server_limit=1)


def test_a_rollout_worker_that_starts_anew_holds_nothing(run):
    async def test(cluster: Cluster) -> None:
        await cluster.ask("a")
        waiting = asyncio.create_task(cluster.ask("b", wait_s=30.0))
        await asyncio.sleep(0.1)
        cluster.workers = {"rollout_worker/0": "h:2:9"}
        cluster.register()
        assert (await waiting).why == "rollout_worker/0 was lost"
        assert cluster.manager.view().running == {0: 0}

    run(test, num_servers=1, server_limit=1)


def test_what_was_given_a_server_and_never_came_is_forgotten(run):
    async def test(cluster: Cluster) -> None:
        await cluster.ask("a")
        assert (await cluster.ask("b", wait_s=300.0)).server == 0  # a's worker is hung

    run(test, num_servers=1, server_limit=1)


def test_a_server_that_is_busy_keeps_what_it_has(run):
    async def test(cluster: Cluster) -> None:
        cluster.processes[0].busy = 1
        await cluster.ask("a")
        assert (await cluster.ask("b", wait_s=300.0)).server == -1

    run(test, num_servers=1, server_limit=1)


# ---- sick servers ---------------------------------------------------------------------------------


def test_a_server_that_answers_no_more_is_left_out_and_comes_back(run):
    async def test(cluster: Cluster) -> None:
        cluster.processes[0].answers = False
        await asyncio.sleep(6.0)
        assert cluster.manager.view().sick == {0: "no connection"}
        assert {(await cluster.ask(f"r{i}")).server for i in range(4)} == {1}
        cluster.processes[0].answers = True
        await asyncio.sleep(10.0)
        assert cluster.manager.view().sick == {}
        assert cluster.events("server_sick", "server_back") == [
            ("server_sick", 0),
            ("server_back", 0),
        ]

    run(test)


def test_one_that_makes_no_token_is_sick(run):
    async def test(cluster: Cluster) -> None:
        cluster.processes[1].generates = False
        await asyncio.sleep(6.0)
        golden.check(cluster.manager.view().sick)

    run(test)


def test_a_broken_request_has_its_server_checked_at_once(run):
    async def test(cluster: Cluster) -> None:
        await cluster.ask("a")
        cluster.processes[0].answers = False
        await cluster.done("a", 0, broken=True, why="connection cut")
        await asyncio.sleep(0.1)
        assert cluster.manager.view().sick == {0: "no connection"}

    run(test)


def test_many_broken_requests_make_one_check_at_a_time(run):
    async def test(cluster: Cluster) -> None:
        cluster.processes[0].thinks_s = 2.0
        for i in range(10):
            await cluster.ask(f"r{i}", server=0)
        for i in range(10):
            await cluster.done(f"r{i}", 0, broken=True, why="connection cut")
            await asyncio.sleep(0.2)
        await asyncio.sleep(5.0)
        assert cluster.processes[0].most_checks == 1

    run(test, sick_after=100)


def test_requests_that_break_on_a_server_that_passes_its_checks(run):
    async def test(cluster: Cluster) -> None:
        for i in range(3):
            assert (await cluster.ask(f"r{i}", server=1)).server == 1
            await cluster.done(f"r{i}", 1, broken=True, why="connection cut")
        golden.check(cluster.manager.view().sick)

    run(test)


def test_breaks_of_a_dead_process_are_not_laid_on_its_successor(run):
    async def test(cluster: Cluster) -> None:
        for i in range(6):
            await cluster.ask(f"r{i}", server=0)
        cluster.restart(0)
        await asyncio.sleep(0.1)
        for i in range(6):
            await cluster.done(f"r{i}", 0, broken=True, why="connection cut")
        assert cluster.manager.view().sick == {}
        assert cluster.manager.view().running == {0: 0, 1: 0}

    run(test)


def test_a_missing_registration_alone_makes_nobody_sick(run):
    async def test(cluster: Cluster) -> None:
        kept = cluster.processes.pop(0)
        cluster.register()
        await asyncio.sleep(1.0)
        assert cluster.manager.view().sick == {}
        kept.answers = False
        await asyncio.sleep(6.0)
        assert cluster.manager.view().sick == {0: "no connection"}

    run(test)


def test_a_registration_that_can_not_be_used_costs_the_others_nothing(run):
    async def test(cluster: Cluster) -> None:
        made = cluster.manager.fleet.make_client

        def refuse(address: ServerAddress) -> Any:
            if address.url == "https://s0:2":
                raise ConfigError("no fingerprint", where=address.url, fix="none")
            return made(address)

        cluster.manager.fleet.make_client = refuse
        cluster.restart(0)
        cluster.restart(1)
        await asyncio.sleep(10.0)  # it would have been checked again
        golden.check(cluster.manager.view().sick)
        assert (await cluster.ask("a")).server == 1

    run(test)


# ---- weights --------------------------------------------------------------------------------------


def test_new_weights_reach_all_at_once(run):
    async def test(cluster: Cluster) -> None:
        cluster.processes[1].takes_s = 3.0
        reply = await cluster.new_weights(1)
        assert reply.versions == {0: 1, 1: 1}
        assert reply.sick == {}
        assert reply.seconds == pytest.approx(3.0)  # not 4
        assert (reply.paused_s, reply.num_bytes) == (pytest.approx(0.3), 200)
        start, end = (r for r in read_jsonl(cluster.path) if r["event"].startswith("update"))
        assert (start["event"], start["version"], start["servers"]) == ("update_start", 1, [0, 1])
        assert (end["seconds"], end["paused_s"], end["failed"]) == (3.0, 0.3, {})

    run(test)


@pytest.mark.parametrize(
    ("mode", "share", "expected"),
    [
        (UpdateMode.ALL_AT_ONCE, 0.25, [[0, 1, 2, 3, 4]]),
        (UpdateMode.ROLLING, 0.25, [[0], [1], [2], [3], [4]]),
        (UpdateMode.ROLLING, 0.5, [[0, 1], [2, 3], [4]]),
        (UpdateMode.ROLLING, 1.0, [[0, 1, 2, 3, 4]]),
    ],
)
def test_waves(mode, share, expected):
    assert waves(range(5), mode=mode, share=share) == expected
    assert waves([], mode=mode, share=share) == []


def test_rolling_leaves_the_others_at_work(run):
    async def test(cluster: Cluster) -> None:
        update = asyncio.create_task(cluster.new_weights(1))
        await asyncio.sleep(0.5)
        assert [p.updating_now for p in cluster.processes.values()] == [1, 0]
        assert (await cluster.ask("a")).server == 1
        newer = asyncio.create_task(cluster.ask("b", min_version=1, wait_s=30))
        await asyncio.sleep(1.0)
        assert [p.updating_now for p in cluster.processes.values()] == [0, 1]
        assert (await newer).server == 0
        assert (await update).seconds == pytest.approx(2.0)

    run(test, update_mode="rolling", update_share=0.5)


def test_a_slow_server_keeps_no_other_from_newer_weights(run):
    async def test(cluster: Cluster) -> None:
        cluster.processes[1].takes_s = 30.0
        first = asyncio.create_task(cluster.new_weights(1))
        await asyncio.sleep(2.0)
        second = asyncio.create_task(cluster.new_weights(2))
        await asyncio.sleep(2.0)
        assert cluster.manager.view().versions == {0: 2, 1: 0}
        assert (await cluster.ask("a", min_version=2)).server == 0
        assert (await first).seconds == pytest.approx(60.0)  # straight on to the newest
        assert (await second).versions == {0: 2, 1: 2}

    run(test)


def test_rolling_updates_of_two_versions_take_turns(run):
    async def test(cluster: Cluster) -> None:
        most = 0

        async def look() -> None:
            nonlocal most
            while True:
                most = max(most, sum(p.updating_now for p in cluster.processes.values()))
                await asyncio.sleep(0.05)

        looking = asyncio.create_task(look())
        first = asyncio.create_task(cluster.new_weights(1))
        await asyncio.sleep(2.5)  # two servers are done, to which the second update comes first
        assert (await cluster.new_weights(2)).versions == {0: 2, 1: 2, 2: 2, 3: 2}
        await first
        looking.cancel()
        assert most == 1

    run(test, num_servers=4, update_mode="rolling", update_share=0.25)


def test_a_server_that_fails_is_left_out_and_the_others_go_on(run):
    async def test(cluster: Cluster) -> None:
        await cluster.ask("a", server=0)
        cluster.processes[0].refuses = 1
        reply = await cluster.new_weights(1)
        assert reply.versions == {0: 0, 1: 1}
        golden.check(reply.sick)
        assert cluster.processes[0].aborted == 1  # its requests go elsewhere
        assert (await cluster.ask("a", server=0)).server == 1
        await asyncio.sleep(5.0)
        assert cluster.manager.view().sick == {}
        assert cluster.manager.view().versions == {0: 1, 1: 1}

    run(test)


def test_one_that_hangs_in_an_update_is_left_out_at_its_deadline(run):
    async def test(cluster: Cluster) -> None:
        cluster.processes[1].takes_s = 10_000.0
        updating = asyncio.create_task(cluster.new_weights(1))
        await asyncio.sleep(0.5)
        assert cluster.manager.view().taking == {0: 1, 1: 1}
        waiting = await cluster.ask("a", min_version=1, wait_s=0.1)
        assert (waiting.server, waiting.in_line) == (-1, True), "weights are on their way"
        reply = await updating
        assert reply.seconds == pytest.approx(65.0)  # 60 and what the client gets over
        golden.check(reply.sick)
        assert cluster.manager.view().taking == {1: 1}, "it may still read them"

    run(test, flush_request_timeout=60.0)


def test_what_a_server_may_be_reading_ends_with_its_answer(run):
    async def test(cluster: Cluster) -> None:
        cluster.processes[0].refuses = 1
        await cluster.new_weights(1)
        assert cluster.manager.view().taking == {}

    run(test)


def test_standing_still_for_weights_is_no_sickness(run):
    async def test(cluster: Cluster) -> None:
        for process in cluster.processes.values():
            process.takes_s = 50.0  # longer than a health check waits
        await asyncio.sleep(4.95)  # the next checks begin just before the update
        reply = await cluster.new_weights(1)
        assert reply.sick == {}
        assert cluster.events("server_sick") == []

    run(test)


def test_a_server_that_comes_anew_has_the_newest_weights_before_it_gets_requests(run):
    async def test(cluster: Cluster) -> None:
        await cluster.new_weights(1)
        await cluster.new_weights(2)
        cluster.restart(0)
        reply = await cluster.ask("a", server=0, wait_s=0.0)
        assert reply.server == 1  # the new one is being checked
        await asyncio.sleep(2.0)
        assert cluster.processes[0].updates == [2]
        reply = await cluster.ask("a", server=0)
        assert (reply.server, reply.url, reply.version) == (0, "https://s0:2", 2)

    run(test)


def test_the_newest_source_passes_over_one_that_is_queued(run):
    async def test(cluster: Cluster) -> None:
        updates = [asyncio.create_task(cluster.new_weights(1))]
        for version in (2, 3, 4):
            await asyncio.sleep(0.1)
            updates.append(asyncio.create_task(cluster.new_weights(version)))
        replies = await asyncio.gather(*updates)
        assert cluster.processes[0].updates == [1, 4]
        assert replies[3].versions == {0: 4, 1: 4}
        assert (await cluster.new_weights(3)).versions == {0: 4, 1: 4}  # late: nothing to do
        assert cluster.processes[0].updates == [1, 4]
        cluster.restart(0)
        await asyncio.sleep(2.0)
        assert cluster.processes[0].updates == [4]

    run(test)


def test_a_failure_of_weights_that_were_passed_over_counts_for_nothing(run):
    async def test(cluster: Cluster) -> None:
        cluster.processes[0].refuses = 1  # the trainers have forgotten version 1
        first = asyncio.create_task(cluster.new_weights(1))
        await asyncio.sleep(0.5)
        assert (await cluster.new_weights(2)).sick == {}
        assert (await first).versions == {0: 2, 1: 2}
        assert cluster.events("server_sick") == []

    run(test)


def test_newer_weights_are_a_new_chance_for_those_that_failed(run):
    async def test(cluster: Cluster) -> None:
        cluster.processes[0].refuses = 7
        await cluster.new_weights(1)
        await asyncio.sleep(70.0)  # the pauses have grown to a minute
        cluster.processes[0].refuses = 0
        await cluster.new_weights(2)
        await asyncio.sleep(2.0)
        assert cluster.manager.view().sick == {}

    run(test)


def test_a_manager_that_is_started_again_asks_the_servers(run):
    async def test(cluster: Cluster) -> None:
        await cluster.ask("a", server=1)
        await cluster.new_weights(1)
        cluster.manager.leave()
        await cluster.task
        cluster.restart(0)  # beside it
        cluster.start_manager()
        await asyncio.sleep(2.0)
        view = cluster.manager.view()
        assert (view.versions, view.sick, view.running) == ({0: 0, 1: 1}, {}, {0: 0, 1: 0})
        await cluster.done("a", 1)  # not known to it
        assert cluster.manager.view().running == {0: 0, 1: 0}
        source = (WeightPart(endpoint="tcp://t:1", name="v1"),)
        assert (await cluster.new_weights(1, parts=source)).versions == {0: 1, 1: 1}
        assert cluster.processes[1].updates == [1]

    run(test)


def test_weights_that_can_not_be_read_are_refused(run):
    async def test(cluster: Cluster) -> None:
        with golden.raises(ProtocolError):
            await cluster.manager.handle(rm.NewWeights(source=b"\xc1"))

    run(test)


def test_clients_are_closed_at_the_end_and_when_their_server_is_replaced(run):
    seen: list[Process] = []

    async def test(cluster: Cluster) -> None:
        seen.extend(cluster.processes.values())
        cluster.restart(0)
        seen.append(cluster.processes[0])
        await asyncio.sleep(2.0)
        assert [p.closed for p in seen] == [1, 0, 0]

    run(test)
    assert [p.closed for p in seen] == [1, 1, 1]


def test_what_an_old_process_says_late_is_not_laid_on_its_successor(run):
    async def test(cluster: Cluster) -> None:
        old = cluster.processes[0]
        old.generates, old.thinks_s = False, 3.0
        await asyncio.sleep(9.0)  # its check has begun and waits for a token
        cluster.restart(0)
        await asyncio.sleep(4.0)  # and fails
        assert cluster.events("server_sick") == []
        assert cluster.manager.view().sick == {}

    run(test)


def test_what_a_server_said_before_an_update_is_old_after_it(run):
    async def test(cluster: Cluster) -> None:
        cluster.processes[0].thinks_s = 3.0  # over what it says of itself
        await asyncio.sleep(5.0)
        await cluster.new_weights(1)  # takes a second
        await asyncio.sleep(10.0)
        assert cluster.processes[0].updates == [1]
        assert cluster.manager.view().versions == {0: 1, 1: 1}

    run(test)


# ---- any order --------------------------------------------------------------------------------------


NUM_STORMS = 12


class Storm:
    """Rollouts that ask and finish, servers that fail and restart, weights that come: at random."""

    def __init__(self, cluster: Cluster, seed: int) -> None:
        self.cluster, self.random = cluster, random.Random(seed)
        self.version, self.num_served, self.over = 0, 0, False

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for i in range(12):
                tasks.create_task(self.rollouts(i))
            trouble = [tasks.create_task(t) for t in (self.crashes(), self.weights())]
            await asyncio.sleep(120.0)
            self.over = True
            await asyncio.wait(trouble)

    async def pause(self, mean_s: float) -> None:
        await asyncio.sleep(self.random.expovariate(1 / mean_s))

    async def rollouts(self, which: int) -> None:
        number = 0
        while not self.over:
            number += 1
            await self.rollout(f"r{which}-{number}")

    async def rollout(self, rid: str) -> None:
        """Chunk after chunk until it is whole; a broken one is asked for again."""
        min_version, former = max(0, self.version - self.random.randrange(3)), -1
        for _ in range(self.random.randrange(1, 4)):
            reply = await self.cluster.ask(
                rid, group=rid[:2], min_version=min_version, server=former, wait_s=200.0
            )
            assert reply.server >= 0, reply.why  # there is always one that comes back
            former, process = reply.server, self.cluster.by_url[reply.url]
            assert reply.version >= min_version
            assert process.version >= min_version or not process.answers
            assert reply.server not in self.cluster.manager.view().sick
            await self.pause(0.5)
            if not process.answers:
                await self.cluster.done(rid, former, broken=True, why="connection cut")
            elif self.random.random() < 0.9:
                await self.cluster.done(rid, former)  # else the message is lost, and it asks anew
            self.num_served += 1
        await self.cluster.done(rid, -1)

    async def crashes(self) -> None:
        while not self.over:
            await self.pause(3.0)
            server = self.random.choice(list(self.cluster.processes))
            process = self.cluster.processes[server]
            what = self.random.randrange(4)
            if what == 0:
                process.answers = False
                await self.pause(1.0)
                self.cluster.restart(server)
            elif what == 1:
                process.refuses += 1
            elif what == 2:
                process.generates = False
                await self.pause(4.0)
                process.generates = True
            else:
                process.takes_s = self.random.choice([0.1, 1.0, 20.0])

    async def weights(self) -> None:
        while not self.over:
            await self.pause(4.0)
            self.version += 1
            reply = await self.cluster.new_weights(self.version)
            for server, version in reply.versions.items():
                assert version >= self.version or server in reply.sick


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(NUM_STORMS))
def test_in_any_order_no_request_is_misled_or_left_and_counters_return_to_zero(run, seed):
    policy = ("round_robin", "least_requests", "least_tokens", "sticky")[seed % 4]
    mode = ("all_at_once", "rolling")[seed // 4 % 2]

    async def test(cluster: Cluster) -> None:
        storm = Storm(cluster, seed)
        await storm.run()
        assert storm.num_served > 100
        view = cluster.manager.view()
        assert (set(view.running.values()), view.waiting) == ({0}, 0)
        assert all(s.num_tokens == 0 for s in cluster.manager.fleet.router.servers.values())

    run(test, num_servers=3, schedule_policy=policy, update_mode=mode, server_limit=3)


# ---- servers that come and go while the run lives -----------------------------------------------


def scaled(cluster: Cluster, **changes: Any) -> None:
    cluster.scaling = Scaling(attempt=1, token="", phase="main", **changes)
    cluster.register()


def test_a_server_that_is_to_go_gets_nothing_new_and_is_dismissed_when_it_is_idle(run):
    async def test(cluster: Cluster) -> None:
        assert (await cluster.ask("a", server=0)).server == 0
        scaled(cluster, drained={"generation_server/0": 60.0})
        assert [(await cluster.ask(f"b{i}", server=0)).server for i in range(3)] == [1, 1, 1]
        await asyncio.sleep(3.0)
        assert cluster.dismissed == []
        await cluster.done("a", 0)
        await asyncio.sleep(2.0)
        assert cluster.dismissed == [0]
        await asyncio.sleep(5.0)
        assert cluster.dismissed == [0, 0], "it did not hear it"
        del cluster.processes[0]
        cluster.register()
        await asyncio.sleep(20.0)
        assert cluster.dismissed == [0, 0]
        assert cluster.manager.view().sick == {}, "nobody misses it"
        told = cluster.events("server_leaving", "server_left", "server_sick")
        assert told == [("server_leaving", 0), ("server_left", 0)]
        assert (await cluster.new_weights(1)).versions == {1: 1}

    run(test)


def test_when_its_time_is_up_a_server_is_dismissed_with_what_it_has(run):
    async def test(cluster: Cluster) -> None:
        await cluster.ask("a", server=0)
        scaled(cluster, drained={"generation_server/0": 30.0, "rollout_worker/1": 0.0})
        await asyncio.sleep(29.0)
        assert cluster.dismissed == []
        await asyncio.sleep(2.0)
        assert cluster.dismissed == [0]

    run(test)


def test_a_makers_server_stays_until_its_worker_has_left(run):
    async def test(cluster: Cluster) -> None:
        cluster.workers = {"rollout_worker/0": "h:1:1", "rollout_worker/1": "h:2:1"}
        drained = {"generation_server/0": 60.0, "rollout_worker/0": 60.0}
        scaled(cluster, drained=drained)
        assert (await cluster.ask("a", worker="rollout_worker/0")).server == 0
        await cluster.done("a", 0)
        await asyncio.sleep(3.0)
        assert cluster.dismissed == [], "its worker may ask again"
        assert (await cluster.ask("b", worker="rollout_worker/0")).server == 0
        await cluster.done("b", 0)
        cluster.workers = {"rollout_worker/1": "h:2:1"}
        cluster.register()
        await asyncio.sleep(2.0)
        assert cluster.dismissed == [0]

    run(test, routes=(("rollout_worker/0", (0,)), ("rollout_worker/1", (1,))))


def test_a_server_that_comes_is_for_its_own_worker_and_takes_the_weights_of_its_like(run):
    async def test(cluster: Cluster) -> None:
        parts = {i: (WeightPart(endpoint=f"tcp://{i}", name="v1"),) for i in (0, 1)}
        await cluster.new_weights(1, routes=parts)
        cluster.processes[2], cluster.pids[2] = Process(), 1
        cluster.workers = {**cluster.workers, "rollout_worker/2": "h:3:1"}
        added = {
            "generation_server/2": "generation_server/1",
            "rollout_worker/2": "rollout_worker/1",
        }
        scaled(cluster, added=added)
        await asyncio.sleep(3.0)
        assert cluster.manager.view().versions == {0: 1, 1: 1, 2: 1}
        assert cluster.processes[2].sources == cluster.processes[1].sources
        assert (await cluster.ask("a", worker="rollout_worker/2")).server == 2
        assert (await cluster.ask("b", worker="rollout_worker/0")).server == 0

    run(test, routes=(("rollout_worker/0", (0,)), ("rollout_worker/1", (1,))))


def test_a_request_that_was_given_up_says_nothing_of_its_server(run):
    """It counted as one that had ended well: a server that hangs was never called sick for its requests."""

    async def test(cluster: Cluster) -> None:
        broken = {"broken": True, "why": "connection cut"}
        for i, end in enumerate((broken, broken, {}, broken)):
            await cluster.ask(f"r{i}", wait_s=1.0, server=1)
            await cluster.done(f"r{i}", 1, **end)
        golden.check(cluster.manager.view().sick)

    run(test)
