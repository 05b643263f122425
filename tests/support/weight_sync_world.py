"""Trainers that hold parts of a made-up model, and a client that reads their stores without sockets."""

from dataclasses import replace

import torch

from realsys.api.errors import DataError, RemoteError
from realsys.api.model import ProcessTopology
from realsys.data.transfer.tensor_store import TensorStore
from realsys.models.shape import ModelShape
from realsys.transport.generation_messages import WeightPart, WeightSource
from realsys.weights.layouts.holdings import fsdp_layout, megatron_layout, whole_layout
from realsys.weights.sync.plan_publish import plan_publish, weights_of, wire_dtypes
from realsys.weights.sync.publisher import WeightPublisher
from realsys.weights.sync.receiver import WeightReceiver

MODEL = "actor@0"
SHAPE = ModelShape(
    family="qwen3",
    hidden_size=16,
    intermediate_size=48,
    num_layers=4,
    num_heads=8,
    num_kv_heads=4,
    head_dim=4,
    vocab_size=64,
    qkv_bias=True,
    qk_norm=True,
)
TIED = replace(SHAPE, tied_embeddings=True)


def layout_of(kind, topo, shape=SHAPE):
    """``fsdp``, ``megatron`` or ``whole``, and e.g. ``d2t1p1``."""
    topology = ProcessTopology.parse(topo)
    if kind == "megatron":
        return megatron_layout(shape, topology)
    return (fsdp_layout if kind == "fsdp" else whole_layout)(shape.weights(), topology)


def dense(weights, *, seed=0, dtype=torch.float32):
    """Name → a whole weight; the numbers of another seed are others."""
    made = torch.Generator().manual_seed(seed)
    return {w.name: torch.randn(w.shape, generator=made).to(dtype) for w in weights}


def finer(box):
    """Views may be finer than the layout: two halves of the rows."""
    if not box.start or box.stop[0] - box.start[0] < 2:
        return [box]
    half = (box.start[0] + box.stop[0]) // 2
    return [box.with_range(0, box.start[0], half), box.with_range(0, half, box.stop[0])]


class Engine:
    """Holds the parts of a rank; some are two views, some lie in a larger tensor."""

    def __init__(self, holding, whole):
        self.views = {}
        for number, (name, boxes) in enumerate(holding.items()):
            self.views[name] = []
            for box in (part for b in boxes for part in (finer(b) if number % 3 == 0 else [b])):
                x = whole[name][tuple(map(slice, box.start, box.stop))].clone()
                if number % 3 == 1 and x.dim() == 2:  # columns of a fused weight
                    fused = torch.zeros(x.shape[0], 2 * x.shape[1], dtype=x.dtype)
                    fused[:, 1::2] = x
                    x = fused[:, 1::2]
                self.views[name].append((box, x))

    def held_weights(self):
        return self.views

    def train(self, whole):
        """Writes the parts of ``whole`` into the same memory."""
        for name, parts in self.views.items():
            for box, x in parts:
                x.copy_(whole[name][tuple(map(slice, box.start, box.stop))])


class Trainers:
    """One copy of a model over workers 10, 11, …, each with a store that its tensor server would give."""

    def __init__(self, layout, whole, *, held="float32", wire="", trained=(), scale=0.0, **options):
        self.workers = [10 + rank for rank in range(len(layout))]
        self.engines = [Engine(holding, whole) for holding in layout]
        self.stores = [TensorStore() for _ in layout]
        giving = plan_publish(
            layout,
            self.workers,
            dtypes=wire_dtypes(weights_of(layout), dtype=held, wire=wire),
        )
        self.giving = giving
        self.publishers = [
            WeightPublisher(
                store,
                giving,
                model=MODEL,
                worker=worker,
                trained=trained,
                adapter_scale=scale,
                may_round=bool(wire),
                **options,
            )
            for worker, store in zip(self.workers, self.stores, strict=True)
        ]

    def train(self, whole):
        for engine in self.engines:
            engine.train(whole)

    def publish(self, version):
        """The source of a version, and what each worker said."""
        said = [
            publisher.publish(engine, version)
            for publisher, engine in zip(self.publishers, self.engines, strict=True)
        ]
        parts = [
            WeightPart(endpoint=f"store://{n}", name=one.name)
            for n, one in enumerate(said)
            if one.name
        ]
        return WeightSource(version=version, parts=tuple(parts)), said


class StoreClient:
    """Gives what the stores hold, last asked first, as copies: like one that got it from far away."""

    def __init__(self, stores, endpoints):
        self._stores, self._endpoints = stores, endpoints
        self.names = []
        self.rows = []  # that were asked for

    def stream(self, sources, *, timeout_s, in_flight, silence_s, sink_for):
        for worker, key, ids in reversed(sources):
            self.rows += ids
            try:
                store = self._stores[int(self._endpoints[worker].removeprefix("store://"))]
                (x,) = store.rows(key, ids)
            except DataError as error:
                raise RemoteError(error.what, where=self.names[worker], fix="-") from error
            yield (worker, key, ids), [x.clone()]

    def cancel(self):
        pass

    def close(self):
        pass


class Receiver(WeightReceiver):
    """Of these trainers, without sockets."""

    def __init__(self, trainers, **options):
        self.clients = []

        def make(endpoints):
            self.clients.append(StoreClient(trainers.stores, endpoints))
            return self.clients[-1]

        super().__init__(make, **options)

    @property
    def rows(self):
        """Rows that were asked for since the last look."""
        found = [row for client in self.clients for row in client.rows]
        for client in self.clients:
            client.rows.clear()
        return found


def assert_same(found, expected):
    """The same names, and numbers bit for bit."""
    assert sorted(found) == sorted(expected)
    for name, x in expected.items():
        assert found[name].dtype == x.dtype, name
        assert torch.equal(found[name], x), name
