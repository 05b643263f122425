"""Every algorithm: one rank or several, FSDP or Megatron, cut or not, the same loss and gradient.

On answers of the weights that train and of older ones (a staleness bound of 2, decoupled PPO).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import algorithm_ranks
import megatron_world as world
import pytest
import torch
from near import near
from parallel_ranks import run_ranks

pytestmark = [pytest.mark.process, pytest.mark.together("algorithms")]
CASES = algorithm_ranks.cases()


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[dict[str, float]]]]:
    """The folder of the models, and figures by place and case, of each rank that has some."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("algorithms")
    world.write_models(folder)
    run_ranks("algorithm_ranks", world.WORLD, folder, timeout_s=400)
    found: dict[str, list[dict[str, float]]] = {}
    for index in range(world.WORLD):
        for case, figures in json.loads((folder / f"rank{index}.json").read_text()).items():
            found.setdefault(case, []).append(figures)
    return folder, found


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradient_are_those_of_one_process(ran: Any, name: str) -> None:
    folder, found = ran
    model = algorithm_ranks.trained(world.make_model(folder / "llama"), "fsdp")
    one = algorithm_ranks.updated(model, CASES[name], algorithm_ranks.experience())
    assert one["grad_norm"] > 1e-4, "something is learned"
    for place in algorithm_ranks.PLACES:
        ranks = found[f"{place}: {name}"]
        for figures in ranks:
            assert seen(figures) == near(seen(one)), place


def seen(figures: dict[str, float]) -> dict[str, float]:
    """Without the largest log-ratio of a token: outputs are on the last stage only, and it with them."""
    largest = {"first_minibatch/max_abs_log_ratio", "mismatch/abs_max"}
    return {name: x for name, x in figures.items() if name not in largest}


def test_teachers_and_entropies_are_those_of_one_process(ran: Any) -> None:
    folder, found = ran
    model = algorithm_ranks.trained(world.make_model(folder / "llama"), "fsdp")
    one = algorithm_ranks.said(model, algorithm_ranks.experience())
    assert set(one) == {"top_ids", "top_logprobs", "logprobs", "entropy"}
    for place in algorithm_ranks.PLACES:
        for figures in found[f"{place}: said"]:
            assert figures["top_ids"] == one["top_ids"], place
            for name in ("top_logprobs", "logprobs", "entropy"):
                assert figures[name] == near(one[name]), place


def test_every_kind_of_loss_and_advantage_is_among_the_cases() -> None:
    names = " ".join(CASES)
    for kind in ("loss=", "advantage="):
        assert names.count(kind) >= 7, names
