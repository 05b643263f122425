"""Which server goes on with a request: policies, rules for all, counters that can't drift."""

import golden
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from realsys.api.worker_configs import SCHEDULE_POLICIES
from realsys.generation.manager.routing import Router, RoutingPolicy, RoutingRequest


def router(
    policy: RoutingPolicy = RoutingPolicy.ROUND_ROBIN, *, servers: int = 3, limit: int = 0
) -> Router:
    """All servers well, at version 0."""
    made = Router(policy, num_servers=servers)
    for server in made.servers.values():
        server.unfit, server.version, server.limit = "", 0, limit
    return made


def place(router: Router, rid: str, **request: object) -> int | None:
    """The server that a request gets at once."""
    router.ask(RoutingRequest(rid=rid, **request))  # type: ignore[arg-type]
    return dict(router.place(now_s=0.0)).get(rid)


def test_policies_are_those_that_an_experiment_may_name():
    assert tuple(SCHEDULE_POLICIES) == tuple(RoutingPolicy)


# ---- policies ---------------------------------------------------------------------------------


def test_round_robin_takes_turns_and_skips_who_may_not():
    one = router()
    assert [place(one, f"r{i}") for i in range(4)] == [0, 1, 2, 0]
    one.set_unfit(1, "is sick")
    assert [place(one, f"s{i}") for i in range(3)] == [2, 0, 2]


def test_least_requests_counts_requests_not_tokens():
    one = router(RoutingPolicy.LEAST_REQUESTS, servers=2)
    assert place(one, "a", num_tokens=1000) == 0
    assert place(one, "b", num_tokens=1) == 1
    assert place(one, "c", num_tokens=1) == 0  # one each: the lower index


def test_least_tokens_counts_tokens_not_requests():
    one = router(RoutingPolicy.LEAST_TOKENS, servers=2)
    assert place(one, "a", num_tokens=1000) == 0
    assert [place(one, f"b{i}", num_tokens=400) for i in range(3)] == [1, 1, 1]  # 400, 800, 1200
    assert place(one, "c", num_tokens=1) == 0  # 1000 against 1200


def test_sticky_keeps_a_group_on_one_server():
    one = router(RoutingPolicy.STICKY)
    assert place(one, "a", group="p", num_tokens=10) == 0
    assert place(one, "b", group="q", num_tokens=10) == 1
    assert [place(one, f"c{i}", group="p", num_tokens=10) for i in range(3)] == [0, 0, 0]


def test_sticky_goes_elsewhere_while_the_home_is_full_and_returns():
    one = router(RoutingPolicy.STICKY, servers=2, limit=2)
    assert [place(one, f"a{i}", group="p") for i in range(3)] == [0, 0, 1]
    assert one.done("a0", 0)
    assert place(one, "b", group="p") == 0


def test_sticky_moves_the_group_when_its_home_may_not_be_used():
    one = router(RoutingPolicy.STICKY, servers=2)
    assert place(one, "a", group="p") == 0
    one.set_unfit(0, "is sick")
    assert place(one, "b", group="p") == 1
    one.set_unfit(0, "")
    assert place(one, "c", group="p") == 1


@pytest.mark.parametrize("policy", RoutingPolicy)
def test_a_continued_request_goes_where_it_was(policy):
    one = router(policy)
    place(one, "other", num_tokens=5, group="g")
    assert place(one, "a", former=2, num_tokens=900, group="g") == 2
    assert place(one, "a", former=2, num_tokens=950, group="g") == 2
    one.set_unfit(2, "is sick")
    assert place(one, "a", former=2, num_tokens=950, group="g") != 2


# ---- rules for all ------------------------------------------------------------------------------


def test_old_weights_draining_and_sickness_are_named():
    one = router()
    one.servers[0].version, one.servers[1].version = 3, 7
    one.servers[1].draining = True
    one.set_unfit(2, "is sick: no answer")
    assert place(one, "a", min_version=5) is None
    golden.check(one.why_not(RoutingRequest(rid="a", min_version=5)))


def test_who_waits_gets_what_becomes_free_in_order_of_arrival():
    one = router(servers=1, limit=1)
    assert place(one, "a") == 0
    assert place(one, "b") is None
    assert place(one, "c") is None
    assert one.done("a", 0)
    assert one.place(now_s=0.0) == [("b", 0)]
    golden.check(one.why_not(RoutingRequest(rid="c")))


def test_an_answer_that_goes_on_goes_before_those_that_begin():
    """A long answer in chunks else stood at the end of the line for each, and lost its cache there."""
    one = router(servers=1, limit=1)
    for rid in ("running", "b", "c"):
        place(one, rid)
    place(one, "goes on", continues=True)
    place(one, "goes on, too", continues=True)
    order = ["running"]
    while one.done(order[-1], 0) and (placed := one.place(now_s=0.0)):
        order += [rid for rid, _ in placed]
    assert order == ["running", "goes on", "goes on, too", "b", "c"]


def test_who_stands_in_the_line_of_a_healthy_server_is_told_so():
    one, asked = router(servers=3, limit=1), RoutingRequest(rid="a", min_version=5, worker="w")

    def in_line(*updating: int) -> bool:
        return one.is_in_line(asked, updating=updating)

    assert not in_line(), "all have old weights, and none gets new ones"
    assert in_line(1)
    one.servers[1].draining = True
    assert in_line()
    one.set_unfit(1, "is sick: no answer")
    assert not in_line(1), "a sick server's promises count for nothing"
    one.servers[2].version, one.servers[2].num_requests = 5, 1
    assert in_line(), "it is full"
    one.leaving.add(2)
    assert not in_line()
    one.leaving.clear()
    one.allow("w", {0, 1})
    assert not in_line()
    one.servers[0].version = 5
    assert not in_line(), "it has room"


def test_one_that_can_not_be_served_holds_up_nobody_behind_it():
    one = router(servers=1)
    assert place(one, "needs newer weights", min_version=1) is None
    assert place(one, "does not") == 0
    one.servers[0].version = 1
    assert one.place(now_s=0.0) == [("needs newer weights", 0)]


def test_several_that_wait_are_placed_at_once_each_where_it_may():
    one = Router(RoutingPolicy.ROUND_ROBIN, num_servers=3)
    for rid, min_version in (("a", 2), ("b", 3), ("c", 1), ("d", 0)):
        place(one, rid, min_version=min_version)
    for server, version in zip(one.servers.values(), (0, 2, 1), strict=True):
        server.unfit, server.version, server.limit = "", version, 1
    assert one.place(now_s=0.0) == [("a", 1), ("c", 2), ("d", 0)]


def test_asking_again_keeps_the_place_in_the_order():
    one = router(servers=1, limit=1)
    place(one, "a")
    place(one, "first")
    place(one, "second")
    assert one.withdraw("first")  # its wait ended
    place(one, "first")
    one.done("a")
    assert one.place(now_s=0.0) == [("first", 0)]


def test_a_worker_with_a_route_uses_its_servers_only():
    one = Router(RoutingPolicy.ROUND_ROBIN, num_servers=3, routes={"w/0": (1,), "w/1": (1, 2)})
    for server in one.servers.values():
        server.unfit, server.version, server.limit = "", 0, 2
    assert [place(one, f"a{i}", worker="w/0", former=0) for i in range(3)] == [1, 1, None]
    assert [place(one, f"b{i}", worker="w/1") for i in range(2)] == [2, 2]
    assert place(one, "c", worker="w/2") == 0
    golden.check(one.why_not(RoutingRequest(rid="a2", worker="w/0")))


# ---- counters -----------------------------------------------------------------------------------


def test_chunks_of_one_request_count_once_each():
    one = router(servers=1)
    for tokens in (10, 20, 30):
        place(one, "a", num_tokens=tokens, former=0)
        assert (one.servers[0].num_requests, one.servers[0].num_tokens) == (1, tokens)
    assert one.done("a", 0)
    assert not one.done("a", 0)
    assert (one.servers[0].num_requests, one.servers[0].num_tokens) == (0, 0)


def test_what_a_dead_process_held_is_not_counted_out_twice():
    one = router(servers=2)
    place(one, "a")
    one.restarted(0, why="is being checked")
    assert one.servers[0].num_requests == 0
    assert place(one, "a") == 1
    assert not one.done("a", 0)  # told late, of the dead one
    assert one.running == {0: 0, 1: 1}


def test_a_lost_worker_holds_nothing_and_waits_no_more():
    one = router(servers=1, limit=2)
    for rid, worker in (("a", "w/0"), ("b", "w/1"), ("c", "w/0"), ("d", "w/1")):
        place(one, rid, worker=worker)
    assert one.worker_lost("w/0") == ["c"]
    assert one.place(now_s=0.0) == [("d", 0)]
    assert one.running == {0: 2}


def test_what_never_came_is_forgotten_and_what_is_new_is_not():
    one = router(servers=1)
    one.ask(RoutingRequest(rid="old"))
    one.place(now_s=10.0)
    one.ask(RoutingRequest(rid="new"))
    one.place(now_s=100.0)
    assert one.forget_idle(0, before_s=50.0) == 1
    assert one.running == {0: 1}
    assert one.done("new")


RIDS = st.sampled_from([f"r{i}" for i in range(12)])
SERVERS = st.integers(0, 3)


class AnyOrder(RuleBasedStateMachine):
    """Anything in any order, against a plain model: which request is where."""

    def __init__(self) -> None:
        super().__init__()
        self.where: dict[str, tuple[int, int, str]] = {}  # rid → server, tokens, worker
        self.waiting: dict[str, RoutingRequest] = {}

    @initialize(policy=st.sampled_from(RoutingPolicy), limit=st.integers(0, 3))
    def start(self, policy: RoutingPolicy, limit: int) -> None:
        self.router = router(policy, servers=4, limit=limit)

    @rule(
        rid=RIDS,
        group=st.sampled_from("pq"),
        num_tokens=st.integers(0, 50),
        min_version=st.integers(0, 3),
        former=st.integers(-1, 3),
        worker=st.sampled_from("vw"),
    )
    def ask(self, rid: str, num_tokens: int, **rest: object) -> None:
        request = RoutingRequest(rid=rid, num_tokens=num_tokens, **rest)  # type: ignore[arg-type]
        self.where.pop(rid, None)
        self.waiting[rid] = request
        self.router.ask(request)
        self.give_out()

    @rule(rid=RIDS, server=st.integers(-1, 3))
    def done(self, rid: str, server: int) -> None:
        known = self.where.get(rid)
        counts = known is not None and server in (-1, known[0])
        assert self.router.done(rid, server) == counts
        if counts:
            del self.where[rid]
        self.give_out()

    @rule(rid=RIDS)
    def wait_ends(self, rid: str) -> None:
        assert self.router.withdraw(rid) == (self.waiting.pop(rid, None) is not None)

    @rule(worker=st.sampled_from("vw"))
    def worker_dies(self, worker: str) -> None:
        waited = [rid for rid, request in self.waiting.items() if request.worker == worker]
        assert sorted(self.router.worker_lost(worker)) == sorted(waited)
        for rid in waited:
            del self.waiting[rid]
        self.where = {r: at for r, at in self.where.items() if at[2] != worker}
        self.give_out()

    @rule(server=SERVERS)
    def server_starts_anew(self, server: int) -> None:
        self.router.restarted(server, why="is being checked")
        self.where = {r: at for r, at in self.where.items() if at[0] != server}
        self.give_out()

    @rule(server=SERVERS, unfit=st.sampled_from(["", "is sick"]))
    def health_changes(self, server: int, unfit: str) -> None:
        self.router.set_unfit(server, unfit)
        self.give_out()

    @rule(server=SERVERS, on=st.booleans())
    def drains(self, server: int, on: bool) -> None:
        self.router.servers[server].draining = on
        self.give_out()

    @rule(server=SERVERS, version=st.integers(-1, 3))
    def version_changes(self, server: int, version: int) -> None:
        self.router.servers[server].version = version
        self.give_out()

    def give_out(self) -> None:
        for rid, server in self.router.place(now_s=0.0):
            request, load = self.waiting.pop(rid), self.router.servers[server]
            assert not load.refusal(request)
            self.where[rid] = (server, request.num_tokens, request.worker)

    @invariant()
    def counters_are_those_of_the_model(self) -> None:
        for index, load in self.router.servers.items():
            here = [tokens for server, tokens, _ in self.where.values() if server == index]
            assert (load.num_requests, load.num_tokens) == (len(here), sum(here))
            assert load.limit == 0 or load.num_requests <= load.limit
        assert self.router.num_waiting == len(self.waiting)

    @invariant()
    def nobody_waits_whom_a_server_could_take(self) -> None:
        for request in self.waiting.values():
            for load in self.router.servers.values():
                assert load.is_full or load.refusal(request)

    def teardown(self) -> None:
        for rid, (server, _, _) in list(self.where.items()):
            assert self.router.done(rid, server)
        for load in self.router.servers.values():
            assert (load.num_requests, load.num_tokens) == (0, 0)


AnyOrder.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestAnyOrder = AnyOrder.TestCase
