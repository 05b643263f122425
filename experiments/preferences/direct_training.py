"""Training of a policy on preference pairs, without a reward model. ``dpo``.

    ref_inf ── dpo_train        without ref_inf if the loss has no reference

Starts from a language model's directory, which is the frozen reference too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from experiments.algorithm import ANSWERS, REFERENCE
from experiments.parts.chosen_settings import SMALL_PREFERENCE_LR, chosen_for_pairs
from experiments.parts.model_files import model_problems, starting_model
from experiments.preferences.pair_training import PairTraining
from realsys.api.basics.preference_losses import DPOLoss, PairLoss
from realsys.api.dataflow import MFCDef
from realsys.api.errors import ConfigError
from realsys.api.experiment import ChosenSetting
from realsys.api.model import ModelInterfaceAbstraction, ModelInterfaceType
from realsys.api.options import ModelOptions, OptimizerOptions, option
from realsys.api.plain import to_plain


@dataclass(frozen=True, kw_only=True)
class DirectTraining(PairTraining):
    """Policy from preference pairs (DPO, IPO, KTO, SimPO)."""

    model: ModelOptions = option(
        ModelOptions(
            optimizer=OptimizerOptions(
                lr=SMALL_PREFERENCE_LR,
                weight_decay=0.0,
                lr_schedule="linear",
                warmup_steps_proportion=0.1,
            )
        ),
        "the policy",
    )
    ref: ModelOptions = option(
        ModelOptions(backend="inference"),
        "the reference: the starting model, frozen; its layout is by default the policy's",
    )
    loss: PairLoss = option(DPOLoss(), "how the policy is pulled towards better answers")

    call = "dpo_train"
    keys = ANSWERS

    @property
    def held(self) -> dict[str, ModelOptions]:
        """The reference, unless the loss has none, and the policy."""
        return {**({"ref": self.ref} if self.loss.needs_reference else {}), "model": self.model}

    def problems(self) -> Iterator[ConfigError]:
        """Yields what trainings on pairs check, and a reference of its own model or adapters."""
        yield from super().problems()
        if "ref" not in self.held:
            return
        yield from model_problems(self.ref, "ref")
        if self.ref.path is not None:
            yield ConfigError(
                "the reference is the starting model, which is model.path",
                where="ref.path",
                fix="leave it out",
            )
        if self.ref.lora.rank:
            yield ConfigError(
                f"ref.lora.rank is {self.ref.lora.rank}, and adapters of a frozen reference learn nothing",
                where="ref.lora.rank",
                fix="leave it out; model.lora.rank trains adapters of the policy",
            )

    def chosen(self, given: Collection[str]) -> tuple[ChosenSetting, ...]:
        """For a real model: learning rate, lengths, memory (parts/chosen_settings.py)."""
        path = self.model.path
        if path is None or (model := starting_model(path)) is None:
            return ()
        proposed = chosen_for_pairs(
            model,
            self.task.measured(path),
            gpus=self.resources().gpu > 0,
            lora=self.model.lora.rank > 0,
            held=tuple(self.held),
        )
        return self.not_given(proposed, given)

    def interface(self) -> ModelInterfaceAbstraction:
        """The interface of policy and reference."""
        return ModelInterfaceAbstraction("direct_preference", {"loss": to_plain(self.loss)})

    def calls(self) -> tuple[MFCDef, ...]:
        """The reference's log-probs, if the loss reads them, and the update."""
        if "ref" not in self.held:
            return super().calls()
        reference = self.call_on(
            "ref",
            "ref_inf",
            ModelInterfaceType.INFERENCE,
            self.keys,
            output_keys=(REFERENCE,),
            output_key_remap={"logprobs": REFERENCE},
        )
        reads = (*self.keys, REFERENCE)
        return (
            reference,
            self.call_on("model", self.call, ModelInterfaceType.TRAIN_STEP, reads),
        )


def dpo() -> DirectTraining:
    """Policy from preference pairs, by DPO or, with ``loss=``, by IPO, KTO or SimPO."""
    return DirectTraining()
