"""GRPO by trl, started by ``bench_against_trl.py`` with the Python of trl's environment.

``trl_grpo.py MODEL QUESTIONS --steps 8 --prompts 64 --group 4 --longest 32`` prints the
times at which steps ended, as JSON.
"""

import argparse
import json
import os
import sys
import tempfile
import time

os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", WANDB_DISABLED="true")

import torch
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    TrainerCallback,
)
from trl import GRPOConfig, GRPOTrainer


def reward(completions, answer, **_):
    """As ``uniform_policy.digits``."""
    return [
        float(c[:3].strip() == a) + 0.01 * sum(x.isdigit() for x in c)
        for c, a in zip(completions, answer, strict=True)
    ]


class Ends(TrainerCallback):
    """Moments."""

    def __init__(self):
        self.moments = []

    def on_step_end(self, *_, **__):
        self.moments.append(time.time())


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("questions")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--prompts", type=int, required=True)
    parser.add_argument("--group", type=int, required=True)
    parser.add_argument("--longest", type=int, required=True)
    parser.add_argument("--shortest", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with open(args.questions) as lines:
        data = Dataset.from_list([json.loads(line) for line in lines])
    ends = Ends()
    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=args.prompts * args.group,
        num_generations=args.group,
        max_completion_length=args.longest,
        generation_kwargs={"min_new_tokens": args.shortest},
        max_steps=args.steps,
        learning_rate=1e-6,
        beta=0.0,
        num_iterations=1,
        logging_steps=1000,
        report_to="none",
        use_cpu=True,
        bf16=False,
        save_strategy="no",
        gradient_checkpointing=False,
        disable_tqdm=True,
    )
    GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32),
        reward_funcs=reward,
        args=config,
        train_dataset=data,
        processing_class=AutoTokenizer.from_pretrained(args.model),
        callbacks=[ends],
    ).train()
    sys.stdout.write("\n" + json.dumps(ends.moments) + "\n")


if __name__ == "__main__":
    main()
