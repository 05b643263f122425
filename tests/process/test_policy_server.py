"""`realsys serve`, `chat` and `eval` on a tiny model, as a user starts them, over plain HTTP."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from real_trials import SMALL_PPO, SMALL_PPO_STEPS, Trials, explain

from realsys.observability.metrics import read_metrics
from realsys.trial.trial_state import State

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

KEY = "sk-of-the-tests"
QUESTION = [{"role": "user", "content": "Tom has 3 apples and gets 4. How many?"}]


@dataclass
class Server:
    process: subprocess.Popen[str]
    url: str

    def ask(self, path: str, body: Any = None, *, key: str = KEY) -> tuple[int, bytes]:
        """One request; POST if it has a body."""
        at = urlsplit(self.url)
        connection = http.client.HTTPConnection(at.hostname or "", at.port, timeout=60)
        try:
            headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
            content = None if body is None else json.dumps(body)
            connection.request("GET" if body is None else "POST", path, content, headers)
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def json(self, path: str, body: Any = None, *, key: str = KEY, status: int = 200) -> Any:
        found, content = self.ask(path, body, key=key)
        assert found == status, content
        return json.loads(content)

    def chat(self, **fields: Any) -> str:
        """The text of a chat completion."""
        body = {"messages": QUESTION, "max_tokens": 12, **fields}
        made = self.json("/v1/chat/completions", body)
        return str(made["choices"][0]["message"]["content"])

    def events(self, path: str, body: Any) -> list[Any]:
        """The events of a stream, without the last word."""
        status, content = self.ask(path, {**body, "stream": True})
        assert status == 200, content
        lines = [line[6:] for line in content.decode().splitlines() if line.startswith("data: ")]
        return [json.loads(line) for line in lines if line != "[DONE]"]


def environment_of(root: Path) -> dict[str, str]:
    """The tests' environment, where a server is a process of its own and not forked."""
    path = {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    return {**Trials(root).environment, **path}


@contextmanager
def running(*argv: str, environment: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """A Python that is killed at the end if it is still there."""
    with subprocess.Popen(
        [sys.executable, *argv], env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


@contextmanager
def serving(environment: dict[str, str], *words: str) -> Iterator[Server]:
    """A server that `realsys serve` has started, on a free port."""
    argv = ["-m", "launcher.cli.entry", "serve", *words, "--port", "0", "--json"]
    environment = {**environment, "REALSYS_API_KEY": KEY}
    with running(*argv, environment=environment) as process:
        assert process.stdout is not None
        line = process.stdout.readline()  # the test's own time limit bounds it
        assert line, "the server ended; its error is above"
        yield Server(process, json.loads(line)["url"])


@pytest.fixture(scope="module")
def server(tiny_policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(environment_of(tmp_path_factory.mktemp("serve")), str(tiny_policy)) as found:
        yield found


def own_greedy_tokens(path: Path, prompt: list[int], count: int) -> list[int]:
    """What the engine says to a prompt without any server."""
    import torch

    from realsys.api.model import GenerationHyperparameters
    from realsys.generation.engine.embedded_engine import generate
    from realsys.models.hf import end_token_ids, load_causal_lm, load_tokenizer

    tokenizer = load_tokenizer(path)
    made = generate(
        load_causal_lm(path),
        [torch.tensor(prompt)],
        GenerationHyperparameters(max_new_tokens=count, greedy=True),
        eos_token_ids=end_token_ids(tokenizer, None),
        pad_token_id=tokenizer.pad_token_id,
        row_seeds=torch.tensor([0]),
    )
    return [int(token) for token in made.tokens[0]]


def test_all_apis_give_the_engines_own_greedy_answer(server: Server, tiny_policy: Path) -> None:
    from realsys.models.hf import load_tokenizer
    from realsys.rollout.conversation.chat_messages import ChatMessage
    from realsys.rollout.conversation.chat_rendering import TemplateRenderer

    tokenizer = load_tokenizer(tiny_policy)
    renderer = TemplateRenderer(tokenizer, end_ids=[tokenizer.eos_token_id])
    prompt = renderer.whole([ChatMessage(role="user", content=QUESTION[0]["content"])], ())
    tokens = own_greedy_tokens(tiny_policy, list(prompt.tokens), 12)
    text = tokenizer.decode([t for t in tokens if t != tokenizer.eos_token_id])
    greedy: dict[str, Any] = {"temperature": 0, "max_tokens": 12}
    assert server.chat(temperature=0) == text
    response = server.json(
        "/v1/responses", {"input": QUESTION, "temperature": 0, "max_output_tokens": 12}
    )
    assert response["output"][0]["content"][0]["text"] == text
    message = server.json("/v1/messages", {"messages": QUESTION, "model": "any", **greedy})
    assert message["content"][0]["text"] == text
    body = {"prompt": list(prompt.tokens), "logprobs": 1, **greedy}
    completion = server.json("/v1/completions", body)["choices"][0]
    assert completion["text"] == text
    assert len(completion["logprobs"]["token_logprobs"]) == len(tokens)


def test_the_pieces_of_a_stream_are_the_whole_answer(server: Server) -> None:
    body = {"messages": QUESTION, "max_tokens": 24, "temperature": 0}
    events = server.events("/v1/chat/completions", body)
    pieces = [e["choices"][0]["delta"].get("content") or "" for e in events]
    assert "".join(pieces) == server.chat(max_tokens=24, temperature=0)
    assert sum(map(bool, pieces)) > 3  # token by token, not all at the end
    text = {"prompt": ["a", "b"], "max_tokens": 8, "temperature": 0}
    whole = server.json("/v1/completions", text)["choices"]
    chunks = [e["choices"][0] for e in server.events("/v1/completions", text)]
    for index in (0, 1):
        mine = "".join(c["text"] for c in chunks if c["index"] == index)
        assert mine == whole[index]["text"]


def test_a_seed_makes_a_sample_reproducible_and_others_differ(server: Server) -> None:
    assert server.chat(seed=5) == server.chat(seed=5)
    assert len({server.chat(seed=seed) for seed in range(4)}) > 1
    assert len({server.chat() for _ in range(4)}) > 1
    body = {"messages": QUESTION, "max_tokens": 12, "seed": 5, "n": 3}
    several = server.json("/v1/chat/completions", body)["choices"]
    texts = [choice["message"]["content"] for choice in several]
    assert texts[0] == server.chat(seed=5)
    assert len(set(texts)) == 3


def test_stop_texts_end_an_answer_before_them(server: Server) -> None:
    whole = server.chat(temperature=0)
    stop = whole[4:6]
    assert server.chat(temperature=0, stop=[stop]) == whole[: whole.find(stop)]


def test_an_answer_is_held_to_a_schema_in_every_api(server: Server) -> None:
    schema = {
        "type": "object",
        "properties": {"sum": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["sum"],
        "additionalProperties": False,
    }
    chat_format = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    body = {"messages": QUESTION, "response_format": chat_format, "max_tokens": 64}
    made = [server.json("/v1/chat/completions", {**body, "seed": i}) for i in range(8)]
    # A random policy may think, and never come to an end.
    ended = [one["choices"][0] for one in made if one["choices"][0]["finish_reason"] == "stop"]
    assert len(ended) >= 3
    texts = [choice["message"]["content"] for choice in ended]
    named: dict[str, Any] = {"prompt": "a", "max_tokens": 9, "guided_regex": "[0-9]{2}/x"}
    (choice,) = server.json("/v1/completions", named)["choices"]
    assert (choice["text"][2:], choice["finish_reason"]) == ("/x", "stop")
    greedy: dict[str, Any] = {"temperature": 0}
    response = server.json(
        "/v1/responses",
        {
            "input": QUESTION,
            "text": {"format": {"type": "json_schema", "schema": schema}},
            **greedy,
        },
    )
    texts.append(response["output"][0]["content"][0]["text"])
    message = server.json(
        "/v1/messages",
        {
            "messages": QUESTION,
            "model": "any",
            "max_tokens": 64,
            "output_config": {"format": {"type": "json_schema", "schema": schema}},
            **greedy,
        },
    )
    texts.append(message["content"][0]["text"])
    for text in texts:
        value = json.loads(text)
        assert value.keys() == {"sum"}
        assert 0 <= value["sum"] <= 99
    status, said = server.ask(
        "/v1/chat/completions",
        {"messages": QUESTION, "response_format": {**chat_format, "json_schema": {"schema": NOT}}},
    )
    assert status == 400
    assert b"Unimplemented keys" in said


NOT = {"not": {"type": "string"}}


def test_a_wrong_key_is_401_everywhere(server: Server) -> None:
    for path, body in (
        ("/v1/models", None),
        ("/v1/chat/completions", {"messages": QUESTION}),
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/messages", {"messages": QUESTION, "max_tokens": 1, "model": "m"}),
    ):
        assert server.ask(path, body, key="sk-wrong")[0] == 401
    assert server.json("/v1/models")["data"][0]["id"] == "tiny"


def test_a_prompt_over_the_models_context_is_refused_in_the_clients_words(server: Server) -> None:
    long = [{"role": "user", "content": "seven apples " * 300}]
    counted = server.json("/v1/messages/count_tokens", {"messages": long, "model": "m"})
    count = counted["input_tokens"]
    for path, body, numbers in (
        ("/v1/chat/completions", {"messages": long, "max_tokens": 9}, [256, count + 9, count, 9]),
        ("/v1/chat/completions", {"messages": long, "stream": True}, [256, count + 1, count, 1]),
        ("/v1/responses", {"input": long}, [256, count + 1, count, 1]),
        ("/v1/completions", {"prompt": [5] * 256}, [256, 272, 256, 16]),
        ("/v1/messages", {"messages": long, "max_tokens": 9, "model": "m"}, [count, 256]),
    ):
        error = server.json(path, body, status=400)["error"]
        is_anthropic = path == "/v1/messages"
        begin = (
            "prompt is too long: " if is_anthropic else "This model's maximum context length is "
        )
        assert error["message"].startswith(begin)
        assert [int(n) for n in re.findall(r"\d+", error["message"])] == numbers
        assert error.get("code") == (None if is_anthropic else "context_length_exceeded")


def test_paths_of_episodes_are_not_there(server: Server) -> None:
    assert server.ask("/rl/start_session", {})[0] == 404


def test_no_key_is_in_the_command_line(server: Server) -> None:
    command = Path(f"/proc/{server.process.pid}/cmdline").read_bytes()
    assert b"realsys.policy_server.serve_model" in command
    assert KEY.encode() not in command


def test_ctrl_c_ends_a_server_that_made_its_key(tiny_policy: Path, tmp_path: Path) -> None:
    argv = ("-m", "launcher.cli.entry", "serve", str(tiny_policy), "--port", "0")
    with running(*argv, environment=Trials(tmp_path).environment) as process:
        assert process.stdout is not None
        told = [process.stdout.readline() for _ in range(3)]
        shown = dict(line.split(maxsplit=1) for line in told)
        made = Server(process, shown["address"].strip().removesuffix("/v1"))
        assert made.json("/v1/models", key=shown["key"].strip())["data"]
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=240) == 0


def test_what_cant_be_served_is_told_and_not_started(tiny_policy: Path, tmp_path: Path) -> None:
    trials = Trials(tmp_path)
    done = trials.run("serve", str(tiny_policy), "--host", "0.0.0.0", "--port", "0")
    assert done.returncode == 4
    assert "add --https" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_chat_in_a_pipe_answers_each_line(tiny_policy: Path, tmp_path: Path) -> None:
    trials = Trials(tmp_path)
    words = ["chat", str(tiny_policy), "--temperature", "0", "--max-tokens", "6"]
    done = subprocess.run(
        [sys.executable, "-m", "launcher.cli.entry", *words],
        input="How many?\n/reset\nHow many?\n/quit\nnever asked\n",
        env=trials.environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    half = len(done.stdout) // 2
    assert done.stdout[:half] == done.stdout[half:]  # the second conversation is the first again
    assert done.stdout.strip()


def test_a_chat_over_https_pins_the_servers_certificate(tiny_policy: Path, tmp_path: Path) -> None:
    trials = Trials(tmp_path)
    words = (str(tiny_policy), "--https", "--cert-out", str(tmp_path / "c"))
    with serving(trials.environment, *words) as found:
        assert (tmp_path / "c").read_text().startswith("-----BEGIN CERTIFICATE-----")

        def chat(url: str) -> subprocess.CompletedProcess[str]:
            words = ["chat", "--url", url, "--max-tokens", "4", "--seed", "1"]
            return subprocess.run(
                [sys.executable, "-m", "launcher.cli.entry", *words],
                input="hi\n",
                env={**trials.environment, "REALSYS_API_KEY": KEY},
                capture_output=True,
                text=True,
                timeout=100,
                check=False,
            )

        assert chat(found.url).returncode == 0
        other = chat(found.url[:-4] + ("0000" if found.url[-4:] != "0000" else "1111"))
        assert other.returncode == 1
        assert "another certificate" in other.stderr


def test_eval_of_a_model_scores_held_out_arithmetic(tiny_policy: Path, tmp_path: Path) -> None:
    out = tmp_path / "results.json"
    words = ("--task", "math", "--limit", "6", "--samples", "4", "--max-new-tokens", "8")
    runs = [
        Trials(tmp_path).run("eval", str(tiny_policy), *words, "--json", "--out", str(out))
        for _ in range(2)
    ]
    assert runs[0].returncode == 0, runs[0].stderr
    told = [json.loads(run.stdout) for run in runs]
    figures = told[0]["figures"]
    assert figures == told[1]["figures"]
    assert list(figures) == [
        *("accuracy", "mean_reward", "response_length/mean", "truncated"),
        *("pass@1", "pass@2", "pass@4"),
    ]
    assert told[0]["num_questions"] == 6
    assert 1 <= figures["response_length/mean"]["value"] <= 8
    results = json.loads(out.read_text())["results"]
    assert len(results) == 6
    assert all(len(r["rewards"]) == len(r["lengths"]) == 4 for r in results)


def test_eval_of_a_trial_gives_the_trainers_own_figures_again(
    trials: Trials, tiny_policy: Path
) -> None:
    files = trials.launch(
        *("ppo-math", "tested", f"actor.path={tiny_policy}", *SMALL_PPO),
        "exp_ctrl.save_freq_steps=4",
    )
    view = trials.wait(files, timeout_s=200)
    assert view.state is State.COMPLETED, explain(files, view)
    done = trials.run("eval", "ppo-math/tested", "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    rows = read_metrics(files.phase(files.root).metrics)
    (own,) = [row for row in rows if row["step"] == SMALL_PPO_STEPS]
    assert told["model"]["step"] == SMALL_PPO_STEPS
    for name in ("accuracy", "mean_reward", "response_length/mean"):
        assert told["figures"][name]["value"] == own[f"eval/{name}"]
    assert (
        Path(told["file"]) == files.root / "evals" / f"actor-step-{SMALL_PPO_STEPS:06d}-math-1.json"
    )
