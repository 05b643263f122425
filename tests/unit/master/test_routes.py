"""Queues of trainers: who gets the next prompt's experience, and when a maker waits for room."""

from hypothesis import given
from hypothesis import strategies as st

from realsys.api.worker_configs import MakerRoute
from realsys.master.rollouts.routes import Routes

ENDPOINTS = ("tcp://a", "tcp://b", "tcp://c")


def maker(index: int, *holders: int, tickets: int | None = None) -> MakerRoute:
    return MakerRoute(
        name=f"maker_{index}",
        rollout_workers=(index,),
        servers=(index,),
        holders=holders,
        sources=holders,
        tickets=tickets,
    )


def test_a_worker_without_a_route_may_send_to_all():
    routes = Routes(holders=(0, 2), endpoints=ENDPOINTS)
    places = routes.places("rollout_worker/5")
    assert (places.holders, places.endpoints) == ((0, 2), ENDPOINTS)
    assert routes.target("rollout_worker/5", urgent=False) == 0
    routes.gave(7, "rollout_worker/5", 0)
    assert routes.target("rollout_worker/5", urgent=False) == 1, "the other one has more room"


def test_a_maker_waits_for_room_but_not_with_what_the_next_step_needs():
    routes = Routes(
        holders=(0, 1), endpoints=ENDPOINTS, makers=[maker(0, 0), maker(1, 0, 1)], buffer_limit=2
    )
    for number in (1, 2):
        routes.gave(number, "rollout_worker/0", 0)
    assert routes.waiting() == {0: 2, 1: 0}
    assert routes.target("rollout_worker/0", urgent=False) is None
    assert routes.target("rollout_worker/0", urgent=True) == 0
    assert routes.target("rollout_worker/1", urgent=False) == 1, "trainer 1 has room"
    routes.left(1)
    assert routes.target("rollout_worker/0", urgent=False) == 0


def test_a_maker_with_so_many_steps_makes_no_more():
    routes = Routes(holders=(0,), endpoints=ENDPOINTS, makers=[maker(0, 0, tickets=2)])
    for number in (1, 2):
        assert routes.target("rollout_worker/0", urgent=False) == 0
        routes.gave(number, "rollout_worker/0", 0)
    assert routes.target("rollout_worker/0", urgent=False) is None
    assert routes.target("rollout_worker/0", urgent=True) == 0, "nobody else may make it"


@given(
    st.lists(st.tuples(st.sampled_from(["gave", "took", "left"]), st.integers(0, 5)), max_size=60)
)
def test_a_prompt_is_in_one_queue_at_most(events):
    routes = Routes(holders=(0, 1), endpoints=ENDPOINTS, makers=[maker(0, 0, 1)])
    where: dict[int, int] = {}
    for what, number in events:
        if what == "gave":
            target = routes.target("rollout_worker/0", urgent=False)
            assert target is not None
            routes.gave(number, "rollout_worker/0", target)
            where[number] = target
        elif what == "took":
            routes.took(number, 1)
            where[number] = 1
        else:
            routes.left(number)
            where.pop(number, None)
    assert routes.waiting() == {h: list(where.values()).count(h) for h in (0, 1)}
