"""Checks that config, weights and tokenizer of a directory belong together and can be run. No torch.

For the plan, and for the worker that loads the model: ``check_hf_directory`` checks that files are
complete, this module that config, weights and tokenizer are of one model. Transformers would report such
faults only minutes after the job has started, or not at all: layers beyond config.json's count are
ignored, missing ones initialised at random.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from realsys.api.errors import CheckpointError, ConfigError, did_you_mean
from realsys.api.options import ALL_LINEAR
from realsys.models.hf_directory import check_hf_directory, read_config, weight_shapes
from realsys.models.shape import FAMILIES, Weight, has_experts, linear_names, shape_of

ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional")
MEGATRON_ROPE_TYPES = ("default", "linear", "llama3")
# Models whose row state is not a list of keys and values, from which generation selects rows.
_RECURRENT_KEYS = (
    "ssm_state_size", "state_size", "mamba_d_state", "conv_L_cache", "linear_conv_kernel_dim",
    "lru_width", "hybrid_override_pattern", "mamba_d_ssm",
)  # fmt: skip
_MAMBA_KEYS = (
    "ssm_state_size", "state_size", "mamba_d_state", "mamba_d_ssm", "hybrid_override_pattern",
)  # fmt: skip
_CONV1D_TYPES = ("gpt2", "openai-gpt", "imagegpt", "decision_transformer")
_RECURRENT_TYPES = ("rwkv", "xlstm", "recurrent_gemma")
_ROW_SELECTING_TYPES = ("minimax",)  # linear attention whose cache supports row selection
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks|block)\.(\d+)\.")
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight")
_FIX = "check that config.json belongs to these weights, or copy the directory again"


def check_consistency(path: str | Path, *, critic: bool = False) -> None:
    """Raises the first of ``consistency_faults``, a CheckpointError."""
    for fault in consistency_faults(path, critic=critic):
        raise fault


def consistency_faults(path: str | Path, *, critic: bool = False) -> Iterator[CheckpointError]:
    """Yields inconsistencies between the files of a complete directory.

    Args:
        critic: the model gets a value head; it need not be in the files.
    Raises:
        CheckpointError: as ``check_hf_directory``.
    """
    root = Path(path)
    facts = check_hf_directory(root, need_tokenizer=False)
    config, where = read_config(root), str(root / "config.json")
    if (problem := _kind_problem(config)) is not None:
        yield CheckpointError(problem[0], where=where, fix=problem[1])
        return
    shapes = weight_shapes(root)
    layers = {int(m[1]) for name in shapes if (m := _LAYER.search(name))}
    if layers and facts.num_layers:
        there = max(layers) + 1
        # Some models store these after the others
        further = config.get("num_nextn_predict_layers") or 0
        is_alone = "text_config" not in config  # else the other parts have layers, too
        if there not in (facts.num_layers, facts.num_layers + further) and (
            is_alone or facts.num_layers > there
        ):
            yield CheckpointError(
                f"config.json says {facts.num_layers} layers, the weights have {there}",
                where=where,
                fix=_FIX,
            )
            return
    yield from _shape_faults(config, shapes, critic=critic, where=where)


def _kind_problem(config: Mapping[str, Any]) -> tuple[str, str] | None:
    """Returns why the model can't be loaded and what to do; None if it can."""
    kind = str(config.get("model_type") or "")
    if config.get("is_encoder_decoder"):
        return f"an encoder-decoder ({kind})", "give a decoder-only language model"
    names = config.get("architectures") or []
    if names and str(names[0]).endswith(("ForMaskedLM", "ForPreTraining", "ForQuestionAnswering")):
        return f"{names[0]} is not a causal language model", "give a decoder-only language model"
    if (quantized := config.get("quantization_config")) is not None:
        method = quantized.get("quant_method", "") if isinstance(quantized, dict) else ""
        return (
            f"its weights are quantized ({method or 'quantization_config'}), and can't be trained",
            "give the model's unquantized weights",
        )
    if not kind:
        return "config.json has no model_type", "give the directory that save_pretrained wrote"
    if _is_unknown(kind):
        own = " and needs its own code, which realsys never runs" if config.get("auto_map") else ""
        return (
            f"the installed transformers has no model_type {kind!r}{own}",
            "check the spelling, or install a transformers that has it",
        )
    return None


def _is_unknown(kind: str) -> bool:
    """True if transformers, which is not imported here, has no folder for a model type."""
    spec = importlib.util.find_spec("transformers")
    if spec is None or not spec.submodule_search_locations:
        return False
    models = Path(next(iter(spec.submodule_search_locations))) / "models"
    words = re.split(r"[_-]", kind)  # gemma3_text is in gemma3
    names = ["_".join(words[:n]) for n in range(1, len(words) + 1)]
    return (models / "llama").is_dir() and not any((models / n).is_dir() for n in names)


def _shape_faults(
    config: dict[str, Any], shapes: Mapping[str, list[int]], *, critic: bool, where: str
) -> Iterator[CheckpointError]:
    """Yields missing weights and wrong shapes; for unsupported families checks only the embedding."""
    text = {**config, **(config.get("text_config") or {})}
    try:
        if config.get("model_type") not in FAMILIES:
            raise ConfigError("another family", where=where, fix="")
        wanted = shape_of(config, critic=critic).weights()
    except ConfigError:
        vocabulary = text.get("vocab_size")
        for name, shape in shapes.items():
            if (
                name.endswith(_EMBEDDINGS)
                and vocabulary
                and len(shape) == 2
                and shape[0] != vocabulary
            ):
                yield _misfit([(name, shape, [vocabulary, shape[1]])], where)
        return
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        what = f"config.json has a missing or invalid size: {type(error).__name__} {error}"
        yield CheckpointError(what, where=where, fix=_FIX)
        return
    bare = "embed_tokens.weight" in shapes  # saved without a head
    found = {
        f"model.{n}" if bare and not n.startswith("lm_head") else n: s for n, s in shapes.items()
    }
    heads = ("lm_head.", "score.", "classifier.")
    body = [w for w in wanted if not (critic and w.name.startswith(heads))]
    missing = [w.name for w in body if w.name not in found]
    if missing:
        names = ", ".join(missing[:3]) + (", …" if len(missing) > 3 else "")
        yield CheckpointError(f"{len(missing)} weights are missing: {names}", where=where, fix=_FIX)
    others = [(w.name, found[w.name], list(w.shape)) for w in body if w.name in found]
    if others := [o for o in others if o[1] != o[2]]:
        yield _misfit(others, where)


def _misfit(others: list[tuple[str, list[int], list[int]]], where: str) -> CheckpointError:
    name, found, wanted = others[0]
    more = f" (and {len(others) - 1} more)" if len(others) > 1 else ""
    return CheckpointError(
        f"{name} has shape {found}, config.json implies {wanted}{more}", where=where, fix=_FIX
    )


# ---- support by backends ---------------------------------------------------------------------------


def backend_faults(path: str | Path, *, backend: str, generates: bool) -> Iterator[CheckpointError]:
    """Yields features of a model that the backend, or generation, does not support.

    Raises:
        CheckpointError: config.json can't be read.
    """
    root = Path(path)
    config, where = read_config(root), str(root / "config.json")
    kind = str(config.get("model_type") or "")
    rope = rope_type(config)
    if rope not in ROPE_TYPES:
        fix = did_you_mean(rope, ROPE_TYPES)
        yield CheckpointError(f"no rope type {rope!r}", where=where, fix=fix)
    elif backend == "megatron" and rope not in MEGATRON_ROPE_TYPES:
        yield CheckpointError(
            f"backend megatron has no rope type {rope!r}",
            where=where,
            fix="use backend=fsdp, which runs the Hugging Face module itself",
        )
    if generates and (found := recurrent_part(config)) is not None:
        yield CheckpointError(
            f"{kind} has {found}: its state can't be split between answers, so our engine makes none of it",
            where=where,
            fix="use a model with attention layers only; or servers that can: schedule=async "
            "schedule.server_backend=sglang (or vllm), with task.eval_size=0 and auto_eval=false",
        )


def rope_type(config: Mapping[str, Any]) -> str:
    """Returns the type of rotary position embedding; ``default`` if the config has none."""
    text = {**config, **(config.get("text_config") or {})}
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        return str(rope)
    found = str(rope.get("rope_type") or rope.get("type") or "default")
    return {"su": "longrope", "mrope": "default"}.get(found, found)  # older names


def recurrent_part(config: Mapping[str, Any]) -> str | None:
    """Describes a model's recurrent state other than keys and values; None if it has none."""
    text = {**config, **(config.get("text_config") or {})}
    kind = str(text.get("model_type") or "")
    if kind in _ROW_SELECTING_TYPES:
        return None
    kinds = [str(k) for k in text.get("layer_types") or ()]
    others = [k for k in kinds if "attention" not in k or k == "linear_attention"]
    if others:
        return f"layers of kind {others[0]}"
    if kind in _RECURRENT_TYPES or any(text.get(key) for key in _RECURRENT_KEYS):
        return "recurrent layers"
    return None


def lora_fault(path: str | Path, targets: tuple[str, ...]) -> ConfigError | None:
    """Returns an error if no layer of the model matches a target of the adapters.

    Raises:
        CheckpointError: the weights' headers can't be read.
    """
    shapes, config = weight_shapes(path), read_config(Path(path))
    layers = linear_names(Weight(name, tuple(shape)) for name, shape in shapes.items())
    text = {**config, **(config.get("text_config") or {})}
    kind = str(text.get("model_type") or "")
    others = "layers of transformers' class Conv1D" if kind in _CONV1D_TYPES else ""
    if any(text.get(key) for key in _MAMBA_KEYS):
        others = "Mamba layers, which read some weights past their adapters"
    if others:
        return ConfigError(
            f"adapters are for linear layers, and {kind} has {others}",
            where="lora.rank",
            fix="leave it out, which trains the whole model, or use another model",
        )
    for target in targets if ALL_LINEAR not in targets else ():
        if target not in layers:
            mixed = " that can have an adapter beside a mixture's experts" * has_experts(shapes)
            return ConfigError(
                f"the model has no linear layer {target!r}{mixed}",
                where="lora.target_modules",
                fix=f"{did_you_mean(target, layers)}; {ALL_LINEAR} means all that can",
            )
    return None
