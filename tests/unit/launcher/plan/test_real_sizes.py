"""Plans of real models on nodes of 8 GPUs of 80 and of 141 GB: what fits, by which terms, what to do."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import golden
import pytest
import torch
import yaml
from real_shapes import SEVEN_BILLION, SEVENTY_BILLION, THIRTY_TWO_BILLION, Config, model_folder
from transformers import LlamaConfig, LlamaForCausalLM

from experiments.parts import model_files
from experiments.ppo_math import ppo_math, ppo_math_async
from launcher.cli.command_line import run
from launcher.plan.memory_check import (
    ModelsTooLarge,
    excess_bytes,
    memory_of_plan,
    servers_of_plan,
    usable_by_worker,
)
from launcher.plan.plan_view import server_rows
from launcher.plan.resolve import resolve
from launcher.submit.planning import make_plan
from realsys.api.cluster import ClusterSpec
from realsys.api.plan import LaunchPlan
from realsys.api.scheduling import GroupOptions, SchedulingOptions, WorkerType
from realsys.generation.embedded_settings import EmbeddedSettings, stages_on_gpu
from realsys.generation.http.served_engine import FetchedWeights
from realsys.generation.served_engines import embedded
from realsys.generation.served_engines.embedded import EmbeddedEngine
from realsys.generation.served_engines.staged_weights import stage
from realsys.planner.memory.memory_of_workers import step_sizes

GiB = 1 << 30
MODELS: dict[str, Config] = {"7b": SEVEN_BILLION, "32b": THIRTY_TWO_BILLION, "70b": SEVENTY_BILLION}


@pytest.fixture
def given(tmp_path: Path, file_root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Questions, and sites of 8 nodes with 8 GPUs. Nothing is chosen: what does not fit is to be said."""
    monkeypatch.setattr(model_files, "SMALL_PARAMS", 1 << 60)
    lines = [json.dumps({"prompt": "a a", "answer": str(i)}) + "\n" for i in range(128)]
    (tmp_path / "q.jsonl").write_text("".join(lines))
    (tmp_path / "held_out.jsonl").write_text("".join(lines[:32]) + "\n")
    (tmp_path / "shared").mkdir()
    for gpu in ("h100", "h200"):
        node = {"nodes": 8, "cpus": 192, "memory_mib": 2_000_000, "gpus": 8, "gpu_type": gpu}
        site = {
            "name": gpu,
            "scheduler": "slurm",
            "file_root": str(tmp_path / "shared"),
            "container": {"runtime": "none"},
            "partitions": {"gpu": {**node, "threads_per_core": 1}},
            "slurm": {"partition": "gpu", "time_limit": "1-00:00:00"},
        }
        (tmp_path / f"{gpu}.yaml").write_text(yaml.safe_dump(site))
    return tmp_path


def words_of(given: Path, model: str, *more: str) -> list[str]:
    """Settings of a run on answers of 8k tokens, 8 a question."""
    path, data = model_folder(given / model, MODELS[model]), given / "q.jsonl"
    usual = {
        "actor.path": path,
        "task.path": data,
        "task.eval_path": given / "held_out.jsonl",
        "task.eval_size": 32,
        "algorithm.kl_ctl": 0.01,
        "task.max_prompt_len": 1024,
        "train_bs_n_seqs": 64,
        "group_size": 8,
        "gen.max_new_tokens": 8192,
        "scheduling.model_worker.gpu": 1,
        "placement.n_model_workers": 8,
    }
    return put(usual, more)


def put(usual: dict[str, object], words: tuple[str, ...] | list[str]) -> list[str]:
    """Settings with others over them."""
    return [f"{k}={v}" for k, v in {**usual, **dict(w.split("=", 1) for w in words)}.items()]


RECOMPUTE = "actor.recompute=true"
OWN_COPY = ("actor.parallel=d4t2p1", "placement.allocation=actor_gen:d8t1p1", "actor.offload=true")
SERVED = (
    "schedule=async",
    "schedule.server_backend=sglang",
    "schedule.weights_through=disk",
    "scheduling.generation_server.gpu=4",
    "schedule.servers=2",
    "task.eval_size=0",
    "actor.backend=megatron",
    "actor.max_tokens_per_mb=9216",
    "ref.max_tokens_per_mb=9216",
    RECOMPUTE,
)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("recipe", "model", "gpu", "settings", "largest"),
    [
        ("grpo-math", "7b", "h100", (), "activations in actor_train 96.2 GiB"),
        ("grpo-math", "7b", "h100", (RECOMPUTE,), None),
        (
            "grpo-math",
            "7b",
            "h100",
            (RECOMPUTE, "group_size=16", "placement.n_model_workers=32", "train_bs_n_seqs=128"),
            None,
        ),
        ("grpo-math", "7b", "h100", (RECOMPUTE, "actor.parallel=d4t2p1"), None),
        ("grpo-math", "7b", "h200", (), "activations in actor_train 96.2 GiB"),
        ("grpo-math", "7b", "h200", ("actor.max_tokens_per_mb=9216",), None),
        (
            "ppo-math",
            "7b",
            "h100",
            (RECOMPUTE, "critic.recompute=true", "actor.max_tokens_per_mb=9216"),
            None,
        ),
        ("ppo-math", "7b", "h200", (RECOMPUTE,), "activations in critic_train 96.2 GiB"),
        ("grpo-math", "32b", "h100", (RECOMPUTE,), "whole copy of actor@0 61.0 GiB"),
        ("grpo-math", "32b", "h200", (RECOMPUTE,), "whole copy of actor@0 61.0 GiB"),
        ("grpo-math", "32b", "h200", (RECOMPUTE, "ref.parallel=d1t8p1", *OWN_COPY), None),
        (
            "grpo-math",
            "32b",
            "h100",
            (
                RECOMPUTE,
                "placement.n_model_workers=32",
                "train_bs_n_seqs=128",
                "ref.parallel=d4t8p1",
                "ref.offload=true",
            ),
            "whole copy of actor@0 61.0 GiB",
        ),
        (
            "grpo-math",
            "70b",
            "h100",
            (
                *SERVED,
                "actor.parallel=d1t8p2",
                "placement.n_model_workers=16",
                "ref.parallel=d1t8p1",
            ),
            "optimizer of actor@0 49.3 GiB",
        ),
        (
            "grpo-math",
            "70b",
            "h100",
            (
                *SERVED,
                "actor.parallel=d1t8p4",
                "placement.n_model_workers=32",
                "ref.parallel=d1t8p1",
            ),
            None,
        ),
        (
            "grpo-math",
            "70b",
            "h200",
            (
                *SERVED,
                "actor.parallel=d1t8p2",
                "placement.n_model_workers=16",
                "ref.parallel=d1t8p1",
            ),
            None,
        ),
    ],
)
def test_fits_or_not_and_by_what(recipe, model, gpu, settings, largest, given):
    words = words_of(given, model, *settings)
    site = str(given / f"{gpu}.yaml")
    if largest is None:
        plan = make_plan(recipe, words, cluster=site)
        (groups,) = memory_of_plan(plan).values()
        assert groups
        for group in groups:
            assert group.memory.bytes <= (usable_by_worker(group, groups) or 0)
            assert sum(group.host.values()) < group.host_limit
        return
    with pytest.raises(ModelsTooLarge) as refused:
        make_plan(recipe, words, cluster=site)
    told = refused.value.problems[0].what
    golden.check(told)
    assert largest in told.split(": ", 1)[1].split("; ")[:2]


@pytest.mark.thorough
@pytest.mark.parametrize("gpu", ["h100", "h200"])
@pytest.mark.parametrize(
    ("model", "recipe"), [("7b", "grpo-math"), ("7b", "ppo-math"), ("32b", "grpo-math")]
)
def test_what_a_refusal_says_leads_to_a_plan_that_fits(model, recipe, gpu, given):
    words, site = words_of(given, model), str(given / f"{gpu}.yaml")
    with pytest.raises(ModelsTooLarge) as refused:
        make_plan(recipe, words, cluster=site)
    (problem,) = refused.value.problems
    said = re.fullmatch(r"((?:[\w.]+=\S+ )+) \(verified: everything fits\)", problem.fix)
    assert said, problem.fix
    changed = said[1].split()
    assert len(changed) <= 7
    usual = dict(w.split("=", 1) for w in words)
    assert make_plan(recipe, put(usual, changed), cluster=site)
    for left_out in changed:  # nothing is said that is of no use
        rest = [c for c in changed if c != left_out]
        if not {"placement.allocation", "actor.parallel", "actor.offload"} & {
            left_out.split("=")[0]
        }:
            plan = make_plan(recipe, put(usual, rest), cluster=site, fits_memory=False)
            assert excess_bytes(memory_of_plan(plan)) > 0, left_out


@pytest.mark.thorough
def test_where_nothing_helps_it_says_how_much_is_missing_and_who_could(given):
    more = ("placement.n_model_workers=16", "actor.backend=megatron", "actor.parallel=d2t8p1")
    words = words_of(given, "70b", *more)
    with pytest.raises(ModelsTooLarge) as refused:
        make_plan("grpo-math", words, cluster=str(given / "h200.yaml"))
    fix = refused.value.problems[0].fix
    assert "schedule.server_backend=sglang" in fix
    assert re.search(
        r"No settings were found with which it fits: with .* exceeds the GPU by [\d.]+ GiB", fix
    )


def test_a_refused_plan_shows_its_table(given, capsys):
    words = words_of(given, "7b")
    assert run(["plan", "grpo-math", *words, "--cluster", str(given / "h100.yaml")]) == 4
    shown = capsys.readouterr()
    (row,) = [line for line in shown.out.splitlines() if "together" in line]
    assert re.search(r"152\.3 GiB +DOES NOT FIT: of 75\.4 GiB usable of 80\.0 GiB", row)
    (call,) = [line for line in shown.out.splitlines() if "while in actor_train" in line]
    assert (
        call.index("activations 96.2 GiB")
        < call.index("gradients of a layer")
        < call.index("logits")
    )
    golden.check(shown.err)
    assert "fix:   actor.recompute=true" in shown.err


# ---- by hand -----------------------------------------------------------------------------------


def test_7b_on_one_node_by_hand(given):
    """28 layers of width 3584 (512 of keys), MLP 18944, vocabulary 152064; micro-batches of 16384."""
    plan = make_plan(
        "grpo-math", words_of(given, "7b", RECOMPUTE), cluster=str(given / "h100.yaml")
    )
    ((group,),) = memory_of_plan(plan).values()
    assert group.workers == tuple(range(8))
    mlp, square, keys = 3 * 18944 * 3584, 3584 * 3584, 512 * 3584
    layer = mlp + 2 * square + 2 * keys + (3584 + 2 * 512) + 2 * 3584  # with biases and norms
    ends = 2 * 152064 * 3584 + 3584  # embedding, head, last norm
    numbers = 28 * layer + ends
    assert numbers == 7_615_616_512
    # Sharded over 8, float32: the weights, their gradients, two moments. To sample with, bfloat16: all.
    actor = {"weights": 4, "gradients": 4, "optimizer": 8}
    assert group.memory.copies["actor@0"] == {
        **{what: n * numbers / 8 for what, n in actor.items()},
        "whole copy": 2 * numbers,
    }
    assert group.memory.copies["ref@0"] == {"weights": 2 * numbers}
    # A token and layer: two norms' inputs (float32) and what they give before and after the weight, twice
    # the projections' heads, gate, up, their product and silu; of all others but one only the input.
    kept = (8 + 4 * 2) * 3584 + 2 * (2 * 3584 + 2 * 512 + 4 * 18944)
    train = group.memory.calls["actor_train"]
    assert train["activations"] == 16384 * (28 * 3584 * 2 + kept)
    assert train["gathered layers"] == 2 * (2 * layer + ends)
    assert train["gradients of a layer"] == (2 + 4) * ends
    # 441 rows of logits at a time, 28 bytes each; the head's gradient twice; 14564 of the tokens are
    # answers, whose states and those of all, and their gradients; the last norm.
    head = 441 * 152064 * 28 + 2 * 2 * 152064 * 3584
    assert train["logits"] == head + 2 * 2 * (16384 + 14564) * 3584 + 6 * 16384 * 3584
    assert group.memory.bytes / GiB == pytest.approx(28.4 + 14.2 + 20.0, abs=0.1)


def test_the_first_stage_of_70b_by_hand(given):
    """20 of 80 layers of width 8192 (1024 of keys), MLP 28672, each cut by 8; vocabulary 128256."""
    settings = (
        *SERVED,
        "actor.parallel=d1t8p4",
        "placement.n_model_workers=32",
        "ref.parallel=d1t8p1",
    )
    plan = make_plan(
        "grpo-math", words_of(given, "70b", *settings), cluster=str(given / "h100.yaml")
    )
    (groups,) = memory_of_plan(plan).values()
    assert [g.workers for g in groups] == [tuple(range(8 * i, 8 * i + 8)) for i in range(4)]
    layer = (2 * 8192 * 8192 + 2 * 1024 * 8192 + 3 * 28672 * 8192) // 8 + 2 * 8192
    mine = 20 * layer + 128256 * 8192 // 8
    # bfloat16 weights, float32 sums of gradients; a master and two moments, no data axis to cut them.
    first = groups[0].memory
    assert first.copies["actor@0"] == {
        "weights": 2 * mine,
        "gradients": 4 * mine,
        "optimizer": 12 * mine,
    }
    everything = 80 * layer + 2 * 128256 * 8192 // 8 + 8192
    assert first.copies["ref@0"] == {"weights": 2 * everything}
    # Four micro-batches are under way: the inputs of 20 layers of each, and one layer whole.
    kept = (8 + 4 * 2) * 8192 + 2 * (2 * 8192 + 2 * 1024 + 4 * 28672) // 8
    assert first.calls["actor_train"] == {"activations": 4 * 9216 * 20 * 8192 * 2 + 9216 * kept}
    assert "logits" in groups[3].memory.calls["actor_train"]


# ---- servers and evaluators -----------------------------------------------------------------------

ASYNC = ("schedule=async", RECOMPUTE, "task.eval_size=0", "scheduling.generation_server.gpu=1")


def servers(given: Path, model: str, gpu: str, *settings: str):
    words = words_of(given, model, *ASYNC, *settings)
    plan = make_plan("grpo-math", words, cluster=str(given / f"{gpu}.yaml"), fits_memory=False)
    (found,) = servers_of_plan(plan).values()
    return plan, found


def test_a_server_of_7b_has_new_weights_beside_those_in_use(given):
    plan, (server,) = servers(given, "7b", "h100", "schedule.servers=4")
    terms, token = server.memory.terms, 2 * 28 * 512 * 2 * (1 + 1 / 28)
    assert (server.kind, server.count) == (WorkerType.GENERATION_SERVER, 4)
    assert terms["weights"] == terms["new weights"] == 2 * 7_615_616_512
    assert terms["prefixes"] == 1 << 28
    assert terms["cache"] == pytest.approx(9216 * token), "one of the longest answers at the least"
    assert terms["logits"] == 64 * 152064 * (2 + 8)
    rest = server.usable - server.memory.bytes
    held = server.memory.tokens_beside(server.usable)
    assert held == pytest.approx(9216 + rest / token, abs=1)
    ((_, what, *_), (*_, together), host) = server_rows([server])
    assert what == "embedded"
    golden.check(together)
    assert host[3].startswith("of 19.0 GiB: new weights 14.2 GiB, process 3.0 GiB")
    assert plan.phases[0].scheduling.generation_server.scheduling.mem == 19 * 1024
    args = plan.phases[0].config.generation_server[0].backend_args
    assert args["least_tokens"] == 1024 + 8192


def test_a_server_of_32b_has_no_room_for_two_copies(given):
    """131 GB of weights, and 4.9 to read prompts, on 141e9 bytes of which 134.8 can be used."""
    _, (server,) = servers(given, "32b", "h200")
    golden.check(server.memory)
    assert "new weights" not in server.memory.terms
    assert (
        server.memory.bytes < server.usable < server.memory.bytes + server.memory.terms["weights"]
    )
    assert server.memory.host["new weights"] == server.memory.terms["weights"]
    on_gpu = 'schedule.server_args={"staging": "gpu"}'
    words = words_of(given, "32b", *ASYNC, on_gpu, "ref.parallel=d1t8p1")
    with golden.raises(ModelsTooLarge):
        make_plan("grpo-math", words, cluster=str(given / "h200.yaml"))


def test_engines_that_divide_their_gpus_themselves_must_hold_the_weights(given):
    sglang = ("schedule.server_backend=sglang", "schedule.weights_through=disk")
    plan, (server,) = servers(given, "70b", "h100", *sglang, "scheduling.generation_server.gpu=4")
    assert server.memory.terms == {"weights": 2 * 70_553_706_496 / 4}
    assert plan.phases[0].config.generation_server[0].tp_size == 4
    ((_, what, *_), (*_, together), _) = server_rows([server])
    assert what == "sglang"
    golden.check(together)
    _, (alone,) = servers(given, "70b", "h100", *sglang)
    assert alone.memory.bytes > alone.usable


def test_an_evaluator_counts_too(given):
    evaluated = (
        "auto_eval=true",
        "exp_ctrl.save_freq_steps=10",
        "scheduling.evaluator.gpu=1",
        "task.eval_size=32",
    )
    plan, (_, evaluator) = servers(given, "7b", "h100", *evaluated)
    assert evaluator.kind is WorkerType.EVALUATOR
    assert evaluator.memory.terms["weights"] == 2 * 7_615_616_512
    assert {"cache", "reading prompts", "logits"} <= set(evaluator.memory.terms)
    # Twice the embedding in float32 while it loads, and a process.
    assert plan.phases[0].scheduling.evaluator.scheduling.mem == 8 * 1024


def test_servers_without_gpus_are_as_ever():
    run_ = ppo_math_async()
    assert run_.scheduling_setup().generation_server.scheduling.mem == 4096
    (server,) = run_.initial_setup().generation_server
    assert set(server.backend_args) == {"dtype", "num_threads"}


def test_where_servers_sample_sequences_are_as_long_as_elsewhere():
    """Model workers have no questions there: 256 tokens were taken for a prompt."""
    base = ppo_math_async()
    data = base.task
    config = base.with_prepared("sft", "/not/there").initial_setup().lazy_init()
    assert step_sizes(config).prompt_tokens == data.max_prompt_len != 256


# ---- new weights that wait in host memory ------------------------------------------------------------


@pytest.fixture
def module() -> torch.nn.Module:
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return LlamaForCausalLM(config).to(torch.bfloat16).eval()


def test_weights_wait_where_they_came_until_the_switch(module):
    new = {name: torch.randn(p.shape) for name, p in module.named_parameters()}
    before = {name: p.clone() for name, p in module.named_parameters()}
    staged = stage(module, new, where="test", wait_there=True)
    assert [waiting for _, waiting in staged.pairs] == list(new.values())
    assert all(waiting is new[name] for (_, waiting), name in zip(staged.pairs, new, strict=True))
    assert all(map(torch.equal, module.parameters(), before.values()))
    staged.switch()
    assert all(torch.equal(p, new[name].bfloat16()) for name, p in module.named_parameters())
    beside = stage(module, new, where="test")
    assert all(made.dtype == torch.bfloat16 for _, made in beside.pairs)


@pytest.mark.parametrize(
    ("staging", "beside", "waits", "bound"),
    [
        ("auto", 8 * 500, False, 4000),
        ("auto", 8 * 500 - 1, True, 9999),
        ("host", 4000, True, 9999),
        ("gpu", 600, False, 600),
    ],
)
def test_a_server_decides_by_the_room_that_a_second_copy_leaves(
    module, monkeypatch, staging, beside, waits, bound
):
    monkeypatch.setattr(embedded, "_on_gpu", lambda module: True)
    weights = sum(2 * p.numel() for p in module.parameters())
    rooms = {weights: beside, 0: 9999}
    monkeypatch.setattr(embedded, "room_on_gpu", lambda module, *, num_rows, kept: rooms[kept])
    new = {name: torch.randn(p.shape) for name, p in module.named_parameters()}
    settings = EmbeddedSettings(staging=staging, least_tokens=500, prefix_bytes=0)
    server = EmbeddedEngine(
        module,
        eos_token_ids=(),
        pad_token_id=0,
        settings=settings,
        fetch=lambda source: FetchedWeights(new, 7),
    )
    assert server._max_tokens() == bound
    source = embedded.WeightSource(version=1, path="/somewhere")
    staged, num_bytes = server._stage(source)
    assert num_bytes == 7
    assert all((made.dtype == torch.float32) == waits for _, made in staged.pairs)


def test_eight_of_the_longest_answers_are_worth_a_second_copy():
    assert stages_on_gpu(8 * 9216, 9216)
    assert not stages_on_gpu(8 * 9216 - 1, 9216)


# ---- of one type, of all ------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["model_worker", "all"])
def test_what_workers_compute_follows_from_their_gpus_in_every_phase(where):
    def phases(**wanted):
        return resolve(
            "ppo-math",
            replace(ppo_math(), scheduling=SchedulingOptions(**wanted)),
            cluster=ClusterSpec(file_root="/tmp/root"),
            trial_name="a",
            user="ada",
            machine_gpus=lambda: 8,
        ).phases

    found = phases(**{where: GroupOptions(gpu=1)})
    assert [p.name for p in found] == ["sft", "main"]
    for phase in found:
        (worker,) = phase.config.model_worker
        assert {s.model.args.get("dtype") for s in worker.shards} <= {"bfloat16", None}
        task = phase.scheduling.model_worker.scheduling
        assert (task.gpu, task.cpu, worker.num_threads) == (1, 6, 6)
    assert phases()[1].config != found[1].config


@pytest.mark.thorough
@pytest.mark.parametrize("where", ["ref.parallel=d1t1p1", "ref.pool=one"])
def test_a_reference_left_at_one_worker_is_cut_over_those_that_are_there(where, given):
    """70B of bfloat16 are 131 GiB, 17 on each of 8."""
    ref = model_folder(given / "large", SEVENTY_BILLION)
    pools = ("placement.pools={one: 0-0}",) if "pool" in where else ()
    changed = (RECOMPUTE, f"ref.path={ref}", where, *pools)
    words, site = words_of(given, "7b", *changed), str(given / "h100.yaml")
    with pytest.raises(ModelsTooLarge) as refused:
        make_plan("grpo-math", words, cluster=site)
    said = re.fullmatch(
        r"((?:[\w.]+=\S+ )+) \(verified: everything fits\)", refused.value.problems[0].fix
    )
    assert said, refused.value.problems[0].fix
    assert "ref.parallel=" in said[1]
    usual = dict(w.split("=", 1) for w in words)
    assert make_plan("grpo-math", put(usual, said[1].split()), cluster=site)


def test_a_critic_left_at_one_worker_is_cut_over_those_that_are_there(given):
    short = ("critic.recompute=true", "gen.max_new_tokens=1024")
    words = words_of(given, "7b", RECOMPUTE, *short, "critic.parallel=d1t1p1")
    with pytest.raises(ModelsTooLarge) as refused:
        make_plan("ppo-math", words, cluster=str(given / "h200.yaml"))
    fix = refused.value.problems[0].fix
    assert "critic.parallel=d8t1p1" in fix, fix
    assert "verified" in fix


@pytest.mark.thorough
def test_a_search_without_a_plan_that_fits_says_what_is_too_large_and_what_helps(given, capsys):
    words = words_of(given, "70b", "task.eval_size=0")
    site = ["--cluster", str(given / "h100.yaml")]
    assert run(["plan", "grpo-math", *words, *site, "--search", "--within", "1"]) == 4
    told = capsys.readouterr().err
    assert re.search(r"needs [\d,]+ MiB: [\w @]+ [\d.]+ GiB; [\w @]+ [\d.]+ GiB", told), told
    fix = told.partition("fix:")[2]
    assert "--gpus" in fix
    assert "recompute=true" in fix  # the rest depends on how far the search has come


# ---- episodes of several turns ------------------------------------------------------------------------


@pytest.mark.thorough
def test_an_agents_episodes_are_counted_as_long_as_they_may_be(given: Path) -> None:
    """The plan of one answer says "fits", and an episode that fills its context would not."""
    site = str(given / "h100.yaml")

    def plan(*settings: str, tokens: int | None = 4096) -> LaunchPlan:
        limit = "none" if tokens is None else tokens
        limits = (f"actor.max_tokens_per_mb={limit}", f"ref.max_tokens_per_mb={limit}")
        usual = ("schedule=async", "scheduling.generation_server.gpu=1", "gen.max_new_tokens=2048")
        words = words_of(given, "7b", *usual, *limits, *settings)
        return make_plan("grpo-math", words, cluster=site)

    plan()
    with pytest.raises(ModelsTooLarge) as refused:
        plan("task.agent=chat")
    fix = refused.value.problems[0].fix
    assert "actor.recompute=true" in fix
    assert "schedule.server_args.max_tokens=N" in fix
    declared = "schedule.server_args.max_tokens=3072"
    plan("task.agent=chat", declared)
    plan("task.agent=chat", "actor.recompute=true")

    def advised(made: LaunchPlan) -> list[str]:
        return [text for text in made.warnings if "max_tokens_per_mb=3072" in text]

    few = ("task.agent=chat", declared, "train_bs_n_seqs=32", "actor.recompute=true")
    assert len(advised(plan(*few, tokens=None))) == 1
    assert not advised(plan(*few))
    with pytest.raises(ModelsTooLarge) as refused:
        plan("task.agent=chat", "actor.recompute=true", tokens=None)
    # 8 turns of 2,048 tokens, what is said to each, and the prompt, in whole steps of 1,024.
    assert "actor.max_tokens_per_mb=25600" in refused.value.problems[0].fix
    own = ("task.agent=command", "task.agent_args.command=x")
    warned = plan(*own)
    assert [text for text in warned.warnings if "32,768" in text]
    assert not [
        text for text in plan(*own, declared, "actor.recompute=true").warnings if "32,768" in text
    ]
