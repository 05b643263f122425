"""Whole trials through the command line, on this machine's GPU: what a user would type first.

``python tests/by_hand/gpu/runs.py cuda|cpu FILE [NAME …]``; kit.py starts it. Each trial's last metrics
are its figures; all of them, and its logs, are put beside FILE. On the stand-in the same commands run small
and without a GPU.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))

from device import Device
from models import causal_lm, shape_of_qwen, shape_of_small

FIGURES = (
    "time/step_s",
    "perf/tokens_per_s",
    "critic/score/mean",
    "actor/grad_norm",
    "actor/first_minibatch/max_abs_log_ratio",
    "eval/accuracy",
)
Figures = dict[str, Any]
_WORDS_S = 10.0  # left of the part's time to tell how a trial was cut


def policy(folder: Path, device: Device) -> Path:
    """A Hugging Face directory: random weights in bfloat16, a tokenizer of bytes, and questions."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = ["<pad>", "<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    made = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<eos>", pad_token="<pad>")
    tokenizer.save_pretrained(folder)
    module = causal_lm(shape_of_small() if device.small else shape_of_qwen("0.5b"), device)
    module.config.eos_token_id, module.config.pad_token_id = 1, 0
    module.generation_config.eos_token_id = 1
    module.save_pretrained(folder)
    questions = [{"prompt": f"{i} + {i % 7} =", "answer": str(i + i % 7)} for i in range(512)]
    lines = "".join(json.dumps(question) + "\n" for question in questions)
    (folder / "questions.jsonl").write_text(lines)
    held_out = [json.dumps({"prompt": f"{i} + 8 =", "answer": str(i + 8)}) for i in range(16)]
    (folder / "held_out.jsonl").write_text("\n".join(held_out))
    return folder


def commands(folder: Path, device: Device) -> dict[str, list[str]]:
    """Name → what follows ``realsys launch``."""
    gpu = [] if device.small else ["scheduling.model_worker.gpu=1"]
    half = (
        []
        if device.small
        else ["scheduling.model_worker.gpu=0.5", "scheduling.generation_server.gpu=0.5"]
    )
    answer, steps, questions = (16, 2, 8) if device.small else (1024, 4, 32)
    own = [
        f"actor.path={folder}",
        f"task.path={folder}/questions.jsonl",
        f"task.eval_path={folder}/held_out.jsonl",
        "task.eval_size=16",
        f"train_bs_n_seqs={questions}",
        "actor.optimizer.lr=1e-6",
    ]
    return {
        # Random weights score 0: entropy alone trains, and all else is as in earnest.
        "grpo_half_a_billion": [
            *("grpo-math", *own, *gpu, "actor.dtype=bfloat16"),
            f"gen.max_new_tokens={answer}",
            f"exp_ctrl.benchmark_steps={steps}",
        ],
        "async_server_on_the_gpu": [
            *("grpo-math-async", *own, *half, "actor.dtype=bfloat16"),
            f"gen.max_new_tokens={answer // 4}",
            f"exp_ctrl.benchmark_steps={steps if device.small else 10}",
        ],
        "ppo_math": [
            *("ppo-math", *gpu),
            f"exp_ctrl.benchmark_steps={2 if device.small else 20}",
            *(["sft.exp_ctrl.benchmark_steps=2"] if device.small else []),
        ],
    }


def launched(arguments: list[str], root: Path, limit_s: float) -> Figures:
    """Runs one trial under the file root ``root``; its newest metrics.

    Raises:
        RuntimeError: it failed, with its last words, or took longer than ``limit_s``.
    """
    environment = {**os.environ, "REALSYS_FILE_ROOT": str(root)}
    command = [sys.executable, "-m", "launcher.cli.entry", "launch", *arguments]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            said, _ = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            process.kill()  # all of its processes end with it
            said, _ = process.communicate(timeout=30)
            raise RuntimeError(f"not done after {limit_s:.0f} s: {said[-400:]}") from None
    if process.returncode:
        raise RuntimeError(f"exit code {process.returncode}: {said[-600:]}")
    (newest,) = sorted(root.rglob("metrics.jsonl"), key=os.path.getmtime)[-1:]
    rows = [json.loads(line) for line in newest.read_text().splitlines()]
    last = rows[-1]
    return {"rows": len(rows), **{name: last[name] for name in FIGURES if name in last}}


def keep(root: Path, folder: Path, name: str) -> None:
    """Copies a trial's metrics, and the ends of its logs, out of its file root."""
    for number, metrics in enumerate(sorted(root.rglob("metrics.jsonl"), key=os.path.getmtime)):
        shutil.copy(metrics, folder / f"{name}-{number}-metrics.jsonl")
    with (folder / f"{name}-logs.txt").open("w") as file:
        for log in sorted(root.rglob("*.log")):
            file.write(f"##### {log.name}\n{log.read_text(errors='replace')[-20_000:]}\n")


def main(kind: str, file: str, *names: str) -> None:
    """The trials called ``names``, or all, one after another."""
    device, found = Device(kind), []
    until_s = float(os.environ.get("KIT_UNTIL_S", time.time() + 600))
    with tempfile.TemporaryDirectory() as folder:
        made = policy(Path(folder, "policy"), device)
        device.free_cache()
        launches = commands(made, device)
        for name in names or launches:
            begin, root = time.perf_counter(), Path(folder, name)
            said: Figures
            try:
                limit_s = until_s - time.time() - _WORDS_S
                said = {"ok": True, "figures": launched(launches[name], root, limit_s)}
            except Exception as error:
                said = {"ok": False, "error": f"{type(error).__name__}: {error}"[:900]}
            keep(root, Path(file).parent, name)
            seconds = round(time.perf_counter() - begin, 1)
            found.append({"part": name, "seconds": seconds, **said})
            sys.stdout.write(f"{json.dumps(found[-1])}\n")
            sys.stdout.flush()
            Path(file).write_text(json.dumps(found))


if __name__ == "__main__":
    torch.set_num_threads(2)
    main(*sys.argv[1:])
