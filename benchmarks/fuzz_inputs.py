"""300 bad inputs for `realsys plan`: none may end in a traceback, read for ever, or give a wrong value.

    python benchmarks/fuzz_inputs.py [--only NAME] [--every N]

Words, YAML files, site files, data sets and model folders, each broken in one way. Each case runs in a
fork of its own with limits on time and memory. A refusal is right, with a reason; an accepted setting
must have the value that was written (text and numbers normalised). Prints what failed, and the counts.
tests/process/test_fuzz_inputs.py runs every thirtieth.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

LIMIT_S = 60.0  # of one case, on a busy machine
LIMIT_BYTES = 6 << 30
REFUSED = (2, 4, 5)  # usage, configuration, site
HERE = "{folder}"  # in words and files: the case's folder

FIFO, ZERO, FOLDER, LOOP = "fifo", "/dev/zero", "folder", "loop"


@dataclass(frozen=True)
class Large:
    """A file that begins with ``head`` and is as long as ``size`` says, zeros behind."""

    size: int
    head: bytes = b""


Content = bytes | str | Large


@dataclass(frozen=True)
class Case:
    """One bad input: files made in a folder, and the words behind `realsys plan`."""

    name: str
    words: tuple[str, ...]
    files: Mapping[str, Content] = field(default_factory=dict)
    gives: tuple[str, str] | None = None  # (setting, text): what it must be, if it is accepted


# ---- the inputs -----------------------------------------------------------------------------

NUMBERS = (
    *("9" * 30, "-" + "9" * 30, "9" * 5000, "1e400", "-1e400", "nan", "inf", "-inf", "1e-400"),
    *("0x10", "1__0", "_1", "1,000", "١٢", "½", "1e", "e1", "--1", "+ 1", "1.5.2", "true", "none"),
    *("", " ", "\ud800", '"\\0"', "\x1b[31m", "a\nb", "[1]", "{a: 1}", "[" * 3000, "{" * 3000),
    *("&a [*a]", "*a", "!!python/object:os.system x", "'", '"', "[1, [2, [3]]", "1 # x", "12 "),
)
PLACES = ("seed", "actor.optimizer.lr", "task.path", "gen.stop_token_ids")
NAMES = (
    *("", ".", "..", "a..b", "seed.", ".seed", "seed.x", "seed.x.y", "actor", "actor.", "Seed"),
    *("actor.optimizer", "sft.actor", "__class__", "actor.__dict__", "gen.max_new_tokens.x"),
    *("x" * 5000, "a." * 2000 + "a", "sedé", "actor optimizer lr", "--seed", "-seed", "lr"),
)
WORKERS = (
    *(
        "placement.n_model_workers=1000000",
        "placement.n_model_workers=9223372036854775807",
        "group_size=10000000000",
    ),
    *(
        "actor.parallel=d1000000t1p1",
        "actor.parallel=d99999999999999999999t1p1",
        "placement.allocation=" + "a" * 999,
    ),
    *(
        "task.train_size=1000000000000",
        "task.eval_size=1000000000000",
        "schedule.max_staleness=1000000000",
    ),
    *("train_bs_n_seqs=1000000000", "gen.max_new_tokens=1000000000000"),
    *(
        "exp_ctrl.total_train_epochs=1000000000000",
        "scheduling.model_worker.mem=9223372036854775807",
    ),
)


def words() -> Iterator[Case]:
    """Settings on the command line."""
    for n, text in enumerate(NUMBERS):
        for place in (PLACES[n % 4], PLACES[(n + 1) % 4]):
            yield Case(f"word {place} {n}", (f"{place}={text}",), gives=(place, text))
    for n, name in enumerate(NAMES):
        yield Case(f"name {n}", (f"{name}=1",))
    for text in WORKERS:
        yield Case(f"many {text[:40]}", (text,))
    many = tuple(f"scheduling.all.env_vars.A{n}=x" for n in range(3000))
    yield Case("3,000 words", many)
    yield Case("long word", ("scheduling.all.env_vars.A=" + "x" * 100_000,))


def yaml_files() -> Iterator[Case]:
    """Settings in a file."""
    bomb = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
        f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]\n"
        for old, new in zip("abcdefghi", "bcdefghij", strict=True)
    )
    texts: dict[str, Content] = {
        "deep list": "seed: " + "[" * 100_000,
        "deep table": "seed: " + "{a: " * 20_000,
        "deep lines": "".join(" " * n + "a:\n" for n in range(1500)),
        "itself": "seed: &a [*a]\n",
        "itself in a table": "scheduling: &a {all: *a}\n",
        "alias bomb": bomb,
        "merge bomb": "a: &a {x: 1}\nb: &b {<<: [*a, *a]}\nactor: {<<: [*b, *b]}\n",
        "60,000 variables": "scheduling.all.env_vars:\n"
        + "".join(f"  A{n}: x\n" for n in range(60_000)),
        "large value": "scheduling.all.env_vars:\n  A: " + "x" * 500_000 + "\n",
        "40 MB line": Large(40 << 20, b"seed: "),
        "terabyte": Large(1 << 40, b"seed: 1\n"),
        "pipe": FIFO,
        "device": ZERO,
        "folder": FOLDER,
        "link to itself": LOOP,
        "no text": b"\xff\xfe\x00s",
        "utf-16": "seed: 3\n".encode("utf-16"),
        "nul": b"seed: 3\0\n",
        "two documents": "seed: 1\n---\nseed: 2\n",
        "key twice": "seed: 1\nseed: 2\n",
        "two spellings": "actor.optimizer.lr: 1\nactor: {optimizer: {lr: 2}}\n",
        "list": "- 1\n- 2\n",
        "text": "hello\n",
        "tag": "seed: !!python/object/apply:os.system [ls]\n",
        "key of a list": "? [1, 2]\n: 3\n",
        "key of null": "null: 3\n~: 4\n",
        "empty key": "'': 3\n",
        "surrogate": 'task.path: "\\ud800"\n',
        "tab": "seed:\t1\n\tx: 2\n",
        "open quote": "task.path: 'x\n",
        "open table": "actor: {optimizer: {lr: 1\n",
        "unknown alias": "seed: *nobody\n",
        "directive": "%YAML 9.9\n---\nseed: 1\n",
        "octal": "seed: 0o17\n",
        "sexagesimal": "seed: 1:30\n",
        "date": "seed: 2020-01-01\n",
        "binary": "seed: !!binary aGVsbG8=\n",
        "group with a value": "actor: 3\n",
        "list for a group": "actor: [1, 2]\n",
        "table for a value": "seed: {a: 1}\n",
        "colons": "seed: 1: 2\n",
    }
    for name, text in texts.items():
        yield Case(f"yaml {name}", ("--config", f"{HERE}/c.yaml"), {"c.yaml": text})


def site_files() -> Iterator[Case]:
    """The description of a site."""
    texts: dict[str, Content] = {
        "pipe": FIFO,
        "device": ZERO,
        "folder": FOLDER,
        "large": Large(1 << 34),
        "unknown name": "schedular: slurm\n",
        "unknown scheduler": "scheduler: pbs\n",
        "partition of text": "scheduler: slurm\npartitions: {a: hello}\n",
        "partition of a list": "scheduler: slurm\npartitions: [a, b]\n",
        "no cpus": "scheduler: slurm\npartitions: {a: {cpus: 0}}\n",
        "many nodes": "scheduler: slurm\npartitions: {a: {nodes: 99999999999999999999}}\n",
        "hostlist bomb": "scheduler: slurm\npartitions: {a: {nodelist: 'n[1-999999999]'}}\n",
        "hostlist": "scheduler: slurm\npartitions: {a: {nodelist: 'n[1-'}}\n",
        "root of nul": 'file_root: "a\\0b"\n',
        "root of a surrogate": 'file_root: "\\ud800"\n',
        "no root": "file_root: ''\n",
        "store": "name_resolve: http://x\n",
        "ports": "name_resolve: etcd://a:99999999\n",
        "time": "scheduler: slurm\nslurm: {time_limit: forever}\n",
        "variables": "env_vars:\n" + "".join(f"  A{n}: x\n" for n in range(60_000)),
        "itself": "partitions: &a {a: *a}\n",
    }
    for name, text in texts.items():
        yield Case(f"site {name}", ("--cluster", f"{HERE}/s.yaml"), {"s.yaml": text})


RECORD = '{"prompt": "1 + 1 =", "answer": "2"}\n'


def data_sets() -> Iterator[Case]:
    """Questions."""
    good, deep = RECORD * 300, "[" * 100_000
    texts: dict[str, Content] = {
        "empty": "",
        "blank": "\n\n\n",
        "pipe": FIFO,
        "device": ZERO,
        "folder": FOLDER,
        "link to itself": LOOP,
        "40 MB line": '{"prompt": "' + "x" * (40 << 20) + '", "answer": "1"}\n',
        "zeros": Large(1 << 34),
        "gzip bomb": _gzip_of_zeros(1 << 31),
        "gzip cut": _gzip_of_zeros(1 << 20)[:-20],
        "gzip of nothing": b"\x1f\x8b",
        "no text": b"\xff\xfe" + good.encode(),
        "utf-16": good.encode("utf-16"),
        "cut": good[:-10],
        "list": "[1, 2]\n",
        "csv": "prompt,answer\n1,2\n",
        "one array": "[" + RECORD.strip() + "]",
    }
    values = {
        "large integer": "9" * 5000,
        "1e400": "1e400",
        "NaN": "NaN",
        "Infinity": "-Infinity",
        "null": "null",
        "true": "true",
        "empty": '""',
        "list": "[]",
        "table": "{}",
        "deep": deep,
        "surrogate": '"\\ud800"',
        "bare word": "hello",
        "single quotes": "'2'",
        "open": '"2',
        "control": '"a\x01"',
    }
    for name, text in texts.items():
        yield Case(f"data {name}", ("task.path={folder}/d.jsonl",), {"d.jsonl": text})
    for name, value in values.items():
        for key in ("prompt", "answer"):
            line = ", ".join(
                f'"{k}": {value if k == key else json.dumps("3")}' for k in ("prompt", "answer")
            )
            text = good + "{" + line + "}\n"
            yield Case(f"data {key} {name}", (f"task.path={HERE}/d.jsonl",), {"d.jsonl": text})


CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
    "max_position_embeddings": 4096,
}
TOKENIZER = '{"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}'


def model_folders() -> Iterator[Case]:
    """A policy in Hugging Face's format."""
    numbers = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    for key in (*numbers, "num_key_value_heads", "model_type"):
        for value in ('"abc"', "null", "-1", "0", "1e400", "[]", "9" * 30, "1.5", "true"):
            config = json.dumps({**CONFIG, key: "@"}).replace('"@"', value)
            yield _model(f"config {key} {value[:12]}", {"config.json": config})
    nested: dict[str, Content] = {
        "deep": "[" * 100_000,
        "list": "[]",
        "large": Large(1 << 34),
        "cut": json.dumps(CONFIG)[:-3],
        "no text": b"\xff\xff",
        "text_config": json.dumps({**CONFIG, "text_config": "x"}),
        "architectures": json.dumps({**CONFIG, "architectures": 3}),
    }
    for name, text in nested.items():
        yield _model(f"config {name}", {"config.json": text})
    for name, text in {
        "empty": "",
        "list": "[]",
        "table": "{}",
        "deep": '{"model": ' * 5000,
        "large": Large(1 << 32),
        "cut": TOKENIZER[:-4],
        "no text": b"\xff\xff\xff",
        "ids": TOKENIZER.replace("0", "99999999999999999999"),
        "unknown": TOKENIZER.replace("WordLevel", "Nothing"),
    }.items():
        yield _model(f"tokenizer {name}", {"tokenizer.json": text})
    size = 8
    for name, data in {
        "empty": b"",
        "short": b"\x05",
        "lying": (2**63).to_bytes(8, "little") + b"{}",
        "large header": Large(3 << 30, (2 << 30).to_bytes(8, "little")),
        "list": (2).to_bytes(8, "little") + b"[]",
        "deep": (100_000).to_bytes(size, "little") + b"[" * 100_000,
        "shape": _header({"a": {"dtype": "F32", "shape": "x", "data_offsets": [0, 4]}}),
        "offsets": _header({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 10**30]}}),
        "no tensors": _header({}),
    }.items():
        yield _model(f"weights {name}", {"model.safetensors": data})
    for name, index in {
        "list": "[]",
        "map of lists": '{"weight_map": {"a": ["x"]}}',
        "map of numbers": '{"weight_map": {"a": 3}}',
        "map of tables": '{"weight_map": {"a": {"b": "c"}}}',
        "nul": '{"weight_map": {"a": "a\\u0000"}}',
        "elsewhere": '{"weight_map": {"a": "/dev/zero"}}',
        "no shard": '{"weight_map": {"a": "b.safetensors"}}',
        "folder": '{"weight_map": {"a": "."}}',
    }.items():
        case = _model(f"index {name}", {"model.safetensors.index.json": index})
        yield replace(case, files={k: v for k, v in case.files.items() if k != "model.safetensors"})
    for name, text in {"loop": "{% for a in range(10**9) %}x{% endfor %}", "open": "{% if"}.items():
        files = {"tokenizer.json": TOKENIZER, "chat_template.jinja": text}
        yield _model(f"template {name}", files)


def _model(name: str, files: Mapping[str, Content]) -> Case:
    whole = {"config.json": json.dumps(CONFIG), "tokenizer.json": TOKENIZER, **files}
    whole.setdefault("model.safetensors", _header({}))
    return Case(f"model {name}", (f"actor.path={HERE}",), whole)


def _header(tensors: Mapping[str, Any]) -> bytes:
    text = json.dumps(tensors).encode()
    return len(text).to_bytes(8, "little") + text


def _gzip_of_zeros(size: int) -> bytes:
    import zlib

    packer = zlib.compressobj(1, wbits=31)
    chunks = [packer.compress(bytes(1 << 20)) for _ in range(size >> 20)]
    return b"".join([*chunks, packer.flush()])


def cases() -> list[Case]:
    """All, in the same order always."""
    kinds = (words(), yaml_files(), site_files(), data_sets(), model_folders())
    return [case for kind in kinds for case in kind]


# ---- running and judging --------------------------------------------------------------------


def fault(case: Case, folder: Path) -> str:
    """What is wrong with how the input was met; empty: nothing. Runs it in a fork."""
    for name, content in case.files.items():
        _make(folder / name, content)
    begun, pid = time.monotonic(), os.fork()
    if pid == 0:
        _child(case, folder)
    status = None
    while status is None and time.monotonic() - begun < LIMIT_S:
        done, waited = os.waitpid(pid, os.WNOHANG)
        status = waited if done else time.sleep(0.005)
    if status is None:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        return f"no end within {LIMIT_S:g} s"
    out, err = ((folder / name).read_text(errors="replace") for name in ("out", "err"))
    if "Traceback" in err or "bug in realsys" in err:
        return "traceback: " + err.strip().splitlines()[-1][:200]
    code = os.waitstatus_to_exitcode(status)
    if code in REFUSED:
        return "" if '"fix"' in out or code == 2 else f"refused without a reason: {err[:200]!r}"
    if code != 0:
        return f"exit status {code}: {err[-200:]!r}"
    return wrong_value(case.gives, json.loads(out)["plan"]["options"]) if case.gives else ""


def wrong_value(gives: tuple[str, str], options: Any) -> str:
    """What an accepted setting became, if that is not what was written."""
    name, text = gives
    value = options
    for part in name.split("."):
        value = value[part]
    same = value is None and text.lower() in ("none", "null", "~", "")
    same |= isinstance(value, str) and value in (text, text[1:-1])
    if isinstance(value, int | float) and not isinstance(value, bool):
        with contextlib.suppress(ValueError):
            same |= math.isclose(float(text), value, rel_tol=1e-15)
    if isinstance(value, list):
        parts = [s for s in text.strip("[]").replace(" ", "").split(",") if s]
        same |= len(parts) == len(value) and all(
            float(p) == v for p, v in zip(parts, value, strict=True)
        )
    return "" if same else f"{name}={text[:40]!r} became {value!r}"


def _make(path: Path, content: Content) -> None:
    if content == FIFO:
        os.mkfifo(path)
    elif content in (ZERO, LOOP):
        path.symlink_to(ZERO if content == ZERO else path)
    elif content == FOLDER:
        path.mkdir()
    elif isinstance(content, Large):
        with path.open("wb") as file:
            file.write(content.head)
            file.truncate(content.size)
    else:
        path.write_bytes(content.encode() if isinstance(content, str) else content)


def _child(case: Case, folder: Path) -> None:
    status = 99
    try:
        for fd, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT, 0o600), fd)
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
        resource.setrlimit(resource.RLIMIT_AS, (LIMIT_BYTES, LIMIT_BYTES))
        os.environ.update(
            HOME=str(folder), REALSYS_FILE_ROOT=f"{folder}/root", TOKENIZERS_PARALLELISM="false"
        )
        from launcher.cli.command_line import run

        status = run(
            ["plan", "ppo-math", "--json", *(w.replace(HERE, str(folder)) for w in case.words)]
        )
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(status)


def run_all(chosen: Sequence[Case]) -> dict[str, str]:
    """Name → fault of those that have one."""
    from launcher.submit.planning import make_plan

    make_plan("ppo-math", ["seed=1"], trial="warm")  # all is imported once, before the forks
    found = {}
    for case in chosen:
        with tempfile.TemporaryDirectory() as folder:
            if what := fault(case, Path(folder)):
                found[case.name] = what
    return found


def main() -> int:
    """Runs the chosen inputs and prints the faults."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default="", help="inputs whose name has this in it")
    parser.add_argument("--every", type=int, default=1, help="each n-th")
    args = parser.parse_args()
    chosen = [case for case in cases() if args.only in case.name][:: args.every]
    faults = run_all(chosen)
    for name, what in faults.items():
        sys.stdout.write(f"{name}: {what}\n")
    kinds = Counter(case.name.split(" ")[0] for case in chosen)
    sys.stdout.write(f"{len(chosen)} inputs {dict(kinds)}: {len(faults)} faults\n")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
