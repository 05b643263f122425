"""A tiny policy and a batch of two-turn answers, with what a plain loop says about them.

Every other answer has an observation in its middle: tokens that the policy did not write and is not
trained on. What stands there under the keys per token is junk.
"""

from dataclasses import replace

import torch
from estimators_named import estimator
from transformers import LlamaConfig, LlamaForCausalLM

from realsys.api.data import MicroBatchSpec
from realsys.api.model import FinetuneSpec, GenerationHyperparameters, Model, ModelName
from realsys.api.options import OptimizerOptions, PPOHyperparameters
from realsys.backends.fsdp import FSDPBackend
from realsys.data.sequence_sample import SequenceSample
from realsys.interfaces.ppo.ppo_actor import PPOActorInterface

torch.set_num_threads(1)
ADAMW = OptimizerOptions(lr=1e-3, weight_decay=0.01, eps=1e-5, gradient_clipping=0.5)
SPEC = FinetuneSpec(total_train_epochs=1, dataset_size=64, train_batch_size=4)
WHOLE, CUT = MicroBatchSpec(), MicroBatchSpec(max_tokens_per_mb=24)
JUNK = -77.0
PROMPT, OBSERVATION = 3, 2
# Two answers to each of four questions: tokens of the policy, before and after an observation.
TURNS = [(2, 3), (4, 0), (1, 2), (5, 0), (3, 1), (2, 0), (1, 1), (6, 0)]
IDS = list("abcd")
OLDEST = [2, 3, 3, 3, 1, 3, 3, 3]  # version of each answer's first token; the others' is 3


def policy():
    """Always the same weights."""
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        initializer_range=0.5,  # far from uniform, so that a wrong row is seen
    )
    return LlamaForCausalLM(config).eval()


def actor(version=3):
    """The policy in a training engine, after ``version`` steps."""
    model = Model(
        name=ModelName("actor"), module=policy(), tokenizer=None, device="cpu", dtype="float32"
    )
    model = FSDPBackend(optimizer=ADAMW).initialize(model, SPEC)
    model.version.global_step = version
    return model


def interface(**changes):
    """PPO without a critic, one minibatch, and no whitening unless asked for."""
    settings = {"max_staleness": changes.pop("max_staleness", None), "group_size": 2}
    ppo = PPOHyperparameters(
        gen=GenerationHyperparameters(max_new_tokens=8, temperature=0.8),
        advantage=estimator("dr_grpo"),
        adv_norm="none",
        ppo_n_minibatches=1,
        kl_ctl=0.0,
        max_reward_clip=100.0,
        early_stop_imp_ratio=None,
    )
    return PPOActorInterface(**vars(replace(ppo, **changes)), **settings)


def masks():
    """Per answer: True on the policy's tokens."""
    for first, second in TURNS:
        hole = OBSERVATION if second else 0
        yield torch.tensor([False] * PROMPT + [True] * first + [False] * hole + [True] * second)


def plain_logprobs(module, tokens):
    """Of all tokens at temperature 0.8; 0 at the first."""
    logits = module(input_ids=tokens[None]).logits[0, :-1] / 0.8
    found = torch.log_softmax(logits, -1).gather(1, tokens[1:, None])[:, 0]
    return torch.cat([torch.zeros(1), found])


@torch.no_grad()
def batch(*, shift=0.0, truncated=()):
    """Sampled by the policy itself, or by one whose log-probs differ by ``shift`` · a random number.

    Args:
        truncated: indices of answers that were cut.
    """
    generator = torch.Generator().manual_seed(1)
    module, every_mask = policy(), list(masks())
    tokens = [torch.randint(0, 40, mask.shape, generator=generator) for mask in every_mask]
    own = [plain_logprobs(module, x) for x in tokens]
    other = [x + shift * torch.randn(x.shape, generator=generator) for x in own]
    versions = [_versions(m, v) for m, v in zip(every_mask, OLDEST, strict=True)]
    mask_N = torch.cat(every_mask)
    lengths = [[len(x), len(y)] for x, y in zip(tokens[::2], tokens[1::2], strict=True)]
    per_token = {
        "packed_input_ids": torch.cat(tokens),
        "prompt_mask": ~mask_N,
        "packed_logprobs": torch.where(mask_N, torch.cat(other), JUNK),
        "packed_ref_logprobs": torch.where(mask_N, torch.cat(own), 2 * JUNK),
        "packed_prox_logprobs": torch.where(mask_N, torch.cat(own), 3 * JUNK),
        "packed_versions": torch.cat(versions),
    }
    rewards = torch.tensor([1.0, 0.0, 0.5, 2.0, 0.0, 1.0, 3.0, 0.0])
    cut = torch.tensor([i in truncated for i in range(len(TURNS))])
    ones = [[1, 1]] * len(IDS)
    return SequenceSample.from_tensors(
        IDS,
        {**dict.fromkeys(per_token, lengths), "rewards": ones, "seq_no_eos_mask": ones},
        {**per_token, "rewards": rewards, "seq_no_eos_mask": cut},
    )


def _versions(mask, oldest):
    versions = torch.where(mask, 3, -1)
    versions[mask.nonzero()[0]] = oldest
    return versions


def without(data, *keys):
    """The batch without these keys."""
    return data.select(data.keys - set(keys))


def weights_of(model):
    """Copies of a model's weights by name."""
    return {k: x.clone() for k, x in model.module.module.state_dict().items()}
