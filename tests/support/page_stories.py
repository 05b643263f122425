"""What a page of the docs needs beside itself: its data in larger numbers, and tiny models."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

from doc_pages import DocPage

from realsys.data.sources.arithmetic_problems import arithmetic_word_problems
from realsys.models.from_scratch.tiny_llama import build_tiny_llama

SIZES = {"hidden_size": 32, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1}
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
WORDS = [f"{a}{b}{c}" for a in "abcdef" for b in "abcd" for c in "abc"]
NUM_SUMS, NUM_WORDS = 28, 11  # records of docs/mixtures.md, held-out ones included


def sums() -> list[str]:
    """Texts for a tokenizer."""
    problems = arithmetic_word_problems(num_problems=300, seed=0, split="train")
    return [problem["prompt"] + problem["answer"] for problem in problems]


def write_model(
    folder: Path, corpus: Iterable[str], *, name: str = "MODEL", positions: int = 0
) -> None:
    """A random model of the corpus's words; with a context of ``positions`` tokens."""
    build_tiny_llama(folder / name, seed=1, corpus=list(corpus), vocab_size=300, **SIZES)
    if positions:
        _change(folder / name / "config.json", max_position_embeddings=positions)


def _change(path: Path, **values: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def write_lines(path: Path, records: Iterable[object]) -> None:
    """A file of JSON lines."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def for_sums(page: DocPage, folder: Path) -> None:
    """A model whose context has room for an agent's tools."""
    write_model(folder, sums(), positions=1024)


def odd_sums(page: DocPage, folder: Path) -> None:
    """A rule that tells a random policy's answers apart, which are never right."""
    (folder / "odd.py").write_text(
        "from realsys.api.registry import register_reward\n"
        "register_reward('odd', lambda token_ids: float(sum(token_ids) % 2), trusted=True)\n"
    )
    for_sums(page, folder)


def programs(page: DocPage, folder: Path) -> None:
    """The page's two problems, often."""
    (records,) = page.blocks("json")
    assert len(records.splitlines()) == 2
    (folder / "problems.jsonl").write_text(records * 20)
    write_model(folder, records.splitlines())


def _as_on_the_page(page: DocPage) -> list[str]:
    """The page's record with other words."""
    (example,) = page.blocks("json")
    text = json.dumps(json.loads(example))
    records = [re.sub(r"\bbac\b", w[::-1], re.sub(r"\bcab\b", w, text)) for w in WORDS]
    return [r.replace('"level": 1', f'"level": {i % 4}') for i, r in enumerate(records)]


def words(page: DocPage, folder: Path) -> None:
    """Words to write backwards, of four levels."""
    records = _as_on_the_page(page)
    (folder / "words.jsonl").write_text("\n".join(records))
    write_model(folder, records)


def chats(page: DocPage, folder: Path) -> None:
    """Conversations, and a model with a chat template."""
    records = _as_on_the_page(page)
    (folder / "chats.jsonl").write_text("\n".join(records))
    write_model(folder, [*records, TEMPLATE])
    _change(folder / "MODEL" / "tokenizer_config.json", chat_template=TEMPLATE)


def two_sources(page: DocPage, folder: Path) -> None:
    """Sums, and words in other columns."""
    first, second = map(json.loads, page.blocks("json"))
    assert set(first) == {"prompt", "answer"}
    assert second["meta"] == {"solution": "bac"}
    rows = [{"prompt": f"{i} + {i} = ", "answer": str(2 * i)} for i in range(NUM_SUMS)]
    write_lines(folder / "sums.jsonl", rows)
    asked = [a + b for a in "abc" for b in "defg"][:NUM_WORDS]
    records = [{"problem": f"Backwards: {w}", "meta": {"solution": w[::-1]}} for w in asked]
    write_lines(folder / "words.jsonl", records)
    write_model(folder, [f"{row}" for row in records])


def pairs(page: DocPage, folder: Path) -> None:
    """Pairs of sums; the worse answer has the same tokens in another order."""
    write_model(folder, sums(), name="POLICY")
    record = json.loads(page.blocks("json")[0])
    assert list(record) == ["prompt", "chosen", "rejected"]
    told = [(n % 9, n % 7) for n in range(192)]
    texts = [
        (f"What is {a} + {b}?", f"{a} + {b} = {a + b}", f"{a + b} = {a} + {b}") for a, b in told
    ]
    write_lines(folder / "pairs.jsonl", (dict(zip(record, pair, strict=True)) for pair in texts))


def one_pair(page: DocPage, folder: Path) -> None:
    """The page's pair, often."""
    write_model(folder, sums(), name="POLICY")
    write_lines(folder / "pairs.jsonl", [json.loads(page.blocks("json")[0])] * 80)


def two_generators(page: DocPage, folder: Path) -> None:
    """The page's settings, and a model of sums: what it says is not looked at."""
    (folder / "two_tasks.yaml").write_text(page.blocks("yaml")[0])
    for_sums(page, folder)


def write_harbor_tasks(page: DocPage, folder: Path, names: tuple[str, ...]) -> Path:
    """Writes the task of docs/harbor.md under several names, into ``tasks``. Returns the first."""
    task = folder / "tasks" / names[0]
    test, solution = page.blocks("sh")
    files = {
        "task.toml": page.blocks("toml")[0],
        "instruction.md": page.blocks("text")[0],
        "environment/Dockerfile": page.blocks("dockerfile")[0],
        "environment/poem.txt": "one\ntwo\nthree\n",
        "tests/test.sh": test,
        "tests/check.py": page.blocks("python")[0],
        "solution/solve.sh": solution,
    }
    for name, text in files.items():
        (task / name).parent.mkdir(parents=True, exist_ok=True)
        (task / name).write_text(text)
    for name in names[1:]:
        shutil.copytree(task, task.parent / name)
    return task


def harbor_tasks(page: DocPage, folder: Path) -> None:
    """Tasks to train on and to hold out, and a model whose context has room for commands."""
    write_harbor_tasks(page, folder, tuple(f"count-lines-{number}" for number in range(18)))
    write_model(folder, [page.text], positions=4096)
