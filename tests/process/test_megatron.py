"""Training over tensor, pipeline and data axes equals training of the whole model in one process."""

import megatron_world as world
import pytest
import torch
from near import assert_near, near
from parallel_ranks import rows_asked
from safetensors.torch import load_file

from realsys.backends.fsdp import FSDPBackend
from realsys.backends.megatron_backend import MegatronBackend

pytestmark = [pytest.mark.process, pytest.mark.together("megatron")]
STEPS = 2
FAMILIES = ("llama", "qwen2", "qwen3", "critic")
# Each layout once; then what is a family's own: embeddings that two stages share, norms that the tensor
# axis shares, a head of one row.
LAYOUTS_OF = {
    "llama": ("d2t1p1", "d1t2p1", "d1t1p2", "d1t2p2", "d2t2p1", "d2t1p2"),
    "qwen2": ("d1t1p2", "d1t2p2", "d2t1p2", "d2t2p1"),
    "qwen3": ("d1t2p2", "d2t2p1"),
    "critic": ("d1t2p2", "d2t2p1", "d2t1p2"),
    "deep": ("d1t1p4",),
}
CASES = [f"{family} {layout}" for family, layouts in LAYOUTS_OF.items() for layout in layouts]


def start(model, **settings):
    return MegatronBackend(optimizer=world.OPTIMIZER, **settings).initialize(model, world.SPEC)


def equal(first, second):
    """Whether two states are the same bits in the same places."""
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(equal(first[k], second[k]) for k in first)
    return torch.equal(first, second) if isinstance(first, torch.Tensor) else first == second


def rank_main(rank):
    for case in CASES:
        family, layout = case.split()
        if (model := rank.model(family, layout)) is None:
            continue
        critic, share = family == "critic", rank.share(model)
        engine = start(model).module
        on_last = engine.groups.is_last_stage and not critic
        rows = rows_asked(engine.part.stage.output_layer) if on_last else []
        figures = {"evaluated": evaluate(engine, share, critic)}
        figures["steps"] = [world.train(engine, share, critic=critic) for _ in range(STEPS - 1)]
        state = engine.state_dict()
        figures["steps"].append(world.train(engine, share, critic=critic))
        engine.save_to_hf(tokenizer=None, save_dir=str(rank.folder / case.replace(" ", "_")))
        after = engine.state_dict()
        engine.load_state_dict(state)
        figures["skipped"] = poisoned(engine, share, critic)
        figures["repeated"] = world.train(engine, share, critic=critic)
        figures["rows"] = max(rows, default=0)
        figures["repeated_bits"] = equal(engine.state_dict(), after)
        rank.found[case] = figures


def poisoned(engine, sample, critic):
    """Steps left out of one where the data-parallel rank with the first id alone has no number."""
    loss = world.value_loss if critic else world.next_token_loss

    factor = float("nan") if "a" in sample.ids else 1.0

    def loss_fn(output, mb):
        found = loss(output, mb)
        return (found[0] * factor, found[1]) if isinstance(found, tuple) else found * factor

    stats = engine.train_batch(
        sample,
        loss_fn=loss_fn,
        loss_weight_fn=world.num_answers,
        mb_spec=world.MicroBatchSpec(max_tokens_per_mb=25),
    )
    return stats["skipped_steps"]


def evaluate(engine, sample, critic):
    return engine.eval_batch(
        sample,
        loss_fn=world.value_loss if critic else world.next_token_loss,
        loss_weight_fn=world.num_answers,
        mb_spec=world.MicroBatchSpec(max_tokens_per_mb=25),
    )


@pytest.fixture(scope="module")
def ran():
    return world.run_world()


@pytest.fixture(scope="module")
def alone(ran):
    """Family → figures and weights of the same steps by the Hugging Face module in this process."""
    torch.set_num_threads(1)
    found = {}
    for family in (*FAMILIES, "deep"):
        critic = family == "critic"
        model = world.make_model(ran[0] / family, critic=critic)
        engine = FSDPBackend(optimizer=world.OPTIMIZER).initialize(model, world.SPEC).module
        evaluated = evaluate(engine, world.batch(), critic)
        steps = [world.train(engine, world.batch(), critic=critic) for _ in range(STEPS)]
        found[family] = evaluated, steps, dict(engine.module.state_dict())
    return found


@pytest.mark.parametrize("case", CASES)
def test_training_equals_one_process(ran, alone, case):
    folder, found = ran
    family = case.split()[0]
    evaluated, steps, weights = alone[family]
    figures = found[case]
    rows = [other.get("rows") for other in figures]
    assert max(rows) == (0 if family == "critic" else 4), "logits are those of a chunk"
    assert figures[0]["skipped"] == 1, "and the step after it is as without it"
    for name in ("evaluated", "steps", "skipped", "repeated", "repeated_bits"):
        assert all(other[name] == figures[0][name] for other in figures), "it is the copy's"
    assert figures[0]["evaluated"] == near(evaluated)
    for found_step, step in zip(figures[0]["steps"], steps, strict=True):
        assert found_step == near(step)
    saved = load_file(folder / case.replace(" ", "_") / "model.safetensors")
    tied = {"lm_head.weight"} if family in ("qwen2", "deep") else set()
    assert set(weights) - tied == set(saved)
    assert_near(saved, {name: weights[name] for name in saved})


@pytest.mark.parametrize("case", CASES)
def test_a_recovered_state_repeats_the_step_to_the_bit(ran, case):
    for figures in ran[1][case]:
        assert figures["repeated"] == figures["steps"][-1]
        assert figures["repeated_bits"]
