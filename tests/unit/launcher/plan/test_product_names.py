"""A preparation's product is used again only if all that makes it is as it was."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from launcher.plan import product_names
from launcher.plan.product_names import imported_sources, product_name
from launcher.submit.planning import make_plan
from realsys.api import registry
from realsys.api.basics import plugin_table
from realsys.api.experiment import ExperimentConfig
from realsys.api.model import (
    ModelAbstraction,
    ModelBackendAbstraction,
    ModelName,
    ModelShardID,
    ProcessTopology,
)
from realsys.api.worker_configs import ExperimentSaveEvalControl, ModelShard, ModelWorker
from realsys.trial import snapshot


@pytest.fixture(autouse=True)
def own_plugins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A test's registrations and modules end with it."""
    monkeypatch.setattr(plugin_table, "registered", {kind: {} for kind in registry.BUILTIN})
    monkeypatch.setattr(registry, "_entry_points", [])
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.startswith(("realsys_import_", "lab_")):
            del sys.modules[name]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The small files of a model's folder."""
    folder = tmp_path / "model"
    (folder / product_names.TEMPLATES).mkdir(parents=True)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / name).write_text("{}")
    (folder / product_names.TEMPLATES / "tools.jinja").write_text("{{ x }}")
    return folder


def config_of(model: Path) -> ExperimentConfig:
    shard = ModelShard(
        id=ModelShardID(model_name=ModelName("model"), topo=ProcessTopology()),
        model=ModelAbstraction("hf_causal_lm", {"path": str(model)}),
        backend=ModelBackendAbstraction("fsdp"),
    )
    return ExperimentConfig(
        exp_ctrl=ExperimentSaveEvalControl(),
        model_rpcs=(),
        model_worker=(ModelWorker(base_seed=1, shards=(shard,)),),
    )


@pytest.mark.parametrize(
    ("file", "counts"),
    [
        ("config.json", True),
        ("tokenizer.json", True),
        ("tokenizer_config.json", True),
        ("chat_template.jinja", True),
        ("additional_chat_templates/tools.jinja", True),
        ("merges.txt", True),  # a new one
        ("README.md", False),
        ("original.pth", False),
    ],
)
def test_the_small_files_of_a_model_make_another_product(
    model: Path, file: str, counts: bool
) -> None:
    before = product_name(config_of(model))
    assert product_name(config_of(model)) == before
    (model / file).write_text("changed")
    assert (product_name(config_of(model)) != before) == counts


def test_a_product_that_another_starts_from_counts_by_its_name(model: Path) -> None:
    config = config_of(model)
    before = product_name(config, products=[str(model)])
    (model / "config.json").write_text("changed")  # it was published meanwhile
    assert product_name(config, products=[str(model)]) == before
    assert product_name(config) != before


def test_code_that_computes_makes_another_product_and_other_code_does_not(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("realsys/models/hf.py", "experiments/task.py", "realsys/observability/x.py"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("1")
    monkeypatch.setattr(snapshot, "code_root", lambda: tmp_path)
    assert all(
        (Path(snapshot.__file__).parents[1] / n).is_dir() for n in product_names.COMPUTING_ROOMS
    )

    def name() -> str:
        snapshot._sources_digest.cache_clear()
        return product_name(config_of(model))

    before = name()
    (tmp_path / "realsys/observability/x.py").write_text("2")
    assert name() == before
    (tmp_path / "experiments/task.py").write_text("2")
    assert (after := name()) != before
    (tmp_path / "realsys/models/hf.py").write_text("2")
    assert name() not in (before, after)
    snapshot._sources_digest.cache_clear()


def test_a_resume_keeps_the_product_while_the_settings_are_the_same(model: Path) -> None:
    former = product_name(config_of(model))
    (model / "chat_template.jinja").write_text("changed")
    assert product_name(config_of(model), former=former) == former
    old = former.partition("-")[0]  # as older revisions named it
    assert product_name(config_of(model), former=old) == old
    changed = replace(config_of(model), dataset_keys=("x",))
    assert product_name(changed, former=former) != former


# ---- plug-ins ---------------------------------------------------------------------------------------


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


PLUGIN = {
    "mine.py": "import json, lab_used\nfrom lab_package import part\nfrom realsys.api import registry\n",
    "lab_used.py": "def late():\n    import lab_late\n",
    "lab_late.py": "X = 1\n",
    "lab_package/__init__.py": "",
    "lab_package/part.py": "from .deep.end import X\nfrom . import beside\n",
    "lab_package/beside.py": "",
    "lab_package/deep/__init__.py": "",
    "lab_package/deep/end.py": "X = 1\n",
    "lab_unused.py": "X = 1\n",
}


def test_the_users_modules_behind_a_plug_in_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, PLUGIN)
    monkeypatch.syspath_prepend(str(tmp_path))
    mine = str(tmp_path / "mine.py")
    registry.load_plugins([mine])
    found = [str(path.relative_to(tmp_path)) for path in imported_sources([mine])]
    assert found[0] == "mine.py"
    assert sorted(found) == sorted(set(PLUGIN) - {"lab_unused.py"})
    assert found == [str(path.relative_to(tmp_path)) for path in imported_sources([mine])]


LATE = {
    "mine.py": "def late():\n    from lab_far.room import part\n    import lab_space.inner.end\n",
    "lab_far/__init__.py": "raise RuntimeError('a plan runs none of this')\n",
    "lab_far/room/__init__.py": "from . import beside\n",
    "lab_far/room/part.py": "X = 1\n",
    "lab_far/room/beside.py": "import lab_far.near\n",
    "lab_far/near.py": "",
    "lab_space/inner/end.py": "",  # in packages without a file of their own
}


def test_a_package_that_only_a_function_imports_is_followed_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, {**LATE, "lab_far/unused.py": "", "lab_space/inner/unused.py": ""})
    monkeypatch.syspath_prepend(str(tmp_path))
    mine = str(tmp_path / "mine.py")
    found = [str(path.relative_to(tmp_path)) for path in imported_sources([mine])]
    assert sorted(found) == sorted(LATE)
    assert not {"lab_far", "lab_space"} & set(sys.modules)


def test_an_installed_plug_in_counts_with_its_own_package_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "site-packages"
    write(
        place,
        {
            "lab_plugin/__init__.py": "from lab_plugin import rules\n",
            "lab_plugin/rules.py": "import lab_other\n",
            "lab_other.py": "",
            "lab-1.dist-info/METADATA": "Name: lab\nVersion: 1\n",
            "lab-1.dist-info/entry_points.txt": "[realsys.plugins]\nlab = lab_plugin\n",
        },
    )
    monkeypatch.syspath_prepend(str(place))
    registry.load_plugins()
    assert [path.relative_to(place).as_posix() for path in imported_sources(())] == [
        "lab_plugin/__init__.py",
        "lab_plugin/rules.py",
    ]


TRANSFORM = """
from realsys.api.registry import register_transform
import lab_words
def tr(record): return {**record, "prompt": lab_words.words(record["prompt"])}
register_transform("tr", tr)
"""


def test_three_plans_with_edited_code_have_three_products(
    file_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one process, as a notebook makes them."""
    monkeypatch.syspath_prepend(str(tmp_path))
    helper, plugin = tmp_path / "lab_words.py", tmp_path / "tr.py"
    helper.write_text("def words(text): return text\n")

    def product() -> str:
        phase = make_plan("ppo-math", [], trial="t", imports=[str(plugin)]).phases[0]
        return str(phase.publish).rpartition("/")[2]

    edits: list[Callable[[], object]] = [
        lambda: plugin.write_text(TRANSFORM),
        lambda: plugin.write_text(TRANSFORM.replace('"prompt"])', '"prompt"] + "!")')),
        lambda: helper.write_text("def words(text): return text.upper()\n"),
    ]
    found = []
    for edit in edits:
        edit()
        found.append(product())
    assert product() == found[-1]
    assert len(set(found)) == 3
    assert len({name.partition("-")[0] for name in found}) == 1
