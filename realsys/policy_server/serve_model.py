"""Serves a saved model until it is told to end: ``python -m realsys.policy_server.serve_model MODEL_DIR``.

For ``realsys serve`` and ``realsys chat``, which find the directory. The key comes in the environment
(REALSYS_API_KEY) and never in the command line, which every user of the machine can read; without one it is
made.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import secrets
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from realsys.api.errors import ClusterError, ConfigError, RealsysError
from realsys.devices.cuda_settings import apply, settings_for
from realsys.devices.model_place import model_place
from realsys.policy_server.client_policy import ClientPolicy
from realsys.policy_server.load_policy import LoadedPolicy, load_policy
from realsys.policy_server.open_sessions import OpenSessions
from realsys.policy_server.server_address import check_address
from realsys.rollout.conversation.chat_messages import Unserved
from realsys.rollout.conversation.renderer_choice import TEMPLATE
from realsys.rollout.endpoint.endpoint_app import answering_app
from realsys.runtime.first_error import first_of
from realsys.transport.http_listener import HttpListener

KEY_VARIABLE = "REALSYS_API_KEY"


def main(words: Sequence[str]) -> int:
    """Serves a model; returns the exit status."""
    settings = _parser().parse_args(words)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    key = os.environ.pop(KEY_VARIABLE, "")  # no child needs it
    try:
        check_address(settings.host, https=settings.https, insecure=settings.insecure)
        device, dtype = model_place(settings.device, settings.dtype)
        apply(settings_for(device))
        policy = load_policy(
            settings.model,
            name=settings.name or settings.model.name,
            dtype=dtype,
            device=device,
            template=settings.template,
            renderer=settings.renderer,
            unserved=settings.unserved,
        )
        asyncio.run(_serve(policy, settings, key))
    except RealsysError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    except KeyboardInterrupt:  # while the model was loaded
        return 130
    return 0


async def _serve(policy: LoadedPolicy, settings: argparse.Namespace, key: str) -> None:
    """Serves until a signal, or until the engine fails."""
    own_key = key or "sk-" + secrets.token_urlsafe(24)
    engine = policy.engine
    sessions = OpenSessions(
        policy.settings,
        lambda: ClientPolicy(engine, max_new_tokens=settings.max_new_tokens),
        key=own_key,
        max_requests=settings.max_requests,
    )
    app = answering_app(sessions)
    listener = HttpListener(
        app,
        name="policy server",
        tls=settings.https,
        host=settings.host,
        ports=(settings.port,),
    )
    over = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, over.set)
    try:
        await engine.start()
        try:
            await listener.start()
        except ClusterError as error:
            raise _port_taken(settings.port, settings.host) from error
        if settings.cert_out is not None:
            _write_certificate(settings.cert_out, listener.cert_pem)
        _announce(policy, listener.url, "" if key else own_key, as_json=settings.json)
        await first_of({"signal": over.wait(), "engine": engine.ended()})
    finally:
        await engine.close()
        await listener.stop()


def _announce(policy: LoadedPolicy, url: str, key: str, *, as_json: bool) -> None:
    """Writes where the server listens. ``key``: one that was made; empty: the user knows it."""
    name = policy.settings.model
    address, _, certificate = url.partition("#")
    if as_json:
        announced = {"schema": 1, "url": url, "model": name, "device": policy.device, "key": key}
        sys.stdout.write(json.dumps({k: v for k, v in announced.items() if v}) + "\n")
    else:
        shown: Mapping[str, str] = {
            "model": f"{name} ({policy.dtype} on {policy.device})",
            "address": f"{address}/v1",
            "certificate": certificate,
            "key": key or f"as given in {KEY_VARIABLE} or --api-key-file",
        }
        sys.stdout.write("".join(f"{k:<12}{v}\n" for k, v in shown.items() if v))
        sys.stdout.write("Ctrl-C ends it.\n")
    sys.stdout.flush()


def _write_certificate(path: Path, pem: str) -> None:
    try:
        path.write_text(pem)
    except OSError as error:
        raise ConfigError(
            f"{path} can't be written: {error.strerror}",
            where="--cert-out",
            fix="name a file in a folder that exists",
        ) from error


def _port_taken(port: int, host: str) -> ConfigError:
    return ConfigError(
        f"port {port} of {host} is taken, or not ours to listen on",
        where="--port",
        fix="give another one, or --port 0 for any that is free",
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="realsys serve", description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--name", default="")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--dtype")
    parser.add_argument("--device")
    parser.add_argument("--max-requests", type=int, default=256)
    parser.add_argument("--max-new-tokens", type=int)
    parser.add_argument("--template", type=Path)
    parser.add_argument("--renderer", default=TEMPLATE)
    parser.add_argument("--unserved", choices=[*Unserved], default=Unserved.REFUSE)
    parser.add_argument("--https", action="store_true")
    parser.add_argument("--cert-out", type=Path)
    parser.add_argument("--insecure", action="store_true")
    parser.add_argument("--json", action="store_true")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
