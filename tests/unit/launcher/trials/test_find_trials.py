"""What is suggested for the name of a trial that is not there."""

from __future__ import annotations

import pytest

from launcher.trials.find_trials import _suggestion

KNOWN = ("ppo-math/first", "ppo-math/second", "sft/third")


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("ppo-mth", ["ppo-math"]),  # an experiment: its newest trial
        ("SFT", ["sft"]),
        ("secnd", ["ppo-math/second"]),  # a trial without its experiment
        ("ppo-math/frist", ["ppo-math/first"]),
        ("/ppo-math/first/", []),
        ("nothing like it", []),
    ],
)
def test_names_like_it_are_suggested(name: str, meant: list[str]) -> None:
    told = _suggestion(name, KNOWN)
    assert [known for known in ("ppo-math", "sft", *KNOWN) if f"'{known}'" in told][:1] == meant[:1]


def test_where_there_is_none_a_launch_is_suggested() -> None:
    assert "realsys launch" in _suggestion("ppo-math", ())
