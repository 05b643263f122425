"""Counts the prompt tokens of questions as sources/chat_tokens.py would tokenize them. No torch.

For the plan: the tokenizer is read with ``tokenizers`` alone, a chat template is rendered by
render_template.py. Tokenizers in other formats than ``tokenizer.json`` are left to the worker.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from realsys.api.basics.bounded_files import read_bounded_text
from realsys.api.basics.template_args import all_texts, template_for
from realsys.api.errors import CheckpointError
from realsys.data.sources.assistant_turns import ANSWER_MARK
from realsys.data.sources.chat_tokens import PROBE, PROBE_TOOL
from realsys.data.sources.marks_as_text import BREAK, MarksAsText, marks_of
from realsys.data.sources.record_shape import Message, Tool, template_forms, with_system
from realsys.models import render_template
from realsys.models.hf_directory import read_json

RENDER_S = 60.0  # wall clock on a busy machine; CPU time has its own limit
INHERITED_ENV = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "HOME", "LANG")
_SPECIAL = [f"{kind}_token" for kind in ("bos", "eos", "unk", "pad", "sep", "cls", "mask")]
_ASKED = {"role": "user", "content": PROBE}
_ANSWERED = {"role": "assistant", "content": "2", "reasoning_content": "one and one"}
_CALLED = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    ],
}
_RESULT = {"role": "tool", "tool_call_id": "c1", "name": "add", "content": "2"}
_SYSTEM = {"role": "system", "content": "Be brief."}
# Conversations as agents have them, each as it is sampled from and as it stands when it is answered.
_TRIALS: tuple[Mapping[str, Any], ...] = tuple(
    {"messages": messages, "add_generation_prompt": opens, "tools": tools}
    for tools in (None, [PROBE_TOOL])
    for messages in (
        [_ASKED],
        [_ASKED, _ANSWERED],
        [_SYSTEM, _ASKED, _ANSWERED, _ASKED],
        [_SYSTEM, _ASKED, _ANSWERED, _ASKED, _ANSWERED, _ASKED, _ANSWERED, _ASKED],
        [_ASKED, _CALLED, _RESULT],
        [_SYSTEM, _ASKED, _CALLED, _RESULT, _ANSWERED, _ASKED],
    )
    for opens in (True, False)
)
_FIX = "save the tokenizer again (tokenizer.save_pretrained), or use another template"


def tokenizer_faults(path: str | Path, *, rows: int) -> list[CheckpointError]:
    """Reports a tokenizer that can't be used with a model with ``rows`` embedding rows."""
    root = Path(path)
    try:
        tokenizer, special = read_tokenizer(root), special_tokens(root)
    except CheckpointError as error:
        return [error]
    if tokenizer is None:
        return []
    where, ids = str(root / "tokenizer.json"), {}
    for name in ("bos_token", "eos_token", "pad_token"):
        if (text := special.get(name)) is not None:
            ids[f"{name} {text!r}"] = tokenizer.token_to_id(text)
    lost = [name for name, number in ids.items() if number is None and "eos" in name]
    if lost:
        what = f"the tokenizer does not have its own {lost[0]}"
        return [CheckpointError(what, where=where, fix=_FIX)]
    own = tokenizer.get_vocab(with_added_tokens=False)
    largest = max(own, key=own.__getitem__, default="")
    known = {name: number for name, number in ids.items() if number is not None}
    worst = max(known.items(), key=lambda pair: pair[1], default=("", -1))
    if own and own[largest] > worst[1]:
        worst = (f"token {largest!r}", own[largest])
    if rows and worst[1] >= rows:
        what = f"the tokenizer's {worst[0]} has id {worst[1]}, the model has {rows} ids (from 0)"
        fix = "use the tokenizer that belongs to this model"
        return [CheckpointError(what, where=where, fix=fix)]
    return []


def prompt_lengths(
    path: str | Path,
    prompts: Sequence[str | Sequence[Message]],
    *,
    system: str | None = None,
    template_args: Mapping[str, Any] | None = None,
    tools: Sequence[Sequence[Tool]] = (),
    marks_as_text: str = "tools",
) -> list[int] | None:
    """Counts the prompt tokens of each question; None if only the worker can tokenize.

    Args:
        prompts: texts, or messages for the chat template.
        system: system prompt for those that have none.
        template_args: keyword arguments of the template.
        tools: of each question, for the template; empty: there are none.
        marks_as_text: in whose texts the template's marks are text.
    Raises:
        CheckpointError: the tokenizer or its chat template is faulty, messages have none, or a text has no
            tokens.
    """
    root = Path(path)
    tokenizer, template = read_tokenizer(root), chat_template(root)
    if tokenizer is None:
        return None
    if template is not None:
        special, args = special_tokens(root), dict(template_args or {})
        literal = MarksAsText(directory_marks(root, tokenizer), of=marks_as_text)
        offers = [tools[i] if tools else () for i in range(len(prompts))]
        texts = [""] * len(prompts)
        with_tools = [bool(offered or args.get("tools")) for offered in offers]
        for chosen, places in by_template(root, with_tools) or ():
            rendered = render(
                chosen,
                special,
                [literal.messages(_messages(prompts[i], system)) for i in places],
                where=str(root),
                args=args,
                tools=[offers[i] for i in places],
            )
            for i, text in zip(places, rendered.texts, strict=True):
                texts[i] = text
        bos = None
    else:
        plain = [p for p in prompts if isinstance(p, str)]
        if len(plain) < len(prompts):
            raise _template_error("there is none, and prompts are messages", str(root))
        texts = [p if p[-1:].isspace() else p + "\n" for p in plain]
        bos = special_tokens(root).get("bos_token")
    lengths = token_counts(tokenizer, texts, root)
    if bos is None:
        return lengths
    token_counts(tokenizer, ["a"], root)  # a worker asks the same of it
    begin = int(tokenizer.encode("a").tokens[:1] == [bos])
    return [begin + length for length in lengths]


def by_template(root: Path, with_tools: Sequence[bool]) -> list[tuple[str, list[int]]] | None:
    """Returns the chat templates, and the places of the conversations that each is for; None: no template.

    Args:
        with_tools: of each conversation, whether it has tools.
    """
    chosen = []
    for tools in (False, True):
        template = chat_template(root, tools=tools) or chat_template(root)
        if template is None:
            return None
        if places := [i for i, has_some in enumerate(with_tools) if has_some == tools]:
            chosen.append((template, places))
    return chosen


def directory_marks(root: Path, tokenizer: Any) -> re.Pattern[str]:
    """Returns the marks of a directory's templates, as ``tokenizers_marks`` finds them."""
    added = [(str(t), t.special) for t in tokenizer.get_added_tokens_decoder().values()]
    return marks_of(added, special_tokens(root).values(), all_texts(_named_templates(root)))


def turn_end(root: Path) -> tuple[str, str] | None:
    """Returns the mark with which the chat template ends an answer, and the tokenizer's end token; None:
    there is no template, or no mark is found.

    Raises:
        CheckpointError: the tokenizer or its template is faulty.
    """
    tokenizer, template = read_tokenizer(root), chat_template(root)
    special = special_tokens(root)
    if tokenizer is None or template is None or "eos_token" not in special:
        return None
    talk = [_ASKED, {"role": "assistant", "content": ANSWER_MARK}, _ASKED]
    (text,), _ = render(template, special, [talk], where=str(root))
    _, found, behind = text.rpartition(ANSWER_MARK)
    mark = directory_marks(root, tokenizer).search(behind)
    return (mark[0], special["eos_token"]) if found and mark else None


def text_lengths(path: str | Path, texts: Sequence[str]) -> list[int] | None:
    """Counts the tokens of texts alone, as answers are tokenized; None if only the worker can.

    Raises:
        CheckpointError: the tokenizer is faulty, or has no tokens for a text.
    """
    tokenizer = read_tokenizer(Path(path))
    return None if tokenizer is None else token_counts(tokenizer, texts, Path(path))


def token_counts(tokenizer: Any, texts: Sequence[str], root: Path) -> list[int]:
    """Raises CheckpointError: a text has what the tokenizer has no token for."""
    parts = [text.split(BREAK) for text in texts]
    try:
        encodings = tokenizer.encode_batch(
            [part for of_text in parts for part in of_text], add_special_tokens=False
        )
    except Exception as error:  # tokenizers raises nothing more special
        said = (str(error).strip().splitlines() or [type(error).__name__])[0]
        text = next((t for t in texts if not _is_encoded(tokenizer, t)), texts[0])
        what = f"the tokenizer can't encode {text[:100]!r}: {said[:200]}"
        fix = "use a tokenizer that takes any text, e.g. one with an unknown token"
        raise CheckpointError(what, where=str(root / "tokenizer.json"), fix=fix) from None
    lengths = iter(len(encoding.ids) for encoding in encodings)
    return [sum(islice(lengths, len(of_text))) for of_text in parts]


def _is_encoded(tokenizer: Any, text: str) -> bool:
    try:
        tokenizer.encode(text, add_special_tokens=False)
    except Exception:
        return False
    return True


def _messages(prompt: str | Sequence[Message], system: str | None) -> list[Message]:
    given = ({"role": "user", "content": prompt},) if isinstance(prompt, str) else tuple(prompt)
    return list(with_system(given, system))


def read_tokenizer(root: Path) -> Any | None:
    """Loads the ``tokenizers.Tokenizer`` of a directory; None if it has no ``tokenizer.json``.

    Raises:
        CheckpointError: it can't be read.
    """
    file = root / "tokenizer.json"
    if not file.is_file():
        return None
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(file))
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:  # a Rust panic is not an Exception
        said = (str(error).strip().splitlines() or [type(error).__name__])[0]
        what = f"the tokenizer can't be read: {said[:200]}"
        raise CheckpointError(
            what, where=str(file), fix="copy the directory again, whole"
        ) from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def special_tokens(root: Path) -> dict[str, str]:
    """Maps names of special tokens (``bos_token``, …) to their texts."""
    found: dict[str, str] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        for key, value in _json(root / name).items():
            text = value.get("content") if isinstance(value, dict) else value
            if key in _SPECIAL and isinstance(text, str):
                found[key] = text
    return found


def chat_template(root: Path, *, tools: bool = False) -> str | None:
    """Returns the template that a tokenizer from here would use for a question, or for one with tools."""
    return template_for(_named_templates(root), tools=tools)


def _named_templates(root: Path) -> dict[str, str]:
    """Returns the templates of a tokenizer by name; the one that has none is ``default``."""
    found = _json(root / "tokenizer_config.json").get("chat_template")
    listed = found if isinstance(found, list) else [{"name": "default", "template": found}]
    named = {str(t.get("name")): t.get("template") for t in listed if isinstance(t, dict)}
    files = {file.stem: file for file in (root / "additional_chat_templates").glob("*.jinja")}
    if (own := root / "chat_template.jinja").is_file():
        named, files = {}, {**files, "default": own}
    for name, file in files.items():
        try:
            named[name] = read_bounded_text(file)
        except (OSError, ValueError) as error:
            raise _template_error(f"it can't be read: {error}", str(file)) from None
    return {name: text for name, text in named.items() if isinstance(text, str) and text}


class FilledTemplate(NamedTuple):
    """Texts of conversations, and the variables that their template takes from outside."""

    texts: list[str]
    names: frozenset[str]


def render(
    template: str,
    special: dict[str, str],
    conversations: Sequence[Sequence[Message]],
    *,
    where: str,
    args: Mapping[str, Any] | None = None,
    trials: Sequence[Mapping[str, Any]] = (),
    tools: Sequence[Sequence[Tool]] = (),
) -> FilledTemplate:
    """Renders the template for each question, in a process with limits.

    Args:
        trials: variables of further renderings, which need only end.
        tools: of each question; empty: there are none.
    Raises:
        CheckpointError: rendering failed or exceeded the limits.
    """
    answer = limited(
        render_template.__name__,
        {
            "template": template,
            "special": special,
            "conversations": [[*template_forms(messages)] for messages in conversations],
            "args": dict(args or {}),
            "trials": [dict(given) for given in trials],
            "tools": [list(offered) for offered in tools],
        },
        where=where,
    )
    return FilledTemplate(answer["texts"], frozenset(answer["names"]))


def names_read(root: Path) -> frozenset[str]:
    """Returns the arguments that the chat templates of a directory take from outside.

    Raises:
        CheckpointError: a template is faulty, or exceeds the limits.
    """
    special, where = special_tokens(root), str(root)
    templates = _named_templates(root).values()
    return frozenset[str]().union(*(render(t, special, [], where=where).names for t in templates))


def limited(module: str, request: Mapping[str, Any], *, where: str) -> dict[str, Any]:
    """Asks a program that fills a template, in a process with limits.

    Args:
        module: the program's name.
    Raises:
        CheckpointError: it failed or exceeded the limits.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", module],
            input=json.dumps(request).encode(),
            capture_output=True,
            timeout=RENDER_S,
            env={name: os.environ[name] for name in INHERITED_ENV if name in os.environ},
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise _template_error(f"it takes longer than {RENDER_S:g} s", where) from None
    if done.returncode < 0:
        seconds = render_template.CPU_S
        raise _template_error(f"it takes longer than {seconds} s of CPU time", where)
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines() or ["no message"]
        raise _template_error(f"it can't be rendered: {said[-1][:200]}", where)
    answer: dict[str, Any] = json.loads(done.stdout)
    if "error" in answer:
        raise _template_error(answer["error"], where)
    return answer


def check_conversations(path: str | Path, *, template: str | None = None) -> None:
    """Fills the chat template with short conversations, in a process with limits.

    Whoever renders conversations with it afterwards does so in a process of ours, without limits.

    Args:
        template: in place of the directory's own.
    Raises:
        CheckpointError: it does not compile, or does not end, or fills the memory.
    """
    root = Path(path)
    for found in _named_templates(root).values() if template is None else [template]:
        render(found, special_tokens(root), [], where=str(root), trials=_TRIALS)


def _template_error(what: str, where: str) -> CheckpointError:
    return CheckpointError(f"the chat template: {what}", where=where, fix=_FIX)


def _json(file: Path) -> dict[str, Any]:
    return read_json(file) if file.is_file() else {}
