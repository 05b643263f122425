"""The picture of a dataflow graph has every call, in its column, and the keys; so has the text."""

from __future__ import annotations

from pathlib import Path

import golden
import pytest
from changed_settings import changed

from experiments.ppo_math import ppo_math
from realsys.api.dataflow import DataflowGraph, MFCDef, build_graph
from realsys.api.model import ModelInterfaceAbstraction, ModelInterfaceType, ModelName
from realsys.observability.pictures.graph_layout import BOX, KEYS, lay_out
from realsys.observability.pictures.graph_picture import draw, graph_figure, graph_text


def call(name: str, reads: tuple[str, ...], makes: tuple[str, ...] = ()) -> MFCDef:
    return MFCDef(
        name=name,
        n_seqs=8,
        interface_type=ModelInterfaceType.INFERENCE,
        interface_impl=ModelInterfaceAbstraction("x"),
        model_name=ModelName(name.partition("_")[0]),
        input_keys=reads,
        output_keys=makes,
    )


def ppo() -> DataflowGraph:
    return ppo_math().with_prepared("sft", "/models/start").initial_setup().graph()


def wide() -> DataflowGraph:
    """A chain beside nine calls that read it from afar, with many keys."""
    keys = tuple(f"key_with_a_rather_long_name_{i}" for i in range(7))
    chain = [call("a", ("d",), keys), call("b", keys[:1], ("x",)), call("c", ("x",), ("y",))]
    return build_graph(
        [*chain, *(call(f"t{i}", ("y", "d", *keys[: i % 3 + 1])) for i in range(9))],
        dataset_keys=("d",),
    )


def single() -> DataflowGraph:
    return build_graph([call("sft_train", ("d",))], dataset_keys=("d", "unread"))


GRAPHS = [ppo, wide, single]


def test_columns_are_the_topological_levels() -> None:
    places = lay_out(ppo()).places
    x = {name: place.x for name, place in places.items() if place.kind == BOX}
    assert x["actor_gen"] < x["rew_inf"] == x["ref_inf"] == x["critic_inf"] < x["actor_train"]
    assert x["actor_train"] == x["critic_train"]
    assert min(x, key=lambda name: x[name]).endswith("data set")


def test_readers_of_the_same_keys_share_one_label() -> None:
    layout = lay_out(ppo())
    labels = sorted(p.text for p in layout.places.values() if p.kind == KEYS)
    assert labels == [
        ("packed_input_ids",),  # ref_inf and critic_inf
        ("packed_input_ids", "prompt_mask"),
        ("packed_input_ids", "prompt_mask", "packed_logprobs", "seq_no_eos_mask"),
        ("packed_prompts",),
        ("packed_ref_logprobs",),
        ("rewards",),
        ("values",),
    ]


@pytest.mark.thorough
@pytest.mark.parametrize("graph", GRAPHS)
def test_picture_shows_every_call(graph: object, tmp_path: Path) -> None:
    built = graph()  # type: ignore[operator]
    (axes,) = graph_figure(built).axes
    texts = [t.get_text() for t in axes.texts]
    for node in built.nodes:
        assert node.name in texts
    assert "data set" in texts
    draw(built, tmp_path / "graph.png")
    assert (tmp_path / "graph.png").read_bytes().startswith(b"\x89PNG")


def test_text_of_the_graph() -> None:
    graph = build_graph(
        [call("a_gen", ("d",), ("x", "y")), call("b_inf", ("x",), ("z",)), call("c", ("y", "d"))],
        dataset_keys=("d",),
    )
    assert graph_text(graph) == "\n".join(
        [
            "data set → d",
            "",
            "level 1",
            "  a_gen  a@0  inference  8 seqs",
            "           ← data set: d",
            "           → x, y",
            "",
            "level 2  (at the same time)",
            "  b_inf  b@0  inference  8 seqs",
            "           ← a_gen: x",
            "           → z",
            "  c      c@0  inference  8 seqs",
            "           ← a_gen: y",
            "           ← data set: d",
        ]
    )


def test_the_text_tells_the_hooks_of_a_call() -> None:
    experiment = changed(
        ppo_math(), {"placement.allocation": "actor_gen:d2", "algorithm.ref_ema_eta": 0.25}
    )
    text = graph_text(experiment.with_prepared("sft", "/models/start").initial_setup().graph())
    golden.line(text, "before:")
    assert "ref@0 (eta 0.25)" in text
    assert "before" not in graph_text(ppo())
