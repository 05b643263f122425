"""What clients write about sampling: taken, refused, and the seeds of several answers."""

from __future__ import annotations

from typing import Any

import golden
import pytest

from realsys.api.errors import ConfigError, DataError
from realsys.policy_server.client_sampling import NO_LIMIT, answer_seed, engine_sampling
from realsys.policy_server.server_address import check_address
from realsys.transport.generation_messages import Sampling


def test_what_a_client_leaves_out_has_the_apis_defaults() -> None:
    assert engine_sampling({}, limit=None, seed=5) == Sampling(
        max_new_tokens=NO_LIMIT, temperature=1.0, top_p=1.0, top_k=-1, sampling_seed=5
    )


def test_what_a_client_sends_reaches_the_engine() -> None:
    wished = {"temperature": 0, "top_p": 0.5, "top_k": 3, "min_tokens": 2, "seed": 9}
    made = engine_sampling(wished, limit=7, stop=("\n",), seed=1)
    assert made == Sampling(
        max_new_tokens=7,
        min_new_tokens=2,
        temperature=0.0,
        top_p=0.5,
        top_k=3,
        stop=("\n",),
        sampling_seed=1,
    )


def test_top_k_of_0_is_off_as_minus_1_is() -> None:
    assert engine_sampling({"top_k": 0}, limit=1, seed=0).top_k == -1


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 1e-40),
        ("temperature", float("inf")),
        ("top_p", 0),
        ("top_p", 1.01),
        ("top_k", -2),
        ("min_tokens", 8),
        ("min_p", 0.1),
        ("presence_penalty", 0.5),
        ("repetition_penalty", 1.1),
        ("logit_bias", {"5": 1}),
    ],
)
def test_what_the_engine_cant_do_is_refused_by_its_field(name: str, value: Any) -> None:
    with pytest.raises(DataError) as caught:
        engine_sampling({name: value}, limit=7, seed=0)
    assert caught.value.where == name


@pytest.mark.parametrize(
    ("name", "value"),
    [("min_p", 0.0), ("frequency_penalty", 0), ("repetition_penalty", 1.0), ("logit_bias", {})],
)
def test_a_value_that_changes_nothing_is_taken(name: str, value: Any) -> None:
    assert engine_sampling({name: value}, limit=7, seed=0) == engine_sampling({}, limit=7, seed=0)


def test_the_first_answer_has_the_requests_seed_and_others_have_seeds_of_their_own() -> None:
    seeds = [answer_seed(42, number) for number in range(16)]
    assert seeds[0] == 42
    assert len(set(seeds)) == 16
    assert seeds == [answer_seed(42, number) for number in range(16)]
    assert all(0 <= seed < 2**63 for seed in [*seeds, answer_seed(-1, 0), answer_seed(2**64, 0)])


@pytest.mark.parametrize(
    ("host", "https", "insecure", "taken"),
    [
        ("127.0.0.1", False, False, True),
        ("localhost", False, False, True),
        ("::1", False, False, True),
        ("0.0.0.0", False, False, False),
        ("node7", False, False, False),
        ("node7", True, False, True),
        ("0.0.0.0", False, True, True),
    ],
)
def test_a_key_travels_in_clear_text_only_where_nobody_else_is_or_on_request(
    host: str, https: bool, insecure: bool, taken: bool
) -> None:
    if taken:
        check_address(host, https=https, insecure=insecure)
    else:
        with golden.raises(ConfigError):
            check_address(host, https=https, insecure=insecure)
