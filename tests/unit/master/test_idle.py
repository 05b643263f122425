"""Which share of a step the workers of a pool had nothing to do."""

import pytest

from realsys.api.model import ModelName, ModelShardID, ProcessTopology
from realsys.master.graph.idle import idle_shares, pools_of


def shard(role, replica=0):
    return ModelShardID(model_name=ModelName(role, replica), topo=ProcessTopology())


def test_workers_of_equal_roles_are_a_pool():
    held = [
        (shard("actor"), 0),
        (shard("critic"), 1),
        (shard("actor"), 2),
        (shard("actor", 1), 2),
        (shard("ref"), 0),
        (shard("ref"), 2),
    ]
    assert pools_of(held) == {"actor+ref": (0, 2), "critic": (1,)}


def test_spans_count_as_far_as_they_lie_in_the_step():
    pools = {"left": (0, 1), "right": (2,)}
    spans = [(0, 10.0, 14.0), (0, 14.0, 16.0), (1, 5.0, 12.0), (2, 19.0, 25.0), (2, 1.0, 2.0)]
    shares = idle_shares(spans, pools, start=10.0, end=20.0)
    assert shares == {"left": pytest.approx((0.4 + 0.8) / 2), "right": pytest.approx(0.9)}


def test_a_step_without_requests_was_idle():
    assert idle_shares([], {"all": (0,)}, start=1.0, end=1.0) == {"all": 1.0}
