"""Checks a Hugging Face model directory for completeness and reads its basic facts. No torch.

Used on a login node before jobs are submitted, and by hf.py before loading. Only names, sizes and
headers are read, so a directory of any size takes milliseconds. Standard library only: the header
of a safetensors file is 8 bytes of length (little endian) and that much JSON, the data follow.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from realsys.api.basics.bounded_files import parse_json, read_bounded_text, unreadable
from realsys.api.errors import CheckpointError
from realsys.models.shape import size_fault

WEIGHTS, WEIGHTS_INDEX = "model.safetensors", "model.safetensors.index.json"
_TOKENIZERS = (("tokenizer.json",), ("tokenizer.model",), ("vocab.json", "merges.txt"))
MAX_JSON_BYTES = 100_000_000  # of a header, as the safetensors library has it, or of an index
_COPY_AGAIN = "copy the directory again, whole"


@dataclass(frozen=True, kw_only=True)
class HFModelFacts:
    """Facts from config.json, the weights' headers and the tokenizer's files."""

    architecture: str  # class name, e.g. "LlamaForCausalLM"; "" if config.json has none
    model_type: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    tied_embeddings: bool
    num_params: int  # stored numbers; tied weights count once
    max_positions: int | None
    tensors: frozenset[str]  # names in the weight files


def check_hf_directory(path: str | Path, *, need_tokenizer: bool = True) -> HFModelFacts:
    """Checks the directory ``path`` and returns facts about its model.

    Raises:
        CheckpointError: a file is missing, incomplete or not JSON; names the file.
    """
    root = Path(path)
    if not root.is_dir():
        fix = "give the path of a model directory; names on the hub must be downloaded first"
        raise CheckpointError(f"no directory {root}", where=str(root), fix=fix)
    config = read_json(root / "config.json")
    tensors = _tensors(root)
    if need_tokenizer:
        _check_tokenizer(root)
    try:
        return _facts(config, tensors)
    except (TypeError, ValueError, AttributeError, LookupError) as error:
        what = f"config.json has a value that no model has: {error}"
        raise CheckpointError(what, where=str(root / "config.json"), fix=_COPY_AGAIN) from None


def safetensors_shapes(file: Path) -> dict[str, list[int]]:
    """Reads the name and shape of each tensor in ``file``, and checks its size against its header.

    Raises:
        CheckpointError: the file is missing, too short or too long, or its header is not JSON.
    """
    if not file.is_file():
        raise CheckpointError(f"{file.name} is missing", where=str(file), fix=_COPY_AGAIN)
    found = file.stat().st_size
    with file.open("rb") as stream:
        header_bytes = int.from_bytes(stream.read(8), "little")
        if found < 8 + header_bytes:
            raise _wrong_size(file, expected=8 + header_bytes, found=found, least=True)
        if header_bytes > MAX_JSON_BYTES:
            what = f"{file.name} says that its header has {header_bytes} bytes"
            raise CheckpointError(what, where=str(file), fix=_COPY_AGAIN)
        text = stream.read(header_bytes)
    try:
        header = parse_json(text)
        header.pop("__metadata__", None)
        data_bytes = max((t["data_offsets"][1] for t in header.values()), default=0)
        shapes = {name: [int(n) for n in t["shape"]] for name, t in header.items()}
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        what = f"{file.name} has no readable safetensors header ({error!r})"
        raise CheckpointError(what, where=str(file), fix=_COPY_AGAIN) from None
    if found != 8 + header_bytes + data_bytes:
        raise _wrong_size(file, expected=8 + header_bytes + data_bytes, found=found)
    return shapes


def weight_files(path: str | Path) -> dict[str, Path]:
    """Maps the name of each weight to the safetensors file that holds it.

    Raises:
        CheckpointError: as ``check_hf_directory``.
    """
    root = Path(path)
    if (root / WEIGHTS).is_file():
        return dict.fromkeys(safetensors_shapes(root / WEIGHTS), root / WEIGHTS)
    index = read_json(root / WEIGHTS_INDEX)["weight_map"]
    return {name: root / file for name, file in index.items()}


def weight_shapes(path: str | Path) -> dict[str, list[int]]:
    """Maps the name of every weight in the directory to its shape.

    Raises:
        CheckpointError: as ``check_hf_directory``.
    """
    return _tensors(Path(path))


def read_config(path: str | Path) -> dict[str, Any]:
    """Reads ``config.json`` of the directory.

    Raises:
        CheckpointError: as ``check_hf_directory``.
    """
    return read_json(Path(path) / "config.json")


def _wrong_size(file: Path, *, expected: int, found: int, least: bool = False) -> CheckpointError:
    state = "half-written" if found < expected else "longer than its header says"
    return CheckpointError(
        f"{file.name} is {state}: "
        f"expected {'at least ' if least else ''}{expected} bytes, found {found}",
        where=str(file),
        fix=_COPY_AGAIN,
    )


def read_json(file: Path) -> dict[str, Any]:
    """Reads a JSON object; raises CheckpointError if the file is missing, damaged or no object."""
    if not file.is_file():
        fix = "give the directory that save_pretrained wrote"
        raise CheckpointError(f"{file.name} is missing", where=str(file), fix=fix)
    try:
        content = parse_json(read_bounded_text(file, max_bytes=MAX_JSON_BYTES))
    except (OSError, ValueError) as error:
        what = f"{file.name} {unreadable(error)}"
        raise CheckpointError(what, where=str(file), fix=_COPY_AGAIN) from None
    if not isinstance(content, dict):
        what = f"{file.name} holds a {type(content).__name__}, not an object"
        raise CheckpointError(what, where=str(file), fix=_COPY_AGAIN)
    return content


def _tensors(root: Path) -> dict[str, list[int]]:
    if (root / WEIGHTS).is_file():
        return safetensors_shapes(root / WEIGHTS)
    if (root / WEIGHTS_INDEX).is_file():
        return _sharded_tensors(root)
    if pickled := sorted(f.name for f in root.glob("*.bin")):
        raise CheckpointError(
            f"weights are pickled only ({', '.join(pickled[:3])}); pickles can run code",
            where=str(root),
            fix="convert it once where you trust it: from_pretrained, then save_pretrained",
        )
    fix = "give the directory that save_pretrained wrote"
    what = f"no weights: neither {WEIGHTS} nor {WEIGHTS_INDEX}"
    raise CheckpointError(what, where=str(root), fix=fix)


def _sharded_tensors(root: Path) -> dict[str, list[int]]:
    weight_map = read_json(root / WEIGHTS_INDEX).get("weight_map")
    weight_map = weight_map if isinstance(weight_map, dict) else {}
    names = list(weight_map.values())
    if not names or not all(
        isinstance(n, str) and "\0" not in n and Path(n).name == n for n in names
    ):
        what = f"{WEIGHTS_INDEX} has no weight_map of file names"
        raise CheckpointError(what, where=str(root / WEIGHTS_INDEX), fix=_COPY_AGAIN)
    shards = {name: safetensors_shapes(root / name) for name in sorted(set(weight_map.values()))}
    if lost := [key for key, shard in weight_map.items() if key not in shards[shard]]:
        where = str(root / weight_map[lost[0]])
        what = f"{len(lost)} tensors are not in the shard the index names, e.g. {lost[0]}"
        raise CheckpointError(what, where=where, fix=_COPY_AGAIN)
    return {key: shards[shard][key] for key, shard in weight_map.items()}


def has_tokenizer(path: str | Path) -> bool:
    """Says whether a tokenizer's files are in the directory."""
    return any(all((Path(path) / f).is_file() for f in files) for files in _TOKENIZERS)


def _check_tokenizer(root: Path) -> None:
    if not has_tokenizer(root):
        choices = ", ".join(" + ".join(files) for files in _TOKENIZERS)
        what = f"no tokenizer: none of {choices}"
        fix = "save the tokenizer into the model's directory (tokenizer.save_pretrained)"
        raise CheckpointError(what, where=str(root), fix=fix)


def _facts(config: dict[str, Any], tensors: dict[str, list[int]]) -> HFModelFacts:
    if (fault := size_fault(config)) is not None:
        raise ValueError(fault)
    text = {**config, **(config.get("text_config") or {})}  # nested config of a multimodal model

    def number(*names: str) -> int:
        return next((int(text[n]) for n in names if text.get(n) is not None), 0)

    heads = number("num_attention_heads", "n_head")
    tied_by_default = text.get("model_type") in ("gpt2",)  # omitted in this family's config.json
    return HFModelFacts(
        architecture=(config.get("architectures") or [""])[0],
        model_type=config.get("model_type", ""),
        vocab_size=number("vocab_size"),
        hidden_size=number("hidden_size", "n_embd"),
        num_layers=number("num_hidden_layers", "n_layer"),
        num_heads=heads,
        num_kv_heads=number("num_key_value_heads") or heads,
        tied_embeddings=bool(text.get("tie_word_embeddings", tied_by_default)),
        num_params=sum(math.prod(shape) for shape in tensors.values()),
        max_positions=number("max_position_embeddings", "n_positions") or None,
        tensors=frozenset(tensors),
    )
