"""How a server is asked for, and what is said when it does not come up. The real one runs in test_pipeline."""

import http.server
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from pipeline import wait_for

from eagle3kit import server as serving
from eagle3kit.errors import KitError
from eagle3kit.params import Params
from eagle3kit.rundir import Run
from eagle3kit.server import Server


def command(engine: serving.Engine, where: str = "cpu", model: str = "org/model", **changes: object) -> list[str]:
    return serving.command(Params(**changes), model, engine, 8123, where)


def option(line: list[str], name: str) -> str:
    return line[line.index(name) + 1]


def test_every_server_binds_to_the_loopback_address_without_remote_code() -> None:
    for engine in (
        serving.plain(),
        serving.ngram(4),
        serving.eagle3(Path("/d"), 3),
        serving.extraction([1, 2], Path("/s"), "cpu"),
    ):
        line = command(engine)
        assert option(line, "--host") == "127.0.0.1"
        assert "--trust-remote-code" not in line
    assert "--trust-remote-code" in command(serving.plain(), trust_remote_code=True)


def test_contestants_differ_in_speculation_only() -> None:
    base = command(serving.plain())
    assert json.loads(option(command(serving.ngram(4)), "--speculative-config")) == {
        "method": "ngram",
        "num_speculative_tokens": 4,
        "prompt_lookup_max": 4,
    }
    line = command(serving.eagle3(Path("/drafter"), 3))
    assert line[: len(base)] == base
    assert json.loads(option(line, "--speculative-config")) == {
        "method": "eagle3",
        "model": "/drafter",
        "num_speculative_tokens": 3,
    }


@pytest.mark.parametrize(("device", "connector"), [("cpu", "CpuHiddenStatesConnector"), ("cuda", "ExampleHiddenStatesConnector")])
def test_extraction_asks_for_the_layers_without_prefix_caching(device: str, connector: str) -> None:
    line = command(serving.extraction([2, 15, 27, 30], Path("/store"), device), device)
    assert "--no-enable-prefix-caching" in line
    assert ("--scheduler-cls" in line) == (device == "cpu")
    speculate = json.loads(option(line, "--speculative-config"))
    assert speculate["draft_model_config"]["hf_config"] == {"eagle_aux_hidden_state_layer_ids": [2, 15, 27, 30]}
    transfer = json.loads(option(line, "--kv-transfer-config"))
    assert transfer["kv_connector"] == connector
    assert transfer["kv_connector_extra_config"] == {"shared_storage_path": "/store"}


def test_on_a_cpu_blocks_are_shorter_than_most_prompts_where_prefixes_are_cached() -> None:
    assert int(option(command(serving.plain()), "--block-size")) == 32
    assert int(option(command(serving.ngram(4)), "--block-size")) == 32
    assert "--block-size" not in command(serving.extraction([2, 30], Path("/store"), "cpu"))
    assert "--block-size" not in command(serving.plain(), "cuda", device="cuda", gpu_count=8, serve_tensor_parallel=8)


def test_a_gpu_gets_its_own_arguments_and_a_hub_id_its_revision(tmp_path: Path) -> None:
    line = command(serving.plain(), "cuda", device="cuda", gpu_count=8, serve_tensor_parallel=8, target_revision="abc")
    assert option(line, "--tensor-parallel-size") == "8"
    assert option(line, "--revision") == "abc"
    assert "--enforce-eager" not in line
    assert "--revision" not in command(serving.plain(), model=str(tmp_path))


def test_cpu_environment_names_every_core_it_may_use() -> None:
    env = serving.environment(Params(threads=1, serve_kv_cache_gb=1), "cpu")
    assert env["OMP_NUM_THREADS"] == "1"
    assert "," not in env["VLLM_CPU_OMP_THREADS_BIND"]
    assert env["VLLM_CPU_KVCACHE_SPACE"] == "1"
    assert "OMP_NUM_THREADS" not in serving.environment(Params(), "cuda")


def broken(run: Run, monkeypatch: pytest.MonkeyPatch, code: str) -> Server:
    monkeypatch.setattr(serving, "command", lambda *_: [sys.executable, "-c", code])
    return Server(run, "m", serving.plain(), "cpu", say=lambda _: None)


def test_a_server_that_ends_says_why(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    server = broken(run, monkeypatch, "print('(APIServer pid=1) ERROR [x.py:1] ValueError: no such model'); exit(1)")
    with pytest.raises(KitError, match="'none' ended while starting; seen .*ValueError: no such model"), server:
        pass
    with pytest.raises(KitError, match="'none' ended"):
        server.require_alive()


def test_a_server_that_was_killed_says_so(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    server = broken(run, monkeypatch, "import os; print('leaked 3 objects', flush=True); os.kill(os.getpid(), 9)")
    with pytest.raises(KitError, match="'none' ended while starting; seen it was ended by SIGKILL"), server:
        pass


def test_a_server_that_does_not_come_up_is_ended(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Run(run.params.replace(serve_start_timeout_s=1), run.stage)
    server = broken(slow, monkeypatch, "import time; time.sleep(99)")
    with pytest.raises(KitError, match="not ready in time.*serve_start_timeout_s"), server:
        pass
    assert server._started().status is not None


LISTEN = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def listening(run: Run, monkeypatch: pytest.MonkeyPatch, ports: list[int]) -> Server:
    """A server that does nothing but listen, on the given ports one after the other."""
    following = iter(ports)
    monkeypatch.setattr(serving, "free_port", lambda: next(following))
    monkeypatch.setattr(serving, "command", lambda _p, _m, _e, port, _d: [sys.executable, "-c", LISTEN, str(port)])
    return Server(run, "m", serving.plain(), "cpu", say=lambda _: None)


def test_a_port_that_was_taken_meanwhile_is_given_up_for_another(
    run: Run, monkeypatch: pytest.MonkeyPatch, answering: Server
) -> None:
    free = serving.free_port()
    with listening(run, monkeypatch, [answering.port, free]) as server:
        assert server.port == free
        assert server.healthy()


SHARING = LISTEN.replace("http.server.HTTPServer(", "Server(").replace(
    "Server((", "class Server(http.server.HTTPServer):\n    allow_reuse_port = True\nServer((", 1
)
"""Listens as vLLM does: with SO_REUSEPORT, so that another of the same user may listen on the same port."""


def test_a_port_that_two_servers_share_is_given_up_for_another(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing fails there: each request goes to either. With the guard off the kit takes such a server."""
    shared, free = serving.free_port(), serving.free_port()
    monkeypatch.setitem(globals(), "LISTEN", SHARING)
    with subprocess.Popen([sys.executable, "-c", SHARING, str(shared)]) as other:
        try:
            assert wait_for(lambda: other.pid in {c.pid for c in psutil.net_connections("tcp") if c.laddr.port == shared}, 20)
            with listening(run, monkeypatch, [shared, free]) as server:
                assert server.port == free
            with pytest.raises(KitError, match=f"another process listens on port {shared} too"):
                listening(run, monkeypatch, [shared] * 9).ensure()
            monkeypatch.setattr(Server, "_shares_port", lambda _: False)
            with listening(run, monkeypatch, [shared]) as server:
                assert server.port == shared
        finally:
            other.kill()


def test_ports_are_not_tried_for_ever(run: Run, monkeypatch: pytest.MonkeyPatch, answering: Server) -> None:
    with pytest.raises(KitError, match="ended while starting; seen .*ddress already in use"):
        listening(run, monkeypatch, [answering.port] * 9).ensure()


def test_somebody_elses_server_on_the_port_is_not_taken_for_ours(
    run: Run, monkeypatch: pytest.MonkeyPatch, answering: Server
) -> None:
    slow = Run(run.params.replace(serve_start_timeout_s=2), run.stage)
    server = broken(slow, monkeypatch, "import time; time.sleep(99)")
    monkeypatch.setattr(serving, "free_port", lambda: answering.port)
    with pytest.raises(KitError, match="not ready in time"):
        server.ensure()


def test_a_server_that_hangs_is_waited_for_no_longer_than_said(run: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections and never says a word
        server = Server(Run(run.params.replace(stall_timeout_s=1), run.stage), "m", serving.plain(), "cpu")
        server.port = silent.getsockname()[1]
        for ask in (lambda: server.post("/v1/completions", {}), server.metrics):
            with pytest.raises(
                KitError, match=r"does not answer /\S+; seen timed out; wanted an answer within 1 s \(stall_timeout_s\)"
            ):
                ask()
        assert not server.healthy()


PIECE = b'data: {"choices": [{"text": "a"}]}\n\n'
REPLIES = {
    "/good": b'{"answer": 1}',
    "/bad": b"too long",
    "/pieces": PIECE * 3 + b"data: [DONE]\n\n",
    "/broken": PIECE + b'data: {"error": {"message": "out of memory"}}\n\n' + b"data: [DONE]\n\n",
    "/cut": PIECE * 2,
    "/empty": b"data: [DONE]\n\n",
    "/silent": b"",
}


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(400 if self.path == "/bad" else 200)
        self.end_headers()
        self.wfile.write(REPLIES[self.path])

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def answering(run: Run) -> Iterator[Server]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as web:
        threading.Thread(target=web.serve_forever, daemon=True).start()
        server = Server(run, "m", serving.plain(), "cpu")
        server.port = web.server_address[1]
        yield server
        web.shutdown()


def test_post_returns_the_reply_or_names_the_refusal(answering: Server) -> None:
    assert answering.post("/good", {}) == {"answer": 1}
    with pytest.raises(KitError, match="refused /bad; seen 400 too long"):
        answering.post("/bad", {})


def test_each_piece_of_a_streamed_answer_has_its_time(answering: Server) -> None:
    times = answering.arrivals("/pieces", {})
    assert len(times) == 3
    assert times == sorted(times)


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/broken", "broke off /broken; seen .*out of memory.*goes on where it stopped"),
        ("/cut", "broke off /cut; seen .*choices"),
        ("/empty", "broke off /empty; seen .*DONE"),
        ("/silent", "broke off /silent; seen nothing"),
        ("/bad", "400 too long"),
    ],
)
def test_a_streamed_answer_that_fails_is_told(answering: Server, path: str, said: str) -> None:
    with pytest.raises(KitError, match=said):
        answering.arrivals(path, {})


def test_post_to_nobody_is_one_line(run: Run) -> None:
    server = Server(run, "m", serving.plain(), "cpu")
    server.port = serving.free_port()
    with pytest.raises(KitError, match="does not answer /x"):
        server.post("/x", {})
