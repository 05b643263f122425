"""Models cut by the megatron backend compute what Hugging Face's do, and give back their weights."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import megatron_world as world
import pytest
import torch
from near import assert_near, near
from safetensors.torch import load_file

from realsys.algorithms.predictions import next_token_logprobs
from realsys.api.errors import ConfigError
from realsys.api.model import GenerationHyperparameters, ModelName
from realsys.api.options import OptimizerOptions
from realsys.backends.fsdp import FSDPBackend
from realsys.backends.hf.offload import HostMemory
from realsys.backends.inference import InferenceBackend
from realsys.backends.megatron.whole_model import plain_module, skeleton_of
from realsys.backends.megatron_backend import MegatronBackend
from realsys.data.sequence_sample import SequenceSample
from realsys.interfaces.ppo.ppo_actor import PPOActorInterface
from realsys.interfaces.ppo.ppo_critic import PPOCriticInterface

pytestmark = [pytest.mark.process, pytest.mark.together("megatron")]
# All families over both axes, then the families in which one axis alone differs.
CUT = (
    *((family, "d1t2p2") for family in ("llama", "qwen2", "qwen3", "critic")),
    *(("llama", "d1t2p1"), ("qwen2", "d1t1p2")),
)
GENERATION = GenerationHyperparameters(n=2, max_new_tokens=4)


class Tokenizer:
    eos_token_id, pad_token_id = 2, 0


def megatron(model, **settings):
    settings = {"optimizer": world.OPTIMIZER, **settings}
    return MegatronBackend(**settings).initialize(model, world.SPEC).module


def inference(model):
    return InferenceBackend().initialize(model, world.SPEC).module


def whole(path, **settings):
    """The same model in this process alone."""
    model = world.make_model(path, **settings)
    return FSDPBackend(optimizer=world.OPTIMIZER).initialize(model, world.SPEC).module


def prompts():
    lengths = {"packed_prompts": [[3], [2], [4]]}
    return SequenceSample.from_tensors("pqr", lengths, {"packed_prompts": torch.arange(20, 29)})


def answers(engine):
    sample = engine.generate(prompts(), tokenizer=Tokenizer(), gconfig=GENERATION)
    return {key: x.tolist() for key, x in sample.data.items()}


def logprobs(predictions, mb):
    lengths = mb.piece_lengths(world.INPUT)
    return next_token_logprobs(predictions, mb.data[world.INPUT], lengths, temperature=1.0)


# ---- what the ranks run -----------------------------------------------------------------------


def rank_main(rank):
    for family, layout in CUT:
        if (model := rank.model(family, layout)) is not None:
            rank.found[f"weights {family} {layout}"] = weights(rank, model, family, layout)
    together(rank)
    replicas(rank)
    variants(rank)
    cuts(rank)
    ppo(rank)


def weights(rank, model, family, layout):
    """The layout that is promised, the outputs, and the weights as they are given back."""
    backend = InferenceBackend()
    promised = backend.layout(model.module, model.topology)[model.rank]
    engine = backend.initialize(model, world.SPEC).module
    held = engine.held_weights()
    name = f"{family}_{layout}_untrained"
    output = engine.forward(world.batch(), mb_spec=world.MicroBatchSpec(max_tokens_per_mb=25))
    torch.save(output, rank.folder / f"{name}_output{model.rank}.pt")
    engine.save_to_hf(tokenizer=None, save_dir=str(rank.folder / name))
    return {
        "same names": set(held) == set(promised),
        "same elements": all(covers(held[n], promised[n]) for n in held),
    }


def covers(held, promised):
    """Whether the windows of a weight are, joined, just the boxes that the layout names."""
    inside = all(any(box.intersection(outer) == box for outer in promised) for box, _ in held)
    return inside and sum(b.numel for b, _ in held) == sum(b.numel for b in promised)


def together(rank):
    """Actor and critic of different layouts in one process, used by turns."""
    actor = megatron(rank.model("llama", "d1t2p2"))
    critic = megatron(rank.model("critic", "d2t2p1"))
    share = world.batch().take(world.SHARES[2][critic.groups.coordinate[1]])
    figures = []
    for _ in range(2):
        figures.append(world.train(actor, world.batch()))
        figures.append(world.train(critic, share, critic=True))
    rank.found["together"] = figures


def replicas(rank):
    """A copy filled from the trained one's windows: its weights, and what it generates."""
    trained = megatron(rank.model("qwen2", "d1t2p2"))
    before = answers(trained)
    world.train(trained, world.batch())
    model = rank.model("qwen2", "d1t2p2")
    model.name, model.filled = ModelName("m", 1), False
    empty = inference(model)
    with torch.no_grad():
        for name, parts in trained.held_weights().items():
            given = dict(parts)
            for box, view in empty.held_weights()[name]:
                view.copy_(given[box])
    empty.weights_changed()
    after = answers(trained)
    trained.save_to_hf(tokenizer=None, save_dir=str(rank.folder / "trained"))
    hook = empty.forward(world.batch(), post_hook=logprobs)
    refused = ""
    try:
        world.train(empty, world.batch())
    except ConfigError as error:
        refused = str(error)
    rank.found["replicas"] = {
        "before": before,
        "after": after,
        "replica": answers(empty),
        "logprobs": hook.tolist(),
        "refused": refused,
    }


def variants(rank):
    """Options: each trains two steps, then once more after its memory was taken and given back."""
    for name, settings in VARIANTS.items():
        family, layout, dtype = settings["case"]
        model = rank.model(family, layout, dtype=dtype)
        engine = megatron(model, **settings.get("options", {}))
        share = rank.share(model)
        steps = [world.train(engine, share) for _ in range(2)]
        state = engine.state_dict()
        steps.append(world.train(engine, share))
        engine.load_state_dict(state)
        memory = HostMemory()
        memory.store(engine.own_memory())
        memory.discard(engine.transient_memory())
        taken = [*engine.own_memory(), *engine.transient_memory()]
        emptied = all(x.untyped_storage().nbytes() == 0 for x in taken if x.numel())
        memory.restore()
        repeated = world.train(engine, share)
        rank.found[f"variant {name}"] = {"steps": steps, "again": repeated, "emptied": emptied}
    masters(rank)


VARIANTS = {
    "recompute": {"case": ("qwen3", "d1t2p2", "float32"), "options": {"recompute": True}},
    "plain optimizer": {
        "case": ("llama", "d2t1p2", "float32"),
        "options": {"distributed_optimizer": False},
    },
    "bfloat16": {"case": ("llama", "d2t2p1", "bfloat16")},
    "bfloat16 throughout": {
        "case": ("qwen2", "d2t1p2", "bfloat16"),
        "options": {"distributed_optimizer": False, "grad_dtype": "model"},
    },
}


def masters(rank):
    """bfloat16 weights written from outside must not come back as the old masters have them."""
    engine = megatron(
        rank.model("llama", "d2t2p1", dtype="bfloat16"), optimizer=OptimizerOptions(lr=1e-30)
    )
    held = engine.held_weights()
    with torch.no_grad():
        for parts in held.values():
            for _, view in parts:
                view.mul_(0.5)
    engine.weights_changed()
    expected = {n: [v.clone() for _, v in parts] for n, parts in held.items()}
    world.train(engine, world.batch().take(world.SHARES[2][engine.groups.coordinate[1]]))
    rank.found["masters"] = [
        torch.equal(view, was)
        for n, parts in engine.held_weights().items()
        for (_, view), was in zip(parts, expected[n], strict=True)
    ]
    nan = megatron(rank.model("llama", "d1t2p2"))
    kept = nan.state_dict()["weights"]
    stats = nan.train_batch(
        world.batch(),
        loss_fn=lambda predictions, mb: predictions.logits().sum() * float("nan"),
        loss_weight_fn=world.num_answers,
    )
    now = nan.state_dict()["weights"]
    same = all(torch.equal(now[n], x) for n, x in kept.items())
    rank.found["nan"] = [stats["skipped_steps"], str(stats["grad_norm"]), same]


def cuts(rank):
    """Gradients of the same batch in one micro-batch and in many."""
    gradients = []
    for max_tokens in (1000, 25):
        engine = megatron(rank.model("qwen3", "d1t2p2"))
        world.train(engine, world.batch(), max_tokens=max_tokens)
        gradients.append([p.main_grad.clone() for p in engine.module.parameters()])
    rank.found["cuts"] = [
        float((one - many).abs().max()) for one, many in zip(*gradients, strict=True)
    ] + [float(max(x.abs().max() for x in gradients[0]))]


PPO = {
    "ppo_n_minibatches": 1,
    "ppo_epochs": 2,
    "use_adaptive_kl_ctl": True,
    "kl_ctl": 0.1,
    "value_norm": True,
    "early_stop_imp_ratio": None,
}


def experience():
    """``batch`` with everything else that PPO trains on, drawn at random."""
    base, generator = world.batch(), torch.Generator().manual_seed(1)
    per_token = ("packed_logprobs", "packed_ref_logprobs", "values")
    tokens = sum(base.piece_lengths(world.INPUT))
    sequences = [[1] * len(pieces) for pieces in world.LENGTHS]
    data = {key: torch.rand(tokens, generator=generator) - 5 for key in per_token}
    data["rewards"] = torch.rand(7, generator=generator)
    data["seq_no_eos_mask"] = torch.rand(7, generator=generator) < 0.5
    lengths = {key: world.LENGTHS if key in per_token else sequences for key in data}
    return base.update(SequenceSample.from_tensors("abcd", lengths, data))


def ppo(rank):
    found = []
    for interface, family in ((PPOActorInterface, "llama"), (PPOCriticInterface, "critic")):
        model = rank.model(family, "d2t1p2")
        _, data, _ = model.topology.coordinate(model.rank)
        megatron(model)
        share = experience().take(world.SHARES[2][data])
        spec = world.MicroBatchSpec(max_tokens_per_mb=25)
        found.append(interface(**PPO).train_step(model, share, spec))
    rank.found["ppo"] = found


# ---- what must be true of it ------------------------------------------------------------------


@pytest.fixture(scope="module")
def ran():
    torch.set_num_threads(1)
    return world.run_world()


@pytest.mark.parametrize(("family", "layout"), CUT)
def test_weights_come_back_to_the_bit_and_outputs_are_hugging_faces(ran, family, layout):
    folder, found = ran
    for figures in found[f"weights {family} {layout}"]:
        assert figures == {"same names": True, "same elements": True}
    start = load_file(folder / family / "model.safetensors")
    back = load_file(folder / f"{family}_{layout}_untrained" / "model.safetensors")
    assert start.keys() == back.keys()
    assert all(torch.equal(start[n], back[n]) for n in start)
    config = [
        json.loads((folder / name / "config.json").read_text())
        for name in (family, f"{family}_{layout}_untrained")
    ]
    assert config[0] == config[1]
    expected = whole(folder / family, critic=family == "critic").forward(world.batch())
    for index in range(len(world.LAYOUTS[layout])):
        output = torch.load(folder / f"{family}_{layout}_untrained_output{index}.pt")
        meant = slice(None) if family == "critic" else followed()
        assert_near(output[meant], expected[meant])


def followed():
    """Which tokens of the batch another one follows: the logits of others mean nothing."""
    return torch.cat([torch.arange(n) < n - 1 for pieces in world.LENGTHS for n in pieces])


def test_two_models_of_different_layouts_share_a_process(ran):
    folder, found = ran
    assert all(figures == found["together"][0] for figures in found["together"])
    actor, critic = whole(folder / "llama"), whole(folder / "critic", critic=True)
    for step in range(2):
        of_actor, of_critic = found["together"][0][2 * step : 2 * step + 2]
        assert of_actor == near(world.train(actor, world.batch()))
        assert of_critic == near(world.train(critic, world.batch(), critic=True))


def test_generation_is_dealt_over_a_slot_and_follows_the_weights(ran):
    folder, found = ran
    first = found["replicas"][0]
    assert all(figures == first for figures in found["replicas"])
    for weights_of, key in (("qwen2", "before"), ("trained", "after")):
        engine = whole(folder / weights_of)
        expected = answers(engine)
        assert first[key]["packed_input_ids"] == expected["packed_input_ids"]
        assert first[key]["packed_logprobs"] == near(expected["packed_logprobs"])
    assert first["before"] != first["after"]
    assert first["replica"] == first["after"]
    expected = engine.forward(world.batch(), post_hook=logprobs).tolist()
    assert first["logprobs"] == near(expected)
    assert "can't be trained" in first["refused"]


@pytest.mark.parametrize("name", VARIANTS)
def test_options_train_alike(ran, name):
    folder, found = ran
    family, _, dtype = VARIANTS[name]["case"]
    engine = whole(folder / family, dtype=dtype)
    expected = [world.train(engine, world.batch()) for _ in range(3)]
    # bfloat16: both keep float32 masters, and round elsewhere on the way.
    tolerance = 1e-5 if dtype == "float32" else 0.05
    for figures in found[f"variant {name}"]:
        for step, one in zip(figures["steps"], expected, strict=True):
            assert step == pytest.approx(one, rel=tolerance, abs=tolerance)
        assert figures["emptied"]
        assert figures["again"] == figures["steps"][-1], "nothing was lost on the way"


def test_masters_follow_weights_that_were_written_from_outside(ran):
    for figures in ran[1]["masters"]:
        assert all(figures)


def test_a_norm_that_is_no_number_leaves_the_weights_alone(ran):
    assert ran[1]["nan"] == [[1, "nan", True]] * len(ran[1]["nan"])


def test_gradients_do_not_depend_on_how_the_batch_is_cut(ran):
    for *differences, largest in ran[1]["cuts"]:
        assert max(differences) < 1e-6
        assert largest > 1e-3, "there were gradients"


def test_ppo_steps_equal_one_process(ran):
    folder, found = ran
    alone = []
    for interface, family in ((PPOActorInterface, "llama"), (PPOCriticInterface, "critic")):
        model = world.make_model(folder / family, critic=family == "critic")
        FSDPBackend(optimizer=world.OPTIMIZER).initialize(model, world.SPEC)
        spec = world.MicroBatchSpec(max_tokens_per_mb=25)
        alone.append(interface(**PPO).train_step(model, experience(), spec))
    first_stage, last_stage = found["ppo"][0], found["ppo"][-1]
    # Outputs are seen on the last stage only, the largest log-ratio of a token with them.
    only_there = {"first_minibatch/max_abs_log_ratio", "mismatch/abs_max"}
    assert drop(first_stage[0], only_there) == drop(last_stage[0], only_there)
    assert first_stage[1] == last_stage[1]
    for figures, one in zip(last_stage, alone, strict=True):
        assert figures == near(one)


def drop(figures, names):
    return {k: x for k, x in figures.items() if k not in names}


def test_ends_of_an_answer_stand_beside_the_config(ran, tmp_path):
    shutil.copytree(ran[0] / "llama", tmp_path, dirs_exist_ok=True)
    settings = tmp_path / "generation_config.json"
    settings.write_text(json.dumps({"eos_token_id": [5, 6]}))
    source = world.make_model(tmp_path).module
    for module in (plain_module(source), skeleton_of(source)):
        assert module.generation_config.eos_token_id == [5, 6]
    assert all(x.is_meta for x in module.parameters())


def test_what_the_backend_can_not_do_is_refused_at_once(ran):
    def start(**settings):
        return megatron(world.make_model(ran[0] / "llama"), **settings)

    with pytest.raises(ConfigError, match="Transformer Engine"):
        start(sequence_parallel=True)
    with pytest.raises(ConfigError, match="float16"):
        megatron(world.make_model(ran[0] / "llama", dtype="float16"))
    model = world.make_model(ran[0] / "llama", "d1t4p1")
    with pytest.raises(ConfigError, match="2 key/value heads"):
        megatron(model)


ALONE = """
import sys, warnings
warnings.simplefilter("error")
sys.path[:0] = [{here!r}, {here!r} + "/../support"]
import torch
torch.set_num_threads(1)
before = (torch.zeros, torch.empty, torch.cuda.current_device, torch.Tensor.type, torch.Tensor.cuda)
import megatron_world as world, test_megatron_models as cases
from realsys.api.errors import InternalError
first = cases.megatron(world.make_model({path!r}))
second = cases.whole({path!r})
steps = [[world.train(engine, world.batch()) for engine in (first, second)] for _ in range(2)]
for ours, theirs in steps:
    assert all(abs(ours[k] - theirs[k]) < 1e-5 for k in theirs), (ours, theirs)
assert cases.answers(first)["packed_input_ids"] == cases.answers(second)["packed_input_ids"]
after = (torch.zeros, torch.empty, torch.cuda.current_device, torch.Tensor.type, torch.Tensor.cuda)
assert all(a is b for a, b in zip(before, after)), "torch is as it was"
with torch.device("meta"):
    assert torch.zeros(1).device.type == "meta"
first.offload()
try:
    first.forward(world.batch())
except InternalError as error:
    assert "offloaded" in str(error)
else:
    raise AssertionError("computed while offloaded")
first.onload()
first.forward(world.batch())
"""


def test_a_process_without_torch_distributed_trains_alone_and_leaves_torch_as_it_was(ran):
    here = str(Path(__file__).parent)
    code = ALONE.format(here=here, path=str(ran[0] / "qwen2"))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
