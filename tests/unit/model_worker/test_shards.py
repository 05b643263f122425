"""A checkpoint's weights are read only with the tokenizer that they were trained with."""

from __future__ import annotations

import json
from pathlib import Path

import golden

from realsys.api.errors import CheckpointError
from realsys.api.model import (
    FinetuneSpec,
    ModelAbstraction,
    ModelBackendAbstraction,
    ModelName,
    ModelShardID,
    ParallelGroups,
    ProcessTopology,
)
from realsys.api.worker_configs import ModelShard, ModelWorker
from realsys.model_worker.shards import Shards

NAME = ModelName("model")
SPEC = FinetuneSpec(total_train_epochs=1, dataset_size=100, train_batch_size=10)


def shards_of(file: Path, words: str) -> Shards:
    """A model made from scratch, whose tokenizer is trained on a file of these words."""
    rows = [{"prompt": f"{words} {i}", "answer": words} for i in range(30)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    corpus = {"type_": "math_sft", "args": {"split": "train", "path": str(file), "eval_size": 2}}
    config = ModelWorker(
        shards=(
            ModelShard(
                id=ModelShardID(model_name=NAME, topo=ProcessTopology()),
                model=ModelAbstraction("tiny_llama", {"vocab_size": 300, "corpus": corpus}),
                backend=ModelBackendAbstraction("inference"),
            ),
        ),
        instantiate=(NAME,),
    )
    shards = Shards(config, device="cpu")
    shards.make_models({NAME: ParallelGroups()})
    shards.initialize(SPEC)
    return shards


def test_a_tokenizer_of_other_texts_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "words.jsonl"
    state = shards_of(file, "uranus").state_dict()
    shards_of(file, "uranus").load_state_dict(state, where="here")
    with golden.raises(CheckpointError):
        shards_of(file, "neptune").load_state_dict(state, where="here")


def test_a_checkpoint_of_before_did_not_know_it(tmp_path: Path) -> None:
    file = tmp_path / "words.jsonl"
    state = shards_of(file, "uranus").state_dict()
    del state["models"][str(NAME)]["vocabulary"]
    shards_of(file, "neptune").load_state_dict(state, where="here")
