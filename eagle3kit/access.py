"""Who may use a run's servers: one key, asked for by every server and sent by the tools.

A loopback port is open to every user of the machine. The servers get a random key in their environment, where other users and
the command line do not show it. vLLM asks for a key under `/v1` only (its `/invocations` generates as well), so `RequireKey` asks
for it everywhere. speculators' tools and trainer and `vllm bench` send none, and the former two take the path of a state file on
the server's word. `open_loader` is for the trainer;

    python -m eagle3kit.access [--store FOLDER] [--trust-remote-code] -- ARGUMENTS OF `speculators`

runs a tool with the key from the environment, and lets no state file be moved that lies outside FOLDER.

vLLM imports this module in the server process (`--middleware eagle3kit.access.RequireKey`); it imports nothing heavy.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import os
import secrets
import sys
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from pathlib import Path
from typing import Any

KEY = "VLLM_API_KEY"
"""The environment variable that holds the key; vLLM's own name for it, so that its guard is on as well."""

_Send = Callable[[Mapping[str, Any]], Awaitable[None]]
_App = Callable[[MutableMapping[str, Any], Any, _Send], Awaitable[None]]


@functools.cache
def run_key() -> str:
    """The key of every server that this process starts: 256 random bits. `vllm bench` measures several with one."""
    return secrets.token_urlsafe(32)


def header(key: str) -> dict[str, str]:
    """The header that a request carries."""
    return {"Authorization": f"Bearer {key}"}


class RequireKey:
    """ASGI middleware that answers 401 to every request, whatever its path, that does not carry the key.

    Raises:
        KeyError: the environment holds no key; the server then does not start, instead of starting open.
    """

    def __init__(self, app: _App) -> None:
        self._app, self._wanted = app, header(os.environ[KEY])["Authorization"].encode()

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: _Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(b"authorization", b"")
        if secrets.compare_digest(given, self._wanted):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            await send({"type": "http.response.start", "status": 401, "headers": [(b"content-type", b"application/json")]})
            await send({"type": "http.response.body", "body": b'{"error": "Unauthorized"}'})


def send_key(key: str) -> None:
    """Make the HTTP clients of speculators' tools and of its trainer send the key: aiohttp's sessions and openai's clients.

    Nothing else in those processes talks through them; the hub's client does not.
    """
    import aiohttp
    import openai

    session = aiohttp.ClientSession.__init__

    @functools.wraps(session)
    def session_with_key(self: Any, *args: Any, **kwargs: Any) -> None:
        session(self, *args, **{**kwargs, "headers": {**(kwargs.get("headers") or {}), **header(key)}})

    def with_key(init: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(init)
        def client_with_key(self: Any, *args: Any, **kwargs: Any) -> None:
            init(self, *args, **{**kwargs, "api_key": key})

        return client_with_key

    aiohttp.ClientSession.__init__ = session_with_key  # type: ignore[method-assign]
    openai.OpenAI.__init__ = with_key(openai.OpenAI.__init__)  # type: ignore[method-assign]
    openai.AsyncOpenAI.__init__ = with_key(openai.AsyncOpenAI.__init__)  # type: ignore[method-assign]


def require_inside(store: Path, path: str) -> None:
    """Raise unless a path that the server named lies in `store`.

    Raises:
        PermissionError: it does not.
    """
    if not Path(path).resolve().is_relative_to(store.resolve()):
        raise PermissionError(f"the server named a state file outside {store}: {path}")


def keep_inside(store: Path) -> None:
    """Let `generate-offline-data` take only state files that lie in `store`: it moves whatever path the server names."""
    tool: Any = importlib.import_module("speculators.cli.generate_offline_data")
    ask = tool.generate_hidden_states_async

    async def ask_and_check(*args: Any, **kwargs: Any) -> Any:
        path, *rest = await ask(*args, **kwargs)
        require_inside(store, path)
        return (path, *rest)

    tool.generate_hidden_states_async = ask_and_check


def open_loader(store: Path) -> None:
    """Let the loader of speculators' trainer use the run's server: it sends the key, and reads and deletes files in `store` only.

    Its worker processes import everything anew, so each does the same when it begins.
    """
    loader: Any = importlib.import_module("speculators.train.dataloader")
    _open_here(store)
    loader._worker_init_fn = functools.partial(_open_in_worker, store)


def _open_in_worker(store: Path, worker: int) -> None:
    from speculators.train.dataloader import _worker_init_fn

    _open_here(store)
    _worker_init_fn(worker)


def _open_here(store: Path) -> None:
    send_key(os.environ[KEY])
    data: Any = importlib.import_module("speculators.train.data")
    ask = data.generate_hidden_states

    def ask_and_check(*args: Any, **kwargs: Any) -> Any:
        path, *rest = ask(*args, **kwargs)
        require_inside(store, path)
        return (path, *rest)

    data.generate_hidden_states = ask_and_check


def trust_remote_code() -> None:
    """Let the tools' tokenizers run the hub's code: `regenerate-responses` has no option for it."""
    import transformers

    load = transformers.AutoTokenizer.from_pretrained
    transformers.AutoTokenizer.from_pretrained = functools.partial(load, trust_remote_code=True)


def main(arguments: list[str]) -> None:
    """Run one of speculators' tools; see the module's docstring."""
    parser = argparse.ArgumentParser(prog="eagle3kit.access")
    parser.add_argument("--store", type=Path)
    parser.add_argument("--trust-remote-code", action="store_true")
    split = arguments.index("--")
    own = parser.parse_args(arguments[:split])
    send_key(os.environ[KEY])
    if own.trust_remote_code:
        trust_remote_code()
    if own.store:
        keep_inside(own.store)
    from speculators.cli import app

    app(arguments[split + 1 :], prog_name="speculators")


if __name__ == "__main__":
    main(sys.argv[1:])
