"""Which directory TRIAL or MODEL means, and the command and key of a server of it."""

from __future__ import annotations

from pathlib import Path

import golden
import pytest

from launcher.serving.saved_models import SavedModel, find_model
from launcher.serving.server_process import read_key, server_command, server_environment
from realsys.api.errors import ConfigError, NoSuchTrial, TrialError
from realsys.config import extras


def model_in(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture
def trial(file_root: Path) -> Path:
    """A trial's folder that has checkpoints of two roles, one of them unfinished."""
    import getpass

    folder = file_root / "runs" / getpass.getuser() / "ppo-math" / "run1"
    for name in ("actor/step-000002", "actor/step-000010", "critic/step-000010"):
        model_in(folder / "checkpoints" / name)
    (folder / "checkpoints/actor/step-000012").mkdir()
    (folder / "plan.json").write_text("{}")
    return folder


def test_a_trial_means_the_actors_newest_whole_checkpoint(trial: Path) -> None:
    found = find_model("ppo-math/run1")
    assert found.path == trial / "checkpoints/actor/step-000010"
    assert (found.name, found.role, found.step) == ("ppo-math/run1@10", "actor", 10)


def test_step_and_role_choose_another(trial: Path) -> None:
    assert find_model("ppo-math", step=2).step == 2
    assert find_model("ppo-math", role="critic").role == "critic"
    with pytest.raises(TrialError) as caught:
        find_model("ppo-math", step=12)
    assert "2, 10" in caught.value.fix
    with golden.raises(TrialError) as caught:
        find_model("ppo-math", role="actr")
    assert "actor" in caught.value.fix


def test_a_directory_of_a_model_is_itself(tmp_path: Path, file_root: Path) -> None:
    folder = model_in(tmp_path / "qwen")
    found = find_model(str(folder))
    assert (found.path, found.name, found.trial) == (folder, "qwen", None)
    with golden.raises(ConfigError):
        find_model(str(folder), step=2)


def test_neither_is_told_with_both(file_root: Path) -> None:
    with golden.raises(NoSuchTrial):
        find_model("nothing")


def test_a_trial_that_has_saved_nothing_is_told(trial: Path) -> None:
    (trial / "checkpoints").rename(trial / "elsewhere")
    with golden.raises(TrialError):
        find_model("ppo-math/run1")


def test_the_command_has_the_options_that_are_set_and_no_key() -> None:
    model = SavedModel(path=Path("/models/m"), name="m")
    options = {"port": 0, "https": True, "insecure": False, "dtype": None, "name": "other"}
    assert server_command(model, options)[1:] == [
        "-P",
        "-m",
        "realsys.policy_server.serve_model",
        *("/models/m", "--name", "other", "--port", "0", "--https"),
    ]


def test_a_server_needs_the_package_of_its_renderer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "find_spec", lambda name: None if name == "renderers" else object())
    assert server_environment("sk-1")["REALSYS_API_KEY"] == "sk-1"
    assert server_environment("", renderer="template")
    with golden.raises(ConfigError):
        server_environment("", renderer="qwen3")


def test_a_key_comes_from_a_file_or_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REALSYS_API_KEY", "sk-env")
    assert read_key(None) == "sk-env"
    file = tmp_path / "key"
    file.write_text("sk-file\n")
    assert read_key(file) == "sk-file"
    for content in ("", "two words", "a\nb"):
        file.write_text(content)
        with golden.raises(ConfigError):
            read_key(file)
    with golden.raises(ConfigError):
        read_key(tmp_path / "none")
