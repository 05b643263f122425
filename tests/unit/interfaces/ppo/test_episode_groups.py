"""Groups compare episodes: one with several branches counts as one, whatever the estimator."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
import torch
from estimators_named import estimator
from near import assert_near

from realsys.api.agent import Episode, Trajectory
from realsys.api.basics.reward import EPISODES, PARTS
from realsys.api.errors import DataError
from realsys.backends.hf.data_parallel import DataParallel
from realsys.data.sequence_sample import SequenceSample
from realsys.interfaces.interface_arguments import PPOSettings
from realsys.interfaces.ppo.episode_groups import EpisodeGroups
from realsys.interfaces.ppo.ppo_experience import prepare_experience
from realsys.rollout.worker.trajectories import episodes_sample

CPU = torch.device("cpu")
# Of each episode: its reward, parts of it, and the KL of its branches to the reference, in nats
REWARDS = (0.0, 1.5, 0.0)
REWARD_PARTS = ({"x": 0.0, "y": 1.0}, {"x": 1.5, "y": 0.0}, {"x": 0.0, "y": 0.0})
ALONE = ((0.3,), (0.6,), (0.9,))
BRANCHED = ((0.3,), (0.2, 0.4), (0.1, 0.2, 0.6))


def trajectory(reward: float, kl: float) -> Trajectory:
    """A token of the prompt, and two of the policy's: ``kl`` is that of the second."""
    return Trajectory(
        tokens=(1, 2, 3),
        from_policy=(False, True, True),
        logprobs=(0.0, -1.0, -2.0),
        versions=(-1, 0, 0),
        reward=reward,
        truncated=False,
        stats={"kl": kl},
    )


def episode(
    reward: float, kls: Sequence[float], parts: Mapping[str, float], *, shares: bool = True
) -> Episode:
    return Episode(
        sequences=tuple(trajectory(reward, kl) for kl in kls),
        reward=reward,
        stats={f"reward/{name}": x for name, x in parts.items()},
        shares_reward=shares,
    )


def batch(
    shape: Sequence[Sequence[float]], *, id: str = "a", may_branch: bool = True
) -> SequenceSample:
    """A group of three episodes with these branches, and the reference's log-probs."""
    episodes = [episode(*row) for row in zip(REWARDS, shape, REWARD_PARTS, strict=True)]
    data = episodes_sample(id, episodes, metadata={}, may_branch=may_branch)
    kls = [kl for branches in shape for kl in branches]
    reference = torch.tensor([x for kl in kls for x in (0.0, -1.0, -2.0 - kl)])
    lengths = [[3] * len(kls)]
    return data.update(
        SequenceSample.from_tensors(
            [id], {"packed_ref_logprobs": lengths}, {"packed_ref_logprobs": reference}
        )
    )


def advantages(data: SequenceSample, name: str, *, kl_coef: float = 0.0) -> torch.Tensor:
    """``[B, 3]``: of each sequence's tokens."""
    settings = PPOSettings(advantage=estimator(name))
    made = prepare_experience(data, settings, kl_coef=kl_coef, ranks=DataParallel())
    return made.batch.data["advantages"].reshape(-1, 3)


ROOT = 3**0.5
BY_HAND = {
    # Scores 0, 1.5, 0: mean 0.5; distances -0.5, 1, -0.5; variance (0.25 + 1 + 0.25) / 2 = 3/4
    "grpo": (-1 / ROOT, 2 / ROOT, -1 / ROOT),
    "dr_grpo": (-0.5, 1.0, -0.5),
    "rloo": (-0.75, 1.5, -0.75),  # from the mean of the other two: 0.75, 0, 0.75
    "maxrl": (-1.0, 2.0, -1.0),  # distances over the mean
    # x as above; y is 1, 0, 0: mean 1/3, distances 2/3, -1/3, -1/3, variance 1/3
    "gdpo": (1 / ROOT, 1 / ROOT, -2 / ROOT),
}


@pytest.mark.parametrize("shape", [ALONE, BRANCHED], ids=["alone", "branched"])
@pytest.mark.parametrize("name", BY_HAND)
def test_an_episode_has_the_same_advantage_with_one_branch_or_three(
    name: str, shape: Sequence[Sequence[float]]
) -> None:
    made = advantages(batch(shape), name)
    wanted = [a for a, branches in zip(BY_HAND[name], shape, strict=True) for _ in branches]
    expected = torch.tensor([[0.0, a, a] for a in wanted])
    assert_near(made, expected, rel=1e-4)


@pytest.mark.parametrize("shape", [ALONE, BRANCHED], ids=["alone", "branched"])
@pytest.mark.parametrize(
    ("name", "penalties"),
    [
        # KL 0.3, 0.6 and 0.9 nats an episode, at 0.1 a nat: as much less than the mean's, 0.06
        ("grpo", (0.03, 0.0, -0.03)),
        ("dr_grpo", (0.03, 0.0, -0.03)),
        ("rloo", (0.045, 0.0, -0.045)),  # than that of the other two: 0.075, 0.06, 0.045
    ],
)
def test_the_kl_penalty_of_an_episode_is_that_of_all_its_branches(
    name: str, penalties: Sequence[float], shape: Sequence[Sequence[float]]
) -> None:
    made = advantages(batch(shape), name, kl_coef=0.1)
    by_episode = [a + p for a, p in zip(BY_HAND[name], penalties, strict=True)]
    wanted = [a for a, branches in zip(by_episode, shape, strict=True) for _ in branches]
    assert_near(made[:, 2], torch.tensor(wanted), rel=1e-4)


def test_without_the_note_branches_are_compared_as_answers() -> None:
    """What the note is for: six answers with two scores of 1.5 have another mean."""
    made = advantages(batch(BRANCHED, may_branch=False), "dr_grpo")
    assert_near(made[:, 2], torch.tensor([-0.5, 1.0, 1.0, -0.5, -0.5, -0.5]))


def test_episodes_whose_answers_have_rewards_of_their_own_are_compared_by_sequence() -> None:
    one = episode(0.0, (0.0,), {})
    two = Episode(
        sequences=(trajectory(3.0, 0.0), trajectory(0.0, 0.0)), reward=0.0, shares_reward=False
    )
    data = episodes_sample("a", [one, two], metadata={}, may_branch=True)
    assert json.loads(data.meta.metadata[EPISODES][0]) == [[0, ""], [1, ""], [2, ""]]
    assert EpisodeGroups.of(data, CPU).episode_B is None
    made = advantages(data, "dr_grpo")
    assert_near(made[:, 2], torch.tensor([-1.0, 2.0, -1.0]))


def test_sums_means_and_spreads_are_of_episodes() -> None:
    groups = EpisodeGroups.of(batch(BRANCHED), CPU)
    assert groups.group_E.tolist() == [0, 0, 0]
    assert groups.episode_B is not None
    assert groups.episode_B.tolist() == [0, 1, 1, 2, 2, 2]
    x_B = torch.tensor([1.0, 2, 4, 3, 3, 9])
    assert groups.sum(x_B).tolist() == [1.0, 6.0, 15.0]
    assert groups.mean(x_B).tolist() == [1.0, 3.0, 5.0]
    assert groups.spread(torch.tensor([7.0, 8, 9])).tolist() == [7.0, 8, 8, 9, 9, 9]
    scores = groups.scores(x_B, torch.ones(6, dtype=torch.int64), {"p": x_B})
    assert scores.scores.tolist() == scores.parts["p"].tolist() == [1.0, 3.0, 5.0]
    assert scores.lengths.tolist() == [1, 2, 3]


def test_the_note_goes_with_its_id_through_gather_take_select_and_split() -> None:
    a, b = batch(BRANCHED, id="a"), batch(ALONE, id="b")
    both = SequenceSample.gather([a, b])
    numbers = {
        id_: json.dumps([[number, ""] for number in found])
        for id_, found in {"a": [0, 1, 1, 2, 2, 2], "b": [0, 1, 2]}.items()
    }
    assert both.meta.metadata[EPISODES] == (numbers["a"], numbers["b"])
    assert len(json.loads(both.meta.metadata[PARTS][0])) == 6
    groups = EpisodeGroups.of(both, CPU)
    assert groups.group_E.tolist() == [0, 0, 0, 1, 1, 1]
    assert groups.episode_B is not None
    assert groups.episode_B.tolist() == [0, 1, 1, 2, 2, 2, 3, 4, 5]
    turned = both.reorder(["b", "a"])
    assert turned.meta.metadata[EPISODES] == (numbers["b"], numbers["a"])
    groups = EpisodeGroups.of(turned, CPU)
    assert groups.episode_B is not None
    assert groups.episode_B.tolist() == [0, 1, 2, 3, 4, 4, 5, 5, 5]
    for part, id in zip(both.split([1, 1]), "ab", strict=True):
        assert part.meta.metadata[EPISODES] == (numbers[id],)
    kept = both.select(["packed_input_ids", "rewards"]).take([0])
    assert kept.meta.metadata[EPISODES] == (numbers["a"],)


def test_two_questions_with_branches_do_not_mix() -> None:
    both = SequenceSample.gather([batch(BRANCHED, id="a"), batch(ALONE, id="b")])
    made = advantages(both, "rloo")
    wanted = [-0.75, 1.5, 1.5, -0.75, -0.75, -0.75, -0.75, 1.5, -0.75]
    assert_near(made[:, 2], torch.tensor(wanted))


def test_a_record_that_was_set_aside_has_no_note_that_fits() -> None:
    other = episodes_sample("c", [episode(1.0, (0.0,), {})], metadata={EPISODES: "[]"})
    assert EpisodeGroups.of(other, CPU).group_E.tolist() == [0]
    assert EpisodeGroups.of(other, CPU).episode_B is None


@pytest.mark.parametrize("note", ['[[0, ""]]', '[[0, ""], [0, ""], [1, ""]]'])
def test_a_note_of_other_sequences_is_an_error(note: str) -> None:
    """Groups would compare branches as if they were episodes, and nobody would know."""
    two = episodes_sample("c", [episode(1.0, (0.0, 0.0), {})], metadata={EPISODES: note})
    with pytest.raises(DataError) as found:
        EpisodeGroups.of(two, CPU)
    assert "id c" in found.value.where


def test_parts_of_other_answers_are_an_error() -> None:
    data = batch(ALONE)
    few = {**data.meta.metadata, PARTS: (json.dumps([{"x": 1.0}]),)}
    wrong = replace(data, meta=replace(data.meta, metadata=few))
    with pytest.raises(DataError) as found:
        advantages(wrong, "gdpo")
    assert "id a" in found.value.where


def test_one_branch_each_needs_no_numbers() -> None:
    groups = EpisodeGroups.of(batch(ALONE), CPU)
    assert groups.episode_B is None
    assert groups.group_E.tolist() == [0, 0, 0]


def test_roles_are_compared_among_themselves():
    def turn(role, reward):
        return replace(trajectory(reward, 0.0), role=role)

    episodes = [
        Episode(sequences=(turn("asks", a), turn("answers", b)), reward=0.0)
        for a, b in ((1.0, 0.0), (3.0, 10.0))
    ]
    data = episodes_sample("a", episodes, metadata={}, may_branch=True)
    groups = EpisodeGroups.of(data, CPU)
    assert groups.group_E.tolist() == [0, 1, 0, 1]
    scores = groups.scores(torch.tensor([1.0, 0.0, 3.0, 10.0]), torch.ones(4, dtype=torch.int64))
    assert scores.group_mean(scores.scores).tolist() == [2.0, 5.0, 2.0, 5.0]
