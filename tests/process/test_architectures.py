"""Small models of many architectures answer, learn, are saved and adapted as transformers does it.

Those that differ in more than sizes; docs/models.md shows what is found of all, by hand
(tests/by_hand/acceptance/architectures.py).
"""

from __future__ import annotations

from pathlib import Path

import pytest
from architecture_checks import YES, checked, peft_takes
from architectures import ALIKE, ARCHITECTURES, make_model

from realsys.api.errors import ConfigError
from realsys.api.options import LoRAOptions
from realsys.backends.hf.lora import add_adapters
from realsys.models.consistency import lora_fault
from realsys.models.hf_directory import weight_shapes
from realsys.models.shape import Weight, linear_names

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name not in ALIKE])
def test_a_model_can_what_the_table_says(name: str, tmp_path: Path) -> None:
    found = checked(name, tmp_path)
    assert {column for column, said in found.items() if said != YES} == {
        *ARCHITECTURES[name].refused
    }


# Names of layers other than Llama's.
@pytest.mark.parametrize(
    "name", ["gpt_neox", "falcon", "phi3", "opt", "bloom", "modernbert-decoder"]
)
def test_all_linear_is_what_peft_takes_it_for(name: str, tmp_path: Path) -> None:
    module = make_model(name, tmp_path)
    files = [Weight(n, tuple(shape)) for n, shape in weight_shapes(tmp_path).items()]
    assert linear_names(files) == peft_takes(module)


@pytest.mark.parametrize("name", ["qwen2_moe", "deepseek_v3"])
def test_names_that_peft_takes_for_experts_are_refused(name: str, tmp_path: Path) -> None:
    module = make_model(name, tmp_path)
    targets = ("o_proj", "gate_proj")
    refused = lora_fault(tmp_path, targets)
    assert refused is not None
    assert "linear layer 'gate_proj'" in refused.what
    with pytest.raises(ConfigError, match="'gate_proj'"):
        add_adapters(module, LoRAOptions(rank=2, target_modules=targets), seed=1)
