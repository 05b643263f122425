"""Fuzzes every message reader with broken messages: only a RealsysError may be raised.

``python benchmarks/fuzz_codec.py [--minutes 10] [--seed N] [--only TARGET …]`` prints executions per
second and, for each new failure of a reader, the seed, the case and the bytes; it then exits with 1.
``--replay TARGET HEX`` runs given bytes again. Not guided by coverage, but aware of the messages'
structure (fuzz_mutations.py), and it calls the real readers (fuzz_targets.py). A reader that takes
longer than a second for a message has failed too.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import resource
import sys
import time
import traceback
from dataclasses import dataclass, field
from random import Random

from fuzz_targets import Target, known_names, targets

SLOW_S = 1.0
MAX_KINDS = 10  # of crashes, then it ends


@dataclass
class Findings:
    """What a run has seen."""

    kinds: dict[tuple[str, ...], str] = field(default_factory=dict)
    num_run: int = 0
    slowest_s: float = 0.0

    def run(self, name: str, target: Target, data: bytes, source: str) -> None:
        """Reads ``data``; notes and prints what must not happen."""
        began_s, self.num_run = time.process_time(), self.num_run + 1
        try:
            target.read(data)
        except target.allowed:
            pass
        except Exception as error:  # the point of it all
            at = traceback.extract_tb(error.__traceback__)[-1]
            text = f"{type(error).__name__}: {str(error)[:300]} ({at.filename}:{at.lineno})"
            self._note(
                (name, type(error).__name__, f"{at.filename}:{at.lineno}"), text, source, data
            )
        took_s = time.process_time() - began_s  # others on this machine don't count
        self.slowest_s = max(self.slowest_s, took_s)
        if took_s > SLOW_S:
            self._note((name, "slow"), f"took {took_s:.1f} s", source, data)

    def _note(self, kind: tuple[str, ...], text: str, source: str, data: bytes) -> None:
        if kind not in self.kinds:
            self.kinds[kind] = text
            print(f"CRASH target={kind[0]} {source}\n  {text}\n  bytes={data.hex()}", flush=True)  # noqa: T201


def fuzz(chosen: dict[str, Target], *, seconds: float, seed: int) -> Findings:
    """Round robin over the targets until the time is over."""
    findings, rng = Findings(), Random()
    names = known_names()
    for name, target in chosen.items():
        for sample in target.samples:
            findings.run(name, target, sample, "a valid message")
    deadline_s = time.monotonic() + seconds
    for case in itertools.count():
        for name, target in chosen.items():
            rng.seed(f"{seed}/{name}/{case}")
            message = rng.choice(target.samples)
            data = target.mutate(rng, message, target.samples, names)
            findings.run(name, target, data, f"seed={seed} case={case}")
        if time.monotonic() > deadline_s or len(findings.kinds) >= MAX_KINDS:
            return findings


def main() -> int:
    """0 when nothing broke."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", default=[], metavar="TARGET")
    parser.add_argument("--replay", nargs=2, metavar=("TARGET", "HEX"))
    args = parser.parse_args()
    logging.disable(logging.CRITICAL)  # readers log what they refuse
    found = targets(args.replay[:1] if args.replay else args.only)
    if args.replay:
        name, text = args.replay
        findings = Findings()
        findings.run(name, found[name], bytes.fromhex(text), "replayed")
    else:
        began_s = time.monotonic()
        findings = fuzz(found, seconds=args.minutes * 60, seed=args.seed)
        took_s = time.monotonic() - began_s
        peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        text = (
            f"executions={findings.num_run} seconds={took_s:.1f} "
            f"per_second={findings.num_run / took_s:.0f} targets={len(found)} seed={args.seed} "
            f"slowest_ms={findings.slowest_s * 1000:.1f} peak_mib={peak_mib:.0f} "
            f"kinds_of_crashes={len(findings.kinds)}"
        )
        print(text)  # noqa: T201
    return 1 if findings.kinds else 0


if __name__ == "__main__":
    sys.exit(main())
