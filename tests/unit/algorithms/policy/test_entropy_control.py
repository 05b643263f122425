"""The weight of the entropy bonus, batch by batch."""

from __future__ import annotations

import golden

from realsys.algorithms.policy.entropy_control import EntropyControl
from realsys.api.errors import CheckpointError


def test_without_a_target_it_is_constant() -> None:
    control = EntropyControl(0.01, target=None, step=0.005)
    control.update(0.0)
    assert control.coef == 0.01
    assert control.state_dict() == {}
    control.load_state_dict({"coef": 7.0, "above": 0.0})
    assert control.coef == 0.01, "the settings win"


def test_it_rises_below_the_target_and_is_off_above() -> None:
    control = EntropyControl(0.0, target=1.0, step=0.25)
    seen = [control.coef]
    for entropy in (0.5, 0.5, 1.5, 0.5, 1.5, 1.5, 1.5, 0.9):
        control.update(entropy)
        seen.append(control.coef)
    # The weight goes 0, .25, .5, .25, .5, .25, 0, 0, .25; there is no bonus after a batch above 1.
    assert seen == [0.0, 0.25, 0.5, 0.0, 0.5, 0.0, 0.0, 0.0, 0.25]


def test_a_resumed_one_goes_on_and_a_step_without_a_figure_changes_nothing() -> None:
    control = EntropyControl(0.0, target=1.0, step=0.25)
    for entropy in (0.5, 0.5, 1.5):
        control.update(entropy)
    other = EntropyControl(0.0, target=1.0, step=0.25)
    other.load_state_dict(control.state_dict())
    for entropy in (float("nan"), 0.5):
        for each in (control, other):
            each.update(entropy)
        assert other.state_dict() == control.state_dict()
    assert other.coef == 0.5
    with golden.raises(CheckpointError):
        other.load_state_dict({"coef": float("nan"), "above": 0.0})
    other.load_state_dict({})  # of a checkpoint from before
