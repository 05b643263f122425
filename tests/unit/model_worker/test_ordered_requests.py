"""A worker's ordered requests: taken strictly by number, whatever order they arrive in."""

import itertools
import threading
from dataclasses import dataclass

import golden
import pytest

from realsys.api.errors import RealsysError
from realsys.model_worker.ordered_requests import OrderedRequests


@dataclass(frozen=True)
class Ask:
    order: int


@pytest.mark.parametrize("arrival", list(itertools.permutations(range(4))))
def test_requests_are_taken_by_number_whatever_their_arrival(arrival):
    requests = OrderedRequests()
    for order in arrival:
        requests.put(Ask(order))
    assert [requests.take(0.0).request.order for _ in arrival] == [0, 1, 2, 3]


def test_a_gap_is_waited_for():
    requests = OrderedRequests()
    requests.put(Ask(1))
    assert requests.take(0.01) is None
    requests.put(Ask(0))
    assert requests.take(0.0).request.order == 0
    assert requests.take(0.0).request.order == 1


def test_the_future_of_a_request_is_its_own_reply():
    requests = OrderedRequests()
    second, first = requests.put(Ask(1)), requests.put(Ask(0))
    requests.take(0.0).reply.set_result("zero")
    requests.take(0.0).reply.set_result("one")
    assert (first.result(0), second.result(0)) == ("zero", "one")


def test_a_taker_wakes_when_its_request_comes():
    requests, taken = OrderedRequests(), []
    taker = threading.Thread(target=lambda: taken.append(requests.take(240.0)), name="taker")
    taker.start()
    requests.put(Ask(0))
    taker.join(240.0)
    assert [ordered.request.order for ordered in taken] == [0]


def test_the_end_wakes_the_taker():
    requests, taken = OrderedRequests(), []
    taker = threading.Thread(target=lambda: taken.append(requests.take(240.0)), name="taker")
    taker.start()
    requests.close()
    taker.join(240.0)
    assert taken == [None]
    assert requests.closed


def test_after_the_end_nothing_is_taken():
    requests = OrderedRequests()
    requests.put(Ask(0))
    requests.close()
    assert requests.take(0.0) is None


def test_a_request_that_nobody_will_take_is_answered_with_an_error():
    """Else its sender waits for hours: those that wait at the end, and those that come after it."""
    requests = OrderedRequests()
    waiting = requests.put(Ask(0))
    requests.close()
    late = requests.put(Ask(1))
    for reply in (waiting, late):
        assert isinstance(reply.exception(0.05), RealsysError)


@pytest.mark.parametrize("taken", [0, 1], ids=["still waiting", "taken already"])
def test_a_number_that_was_given_before_is_refused(taken):
    """Two requests of one number: the first's reply must not be lost, nor the second wait for ever."""
    requests = OrderedRequests()
    first = requests.put(Ask(0))
    ordered = requests.take(0.0) if taken else None
    with golden.raises(RealsysError):
        requests.put(Ask(0))
    (ordered or requests.take(0.0)).reply.set_result("first")
    assert first.result(0) == "first"


def test_many_threads_fill_and_one_empties_in_order():
    requests, count = OrderedRequests(), 400
    fillers = [
        threading.Thread(
            target=lambda start=start: [requests.put(Ask(i)) for i in range(start, count, 4)],
            name=f"filler {start}",
        )
        for start in range(4)
    ]
    for filler in fillers:
        filler.start()
    assert [requests.take(240.0).request.order for _ in range(count)] == list(range(count))
    for filler in fillers:
        filler.join(240.0)
