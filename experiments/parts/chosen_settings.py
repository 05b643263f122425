"""Chooses settings for the model at hand, where neither user nor recipe gives a value. Pure.

The declared defaults suit models of up to ``SMALL_PARAMS`` weights, such as the built-in one, and stay for
those. For a larger one this file says what else to begin with. `realsys plan` prints what and why.

Sources:

learning rates  RL: 1e-6 from 1 B weights on, as verl's examples and TRL's ``GRPOConfig``; 3e-6
    below, as prime-rl for 0.6 B; 1e-5 below 0.3 B, measured with SmolLM2-135M (docs/configuration.md). The
    critic's is ten times the policy's (verl's PPO examples). Fine-tuning: 1e-5 (verl's SFT examples), 2e-5
    (TRL's ``SFTConfig``). A policy from preference pairs: as RL (1e-6, TRL's ``DPOConfig``). Adapters learn
    best at about ten times the rate of the whole model (Schulman et al., "LoRA Without Regret", 2025).
lengths         answers of 1024 tokens (verl's examples on GSM8K); half for models below 1 B, and half
    again without a chat template: such a model seldom ends an answer by itself.
batch           512 answers a step, in groups of 8 (TRL's ``num_generations``; verl has 5, DAPO 16). With a
    critic one answer a question (verl's PPO examples). On CPUs 64, in one update.
objective       of a model of one's own, of any size: no entropy bonus, and of GRPO and its kin no KL
    penalty, so no reference model (TRL's ``GRPOConfig``: beta 0; verl's ``actor``: entropy_coeff 0,
    use_kl_loss false). AdamW makes whole steps of any gradient, so that where answers score alike a
    bonus alone moves the weights at the whole rate.
memory          recomputed activations from 1 B weights on (verl's examples, all sizes); micro-batches of
    2048 tokens on CPUs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from realsys.api.experiment import ChosenSetting

SMALL_PARAMS = 10_000_000
# Of the built-in recipes for small models (recipes.py, sft.py); for a larger one they count as not given.
SMALL_LR, SMALL_CRITIC_LR, SMALL_SFT_LR, SMALL_ANSWER = 3e-4, 1e-3, 2e-3, 16
SMALL_PREFERENCE_LR = 3e-4
# Of the same recipes: their starting policy is made from scratch and fine-tuned on slips (recipes.py).
FROM_SCRATCH_KL, FROM_SCRATCH_ENTROPY = 0.01, 0.01
OF_RECIPES: dict[str, tuple[float, ...]] = {
    "actor.optimizer.lr": (SMALL_LR,),
    "critic.optimizer.lr": (SMALL_CRITIC_LR,),
    "model.optimizer.lr": (SMALL_SFT_LR, SMALL_PREFERENCE_LR),
    "gen.max_new_tokens": (SMALL_ANSWER,),
    "algorithm.entropy_coef": (FROM_SCRATCH_ENTROPY,),
    "algorithm.kl_ctl": (FROM_SCRATCH_KL,),
}
BILLION = 1_000_000_000
_RATES = (  # fewest weights, learning rate of RL, of fine-tuning
    (BILLION, 1e-6, 1e-5),
    (BILLION * 3 // 10, 3e-6, 2e-5),
    (0, 1e-5, 5e-5),
)
LORA_TIMES, CRITIC_TIMES = 10, 10
MOST_ANSWER = 1024
ANSWERS, ANSWERS_ON_CPUS, GROUP = 512, 64, 8
HELD_OUT, HELD_OUT_ON_CPUS, HELD_OUT_PART = 500, 64, 10
TOKENS_ON_CPUS = 2048


@dataclass(frozen=True, kw_only=True)
class StartingModel:
    """What is chosen by: number of weights, positions (0: unknown), whether it has a chat template."""

    params: int
    positions: int
    chats: bool

    @property
    def size(self) -> str:
        """``135 M weights``, ``7.62 B weights``."""
        unit, of = ("B", BILLION) if self.params >= BILLION else ("M", 1_000_000)
        return f"{self.params / of:.3g} {unit} weights"


@dataclass(frozen=True, kw_only=True)
class MeasuredQuestions:
    """Of a file: tokens of the longest question that was read, numbers of questions.

    Attributes:
        exact: all were counted, not a part of a large file.
        held_out: in a file of their own; None: they are taken from ``total``.
    """

    longest: int
    exact: bool
    total: int
    held_out: int | None = None


def chosen_for_rl(
    model: StartingModel,
    questions: MeasuredQuestions | None,
    *,
    gpus: bool,
    critic: bool,
    adapters: frozenset[str],
    group_size: int | None,
    max_prompt_len: int | None,
    min_new_tokens: int = 0,
) -> Iterator[ChosenSetting]:
    """Yields settings of reinforcement learning.

    Args:
        questions: those of a file; None: they are made, and not measured.
        adapters: roles of which adapters alone train.
        group_size: answers a question; None: to be chosen.
        max_prompt_len: longest question; None: to be chosen, by ``questions``.
    """
    trained = ("actor", "critic") if critic else ("actor",)
    for role in trained:
        yield _learning_rate(model, role, lora=role in adapters, critic=role == "critic")
    if max_prompt_len is None:
        assert questions is not None
        found = _longest_prompt(model, questions)
        max_prompt_len = int(found.value)
        yield found
    yield _longest_answer(model, max_prompt_len, least=min_new_tokens)
    if group_size is None:
        why = (
            "a critic says what to expect, no group does" if critic else "compared with each other"
        )
        group_size = 1 if critic else GROUP
        yield ChosenSetting(path="group_size", value=group_size, why=why)
    yield from _batch(questions, gpus=gpus, group_size=group_size)
    yield from _memory(model, trained, (*trained, "ref"), gpus=gpus)


def chosen_for_own_model(*, steers_entropy: bool, compares: bool) -> Iterator[ChosenSetting]:
    """Yields settings of the objective for a policy that is given, of any size.

    Args:
        steers_entropy: the bonus is steered towards a target, from where it stands.
        compares: there is no critic, and nothing else asks for a reference.
    """
    if not steers_entropy:
        why = "a model of your own; where answers score alike a bonus alone would move it"
        yield ChosenSetting(path="algorithm.entropy_coef", value=0.0, why=why)
    if compares:
        why = (
            "a model of your own, as published without a critic: saves the reference, 1/7 of a step"
        )
        yield ChosenSetting(path="algorithm.kl_ctl", value=0.0, why=why)


def chosen_for_sft(
    model: StartingModel, questions: MeasuredQuestions | None, *, gpus: bool, lora: bool
) -> Iterator[ChosenSetting]:
    """Yields settings of fine-tuning."""
    yield _learning_rate(model, "model", lora=lora, sft=True)
    yield from _sizes_of_answers(model, questions)
    yield from _memory(model, ("model",), ("model",), gpus=gpus)


def chosen_for_pairs(
    model: StartingModel,
    questions: MeasuredQuestions | None,
    *,
    gpus: bool,
    lora: bool,
    held: tuple[str, ...],
) -> Iterator[ChosenSetting]:
    """Yields settings of a policy's training on pairs: the learning rate of RL, the rest of fine-tuning.

    Args:
        held: roles of models: the policy's, and the reference's if there is one.
    """
    yield _learning_rate(model, "model", lora=lora)
    yield from _sizes_of_answers(model, questions)
    yield from _memory(model, ("model",), held, gpus=gpus)


def _sizes_of_answers(
    model: StartingModel, questions: MeasuredQuestions | None
) -> Iterator[ChosenSetting]:
    if questions is not None:
        prompt = _longest_prompt(model, questions)
        yield prompt
        answer = _longest_answer(replace(model, params=BILLION, chats=True), prompt.value, least=1)
        yield replace(answer, path="max_answer_len", why="a longer one is an error")


def _learning_rate(
    model: StartingModel, role: str, *, lora: bool, critic: bool = False, sft: bool = False
) -> ChosenSetting:
    rl, fine = next((rl, fine) for least, rl, fine in _RATES if model.params >= least)
    rate, why = (fine if sft else rl), model.size
    if critic:
        rate, why = rate * CRITIC_TIMES, f"{why}; a critic learns {CRITIC_TIMES} times as fast"
    if lora:
        rate, why = rate * LORA_TIMES, f"{why}; adapters take {LORA_TIMES} times the rate"
    return ChosenSetting(path=f"{role}.optimizer.lr", value=float(f"{rate:.3g}"), why=why)


def _longest_prompt(model: StartingModel, questions: MeasuredQuestions) -> ChosenSetting:
    """A power of two, with a quarter more where a part was counted, within the positions."""
    least = questions.longest if questions.exact else questions.longest * 5 // 4
    value = max(64, 1 << (least - 1).bit_length())
    if model.positions:
        value = max(min(value, model.positions // 2), questions.longest)
    counted = "" if questions.exact else " of those counted"
    why = f"the longest question{counted} has {questions.longest} tokens"
    return ChosenSetting(path="task.max_prompt_len", value=value, why=why)


def _longest_answer(model: StartingModel, prompt: int, *, least: int) -> ChosenSetting:
    value, reasons = MOST_ANSWER, [model.size]
    if model.params < BILLION:
        value //= 2
    if not model.chats:
        value //= 2
        reasons.append("no chat template")
    if 0 < model.positions - prompt < value:
        value = model.positions - prompt
        reasons = [f"{model.positions} positions less the prompt's {prompt}"]
    return ChosenSetting(path="gen.max_new_tokens", value=max(value, least), why=", ".join(reasons))


def _batch(
    questions: MeasuredQuestions | None, *, gpus: bool, group_size: int
) -> Iterator[ChosenSetting]:
    answers = ANSWERS if gpus else ANSWERS_ON_CPUS
    where = "" if gpus else " on CPUs"
    held_out, why = (HELD_OUT, "") if gpus else (HELD_OUT_ON_CPUS, "answered on CPUs")
    size, of = max(1, answers // group_size), f"{answers} answers a step{where}"
    if questions is not None:
        most = questions.held_out
        if most is None:
            most = questions.total // HELD_OUT_PART
        if most < held_out:
            why = f"of {questions.total} questions" if questions.held_out is None else "all"
            held_out = most
        left = questions.total - (held_out if questions.held_out is None else 0)
        if 0 < left < size:
            size, of = left, "all questions"
    yield ChosenSetting(path="train_bs_n_seqs", value=size, why=of)
    if why:
        yield ChosenSetting(path="task.eval_size", value=held_out, why=why)
    if not gpus:
        why = "so few answers make one update"
        yield ChosenSetting(path="algorithm.ppo_n_minibatches", value=1, why=why)


def _memory(
    model: StartingModel, trained: tuple[str, ...], held: tuple[str, ...], *, gpus: bool
) -> Iterator[ChosenSetting]:
    for role in held if not gpus else ():
        why = "on CPUs; a step's memory grows with it"
        yield ChosenSetting(path=f"{role}.max_tokens_per_mb", value=TOKENS_ON_CPUS, why=why)
    for role in trained if gpus and model.params >= BILLION else ():
        why = f"{model.size}: activations take more memory than they do"
        yield ChosenSetting(path=f"{role}.recompute", value=True, why=why)
