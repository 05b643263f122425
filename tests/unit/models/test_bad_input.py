"""Mistakes as users make them, on the command line: each is told before anything is started.

Every one of them says what is wrong, where, and what to do, and nothing is written.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from test_hf_directory import write_safetensors
from test_whole_models import CONFIG, shapes
from tokenizers import Tokenizer, models, pre_tokenizers

from experiments.sft import SFTExperiment
from experiments.task import MathTask, Task
from launcher.cli.command_line import run
from launcher.terminal.exit_codes import ExitCode
from realsys.api.basics import plugin_table
from realsys.api.experiment import ExperimentConfig
from realsys.api.model import ModelName
from realsys.api.options import WandbOptions
from realsys.api.worker_configs import Evaluator, GenerationServer, GserverManager, RolloutWorker
from realsys.models.shape import ModelShape, Weight

pytestmark = pytest.mark.usefixtures("file_root")

GOOD = {"prompt": "1 + 1 =", "answer": "2"}
Refused = Callable[..., str]


@pytest.fixture
def refused(file_root: Path, capsys: pytest.CaptureFixture[str]) -> Refused:
    """Launches and returns the message; asserts that nothing was started."""

    def launch(*words: str, status: ExitCode = ExitCode.CONFIG_INVALID) -> str:
        before = file_root.exists()
        assert run(["launch", *words]) == status
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        assert "  where: " in captured.err
        assert "  fix:   " in captured.err
        assert captured.out == ""
        assert file_root.exists() == before
        return captured.err

    return launch


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    """A checkpoint that is whole as far as one can see without torch; a token is a letter."""
    folder = tmp_path / "policy"
    folder.mkdir()
    config = {**CONFIG, "vocab_size": 256}
    (folder / "config.json").write_text(json.dumps(config))
    alphabet = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.save(str(folder / "tokenizer.json"))
    write_safetensors(folder / "model.safetensors", shapes(config))
    return folder


def questions(folder: Path, *records: object) -> Path:
    """A JSONL file of ``records``; text is written as it is."""
    path = folder / "questions.jsonl"
    lines = [r if isinstance(r, str) else json.dumps(r) for r in records]
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def assert_in_order(message: str, *wanted: str) -> None:
    """All of ``wanted`` are there: what, then where, then fix."""
    at = -1
    for text in wanted:
        found = message.find(text, at + 1)
        assert found >= 0, f"{text!r} is not in, or not in its place in:\n{message}"
        at = found


# ---- names and values -----------------------------------------------------------------------


def test_an_unknown_experiment_gets_the_nearest(refused: Refused) -> None:
    message = refused("ppo-mth")
    assert_in_order(
        message, "no experiment called 'ppo-mth'", "command line", "did you mean 'ppo-math'"
    )


def test_an_unknown_key_gets_the_nearest(refused: Refused) -> None:
    message = refused("ppo-math", "ppo.eps_clp=0.2")
    assert_in_order(
        message, "'ppo.eps_clp'", "command line 'ppo.eps_clp=0.2'", "'algorithm.loss.eps_clip'"
    )


@pytest.mark.parametrize(
    ("word", "what", "fix"),
    [
        ("group_size=many", "group_size is 'many'", "whole number"),
        ("actor.optimizer.lr=fast", "actor.optimizer.lr is 'fast'", "number"),
        ("tensorboard=2", "tensorboard is '2'", "true or false"),
        ("algorithm.loss.eps_clip=1.5", "algorithm.loss.eps_clip is 1.5", "less than 1"),
        ("actor.dtype=fp8", "actor.dtype is 'fp8'", "float32, bfloat16, float64"),
        ("actor.parallel=2x2", "'2x2' is no parallel layout", "d2t1p1"),
        ("gen.top_p=0", "top_p is 0", "(0, 1]"),
    ],
)
def test_a_value_of_the_wrong_kind_is_named_with_what_fits(
    refused: Refused, word: str, what: str, fix: str
) -> None:
    message = refused("ppo-math", word)
    assert_in_order(message, what, "where: ", word.partition("=")[0].rpartition(".")[0], fix)


@pytest.mark.parametrize(
    ("word", "what", "fix"),
    [
        ("task.reward=math_verfy", "no reward called 'math_verfy'", "'math_verify'"),
        ("actor.backend=fdsp", "no backend called 'fdsp'", "'fsdp'"),
    ],
)
def test_an_unknown_plug_in_gets_the_nearest(
    refused: Refused, word: str, what: str, fix: str
) -> None:
    assert_in_order(refused("ppo-math", word), what, word.partition("=")[0], fix)


def test_an_unknown_cluster_gets_the_nearest(refused: Refused) -> None:
    message = refused("ppo-math", "--cluster", "lokal")
    assert_in_order(message, "no cluster spec called 'lokal'", "where: ", "'local'?", "YAML file")


# ---- checkpoints ----------------------------------------------------------------------------


def test_a_checkpoint_that_is_not_there(refused: Refused) -> None:
    message = refused("ppo-math", "actor.path=/no/such/model")
    assert_in_order(message, "no directory /no/such/model", "actor.path", "names on the hub")


def test_a_folder_that_is_no_checkpoint(refused: Refused, tmp_path: Path) -> None:
    message = refused("ppo-math", f"actor.path={tmp_path}")
    assert_in_order(message, "config.json is missing", "actor.path", "save_pretrained")


def test_a_half_written_checkpoint_is_told_with_both_sizes(refused: Refused, policy: Path) -> None:
    weights = policy / "model.safetensors"
    whole = weights.stat().st_size
    os.truncate(weights, whole - 100)
    assert_in_order(
        refused("ppo-math", f"actor.path={policy}"),
        f"half-written: expected {whole} bytes, found {whole - 100}",
        f"actor.path, {weights}",
        "copy the directory again",
    )


def test_a_checkpoint_that_may_not_be_read(
    refused: Refused, policy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = policy / "model.safetensors"
    usual = Path.open

    def as_another_user(path: Path, *args: Any, **kwargs: Any) -> Any:
        if path == weights:  # root, who may run this test, is refused nothing
            raise PermissionError(13, "Permission denied", str(path))
        return usual(path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", as_another_user)
    message = refused("ppo-math", f"actor.path={policy}")
    assert_in_order(message, "Permission denied", str(weights), "readable for this user")


# ---- data sets ------------------------------------------------------------------------------


def test_a_data_set_that_is_not_there(refused: Refused) -> None:
    message = refused("sft-math", "task.path=/no/questions.jsonl")
    assert_in_order(message, "No such file", "task.path, /no/questions.jsonl", "JSONL")


def test_an_empty_data_set(refused: Refused, tmp_path: Path) -> None:
    path = questions(tmp_path, "", "")
    message = refused("sft-math", f"task.path={path}")
    assert_in_order(message, "the data set is empty", f"task.path, {path}", "add lines")


@pytest.mark.parametrize(
    ("record", "what"),
    [
        ({"prompt": "1 + 2 ="}, "'answer' is missing"),
        ({"prompt": "1 + 2 =", "answer": None}, "'answer' is null"),
        ({"prompt": "1 + 2 =", "answer": ["3"]}, "'answer' is a list"),
        ({"answer": "3"}, "'prompt' is missing"),
        ("[1, 2]", "a list, not an object"),
        ('{"prompt": "1', "not JSON"),
    ],
)
def test_a_record_that_can_not_be_used_is_named_by_its_line(
    refused: Refused, tmp_path: Path, record: object, what: str
) -> None:
    path = questions(tmp_path, GOOD, "", record, GOOD)
    message = refused("sft-math", f"task.path={path}")
    assert_in_order(message, what, f"task.path, {path}:3", "fix:")


def test_a_prompt_over_the_limit_is_named_with_both_numbers(
    refused: Refused, policy: Path, tmp_path: Path
) -> None:
    path = questions(tmp_path, *[GOOD] * 70, {"prompt": "x" * 40, "answer": "1"})
    words = (f"task.path={path}", f"actor.path={policy}", "task.max_prompt_len=20")
    assert_in_order(
        refused("ppo-math", *words, "task.eval_size=0"),
        "1 of 71 questions are longer than 20 tokens; record 71 has 41",
        f"task.max_prompt_len and {path}",
        "raise task.max_prompt_len to 41",
    )


def test_fewer_questions_than_a_batch(refused: Refused, policy: Path, tmp_path: Path) -> None:
    path = questions(tmp_path, *[GOOD] * 50)
    message = refused("ppo-math", f"task.path={path}", f"actor.path={policy}", "task.eval_size=10")
    assert_in_order(message, "50 questions are too few: 64 per batch and 10 held out", str(path))


def test_a_batch_that_does_not_divide(refused: Refused) -> None:
    assert_in_order(
        refused("ppo-math", "train_bs_n_seqs=30", "actor.parallel=d2t1p1"),
        "a batch of 30 questions does not divide into 4 minibatches on 2 data-parallel ranks",
        "train_bs_n_seqs, algorithm.ppo_n_minibatches and actor.parallel",
        "a multiple of 8",
    )


# ---- several at once ------------------------------------------------------------------------


def test_all_mistakes_are_told_at_once(refused: Refused, tmp_path: Path) -> None:
    path = questions(tmp_path, GOOD, {"prompt": "?"})
    message = refused(
        "ppo-math",
        "seed=one",
        "ppo.eps_clp=1",
        "task.reward=math_verfy",
        f"task.path={path}",
        "actor.path=/no/model",
        "train_bs_n_seqs=30",
        "algorithm.ppo_n_minibatches=2",
        "actor.parallel=d2t1p1",
    )
    for what in (
        "seed is 'one'",
        "'ppo.eps_clp'",
        "'math_verfy'",
        f"{path}:2",
        "/no/model",
        "a batch of 30",
    ):
        assert message.count(what) >= 1, f"{what!r} is not in:\n{message}"
    assert message.startswith("error: 6 ")


# ---- where trials are written ---------------------------------------------------------------


def test_a_file_root_that_is_a_file(refused: Refused, file_root: Path) -> None:
    file_root.write_text("")
    assert_in_order(
        refused("ppo-math", status=ExitCode.CLUSTER_REFUSED),
        f"{file_root} is not a folder",
        f"file_root {file_root}",
        "REALSYS_FILE_ROOT",
    )


def test_no_permission_to_write(
    refused: Refused, file_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file_root.mkdir()
    usual = os.access
    monkeypatch.setattr(  # root, who may run this test, is refused nothing
        os, "access", lambda path, mode: Path(path) != file_root and usual(path, mode)
    )
    assert_in_order(
        refused("ppo-math", status=ExitCode.CLUSTER_REFUSED),
        f"no permission to write in {file_root}",
        f"file_root {file_root}",
        "REALSYS_FILE_ROOT to a folder of yours",
    )


# ---- workers without work -------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Idlers(SFTExperiment):
    """Asks for workers that nothing gives work."""

    wants: str = ""
    task: Task = MathTask(eval_size=0)
    train_bs_n_seqs: int = 4

    def initial_setup(self) -> ExperimentConfig:
        config = super().initial_setup()
        actor = ModelName("model")
        changes: dict[str, Any] = {
            "generation_server": (GenerationServer(),),
            "gserver_manager": (GserverManager(model_name=actor, n_servers=1),),
            "rollout_worker": (RolloutWorker(), RolloutWorker()),
            "evaluator": (Evaluator(), Evaluator(role="model")),
        }
        return replace(config, **{self.wants: changes[self.wants]})


@pytest.fixture
def idlers(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(plugin_table.registered["experiment"], "idlers", Idlers)
    return "idlers"


@pytest.mark.parametrize(
    ("wants", "what", "where"),
    [
        ("generation_server", "1 generation_server workers, but rollouts", ".generation_server"),
        ("gserver_manager", "1 gserver_manager workers, but rollouts", ".gserver_manager"),
        ("rollout_worker", "2 rollout_worker workers, but rollouts", ".rollout_worker"),
        ("evaluator", "2 evaluators would write the same files", ".evaluator"),
        ("evaluator", "'actor' is not trained", ".evaluator[0].role"),
        ("evaluator", "the evaluator has no questions", ".evaluator[1].benchmarks"),
    ],
)
def test_workers_without_work_are_refused(
    refused: Refused, idlers: str, wants: str, what: str, where: str
) -> None:
    message = refused(idlers, f"wants={wants}")
    assert_in_order(message, what, f"initial_setup(){where}")


@pytest.mark.parametrize(
    ("words", "what", "where"),
    [
        ((), "none is saved before the end", "exp_ctrl.save_freq_steps"),
        (
            ("exp_ctrl.save_freq_steps=2", "task.eval_size=0"),
            "no held-out questions",
            "task.eval_size",
        ),
    ],
)
def test_automatic_evaluation_needs_checkpoints_and_questions(
    refused: Refused, words: tuple[str, ...], what: str, where: str
) -> None:
    assert_in_order(refused("ppo-math", "auto_eval=true", *words), what, where, "leave auto_eval")


def test_wandb_without_its_package_is_refused_in_every_phase(
    refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: None if name == "wandb" else usual(name, *rest),
    )
    message = refused("ppo-math", "wandb.mode=offline")
    assert_in_order(
        message, "'offline'", "wandb is not installed", "wandb.mode", "pip install 'realsys[wandb]'"
    )
    assert "phase sft: wandb.mode" in refused("ppo-math", "sft.wandb.mode=online")


def test_wandb_with_its_package_is_planned(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: object())
    assert run(["plan", "ppo-math", "wandb.mode=offline", "--json"]) == ExitCode.OK
    options = json.loads(capsys.readouterr().out)["plan"]["options"]
    assert options["wandb"]["mode"] == WandbOptions(mode="offline").mode


# ---- sizes that no model has ------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("num_hidden_layers", 10**9),
        ("num_hidden_layers", 2_001),
        ("num_hidden_layers", 1e12),
        ("num_attention_heads", 10**9),
        ("num_key_value_heads", 2**31),
        ("head_dim", 10**9),
        ("hidden_size", 2**40),
        ("intermediate_size", 10**12),
        ("vocab_size", 10**10),
        ("num_experts", 10**9),
        ("n_layer", 10**9),
    ],
)
@pytest.mark.parametrize("nested", [False, True])
def test_a_size_that_no_model_has_is_refused_before_anything_is_made_of_that_size(
    refused: Refused,
    policy: Path,
    name: str,
    size: float,
    nested: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    listed = []
    of_layer = ModelShape.layer_weights

    def counted(self: ModelShape, layer: int) -> list[Weight]:
        listed.append(layer)
        assert len(listed) < 1000, (
            "the plan lists the weights of every layer that config.json names"
        )
        return of_layer(self, layer)

    monkeypatch.setattr(ModelShape, "layer_weights", counted)
    file = policy / "config.json"
    config = json.loads(file.read_text())
    config |= {"text_config": {name: size}} if nested else {name: size}
    file.write_text(json.dumps(config))
    message = refused("ppo-math", f"actor.path={policy}", f"critic.path={policy}")
    assert_in_order(message, name, "actor.path", "fix")


def test_config_and_header_are_compared_before_the_memory_is_predicted(
    refused: Refused, policy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = policy / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "num_hidden_layers": 1_999}))
    message = refused("ppo-math", f"actor.path={policy}", f"critic.path={policy}")
    assert_in_order(message, "1999 layers", "actor.path", "fix")


# ---- secrets ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "where"),
    [
        (
            ("scheduling.model_worker.env_vars.HF_TOKEN=opensesame",),
            "model_worker.env_vars.HF_TOKEN",
        ),
        (("scheduling.master_worker.env_vars.A=hf_opensesameopensesame",), "env_vars.A"),
        (("task.system=Use sk-opensesameopensesame.",), "task.system"),
        (("wandb.entity=https://ada:opensesame@wandb.example",), "wandb.entity"),
    ],
)
def test_a_secret_in_a_setting_is_refused_and_stands_nowhere(
    refused: Refused, words: tuple[str, ...], where: str, tmp_path: Path
) -> None:
    message = refused("ppo-math", *words)
    assert_in_order(message, "plan", where, "fix")
    assert "opensesame" not in message
    assert not [f for f in tmp_path.rglob("*") if f.is_file() and b"opensesame" in f.read_bytes()]


def test_a_secret_in_a_site_file_is_refused_with_the_safe_way(
    refused: Refused, tmp_path: Path
) -> None:
    site = tmp_path / "site.yaml"
    site.write_text("scheduler: local\nenv_vars:\n  HF_TOKEN: opensesame\n")
    message = refused("ppo-math", "--cluster", str(site))
    assert_in_order(message, "HF_TOKEN", "env_vars.HF_TOKEN", "secrets")
    assert "opensesame" not in message
