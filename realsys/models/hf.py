"""Loads Hugging Face directories into modules and writes modules to such directories.

Nothing is downloaded and no code from a directory is run (``trust_remote_code`` is off). Files are
checked first (hf_directory.py), and missing weights, which transformers would initialise at random with
a warning, are an error. Dropout is off in every module loaded: otherwise a policy's probabilities would
differ from those that it sampled with.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    AutoTokenizer,
    GenerationConfig,
)
from transformers.utils import logging as hf_logging

from realsys.api.errors import CheckpointError, RealsysError
from realsys.data.sources.chat_tokens import PromptTokenizer
from realsys.models.hf_directory import check_hf_directory, weight_shapes
from realsys.models.load_errors import explain_load_error
from realsys.models.skeleton import (
    converts,
    duplicated_ties,
    make_memory,
    skeleton,
    stored_names,
    unused_names,
)
from realsys.models.tokenizer_files import TokenizerFiles
from realsys.models.weight_files import WeightFiles
from realsys.models.weight_writer import MAX_FILE_BYTES, WeightSpec, can_write, write_weights

logger = logging.getLogger(__name__)

_LOCAL = {"local_files_only": True, "trust_remote_code": False}
_CRITIC_HEADS = ("score", "classifier")  # name of the head, by model family
_LM_HEADS = ("lm_head.", "embed_out.")
_HEAD_NOT_USED = "critic head of the checkpoint not used path=%s init_head=zero"


@dataclass(frozen=True)
class StreamedWeights:
    """Full weights that are produced one by one, with their specs known in advance, in the same order."""

    kinds: Mapping[str, WeightSpec]
    weights: Iterable[tuple[str, Tensor]]


# A skeleton, and the names of its weights in the files.
Skeleton = tuple[nn.Module, Mapping[str, str]]


def load_hf_config(path: str | Path) -> Any:
    """Loads the ``PretrainedConfig`` in ``path``."""
    with _as_checkpoint_error(path):
        return AutoConfig.from_pretrained(path, **_LOCAL)


def token_skipped_by_scores(config: Any) -> int | None:
    """Returns the token behind which transformers' sequence classifiers don't look for a sequence's score:
    their padding, even where it is the end token. None: scores are read at the last token, as of models
    with a value for each token, which realsys saves.
    """
    kinds = getattr(config, "architectures", None) or ()
    if not any(kind.endswith("ForSequenceClassification") for kind in kinds):
        return None
    pad: int | None = getattr(config.get_text_config(), "pad_token_id", None)
    return pad


def load_tokenizer(path: str | Path) -> Any:
    """Loads the tokenizer in ``path``; it pads on the left, with the EOS token if it has no pad token.

    ``tokenizer.files`` are its ``TokenizerFiles``, which ``save_hf`` writes.
    """
    check_hf_directory(path)
    with _as_checkpoint_error(path):
        tokenizer = AutoTokenizer.from_pretrained(path, **_LOCAL)
        tokenizer.files = TokenizerFiles.read(Path(path), tokenizer)
    tokenizer.padding_side = "left"
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_causal_lm(path: str | Path, *, dtype: str = "float32", device: str = "cpu") -> nn.Module:
    """Loads the language model in ``path``, in evaluation mode.

    Args:
        dtype: torch name of the weights' dtype.
    Raises:
        CheckpointError: files or weights are missing, torn, or of another shape.
    """
    if (found := readable_skeleton(path, critic=False, dtype=dtype)) is not None:
        return _filled(found, path, device)
    module, missing = _load(AutoModelForCausalLM, path, dtype)
    _refuse_missing(missing, path)
    return module.to(device)


def load_critic(
    path: str | Path,
    *,
    dtype: str = "float32",
    device: str = "cpu",
    init_head: Literal["zero", "from_checkpoint"] = "zero",
) -> nn.Module:
    """Loads a model with one output per token (``.logits`` ``[B, T, 1]``), in evaluation mode.

    Args:
        path: a language model, a critic or a reward model.
        init_head: ``zero`` starts with values of 0, whatever ``path`` holds;
            ``from_checkpoint`` uses the head of a critic or reward model (a missing bias is 0).
    Raises:
        CheckpointError: as ``load_causal_lm``, or the checkpoint has no head.
    """
    found = readable_skeleton(
        path, critic=True, dtype=dtype, takes_head=init_head == "from_checkpoint"
    )
    if found is not None:
        if init_head == "zero" and any(n in weight_shapes(path) for n in _head_names(found[0])):
            logger.warning(_HEAD_NOT_USED, path)
        return _filled(found, path, device)
    module, missing = _load(AutoModelForTokenClassification, path, dtype, num_labels=1)
    name = next(n for n in _CRITIC_HEADS if hasattr(module, n))
    head, weight, bias = getattr(module, name), f"{name}.weight", f"{name}.bias"
    _refuse_missing(missing - {weight, bias}, path)
    if init_head == "from_checkpoint" and weight in missing:
        raise CheckpointError(
            f"no critic head: {weight} is missing",
            where=str(path),
            fix='use init_head="zero", or the directory of a critic or reward model',
        )
    if init_head == "zero" and weight not in missing:
        logger.warning(_HEAD_NOT_USED, path)
    zeroed = {weight, bias} if init_head == "zero" else missing
    with torch.no_grad():
        for key, parameter in head.named_parameters(prefix=name):
            if key in zeroed:
                parameter.zero_()
    return module.to(device)


def empty_model(
    path: str | Path, *, critic: bool = False, dtype: str = "float32", device: str = "cpu"
) -> nn.Module:
    """Makes the module with uninitialised weights, without reading any; a critic's as well."""
    module = hf_skeleton(path, critic=critic, dtype=dtype)
    make_memory(module, device)
    return module.to(device)


def hf_skeleton(path: str | Path, *, critic: bool, dtype: str) -> nn.Module:
    """Makes the model of ``path``, in evaluation mode, with weights that have shapes but no memory."""
    config = load_hf_config(path)
    auto: Any = AutoModelForCausalLM
    if critic:
        auto, config.num_labels = AutoModelForTokenClassification, 1
    with _quiet_transformers(), _as_checkpoint_error(path):
        module: nn.Module = skeleton(lambda: auto.from_config(config, dtype=getattr(torch, dtype)))
        if not critic:
            # Generation config with the end tokens
            module.generation_config = _generation_config(path)
    _disable_dropout(module)
    return module


def _generation_config(path: str | Path) -> Any:
    if (Path(path) / "generation_config.json").is_file():
        return GenerationConfig.from_pretrained(path, local_files_only=True)
    return GenerationConfig.from_pretrained(
        path, config_file_name="config.json", local_files_only=True, _from_model_config=True
    )


def end_token_ids(tokenizer: Any, generation_config: Any) -> list[int]:
    """Returns the tokenizer's end token, those that end turns of its chat template, with calls and without,
    and those of the generation config, ascending.

    Args:
        generation_config: a transformers ``GenerationConfig``, or None.
    """
    own = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
    ends = PromptTokenizer(tokenizer).stop_ids()
    return sorted({*own, *_listed_ends(generation_config), *ends})


def _listed_ends(generation_config: Any) -> list[int]:
    own = getattr(generation_config, "eos_token_id", None)
    several = own if isinstance(own, list | tuple) else [own]
    return [int(i) for i in several if i is not None]


def _end_turns(module: Any, tokenizer: Any) -> None:
    """Has whoever generates with a saved model stop where its turns end, as they did in training."""
    if tokenizer is None or not module.can_generate():
        return
    config = module.generation_config
    own, ends = _listed_ends(config), end_token_ids(tokenizer, config)
    if {*own} != {*ends}:
        config.eos_token_id = ends


def load_generation_config(path: str | Path) -> Any:
    """Loads the generation config that a model from the directory ``path`` would have."""
    try:
        return GenerationConfig.from_pretrained(path, local_files_only=True)
    except OSError:  # no such file: transformers derives them from the model's config
        return GenerationConfig.from_model_config(load_hf_config(path))


def readable_skeleton(
    path: str | Path, *, critic: bool, dtype: str, takes_head: bool = False
) -> Skeleton | None:
    """Makes an ``hf_skeleton`` and maps its weights to their names in the files, for reading one by one.

    Returns None if transformers itself must load the model: it renames or merges weights, keeps some in
    another dtype, or the directory is faulty, which it then reports.

    Args:
        takes_head: read a critic's head from the files; otherwise it is left out and starts at 0.
    """
    check_hf_directory(path, need_tokenizer=False)
    stored = weight_shapes(path)
    try:
        module = hf_skeleton(path, critic=critic, dtype=dtype)
    except CheckpointError:
        return None
    head = _head_names(module) if critic else []
    made = head[1:] if takes_head else head
    looked_at = {name: s for name, s in stored.items() if takes_head or name not in head}
    names = stored_names(module, looked_at, made=made, dtype=getattr(torch, dtype))
    if names is None or not _equal_where_tied(module, WeightFiles(path)):
        logger.info("model loaded whole by transformers path=%s", path)
        return None
    _warn_of_unused(unused_names(module, stored), path)
    return module, names


def _head_names(module: nn.Module) -> list[str]:
    """Names of the weight and bias of a critic's head."""
    name = next(n for n in _CRITIC_HEADS if hasattr(module, n))
    return [f"{name}.weight", f"{name}.bias"]


def _equal_where_tied(module: nn.Module, files: WeightFiles) -> bool:
    """True if weights that are tied in the module are equal in the files, if stored twice."""
    return all(
        files.are_equal(first, other)
        for first, *others in duplicated_ties(module, files.shapes)
        for other in others
    )


@torch.no_grad()
def _filled(found: Skeleton, path: str | Path, device: str) -> nn.Module:
    """Moves the skeleton to ``device`` and reads its weights one by one."""
    module, names = found
    make_memory(module, device)
    files = WeightFiles(path)
    with _as_checkpoint_error(path):
        for name, parameter in module.named_parameters():
            if name in names:
                parameter.copy_(files.window(names[name]))
            else:
                parameter.zero_()
    return module.to(device)


def save_hf(
    module: Any,
    tokenizer: Any,
    save_dir: str | Path,
    state_dict: Mapping[str, Tensor] | None = None,
    also: Callable[[Path], None] | None = None,
    *,
    weights: StreamedWeights | None = None,
) -> None:
    """Writes config, safetensors and tokenizer to ``save_dir``, completely or not at all.

    Written beside the target, flushed to disk and renamed into place. An existing directory is
    replaced; a crash between the two renames leaves it as ``.<name>.old``. Only one process at a
    time may write a target.

    Args:
        tokenizer: written as it was read, if ``load_tokenizer`` has read it; None writes no tokenizer.
        state_dict: full weights, if ``module`` holds only shards of them.
        also: called with the directory, to write further files into it.
        weights: full weights, each of which exists only while it is written; for modules that
            ``can_stream``. Tied weights are given once.
    """
    target = Path(save_dir)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial, old = (target.parent / f".{target.name}.{end}" for end in ("partial", "old"))
    shutil.rmtree(partial, ignore_errors=True)
    _end_turns(module, tokenizer)
    if weights is None:
        state_dict = untied(module, module.state_dict() if state_dict is None else state_dict)
        kinds = {name: WeightSpec.of(x) for name, x in state_dict.items()}
        if can_stream(module, kinds):
            weights = StreamedWeights(kinds, state_dict.items())
    with _quiet_transformers():
        if weights is None:
            # transformers lets only the job's first process write; the caller has chosen this process.
            module.should_save_on_this_rank = lambda is_main_process: True
            module.save_pretrained(partial, state_dict=state_dict)
        else:
            partial.mkdir(parents=True)
            _save_config(module, partial, weights.kinds)
            write_weights(partial, weights.kinds, weights.weights, max_bytes=MAX_FILE_BYTES)
        files: TokenizerFiles | None = getattr(tokenizer, "files", None)
        if files is not None and files.are_of(tokenizer):
            files.write(partial)
        elif tokenizer is not None:
            tokenizer.save_pretrained(partial)
    if also is not None:
        also(partial)
    for file in [*partial.rglob("*"), partial]:
        _fsync(file)
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)  # a non-empty folder can't be replaced by a rename
    partial.rename(target)
    _fsync(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def can_stream(module: Any, kinds: Mapping[str, WeightSpec]) -> bool:
    """True if weights of ``module`` can be written one by one: transformers merges none for saving."""
    return not converts(module) and can_write(kinds)


def _save_config(module: Any, folder: Path, kinds: Mapping[str, WeightSpec]) -> None:
    """Writes config and generation config as ``save_pretrained`` does."""
    floats = (kind.dtype for kind in kinds.values() if kind.dtype.is_floating_point)
    module.config.dtype = str(next(floats, module.dtype)).removeprefix("torch.")
    module.config.architectures = [type(module).__name__.removeprefix("FSDP")]
    module.config.save_pretrained(folder)
    if module.can_generate():
        module.generation_config.save_pretrained(folder)


def untied(module: nn.Module, state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Removes the second names of tied weights, which a gathered state dict holds as copies."""
    left_out = {*(getattr(module, "all_tied_weights_keys", None) or ())}
    left_out |= {*(getattr(module, "_keys_to_ignore_on_save", None) or ())}
    return {key: tensor for key, tensor in state_dict.items() if key not in left_out}


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _load(auto: Any, path: str | Path, dtype: str, **extra: Any) -> tuple[nn.Module, set[str]]:
    """Loads a module without dropout, and the names of weights missing in the files."""
    check_hf_directory(path, need_tokenizer=False)
    with _quiet_transformers(), _as_checkpoint_error(path):
        module, report = auto.from_pretrained(
            path,
            dtype=getattr(torch, dtype),
            use_safetensors=True,
            output_loading_info=True,
            **_LOCAL,
            **extra,
        )
    if errors := report["error_msgs"]:
        raise CheckpointError(
            f"{len(errors)} weights could not be read, first: {errors[0]}",
            where=str(path),
            fix="check that config.json belongs to these weights",
        )
    _warn_of_unused(sorted(report["unexpected_keys"]), path)
    _disable_dropout(module)
    _own_memory(module)
    return module.eval(), set(report["missing_keys"])


def _warn_of_unused(names: Iterable[str], path: str | Path) -> None:
    heads = (*_LM_HEADS, *(f"{n}." for n in _CRITIC_HEADS))
    if left := [name for name in names if not name.startswith(heads)]:
        logger.warning("weights not used path=%s count=%d keys=%s", path, len(left), left[:8])


def _refuse_missing(missing: set[str], path: str | Path) -> None:
    if missing:
        names = ", ".join(sorted(missing)[:8]) + (", …" if len(missing) > 8 else "")
        raise CheckpointError(
            f"{len(missing)} weights are missing: {names}",
            where=str(path),
            fix="check that config.json belongs to these weights, or copy the directory again",
        )


def _own_memory(module: nn.Module) -> None:
    """Copies weights that are views of the memory-mapped file.

    Rewriting that file would change or crash this process, and a weight's alignment in the file would
    affect the last bit of kernels' results.
    """
    for parameter in module.parameters():
        parameter.data = parameter.data.clone()


def _disable_dropout(module: nn.Module) -> None:
    for part in module.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
        if isinstance(getattr(part, "attention_dropout", None), float):
            setattr(part, "attention_dropout", 0.0)  # noqa: B010 - an attribute mypy can't see


@contextmanager
def _as_checkpoint_error(path: str | Path) -> Iterator[None]:
    """Turns exceptions of transformers into CheckpointErrors with a place and a remedy."""
    try:
        yield
    except RealsysError:
        raise
    except Exception as error:  # errors of transformers, tokenizers and huggingface_hub
        what, fix = explain_load_error(error)
        raise CheckpointError(what, where=str(path), fix=fix) from error


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Suppresses progress bars and the table of missing weights, which are checked here."""
    verbosity, bars = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        hf_logging.set_verbosity(verbosity)
        if bars:
            hf_logging.enable_progress_bar()
