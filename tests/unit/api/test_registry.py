"""Plug-ins by name: what is built in exists, what is unknown comes with the nearest name."""

import ast
import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path

import golden
import pytest

from realsys.api import registry
from realsys.api.basics import plugin_table
from realsys.api.errors import ConfigError, UnknownName
from realsys.api.model import (
    DatasetAbstraction,
    ModelAbstraction,
    ModelBackendAbstraction,
    ModelInterfaceAbstraction,
)


@pytest.fixture(autouse=True)
def empty_tables(monkeypatch):
    """A test's own registrations end with it."""
    monkeypatch.setattr(plugin_table, "registered", {kind: {} for kind in registry.BUILTIN})
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.startswith("realsys_import_"):
            del sys.modules[name]


@dataclass
class Thing:
    size: int = 1


BUILTINS = [
    pytest.param(kind, name, target, id=f"{kind} {name}")
    for kind, table in registry.BUILTIN.items()
    for name, target in table.items()
]


@pytest.mark.thorough
@pytest.mark.parametrize(("kind", "name", "target"), BUILTINS)
def test_everything_built_in_is_in_the_module_that_its_text_names(kind, name, target):
    """Read, not imported: a login node has no torch."""
    module, _, attribute = target.partition(":")
    spec = importlib.util.find_spec(module)
    assert spec is not None, module
    tree = ast.parse(Path(spec.origin).read_text())
    defined = {getattr(node, "name", None) for node in tree.body}
    assert attribute in defined


def test_a_registered_thing_is_made_by_its_abstraction():
    registry.register_interface("mine", Thing)
    registry.register_backend("mine", Thing)
    registry.register_dataset("mine", lambda tokenizer, seed, size: (tokenizer, seed, size))
    registry.register_model("mine", lambda name, width: (name, width))
    assert registry.make_interface(ModelInterfaceAbstraction("mine", {"size": 3})) == Thing(3)
    assert registry.make_backend(ModelBackendAbstraction("mine")) == Thing(1)
    assert registry.make_dataset(
        DatasetAbstraction("mine", {"size": 2}), tokenizer="t", seed=7
    ) == ("t", 7, 2)
    assert registry.make_model(ModelAbstraction("mine", {"width": 4}), name="a") == ("a", 4)


def test_agents_environments_rewards_and_experiments_have_tables_of_their_own():
    registry.register_agent("x", Thing)
    registry.register_environment("x", Thing)
    registry.register_experiment("x", Thing)
    registry.register_reward("x", len)
    assert registry.make_agent("x", size=2) == Thing(2)
    assert registry.make_environment("x") == Thing()
    assert registry.make_experiment("x", size=5) == Thing(5)
    assert registry.find_reward("x") is len


def test_an_experiment_that_is_built_in_is_found():
    assert registry.find("experiment", "sft-math").__name__ == "sft_math"


def test_an_unknown_name_comes_with_the_nearest():
    with golden.raises(UnknownName) as refused:
        registry.find("interface", "ppo_acter", where="MFC 'actor_train'")
    assert refused.value.where == "MFC 'actor_train'"
    assert "'ppo_actor'" in refused.value.fix


def test_check_imports_nothing():
    before = set(sys.modules)
    assert registry.check("backend", "fsdp", where="x") is None
    assert isinstance(registry.check("backend", "fsdq", where="x"), UnknownName)
    assert set(sys.modules) == before


def test_names_are_built_ins_and_ones_own():
    registry.register_backend("aaa", Thing)
    assert registry.names("backend") == ["aaa", "fsdp", "inference", "megatron"]


def test_a_taken_name_is_refused_but_the_same_thing_again_is_fine():
    registry.register_interface("mine", Thing)
    registry.register_interface("mine", Thing)
    with golden.raises(ConfigError):
        registry.register_interface("mine", type("Other", (), {}))
    with golden.raises(ConfigError):
        registry.register_interface("ppo_actor", Thing)


@pytest.mark.parametrize("args", [{"sise": 3}, {"size": 1, "colour": 2}])
def test_arguments_that_it_does_not_take_are_told_by_name(args):
    registry.register_interface("mine", Thing)
    with golden.raises(ConfigError) as refused:
        registry.make_interface(ModelInterfaceAbstraction("mine", args))
    assert max(args, key=lambda a: a != "size") in refused.value.what


def test_a_missing_argument_is_told_by_name():
    registry.register_dataset("mine", lambda tokenizer, seed, path: path)
    with golden.raises(ConfigError):
        registry.make_dataset(DatasetAbstraction("mine"), tokenizer="t", seed=1)


def test_a_type_error_of_its_inside_is_not_blamed_on_the_arguments():
    """torch says "argument 'input' must be Tensor": the arguments of the abstraction are right."""

    def calls_torch():
        raise TypeError("linear(): argument 'input' must be Tensor, not str")

    registry.register_interface("mine", calls_torch)
    with golden.raises(TypeError):
        registry.make_interface(ModelInterfaceAbstraction("mine"))


# ---- plug-ins -------------------------------------------------------------------------------------

PLUGIN = """
from realsys.api.registry import register_reward
def one(**about): return 1.0
register_reward("one", one)
"""


def test_a_file_is_imported_once_and_registers(tmp_path):
    file = tmp_path / "my_rewards.py"
    file.write_text(PLUGIN)
    registry.load_plugins([str(file)])
    first = registry.find_reward("one")
    registry.load_plugins([str(file)])  # each worker and the launcher may ask again
    assert registry.find_reward("one") is first
    assert first(response="", answer="") == 1.0


def test_two_files_of_one_name_are_two_plug_ins(tmp_path):
    for folder, reward in (("a", "one"), ("b", "two")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine.py").write_text(PLUGIN.replace('"one"', f'"{reward}"'))
    files = [str(tmp_path / "a" / "mine.py"), str(tmp_path / "b" / "mine.py")]
    registry.load_plugins(files)
    built_in = registry.BUILTIN["reward"]
    assert registry.names("reward") == sorted([*built_in, "one", "two"])
    rules = [registry.find_reward(name) for name in ("one", "two")]
    assert [
        sys.modules[rule.__module__].__file__ for rule in rules
    ] == files  # as pickle finds them
    registry.load_plugins(files)
    assert [registry.find_reward(name) for name in ("one", "two")] == rules


EDITED = """
from realsys.api.registry import register_reward
def rule(**about): return {value}
register_reward("{name}", rule)
"""


def test_a_launcher_imports_an_edited_file_again_and_a_worker_does_not(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(EDITED.format(name="old", value=1.0))
    registry.load_plugins([str(file)])
    first = registry.find_reward("old")
    registry.load_plugins([str(file)], if_changed=True)
    assert registry.find_reward("old") is first
    file.write_text(EDITED.format(name="old", value=2.0))  # of the same size, in the same second
    registry.load_plugins([str(file)])
    assert registry.find_reward("old")() == 1.0
    registry.load_plugins([str(file)], if_changed=True)
    assert registry.find_reward("old")() == 2.0
    file.write_text(EDITED.format(name="new", value=3.0))
    registry.load_plugins([str(file)], if_changed=True)
    assert set(registry.names("reward")) - set(registry.BUILTIN["reward"]) == {"new"}
    file.write_text(EDITED.format(name="new", value="1 / 0"))  # fails when it is called alone
    registry.load_plugins([str(file)], if_changed=True)
    file.write_text("1 / 0\n")
    with golden.raises(ConfigError):
        registry.load_plugins([str(file)], if_changed=True)
    assert set(registry.names("reward")) - set(registry.BUILTIN["reward"]) == {"new"}


@pytest.mark.parametrize(
    "text",
    [
        "1 / 0",
        "def (:",
        "import no_such_module_here",
    ],
)
def test_a_file_that_fails_is_told_with_its_reason(tmp_path, text):
    file = tmp_path / "broken.py"
    file.write_text(text)
    with golden.raises(ConfigError) as refused:
        registry.load_plugins([str(file)])
    assert refused.value.where == f"--import {file}"
    assert "realsys_import_broken" not in sys.modules


def test_a_missing_file_and_a_missing_module_are_told(tmp_path):
    with golden.raises(ConfigError):
        registry.load_plugins([str(tmp_path / "nowhere.py")])
    with golden.raises(ConfigError):
        registry.load_plugins(["no_such_module_here"])


def test_a_file_mended_after_a_failure_can_be_imported(tmp_path):
    """A notebook or a shell completion asks again in the same process."""
    file = tmp_path / "mended.py"
    file.write_text(PLUGIN + "\n1 / 0\n")
    with golden.raises(ConfigError):
        registry.load_plugins([str(file)])
    file.write_text(PLUGIN + "\n")
    registry.load_plugins([str(file)])
    assert registry.find_reward("one")() == 1.0


def test_a_plug_ins_own_config_error_is_passed_on(tmp_path):
    file = tmp_path / "taken.py"
    file.write_text(PLUGIN.replace('"one"', '"math_verify"'))
    with golden.raises(ConfigError):
        registry.load_plugins([str(file)])


def test_entry_points_are_imported(tmp_path, monkeypatch):
    (tmp_path / "reward_package_for_a_test.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(str(tmp_path))
    package = tmp_path / "mine-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Name: mine\nVersion: 1.0\n")
    points = "[realsys.plugins]\nmine = reward_package_for_a_test:one\n"
    (package / "entry_points.txt").write_text(points)
    registry.load_plugins()
    assert registry.find_reward("one")() == 1.0
