"""What was worked out for one transfer serves the next, but only while weights are where they were."""

import queue
import threading

import golden
import pytest
import torch

from realsys.api.errors import ConfigError, InternalError
from realsys.api.model import ProcessTopology
from realsys.models.shape import Weight
from realsys.weights.layouts.boxes import Box
from realsys.weights.layouts.holdings import whole_layout
from realsys.weights.realloc.realloc import Reallocator, ReallocReport
from realsys.weights.realloc.realloc_plan import plan_realloc

WEIGHTS = [Weight("a", (6, 4)), Weight("b", (5,))]
LAYOUT = whole_layout(WEIGHTS, ProcessTopology())
PLAN = plan_realloc(WEIGHTS, LAYOUT, [0], LAYOUT, [1])


class QueueLink:
    """Messages of a few bytes between two threads; in place: to and from the weights' own memory."""

    def __init__(self, queues, worker, in_place):
        self.queues, self.worker, self.in_place = queues, worker, in_place

    def connect(self, sends_to, receives_from):
        pass

    def bucket_bytes(self, sender, receiver, fan_out):
        return 32

    def alone_bytes(self, sender, receiver):
        return 0 if self.in_place else None

    def accepts(self, memory):
        return True

    def out_buffer(self, peer, num_bytes):
        return torch.empty(num_bytes, dtype=torch.uint8)

    def post(self, sends, receives):
        for peer, send in sends.items():
            self.queues[self.worker, peer].put(send.buffer.clone())

    def arrivals(self, receives):
        for peer, receive in receives.items():
            came = self.queues[peer, self.worker].get(timeout=60)
            if receive.into is not None:
                receive.into.copy_(came)
            yield peer, came

    def drain(self):
        pass


class Pair:
    def __init__(self, *, in_place=False):
        queues = {(0, 1): queue.Queue(), (1, 0): queue.Queue()}
        links = (QueueLink(queues, worker, in_place) for worker in (0, 1))
        self.sender, self.receiver = map(Reallocator, (0, 1), links)

    def move(self, source, target, eta=1.0):
        reports = []
        thread = threading.Thread(
            target=lambda: reports.append(self.sender.run(PLAN, views(source), None, eta)),
            name="sender",
        )
        thread.start()
        report = self.receiver.run(PLAN, None, views(target), eta)
        thread.join(60)
        assert not thread.is_alive()
        return [*reports, report]


def weights(value):
    return {w.name: torch.full(w.shape, float(value)) for w in WEIGHTS}


def views(held):
    return {name: [(Box.whole(tuple(x.shape)), x)] for name, x in held.items()}


def same(held, value):
    return all(bool((x == value).all()) for x in held.values())


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("etas", [(1.0, 1.0, 0.5), (0.5, 0.5, 1.0), (1.0, 0.25, 0.5)], ids=str)
def test_new_values_arrive_each_time(etas, in_place):
    pair, source, target, held = Pair(in_place=in_place), weights(0), weights(0), 0.0
    for value, eta in zip((4, 8, 16), etas, strict=True):
        for x in source.values():
            x.fill_(value)
        pair.move(source, target, eta)
        held = value * eta + held * (1 - eta)
        assert same(target, held)


def test_weights_that_moved_are_found_where_they_are_now():
    pair, source, target = Pair(), weights(1), weights(0)
    pair.move(source, target)
    new_source, new_target = weights(2), weights(0)
    pair.move(new_source, new_target)
    assert same(new_target, 2)
    assert same(target, 1), "the memory of before is not written to"
    pair.move(source, new_target)
    assert same(new_target, 1)


def test_a_transfer_that_can_not_be_done_is_refused_and_ends_the_use_of_its_link():
    lonely = Reallocator(1, None)
    for eta in (0.0, 1.5):
        with golden.raises(ConfigError):
            lonely.run(PLAN, None, views(weights(0)), eta)
    for _ in range(2):  # there is no link, and then an earlier one failed
        with golden.raises(InternalError):
            lonely.run(PLAN, None, views(weights(0)))


def test_a_report_has_what_a_worker_moved():
    pair = Pair()
    assert pair.move(weights(1), weights(0)) == [
        ReallocReport(**moved)
        for moved in (
            {"bytes_sent": 116, "bytes_received": 0, "bytes_copied": 0},
            {"bytes_sent": 0, "bytes_received": 116, "bytes_copied": 0},
        )
    ]
    own = plan_realloc(WEIGHTS, LAYOUT, [0], LAYOUT, [0])
    target = weights(0)
    report = Reallocator(0).run(own, views(weights(3)), views(target), 0.5)
    assert report == ReallocReport(bytes_sent=0, bytes_received=0, bytes_copied=116)
    assert same(target, 1.5)
