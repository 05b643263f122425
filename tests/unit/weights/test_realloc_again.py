"""What was worked out for one transfer serves the next, but only while weights are where they were."""

import queue
import threading

import pytest
import torch

from realsys.api.model import ProcessTopology
from realsys.models.shape import Weight
from realsys.weights.layouts.boxes import Box
from realsys.weights.layouts.holdings import whole_layout
from realsys.weights.realloc.realloc import Reallocator
from realsys.weights.realloc.realloc_plan import plan_realloc

WEIGHTS = [Weight("a", (6, 4)), Weight("b", (5,))]
LAYOUT = whole_layout(WEIGHTS, ProcessTopology())
PLAN = plan_realloc(WEIGHTS, LAYOUT, [0], LAYOUT, [1])


class QueueLink:
    """Messages of a few bytes between two threads."""

    def __init__(self, queues, worker):
        self.queues, self.worker = queues, worker

    def connect(self, sends_to, receives_from):
        pass

    def bucket_bytes(self, sender, receiver, fan_out):
        return 32

    def alone_bytes(self, sender, receiver):
        return None

    def out_buffer(self, peer, num_bytes):
        return torch.empty(num_bytes, dtype=torch.uint8)

    def post(self, sends, receives):
        for peer, send in sends.items():
            self.queues[self.worker, peer].put(send.buffer)

    def arrivals(self, receives):
        for peer in receives:
            yield peer, self.queues[peer, self.worker].get(timeout=60)

    def drain(self):
        pass


class Pair:
    def __init__(self):
        queues = {(0, 1): queue.Queue(), (1, 0): queue.Queue()}
        self.sender, self.receiver = (Reallocator(w, QueueLink(queues, w)) for w in (0, 1))

    def move(self, source, target, eta=1.0):
        thread = threading.Thread(
            target=self.sender.run, args=(PLAN, views(source), None, eta), name="sender"
        )
        thread.start()
        self.receiver.run(PLAN, None, views(target), eta)
        thread.join(60)
        assert not thread.is_alive()


def weights(value):
    return {w.name: torch.full(w.shape, float(value)) for w in WEIGHTS}


def views(held):
    return {name: [(Box.whole(tuple(x.shape)), x)] for name, x in held.items()}


def same(held, value):
    return all(bool((x == value).all()) for x in held.values())


@pytest.mark.parametrize("eta", [1.0, 0.5])
def test_new_values_arrive_each_time(eta):
    pair, source, target = Pair(), weights(4), weights(0)
    pair.move(source, target, eta)
    assert same(target, 4 * eta)
    for x in source.values():
        x.fill_(8)
    pair.move(source, target, eta)
    assert same(target, 8 * eta + 4 * eta * (1 - eta))


def test_weights_that_moved_are_found_where_they_are_now():
    pair, source, target = Pair(), weights(1), weights(0)
    pair.move(source, target)
    new_source, new_target = weights(2), weights(0)
    pair.move(new_source, new_target)
    assert same(new_target, 2)
    assert same(target, 1), "the memory of before is not written to"
    pair.move(source, new_target)
    assert same(new_target, 1)
