"""In which dtype streamed weights travel, by what the servers are told to compute in."""

import pytest

from experiments.asynchronous import Async


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, ""),  # as the actor computes
        ({"server_args": {"dtype": "float32"}}, ""),
        ({"server_args": {"dtype": "bfloat16"}}, "bfloat16"),
        ({"server_args": {"dtype": "float16"}}, "float16"),
        ({"server_backend": "sglang", "server_args": {"dtype": "bfloat16"}}, "bfloat16"),
        ({"server_args": {"dtype": "bfloat16"}, "wire_dtype": "float32"}, "float32"),
        ({"server_args": {"dtype": "bfloat16"}, "weights_through": "disk"}, ""),
    ],
)
def test_what_servers_of_half_precision_would_round_travels_rounded(options, expected):
    assert Async(**options).control().wire_dtype == expected
