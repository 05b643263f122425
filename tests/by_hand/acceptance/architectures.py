"""Which architectures answer, learn, are saved and adapted as in transformers? By hand; about a minute.

    python tests/by_hand/acceptance/architectures.py

Runs the checks of tests/process/test_architectures.py, writes results/architectures.json and from it the
page docs/models.md.
"""

from __future__ import annotations

import datetime
import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
RESULT = HERE / "results" / "architectures.json"
PAGE = ROOT / "docs" / "models.md"
YES, FAILED = "yes", "failed"
PACKAGES = ("torch", "transformers", "peft")
INTRODUCTION = """# Models

Backend fsdp trains the modules of transformers themselves: an architecture needs no code of its own here.
This page is made by `python tests/by_hand/acceptance/architectures.py`. It makes a small model with random
weights of each of {num} architectures and compares what realsys computes with what transformers
computes. The same checks run in `tests/process/test_architectures.py` of those that differ in more than
sizes. Whose tool calls are read stands in
[agents_endpoint.md](agents_endpoint.md#how-tool-calls-are-read).

| Column | What is checked, in float32 on a CPU |
|---|---|
| generate | answers to three prompts of different lengths, greedy and sampled with fixed seeds, of the \
engine inside a trainer and of a generation server's: the tokens of `generate` of transformers to each \
prompt alone (sampled ones drawn from its logits by our sampler); \
log-probabilities within 1e-4 of a plain forward |
| train | loss and gradient of a supervised step through backend fsdp: those of a plain loop, within 1e-5 |
| recompute | `actor.recompute=true` gives the same gradient within 1e-6 |
| save | transformers reads the trained model and computes the same logits within 1e-5; weights for other \
copies and servers are laid out by the names that the trained model has |
| lora | `actor.lora.rank=2 actor.lora.target_modules=all-linear`: adapters alone train; peft reads the \
adapters and transformers the merged model, with the same logits |

"""
NOTES = """
Llama, Qwen2 and Qwen3 have a fast path for answers, are trained packed, and can be split over tensor and
pipeline axes ([layouts](parallelism.md)). Others are computed by transformers' own code, on data axes only.
Their memory is not predicted.

`all-linear` means what peft means by it: every linear layer but the head. Two differences: the experts of
a mixture, which transformers holds as one weight, get no adapters, nor do shared experts of the same names,
which peft can't tell from them in some mixtures; and where adapters would be read past
(Mamba) or layers are none of torch's linear ones (GPT-2), the plan refuses them.
`actor.lora.target_modules=query_key_value,dense` names layers.

Refused answers: with `schedule=async schedule.server_backend=sglang` (or `vllm`), `task.eval_size=0` and
without `auto_eval`, our engine makes none, and the plan leaves it to the server whether it can. That was
not tried with these models.
"""


def page(result: Mapping[str, Any]) -> str:
    """The page of docs, from what the checks found."""
    models: dict[str, dict[str, str]] = result["models"]
    columns = list(next(iter(models.values())))
    text = INTRODUCTION.format(num=len(models))
    text += f"| `model_type` | {' | '.join(columns)} |\n|---|{'---|' * len(columns)}\n"
    reasons: dict[str, int] = {}
    for name, found in models.items():
        cells = []
        for column in columns:
            if (said := found[column]) not in (YES, FAILED):
                words = said.removeprefix(f"{name} has ").replace(f", and {name} has ", ": ")
                said = f"refused ({reasons.setdefault(words, len(reasons) + 1)})"
            cells.append(said)
        text += f"| {name} | {' | '.join(cells)} |\n"
    text += "\nWords of the plan:\n\n"
    text += "".join(f"{number}. {said}\n" for said, number in reasons.items())
    packages = ", ".join(f"{name} {result['packages'][name]}" for name in PACKAGES)
    text += f"\nFound on {result['at'][:10]} with {packages}, revision {result['revision'][:12]}.\n"
    return text + NOTES


def main() -> int:
    """Runs all checks; returns 1 if one failed."""
    sys.path[:0] = [str(ROOT), str(ROOT / "tests/support")]
    import torch
    from architecture_checks import COLUMNS, checked
    from architectures import ARCHITECTURES

    torch.set_num_threads(1)
    models, failed = {}, Counter[str]()
    for name in ARCHITECTURES:
        with tempfile.TemporaryDirectory() as folder:
            try:
                models[name] = checked(name, Path(folder))
            except AssertionError as error:
                failed[name] += 1
                models[name] = dict.fromkeys(COLUMNS, FAILED)
                sys.stdout.write(f"{name}: {error}\n")
    revision = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    result = {
        "command": "python tests/by_hand/acceptance/architectures.py",
        "revision": revision.stdout.strip(),
        "at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "ok": not failed,
        "packages": {name: version(name) for name in PACKAGES},
        "models": models,
    }
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    PAGE.write_text(page(result))
    sys.stdout.write(f"{len(models)} architectures, {len(failed)} failed\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
