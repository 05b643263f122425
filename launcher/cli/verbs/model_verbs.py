"""The verbs for saved models: ``serve`` puts one behind an HTTP API, ``chat`` and ``eval`` ask it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Annotated, Any

import typer

from launcher.cli import shared_options as o
from launcher.terminal.exit_codes import ExitCode
from realsys.rollout.conversation.chat_messages import Unserved

if TYPE_CHECKING:
    from launcher.serving.chat_client import ChatClient
    from launcher.serving.saved_models import SavedModel
    from realsys.evaluator.saved_model import EvaluatedModel

_PORT = 8000
Template = Annotated[
    Path | None, o.option("--template FILE", "A chat template in place of the tokenizer's.")
]
Renderer = Annotated[
    str | None,
    o.option("--renderer NAME", "A family of the package renderers, in place of the template."),
]
KeyFile = Annotated[
    Path | None,
    o.option("--api-key-file FILE", "The key; default: $REALSYS_API_KEY, or one is made."),
]


def serve(
    model: o.Model,
    host: Annotated[str, o.option("--host HOST", "Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, o.option("--port N", "0: any that is free.", min=0, max=65535)] = _PORT,
    api_key_file: KeyFile = None,
    step: o.Step = None,
    role: o.Role = None,
    dtype: o.Dtype = None,
    device: o.Device = None,
    template: Template = None,
    renderer: Renderer = None,
    name: Annotated[str | None, o.option("--name NAME", "The model's name in replies.")] = None,
    max_requests: Annotated[
        int, o.option("--max-requests N", "On their way together; more get status 429.", min=1)
    ] = 256,
    max_new_tokens: Annotated[
        int | None,
        o.option("--max-new-tokens N", "Of an answer without a limit of its own.", min=1),
    ] = None,
    unserved: Annotated[
        Unserved,
        o.option("--unserved refuse|drop", "Pictures and tools that the model can't take."),
    ] = Unserved.REFUSE,
    https: Annotated[
        bool, o.option("--https", "Encrypt, with a certificate made for this start.")
    ] = False,
    cert_out: Annotated[
        Path | None, o.option("--cert-out FILE", "Write that certificate, for clients to trust.")
    ] = None,
    insecure: Annotated[
        bool, o.option("--insecure", "Plain HTTP though other machines reach the address.")
    ] = False,
    json: o.Json = False,
    cluster: o.Cluster = None,
) -> None:
    """Serve a saved model over OpenAI's and Anthropic's APIs, until Ctrl-C."""
    from launcher.serving.saved_models import find_model
    from launcher.serving.server_process import read_key, server_command, server_environment
    from launcher.terminal import output

    found = find_model(model, cluster=cluster, step=step, role=role)
    key = read_key(api_key_file)
    options = {
        "host": host,
        "port": port,
        "dtype": dtype,
        "device": device,
        "template": template,
        "renderer": renderer,
        "max-requests": max_requests,
        "max-new-tokens": max_new_tokens,
        "unserved": unserved.value,
        "https": https or cert_out is not None,
        "cert-out": cert_out,
        "insecure": insecure,
        "json": json,
    }
    argv = server_command(found, {**({"name": name} if name else {}), **options})
    environment = server_environment(key, renderer=renderer)
    output.say(f"loading {found.path}")
    sys.stdout.flush()
    os.execve(argv[0], argv, environment)


def chat(
    model: Annotated[
        str | None, o.argument("TRIAL|MODEL", "A trial or a model's directory; none with --url.")
    ] = None,
    system: Annotated[str, o.option("--system TEXT", "System message.")] = "",
    temperature: Annotated[float | None, o.option("--temperature X", "0 is greedy.", min=0)] = None,
    top_p: Annotated[float | None, o.option("--top-p X", "Of the sampling.", min=0, max=1)] = None,
    seed: Annotated[int | None, o.option("--seed N", "Of the sampling.")] = None,
    max_tokens: Annotated[
        int | None, o.option("--max-tokens N", "Of an answer; default: what fits.", min=1)
    ] = None,
    url: Annotated[
        str | None, o.option("--url URL", "Of a server that runs; default: one of its own.")
    ] = None,
    key_file: Annotated[
        Path | None, o.option("--key-file FILE", "That server's key; default: $REALSYS_API_KEY.")
    ] = None,
    step: o.Step = None,
    role: o.Role = None,
    dtype: o.Dtype = None,
    device: o.Device = None,
    template: Template = None,
    renderer: Renderer = None,
    cluster: o.Cluster = None,
) -> int:
    """Chat with a saved model, in the terminal or through a pipe."""
    from launcher.serving.chat_client import ChatClient
    from launcher.serving.chat_loop import HELP, ChatLoop
    from launcher.serving.server_process import read_key
    from launcher.terminal import output

    if (model is None) == (url is None):
        raise typer.BadParameter("name a trial or a model, or give --url of a server")
    given = {"temperature": temperature, "top_p": top_p, "seed": seed, "max_tokens": max_tokens}
    sampling = {k: v for k, v in given.items() if v is not None}
    options = {"dtype": dtype, "device": device, "template": template, "renderer": renderer}

    @contextmanager
    def client() -> Iterator[ChatClient]:
        if url is not None:
            yield ChatClient(url, read_key(key_file), sampling=sampling)
            return
        from launcher.serving.saved_models import find_model
        from launcher.serving.server_process import own_server

        found = find_model(model or "", cluster=cluster, step=step, role=role)
        output.say(f"loading {found.path}")
        with own_server(found, options) as (own_url, key):
            yield ChatClient(own_url, key, sampling=sampling)

    with client() as asked:
        loop = ChatLoop(
            answers=asked.answer,
            read=_lines(),
            write=_write_piece,
            notify=output.say,
            system=system,
        )
        if sys.stdin.isatty():
            output.say(HELP)
        loop.run()
    return ExitCode.RUN_FAILED if loop.num_failed and not sys.stdin.isatty() else ExitCode.OK


def _lines() -> Callable[[], str | None]:
    """Returns what reads the next line: with a prompt and a history on a terminal, else plainly."""
    if not sys.stdin.isatty():
        return lambda: sys.stdin.readline() or None
    import readline  # noqa: F401  (arrow keys and history in input())

    def ask() -> str | None:
        try:
            return input("> ")
        except (EOFError, KeyboardInterrupt):
            return None

    return ask


def _write_piece(piece: str) -> None:
    from launcher.terminal.text import visible

    text = visible(piece)
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
    sys.stdout.flush()


def eval_(
    model: o.Model,
    words: Annotated[
        list[str] | None, o.argument("task.NAME=VALUE", "Settings of the task.")
    ] = None,
    task: Annotated[
        str | None, o.option("--task KIND", "What is asked, e.g. math; default: the trial's own.")
    ] = None,
    benchmark: Annotated[
        str | None,
        o.option("--benchmark NAME", "One of the trial's benchmarks, in its task's place."),
    ] = None,
    samples: Annotated[int, o.option("--samples K", "Answers a question.", min=1)] = 1,
    temperature: Annotated[
        float | None, o.option("--temperature X", "Default: greedy; 1 with several samples.", min=0)
    ] = None,
    top_p: Annotated[float, o.option("--top-p X", "Of the sampling.", min=0, max=1)] = 1.0,
    max_new_tokens: Annotated[
        int | None, o.option("--max-new-tokens N", "Of an answer; default: at most 1024.", min=1)
    ] = None,
    limit: Annotated[int | None, o.option("--limit N", "Most questions.", min=1)] = None,
    at_once: Annotated[
        int, o.option("--at-once N", "Episodes at a time, where the task has an agent.", min=1)
    ] = 64,
    seed: Annotated[
        int | None, o.option("--seed N", "Of questions, answers and intervals; default: 1.")
    ] = None,
    step: o.Step = None,
    role: o.Role = None,
    dtype: o.Dtype = None,
    device: o.Device = None,
    imports: o.Imports = None,
    out: Annotated[
        Path | None, o.option("--out FILE", "Write the results; default: beside the trial.")
    ] = None,
    json: o.Json = False,
    cluster: o.Cluster = None,
) -> int:
    """Ask a saved model a task's held-out questions, and score its answers."""
    from launcher.serving.model_evaluation import (
        AskedOptions,
        agents_logs,
        as_trained,
        evaluated,
        result_file,
        task_settings,
    )
    from launcher.serving.saved_models import find_model
    from launcher.terminal import output
    from realsys.api.plain import to_plain

    found = find_model(model, cluster=cluster, step=step, role=role)
    chosen = task_settings(
        found,
        task,
        words or [],
        benchmark=benchmark,
        imports=imports or [],
        limit=limit,
        cluster=cluster,
        report=output.say,
    )
    asked = AskedOptions(
        samples=samples,
        temperature=temperature,
        top_p=top_p,
        max_new_tokens=max_new_tokens,
        limit=limit,
        seed=1 if seed is None else seed,
        device=device,
        dtype=dtype,
        at_once=at_once,
    )
    if task is None:
        named = {"seed": seed, "max_new_tokens": max_new_tokens, "dtype": dtype}
        asked = as_trained(found, asked, given={k for k, v in named.items() if v is not None})
    file = result_file(found, benchmark or chosen.kind, out)
    if file is not None:
        _check_writable(file)
    # What plug-ins print is no result
    with agents_logs(file) as logs, redirect_stdout(sys.stderr):
        made = evaluated(found, chosen, asked, logs=logs, report=output.say)
    summary = {
        "model": {"path": str(found.path), "name": found.name, "step": found.step},
        "task": to_plain(chosen),
        "asked": {**asdict(asked), "max_new_tokens": made.max_new_tokens},
        **{k: v for k, v in to_plain(made).items() if k != "results"},
    }
    if file is not None:
        _write_results(file, {"schema": 1, **summary, "results": to_plain(made.results)})
    if json:
        output.document(**summary, file=None if file is None else str(file))
    else:
        _print_figures(found, made, samples, file)
    return ExitCode.OK


def _check_writable(file: Path) -> None:
    """Raises ConfigError if results can't be written: before questions are asked."""
    with _writing(file):
        file.parent.mkdir(exist_ok=True)
        with TemporaryFile(dir=file.parent):
            pass


def _write_results(file: Path, content: Mapping[str, Any]) -> None:
    from realsys.trial.records import dumps

    with _writing(file):
        file.write_bytes(dumps(content) + b"\n")


@contextmanager
def _writing(file: Path) -> Iterator[None]:
    from realsys.api.errors import ConfigError

    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"{file} can't be written: {error.strerror}",
            where="--out",
            fix="name a file in a folder that exists and is yours",
        ) from error


def _print_figures(
    found: SavedModel, made: EvaluatedModel, samples: int, file: Path | None
) -> None:
    from launcher.terminal import output
    from launcher.terminal.text import duration, number

    several = f", {samples} answers each" if samples > 1 else ""
    output.data(
        f"{found.name}: {made.num_questions} of {made.num_held_out} held-out questions{several}, "
        f"at most {made.max_new_tokens} tokens, {duration(made.seconds)} on {made.device}"
    )
    rows = [
        (name, number(e.value), f"{number(e.low)} … {number(e.high)}", e.interval)
        for name, e in made.figures.items()
    ]
    output.table(("figure", "mean", "95 %", "interval"), rows)
    unscored = [result for result in made.results if not result.rewards]
    if unscored:
        why = unscored[0].problem or "the rule failed on their records"
        output.warn(f"{len(unscored)} questions got no score: {why}")
    failed = [result.problem for result in made.results if result.rewards and result.problem]
    if failed:
        output.warn(f"the agent failed at {len(failed)} questions: {failed[0]}")
    output.say(f"results: {file}" if file is not None else "--out FILE keeps the results")
