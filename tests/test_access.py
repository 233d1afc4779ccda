"""The key of a server: asked for on every path, sent by the kit and by speculators' tools, shown nowhere."""

import asyncio
import http.server
import importlib
import pickle
import subprocess
import sys
import threading
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import aiohttp
import openai
import pytest

from eagle3kit import access, compat
from eagle3kit import server as serving
from eagle3kit.params import Params
from eagle3kit.process import Child
from eagle3kit.rundir import Run
from eagle3kit.server import Server


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv(access.KEY, "secret")
    return "secret"


# ---- the server's side


def ask(headers: dict[str, str], path: str = "/invocations", kind: str = "http") -> list[dict[str, Any]]:
    """What the guard sends for a request; an application behind it answers 200."""
    sent: list[dict[str, Any]] = []

    async def application(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def send(message: Any) -> None:
        sent.append(dict(message))

    raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    asyncio.run(access.RequireKey(application)({"type": kind, "path": path, "headers": raw}, None, send))
    return sent


@pytest.mark.parametrize("path", ["/v1/completions", "/invocations", "/tokenize", "/metrics", "/health", "/"])
@pytest.mark.parametrize("headers", [{}, access.header("EMPTY"), access.header(""), {"Authorization": "secret"}])
def test_every_path_refuses_a_request_without_the_key(path: str, headers: dict[str, str]) -> None:
    assert ask(headers, path)[0]["status"] == 401


def test_the_key_lets_in() -> None:
    assert ask(access.header("secret"))[0]["status"] == 200


def test_a_websocket_without_the_key_is_closed_and_the_start_of_the_application_is_not() -> None:
    assert ask({}, kind="websocket") == [{"type": "websocket.close", "code": 1008}]
    assert ask({}, kind="lifespan")[0]["status"] == 200


def test_a_server_without_a_key_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(access.KEY)
    with pytest.raises(KeyError):
        ask({})


def test_vllm_puts_the_guard_before_its_routes(run: Run) -> None:
    """By the option that the kit gives it. vLLM's own guard, which the key turns on, leaves `/invocations` open."""
    fastapi = pytest.importorskip("fastapi")
    from starlette.testclient import TestClient
    from vllm.entrypoints.serve.middleware.register import init_entrypoints_middleware

    line = serving.command(run.params, "model", serving.plain(), 8123, "cpu")

    def status(middleware: list[str], headers: dict[str, str]) -> int:
        app = fastapi.FastAPI()
        app.post("/invocations")(lambda: {})
        quiet = {f"allowed_{what}": ["*"] for what in ("origins", "methods", "headers")}
        args = Namespace(**quiet, allow_credentials=False, api_key=None, enable_request_id_headers=False, middleware=middleware)
        init_entrypoints_middleware(args, app, ("generate",))
        return int(TestClient(app).post("/invocations", headers=headers).status_code)

    ours = [line[line.index("--middleware") + 1]]
    assert status(ours, {}) == 401
    assert status(ours, access.header("secret")) == 200
    assert status([], {}) == 200  # so it is ours that is needed


# ---- the kit's side


def test_a_runs_servers_have_a_key_of_their_own_that_no_command_line_shows(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[list[str], dict[str, str]]] = []

    class Recorded(Child):
        def __init__(self, name: str, command: list[str], logs: Path, env: dict[str, str]) -> None:
            started.append((command, env))

    monkeypatch.setattr(serving, "Child", Recorded)
    keys = set()
    for _ in range(2):
        access.run_key.cache_clear()  # as in another process
        server = Server(run, "m", serving.plain(), "cpu")
        server.begin()
        command, env = started[-1]
        keys.add(env[access.KEY])
        assert len(env[access.KEY]) >= 43  # 256 bits in base64
        assert not any(env[access.KEY] in part for part in [*command, *server.tool()])
    assert len(keys) == 2


class Recorder(http.server.BaseHTTPRequestHandler):
    seen: list[tuple[str, str | None]] = []  # noqa: RUF012 - the server makes one object a request

    def do_GET(self) -> None:
        self.seen.append((self.path, self.headers["Authorization"]))
        body = b'{"object": "list", "data": []}'
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def recorder() -> Iterator[http.server.ThreadingHTTPServer]:
    Recorder.seen.clear()
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Recorder) as web:
        threading.Thread(target=web.serve_forever, daemon=True).start()
        yield web
        web.shutdown()


def test_the_kit_sends_the_key_with_every_request_and_past_any_proxy(
    run: Run, recorder: http.server.ThreadingHTTPServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{serving.free_port()}")  # nobody there
    server = Server(run, "m", serving.plain(), "cpu")
    server.port = recorder.server_address[1]
    monkeypatch.setattr(server, "_listens", lambda: True)  # this process listens there, in a session of its own
    server.metrics()
    assert server.healthy()
    assert [sent for _, sent in Recorder.seen] == [access.header(server.secret[access.KEY])["Authorization"]] * 2


def tools_requests(port: int) -> list[str | None]:
    """The requests that speculators' tools and its trainer begin with, made as they make them."""

    async def both() -> None:
        async with aiohttp.ClientSession(headers={"Accept": "application/json"}) as session:
            await (await session.get(f"http://127.0.0.1:{port}/v1/models")).json()
        async with openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="EMPTY", max_retries=0) as client:
            await client.models.list()

    asyncio.run(both())
    openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="EMPTY", max_retries=0).models.list()
    return [sent for _, sent in Recorder.seen]


def test_a_tools_own_exceptions_from_the_proxy_are_kept(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "hub.example")
    assert Server(run, "m", serving.plain(), "cpu").secret["no_proxy"] == "hub.example,127.0.0.1"


def test_speculators_tools_send_the_key(recorder: http.server.ThreadingHTTPServer, monkeypatch: pytest.MonkeyPatch) -> None:
    assert tools_requests(recorder.server_address[1]) == [None, "Bearer EMPTY", "Bearer EMPTY"]  # as they are
    Recorder.seen.clear()
    for client in (aiohttp.ClientSession, openai.OpenAI, openai.AsyncOpenAI):
        monkeypatch.setattr(client, "__init__", client.__init__)  # put back at the end
    access.send_key("secret")
    assert tools_requests(recorder.server_address[1]) == ["Bearer secret"] * 3


# ---- what the server says


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The tool's module with an answer that a test sets."""
    made = ModuleType("speculators.cli.generate_offline_data")
    monkeypatch.setitem(sys.modules, made.__name__, made)
    return made


def answer(tool: ModuleType, path: Path | str) -> Any:
    async def ask(*_: Any, **__: Any) -> Any:
        return str(path), {}

    tool.generate_hidden_states_async = ask  # type: ignore[attr-defined]


def test_a_state_file_outside_the_runs_folder_is_not_taken(tool: ModuleType, tmp_path: Path) -> None:
    store = tmp_path / "captured"
    store.mkdir()
    (store / "link").symlink_to(tmp_path)
    for path, good in (
        (store / "a.safetensors", True),
        (store / ".." / "a.safetensors", False),
        (store / "link" / "a.safetensors", False),
        ("/etc/passwd", False),
        (tmp_path / "captured2" / "a", False),
    ):
        answer(tool, path)
        assert asyncio.run(tool.generate_hidden_states_async())[0] == str(path)  # without the guard
        access.keep_inside(store)
        if good:
            assert asyncio.run(tool.generate_hidden_states_async()) == (str(path), {})
        else:
            with pytest.raises(PermissionError, match="outside"):
                asyncio.run(tool.generate_hidden_states_async())


def test_the_names_that_are_replaced_are_still_the_tools_and_the_trainers() -> None:
    tool, loader, data = (
        str(compat.Package("speculators").text(f"speculators/{file}.py"))
        for file in ("cli/generate_offline_data", "train/dataloader", "train/data")
    )
    assert "hidden_states_path, _ = await generate_hidden_states_async(" in tool
    assert "handle, hs_transfer_params = generate_hidden_states(" in data
    assert "worker_init_fn=_worker_init_fn if use_workers" in loader


@pytest.fixture
def loader(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The trainer's module of data sets; what `open_loader` replaces is put back at the end."""
    data, loading = (importlib.import_module(f"speculators.train.{name}") for name in ("data", "dataloader"))
    monkeypatch.setattr(loading, "_worker_init_fn", loading._worker_init_fn)
    monkeypatch.setattr(data, "generate_hidden_states", lambda *_, **__: ("/etc/passwd", {}))
    for client in (aiohttp.ClientSession, openai.OpenAI, openai.AsyncOpenAI):
        monkeypatch.setattr(client, "__init__", client.__init__)
    monkeypatch.setenv(access.KEY, "secret")
    yield data


def test_the_trainer_takes_no_file_from_outside_the_runs_folder_either(loader: ModuleType, tmp_path: Path) -> None:
    assert loader.generate_hidden_states()[0] == "/etc/passwd"  # without the guard
    access.open_loader(tmp_path)
    with pytest.raises(PermissionError, match="outside"):
        loader.generate_hidden_states()


def test_the_trainers_worker_processes_send_the_key_too(loader: ModuleType, tmp_path: Path) -> None:
    """Such a process imports everything anew, and is told what to do first by a function that it finds by name."""
    access.open_loader(tmp_path)
    told = pickle.dumps(importlib.import_module("speculators.train.dataloader")._worker_init_fn)
    code = (
        "import pickle, openai, sys; pickle.loads(sys.stdin.buffer.read())(0);"
        "print(openai.OpenAI(api_key='EMPTY').api_key, __import__('torch').get_num_threads())"
    )
    worker = subprocess.run([sys.executable, "-c", code], input=told, capture_output=True, check=True)
    assert worker.stdout.split() == [b"secret", b"1"]


def test_the_hubs_code_is_trusted_where_the_parameters_say_so(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "--trust-remote-code" not in Server(run, "m", serving.plain(), "cpu").tool()
    trusting = Run(Params(run_name="unit", runs_dir=run.params.runs_dir, trust_remote_code=True), run.stage)
    assert "--trust-remote-code" in Server(trusting, "m", serving.plain(), "cpu").tool()
    transformers = importlib.import_module("transformers")
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda *_, **kwargs: asked.append(kwargs))
    access.trust_remote_code()
    transformers.AutoTokenizer.from_pretrained("m")
    assert asked == [{"trust_remote_code": True}]
