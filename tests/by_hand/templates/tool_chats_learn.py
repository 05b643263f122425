"""Do tiny models learn tool chats in four families' templates, and go on so in reinforcement? By hand.

    python tests/by_hand/templates/tool_chats_learn.py [--templates FOLDER] [--only NAME ...]

writes results/tool_chats_learn.json; ten minutes on two busy cores. For each of Qwen2.5's, Qwen3's, Llama
3.1's and GLM 4.5's templates a model of random weights, with that family's special tokens, is fine-tuned
on chats of two questions with a call of one tool and an answer to each. Then it is trained for two steps
through an agent with that tool, a client of the endpoint. But for Qwen3's, the tokenizer's end token is
that of texts, as base models have it, and not what ends a turn. Qwen2.5's model has more embedding rows
than its tokenizer has tokens; GLM's generation config lists the next roles' marks (docs/chat_data.md).

Checked, with bounds that were fixed before the runs:

- what fine-tuning trains of each turn ends with the template's mark;
- of answers at temperature 1, to questions drawn anew, 0.9 end by themselves, and 0.8 of the
  first ones are calls with both arguments as the endpoint understands them: of ``realsys eval`` after
  fine-tuning (before it is written beside), and in each step of reinforcement;
- each episode of reinforcement is one branch, with several answers of the policy.

``written`` counts calls that stand in the text, too, as GLM's template has them; the agent goes on with
these. ``later_understood`` is of the second question, and has no bound: fine-tuning sees it as the
template writes it, Qwen3's without the empty thought of earlier answers, which an episode keeps, and so
tiny a model stumbles over that.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
sys.path[:0] = [str(ROOT), str(HERE.parents[1] / "support")]

import torch  # noqa: E402
from by_hand import HandCheck  # noqa: E402
from real_trials import Trials, explain  # noqa: E402
from tokenizers import AddedToken  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast  # noqa: E402
from trl_templates import PACKAGE, fetched  # noqa: E402

from realsys.data.sources.chat_tokens import PromptTokenizer  # noqa: E402
from realsys.models.from_scratch.tiny_llama import train_tokenizer  # noqa: E402
from realsys.models.hf import load_tokenizer  # noqa: E402
from realsys.observability.metrics import read_metrics  # noqa: E402
from realsys.trial.records import TrialFiles  # noqa: E402
from realsys.trial.trial_state import State  # noqa: E402

LEAST = {"ended": 0.9, "understood": 0.8}  # after fine-tuning, and in reinforcement
NUM_CHATS, NUM_ASKED, STEPS = 1440, 64, 2
VOCABULARY, POSITIONS, ANSWER = 640, 1024, 64
AGENT = ROOT / "tests" / "support" / "tool_chat_agent.py"
NUMBER = {"type": "integer"}
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": NUMBER, "b": NUMBER},
            "required": ["a", "b"],
        },
    },
}
TAGS = ("<tool_call>", "</tool_call>")
THOUGHTS = ("<think>", "</think>")


@dataclass(frozen=True, kw_only=True)
class Family:
    """A base model's tokenizer, as far as templates see it.

    Attributes:
        eos: the tokenizer's end token. stops: those of the model's generation config.
        special, added: tokens of their own, control tokens and others.
        call_end, answer_end: what the template ends turns with.
        spare_rows: embedding rows beyond the tokenizer's tokens.
    """

    template: str
    eos: str
    stops: tuple[str, ...]
    special: tuple[str, ...]
    added: tuple[str, ...] = ()
    bos: str | None = None
    call_end: str
    answer_end: str
    spare_rows: int = 0


FAMILIES = (
    Family(
        template="qwen2_5",
        eos="<|endoftext|>",
        stops=("<|endoftext|>",),
        special=("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        added=TAGS,
        call_end="<|im_end|>",
        answer_end="<|im_end|>",
        spare_rows=72,
    ),
    Family(
        template="qwen3",
        eos="<|im_end|>",
        stops=("<|im_end|>", "<|endoftext|>"),
        special=("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        added=(*TAGS, "<tool_response>", "</tool_response>", *THOUGHTS),
        call_end="<|im_end|>",
        answer_end="<|im_end|>",
    ),
    Family(
        template="llama3_1",
        bos="<|begin_of_text|>",
        eos="<|end_of_text|>",
        stops=("<|end_of_text|>",),
        special=(
            *("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>"),
            *("<|eom_id|>", "<|eot_id|>", "<|python_tag|>"),
        ),
        call_end="<|eot_id|>",
        answer_end="<|eot_id|>",
    ),
    Family(
        template="glm4moe",
        eos="<|endoftext|>",
        stops=("<|endoftext|>", "<|user|>", "<|observation|>"),
        special=(
            *("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>"),
            "<|observation|>",
        ),
        added=(
            *(*TAGS, *THOUGHTS, "<tool_response>", "</tool_response>", "<arg_key>", "</arg_key>"),
            *("<arg_value>", "</arg_value>"),
        ),
        call_end="<|observation|>",
        answer_end="<|user|>",
    ),
)

FINE_TUNING = (
    "task=file",
    f"max_answer_len={ANSWER}",
    f"task.max_prompt_len={POSITIONS - ANSWER}",
    "task.eval_size=0",
    "model.optimizer.lr=4e-3",
    "model.optimizer.lr_schedule=linear",
    "train_bs_n_seqs=8",
    "exp_ctrl.total_train_epochs=1",
    "tensorboard=false",
    "scheduling.model_worker.cpu=1",
)
AGENTS_TASK = (
    "task.reward=math_verify",  # of nobody: the agent says its reward
    f"task.max_prompt_len={POSITIONS - ANSWER}",
    "task.agent=python",
    f"task.agent_args.function={AGENT}:solve",
)
REINFORCEMENT = (
    "task=file",
    *AGENTS_TASK,
    "task.eval_size=0",
    f"exp_ctrl.benchmark_steps={STEPS}",
    "exp_ctrl.eval_freq_steps=none",
    "train_bs_n_seqs=8",
    "group_size=4",
    f"gen.max_new_tokens={ANSWER}",
    "tensorboard=false",
    "scheduling.model_worker.cpu=1",
)


# ---- chats and models ----------------------------------------------------------------------------


def drawn_sums(draw: random.Random) -> list[tuple[int, int]]:
    """What a chat's two questions add."""
    return [(draw.randint(0, 9), draw.randint(0, 9)) for _ in range(2)]


def question(pair: tuple[int, int]) -> str:
    """What the user says."""
    return f"add {pair[0]} and {pair[1]}"


def chat(sums: list[tuple[int, int]]) -> dict[str, Any]:
    """A conversation as OpenAI's API has it, with its tools."""
    messages: list[dict[str, Any]] = []
    for place, (a, b) in enumerate(sums):
        function = {"name": "add", "arguments": json.dumps({"a": a, "b": b})}
        call = {"id": f"call{place:05}", "type": "function", "function": function}
        messages += [
            {"role": "user", "content": question((a, b))},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": call["id"], "content": str(a + b)},
            {"role": "assistant", "content": str(a + b)},
        ]
    return {"messages": messages, "tools": [TOOL]}


def asked(sums: list[tuple[int, int]]) -> dict[str, Any]:
    """A record for the agent: both questions, and what is right."""
    questions = [question(pair) for pair in sums]
    known = [str(sum(pair)) for pair in sums]
    return {
        "prompt": questions[0],
        "questions": questions,
        "sums": known,
        "answer": known[-1],
        "tools": [TOOL],
    }


def write_records(folder: Path) -> dict[str, Path]:
    """Writes chats to fine-tune on, and two files of questions, each drawn for itself."""
    draw = random.Random(1)
    files = {}
    for name, made, number in (
        ("chats", chat, NUM_CHATS),
        ("trained", asked, NUM_ASKED),
        ("held_out", asked, NUM_ASKED),
    ):
        files[name] = folder / f"{name}.jsonl"
        records = (made(drawn_sums(draw)) for _ in range(number))
        files[name].write_text("".join(json.dumps(record) + "\n" for record in records))
    return files


def make_tokenizer(family: Family, template: str) -> PreTrainedTokenizerFast:
    """Trains byte pairs, and adds the family's tokens."""
    texts = [template, json.dumps(TOOL, indent=4), json.dumps(chat([(1, 2), (3, 4)]))]
    backend = train_tokenizer(texts * 4, vocab_size=VOCABULARY).backend_tokenizer
    kinds = ((family.special, True), (family.added, False))
    backend.add_tokens(
        [
            AddedToken(t, special=is_special, normalized=False)
            for some, is_special in kinds
            for t in some
        ]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=family.bos,
        eos_token=family.eos,
        pad_token=family.special[0],
        extra_special_tokens=[*family.special],
        chat_template=template,
        padding_side="left",
        model_max_length=POSITIONS,
        clean_up_tokenization_spaces=False,
    )


def write_model(family: Family, template: str, folder: Path) -> None:
    """Writes random weights with the family's tokenizer."""
    tokenizer = make_tokenizer(family, template)
    config = LlamaConfig(
        vocab_size=len(tokenizer) + family.spare_rows,
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=POSITIONS,
        initializer_range=0.08,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    torch.manual_seed(1)
    model = LlamaForCausalLM(config)
    model.generation_config.eos_token_id = tokenizer.convert_tokens_to_ids([*family.stops])
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


# ---- what is measured ----------------------------------------------------------------------------


def trained_ends(model: Path) -> list[str]:
    """Returns the last trained token of each turn of a chat."""
    record = chat([(1, 2), (3, 4)])
    tokenizer = load_tokenizer(model)
    sequences, _ = PromptTokenizer(tokenizer).conversation(record["messages"], record["tools"])
    return [
        tokenizer.decode([token])
        for one in sequences
        for token, has_none, next_has_none in zip(
            one.tokens, one.no_loss, [*one.no_loss[1:], True], strict=True
        )
        if not has_none and next_has_none
    ]


def evaluated(trials: Trials, model: Path, questions: Path) -> dict[str, float]:
    """What the agent counts of a model's answers at temperature 1."""
    out = str(questions.parent / "figures.json")
    words = ("--task", "file", f"task.eval_path={questions}", "--limit", str(NUM_ASKED))
    sampling = ("--temperature", "1", "--max-new-tokens", str(ANSWER), "--json", "--out", out)
    done = trials.run("eval", str(model), *words, *AGENTS_TASK, *sampling, timeout_s=300)
    if done.returncode:
        raise RuntimeError(f"realsys eval: {done.returncode}\n{done.stdout}\n{done.stderr}")
    figures = json.loads(done.stdout)["figures"]
    return of_agent({name: figure["value"] for name, figure in figures.items()})


def of_agent(figures: dict[str, Any]) -> dict[str, float]:
    """The agent's own numbers."""
    return {k.rpartition("/")[2]: round(v, 3) for k, v in figures.items() if "agent/" in k}


def run(trials: Trials, experiment: str, name: str, *words: str) -> TrialFiles:
    """Runs a trial to its end."""
    files = trials.launch(experiment, name, *words)
    view = trials.wait(files, timeout_s=600, every_s=1)
    if view.state is not State.COMPLETED:
        raise RuntimeError(explain(files, view))
    return files


def saved_model(files: TrialFiles) -> Path:
    """The newest checkpoint."""
    found = (p for p in files.root.rglob("model/step-*") if (p / "config.json").is_file())
    return max(found, key=lambda p: p.name)


def measured(
    trials: Trials, family: Family, template: str, files: dict[str, Path]
) -> dict[str, Any]:
    """A family's figures: before, after fine-tuning, and of each step of reinforcement."""
    name, base = family.template, files["chats"].parent / family.template
    write_model(family, template, base)
    before = evaluated(trials, base, files["held_out"])
    words = (f"model.path={base}", f"task.path={files['chats']}", *FINE_TUNING)
    tuned = saved_model(run(trials, "sft-math", name, *words))
    after = evaluated(trials, tuned, files["held_out"])
    words = (f"actor.path={tuned}", f"task.path={files['trained']}", *REINFORCEMENT)
    metrics = read_metrics(run(trials, "grpo-math-async", name, *words).root / "metrics.jsonl")
    return {
        "trained_ends": trained_ends(base),
        "before": before,
        "after": after,
        "reinforcement": [of_agent(row) for row in metrics if "rollout/agent/calls" in row],
    }


def faults(family: Family, found: dict[str, Any]) -> Iterator[str]:
    """Yields what does not hold. None has less than one branch: all have one where their mean is one."""
    if found["trained_ends"] != [family.call_end, family.answer_end] * 2:
        yield f"turns end with {found['trained_ends']}"
    steps = found["reinforcement"]
    if len(steps) != STEPS:
        yield f"{len(steps)} steps of reinforcement"
    places = {"after": found["after"], **{f"step {i}": step for i, step in enumerate(steps, 1)}}
    for place, figures in places.items():
        for name, least in LEAST.items():
            if figures[name] < least:
                written = f", {figures['written']} written" if name == "understood" else ""
                yield f"{place}: {name} {figures[name]}{written}"
    for place, figures in enumerate(steps, 1):
        if figures["branches"] != 1 or figures["calls"] <= 1:
            yield f"step {place}: {figures['calls']} answers in {figures['branches']} branches"


def main() -> int:
    """Returns 0 where it holds for every family."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--templates", type=Path)
    parser.add_argument("--only", nargs="*", choices=[f.template for f in FAMILIES], default=[])
    given = parser.parse_args()
    check = HandCheck(__file__)
    problems, table = [], {}
    with tempfile.TemporaryDirectory(prefix="realsys-tool-chats-") as name:
        folder = Path(name)
        templates, files = given.templates or fetched(folder), write_records(folder)
        trials = Trials(folder / "root")
        try:
            for family in FAMILIES:
                if family.template in (given.only or [family.template]):
                    template = (templates / f"{family.template}.jinja").read_text()
                    table[family.template] = found = measured(trials, family, template, files)
                    sys.stdout.write(f"{family.template} {json.dumps(found)}\n")
                    problems += [f"{family.template}: {what}" for what in faults(family, found)]
        finally:
            trials.end_all()
    what = f"tiny models learn tool chats in templates of {PACKAGE}"
    args = f"--only {' '.join(given.only)}" if given.only else ""
    return check.write(what, problems, args=args, least=LEAST, families=table)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that its trials are ended
    sys.exit(main())
