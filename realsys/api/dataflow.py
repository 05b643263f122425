"""The dataflow graph of an experiment: model function calls (MFCs) and the keys between them.

``build_graph`` is pure and rejects graphs that would hang at run time: cycles, two producers of one
key, keys without a producer. Values in, values out; drawing is in realsys/observability/graph_picture.
"""

from __future__ import annotations

import graphlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from realsys.api.data import MicroBatchSpec
from realsys.api.errors import ConfigError, Problems, did_you_mean, raise_all
from realsys.api.model import ModelInterfaceAbstraction, ModelInterfaceType, ModelName


@dataclass(frozen=True, kw_only=True)
class ParamReallocHook:
    """Moves weights between two parallel layouts of a role before or after a call.

    Exactly one end is given, the other is the call's own model. ``eta`` blends:
    target ← eta · source + (1 − eta) · target (1 replaces; less keeps an average).
    """

    source: ModelName | None = None
    target: ModelName | None = None
    eta: float = 1.0

    def __post_init__(self) -> None:
        if (self.source is None) == (self.target is None):
            raise ConfigError(
                f"source={self.source} and target={self.target}",
                where="ParamReallocHook",
                fix="name exactly one of them; the other end is the call's own model",
            )
        if not 0 < self.eta <= 1:
            raise ConfigError(
                f"eta is {self.eta}", where="ParamReallocHook.eta", fix="use a number in (0, 1]"
            )


@dataclass(frozen=True, kw_only=True)
class OffloadHook:
    """Moves the call's model to CPU memory before or after the call."""


Hook = ParamReallocHook | OffloadHook


def averaged_models(calls: Iterable[MFCDef]) -> frozenset[ModelName]:
    """Models that hooks update as a moving average of another copy (``eta`` below 1)."""
    return frozenset(
        hook.target or call.model_name
        for call in calls
        for hook in (*call.pre_hooks, *call.post_hooks)
        if isinstance(hook, ParamReallocHook) and hook.eta < 1
    )


@dataclass(frozen=True, kw_only=True)
class MFCDef:
    """One model function call: a node of the graph.

    Attributes:
        name: unique in the graph, e.g. ``actor_gen``.
        model_name: the model copy it runs on.
        interface_type, interface_impl: which method of which interface.
        n_seqs: datapoints (ids) per call, over all data-parallel ranks.
        input_keys, output_keys: names in the buffer; ``*_key_remap`` maps (buffer name →
            interface's name for inputs, interface's name → buffer name for outputs).
        mb_spec: how the engine cuts the batch.
        n_minibatches: number of sequential updates into which a training call splits its batch.
        min_n_seqs_per_pass: minimum number of datapoints per data-parallel rank.
        log_return_value: also write the returned statistics to the worker's log.
        pre_hooks, post_hooks: weight movements around the call.
    """

    name: str
    n_seqs: int
    interface_type: ModelInterfaceType
    interface_impl: ModelInterfaceAbstraction
    model_name: ModelName
    input_keys: tuple[str, ...] = ()
    input_key_remap: Mapping[str, str] = field(default_factory=dict)
    output_keys: tuple[str, ...] = ()
    output_key_remap: Mapping[str, str] = field(default_factory=dict)
    mb_spec: MicroBatchSpec = field(default_factory=MicroBatchSpec)
    n_minibatches: int = 1
    min_n_seqs_per_pass: int = 1
    log_return_value: bool = False
    pre_hooks: tuple[Hook, ...] = ()
    post_hooks: tuple[Hook, ...] = ()

    def __post_init__(self) -> None:
        if self.n_seqs < 1:
            raise ConfigError(
                f"n_seqs is {self.n_seqs}", where=f"MFC {self.name!r}", fix="use 1 or more"
            )
        if self.n_minibatches < 1:
            raise ConfigError(
                f"n_minibatches is {self.n_minibatches}",
                where=f"MFC {self.name!r}",
                fix="use 1 or more",
            )
        for label, remap, keys in (
            ("input_key_remap", self.input_key_remap, self.input_keys),
            (
                "output_key_remap",
                {v: k for k, v in self.output_key_remap.items()},
                self.output_keys,
            ),
        ):
            for key in remap:
                if key not in keys:
                    raise ConfigError(
                        f"{label} names {key!r}, which is not a key of this call",
                        where=f"MFC {self.name!r}",
                        fix=did_you_mean(key, keys),
                    )

    @property
    def role(self) -> str:
        """Role of the model that the call runs on."""
        return self.model_name.role

    @property
    def is_train(self) -> bool:
        """True if the call updates weights."""
        return self.interface_type is ModelInterfaceType.TRAIN_STEP


@dataclass(frozen=True)
class DataflowGraph:
    """A validated graph. ``levels`` are its topological levels; nodes of one level are independent."""

    nodes: tuple[MFCDef, ...]
    producers: Mapping[str, str]  # key → name of the call that makes it
    dataset_keys: frozenset[str]
    parents: Mapping[str, frozenset[str]]
    levels: tuple[tuple[str, ...], ...]

    def __getitem__(self, name: str) -> MFCDef:
        for node in self.nodes:
            if node.name == name:
                return node
        raise KeyError(name)

    def children(self, name: str) -> tuple[str, ...]:
        """Names of calls that read a key which ``name`` produces, in graph order."""
        return tuple(n.name for n in self.nodes if name in self.parents[n.name])

    def edges(self) -> list[tuple[str, str, tuple[str, ...]]]:
        """Lists (producer, consumer, keys) for every pair that shares keys."""
        found = []
        for node in self.nodes:
            for parent in sorted(self.parents[node.name]):
                keys = tuple(k for k in node.input_keys if self.producers.get(k) == parent)
                found.append((parent, node.name, keys))
        return found

    @property
    def sources(self) -> tuple[MFCDef, ...]:
        """Calls that read only data set keys, where a datapoint enters the graph."""
        return tuple(n for n in self.nodes if not self.parents[n.name])


def hooks_text(call: MFCDef) -> str:
    """Returns ``before: weights from actor@0; after: to CPU memory``."""
    parts = []
    for when, hooks in (("before", call.pre_hooks), ("after", call.post_hooks)):
        if hooks:
            parts.append(f"{when}: " + ", ".join(_hook_text(hook) for hook in hooks))
    return "; ".join(parts)


def _hook_text(hook: Hook) -> str:
    if isinstance(hook, OffloadHook):
        return "to CPU memory"
    assert isinstance(hook, ParamReallocHook)
    blend = "" if hook.eta == 1 else f" (eta {hook.eta:g})"
    words = f"weights from {hook.source}" if hook.source else f"weights to {hook.target}"
    return words + blend


def build_graph(nodes: Sequence[MFCDef], *, dataset_keys: Iterable[str]) -> DataflowGraph:
    """Validates the calls and orders them by level.

    Args:
        nodes: the calls, in the order of the experiment file (kept within a level).
        dataset_keys: keys that every datapoint has from the start.
    Raises:
        ConfigErrors: missing or duplicate names, two producers of a key, a key without a producer (with
            the nearest name), a cycle (named call by call); all problems at once.
    """
    known = frozenset(dataset_keys)
    problems = Problems()
    if not nodes:
        problems.add("no calls", where="dataflow graph", fix="add an MFCDef")
    names = [n.name for n in nodes]
    for name in sorted({n for n in names if names.count(n) > 1}):
        problems.add(f"two calls named {name!r}", where="dataflow graph", fix="rename one")
    producers = _producers(nodes, known, problems)
    _check_inputs(nodes, known, producers, problems)
    _check_batches(nodes, problems)
    parents = {
        n.name: frozenset(producers[k] for k in n.input_keys if k in producers) for n in nodes
    }
    levels = _levels(names, parents, problems)
    raise_all(problems)
    return DataflowGraph(tuple(nodes), producers, known, parents, levels)


def _producers(
    nodes: Sequence[MFCDef], dataset_keys: frozenset[str], problems: Problems
) -> dict[str, str]:
    producers: dict[str, str] = {}
    for node in nodes:
        for key in node.output_keys:
            other = "the data set" if key in dataset_keys else producers.get(key)
            if other is not None:
                problems.add(
                    f"key {key!r} has two producers: {other} and {node.name}",
                    where=f"MFC {node.name!r}, output_keys",
                    fix="give one of them another name (output_key_remap)",
                )
            producers.setdefault(key, node.name)
    return producers


def _check_inputs(
    nodes: Sequence[MFCDef],
    dataset_keys: frozenset[str],
    producers: Mapping[str, str],
    problems: Problems,
) -> None:
    for node in nodes:
        for key in node.input_keys:
            if key not in dataset_keys and key not in producers:
                problems.add(
                    f"no call produces key {key!r}",
                    where=f"MFC {node.name!r}, input_keys",
                    fix=did_you_mean(key, [*dataset_keys, *producers]),
                )


def _check_batches(nodes: Sequence[MFCDef], problems: Problems) -> None:
    """Reports calls of unequal batch sizes.

    A step runs each call once, so datapoints would be left over or awaited for ever.
    """
    for node in nodes:
        if not node.input_keys:
            problems.add(
                "it reads no keys, so it would never start",
                where=f"MFC {node.name!r}, input_keys",
                fix="give it a key of the data set",
            )
        if node.n_seqs != nodes[0].n_seqs:
            problems.add(
                f"{node.name} takes {node.n_seqs} datapoints a call, "
                f"{nodes[0].name} takes {nodes[0].n_seqs}",
                where=f"MFC {node.name!r}, n_seqs",
                fix="use one number for all calls: a step runs each of them once",
            )


def _levels(
    names: Sequence[str], parents: Mapping[str, frozenset[str]], problems: Problems
) -> tuple[tuple[str, ...], ...]:
    sorter = graphlib.TopologicalSorter(parents)
    try:
        sorter.prepare()
    except graphlib.CycleError as error:
        path = " → ".join(reversed(error.args[1]))
        problems.add(
            f"the calls form a cycle: {path}",
            where="dataflow graph",
            fix="remove one of the keys on that path",
        )
        return ()
    levels = []
    while sorter.is_active():
        ready = sorted(sorter.get_ready(), key=list(names).index)
        levels.append(tuple(ready))
        sorter.done(*ready)
    return tuple(levels)
