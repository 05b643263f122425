"""Clusters of tests that start at the same time get ports of their own."""

from __future__ import annotations

import os
import socket

import claimed_ports


def test_ports_that_nobody_listens_on_yet_are_given_once(monkeypatch):
    first = 100_000 * os.getpid()  # no cluster of another fork claims these

    class Draws:
        given = iter([first, first + 3, first + 10])

        def randrange(self, *_):
            return next(self.given)

    draws = Draws()
    monkeypatch.setattr(claimed_ports.random, "SystemRandom", lambda: draws)
    monkeypatch.setattr(claimed_ports, "_is_free", lambda port: True)
    monkeypatch.setattr(claimed_ports, "_mine", [])
    try:
        assert claimed_ports.free_ports(5) == first
        assert claimed_ports.free_ports(5) == first + 10, "two of the second five are promised"
    finally:
        for claim in claimed_ports._mine:
            claim.close()
    with socket.socket(socket.AF_UNIX) as again:
        again.bind(f"\0realsys test port {first}")
