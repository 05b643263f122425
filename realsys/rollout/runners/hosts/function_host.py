"""Runs functions as agents, many at a time, in any interpreter: it imports the standard library only.

``python function_host.py FILE.py:FUNCTION | MODULE:FUNCTION``

Lines of JSON come in on standard input: ``{"id", "task", "base_url", "session_url", "key", "model"}`` starts an
episode, ``{"cancel": id}`` ends it. Lines go out on what was standard output: ``{"id", "result"}`` or ``{"id",
"error"}``. What the function prints goes to the log.
"""

import asyncio
import importlib
import importlib.util
import inspect
import json
import os
import sys
import threading
import traceback


def load(name):
    place, _, attribute = name.rpartition(":")
    if place.endswith(".py"):
        sys.path.insert(0, os.path.dirname(os.path.abspath(place)))
        spec = importlib.util.spec_from_file_location("realsys_agent", place)
        module = importlib.util.module_from_spec(spec)
        sys.modules["realsys_agent"] = module
        spec.loader.exec_module(module)
    else:
        sys.path.insert(0, os.getcwd())
        module = importlib.import_module(place)
    return getattr(module, attribute)


def openai_client(order):
    import openai

    return openai.AsyncOpenAI(base_url=order["base_url"], api_key=order["key"])


def anthropic_client(order):
    import anthropic

    root = order["base_url"].removesuffix("/v1")
    return anthropic.AsyncAnthropic(base_url=root, api_key=order["key"])


MAKERS = {
    "client": openai_client,
    "anthropic_client": anthropic_client,
    "task": lambda order: order["task"],
    "base_url": lambda order: order["base_url"],
    "session_url": lambda order: order["session_url"],
    "api_key": lambda order: order["key"],
    "model": lambda order: order["model"],
}


def arguments(function):
    """Returns which of ``MAKERS`` the function's parameters name."""
    wanted = []
    for name, parameter in inspect.signature(function).parameters.items():
        if name in MAKERS:
            wanted.append(name)
        elif parameter.default is parameter.empty and parameter.kind not in (
            parameter.VAR_POSITIONAL,
            parameter.VAR_KEYWORD,
        ):
            raise TypeError(f"parameter {name!r} is none of {', '.join(MAKERS)}")
    return wanted


async def play(function, wanted, order):
    made = {name: MAKERS[name](order) for name in wanted}
    try:
        if inspect.iscoroutinefunction(function):
            return await function(**made)
        return await asyncio.to_thread(function, **made)
    finally:
        for name in ("client", "anthropic_client"):
            if name in made:
                await made[name].close()


async def main():
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # the function's own prints
    lock = threading.Lock()

    def tell(**line):
        with lock:
            out.write(json.dumps(line, default=str) + "\n")

    function = load(sys.argv[1])
    wanted = arguments(function)
    loop, running = asyncio.get_running_loop(), {}

    async def one(order):
        try:
            result = await play(function, wanted, order)
            tell(id=order["id"], result=result)
        except asyncio.CancelledError:
            tell(id=order["id"], error="cancelled")
        except BaseException as error:
            traceback.print_exc()
            tell(id=order["id"], error=f"{type(error).__name__}: {error}"[:2000])
        finally:
            running.pop(order["id"], None)

    def take(order):
        if "cancel" in order:
            if task := running.get(order["cancel"]):
                task.cancel()
        else:
            running[order["id"]] = loop.create_task(one(order))

    ended = asyncio.Event()

    def read():
        for line in sys.stdin:
            loop.call_soon_threadsafe(take, json.loads(line))
        loop.call_soon_threadsafe(ended.set)

    threading.Thread(target=read, daemon=True).start()
    tell(ready=True)
    await ended.wait()


if __name__ == "__main__":
    asyncio.run(main())
    os._exit(0)  # a function's threads may still run
