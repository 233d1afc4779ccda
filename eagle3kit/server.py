"""A `vllm serve` process: its command line, its start, its health, its end.

Four ways of serving the same target are used, each an `Engine`: plain, with n-gram speculation, with the trained drafter, and
with hidden-state extraction. Only the last part of the command line differs between them.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import socket
import sys
import sysconfig
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from eagle3kit import access, step_trace, supervise
from eagle3kit.errors import KitError
from eagle3kit.params import Params
from eagle3kit.process import Child, how_ended
from eagle3kit.rundir import Run

LOOPBACK = "127.0.0.1"
PORTS_TRIED = 3
"""A port that was free when it was chosen can be taken before the server, which imports for a while first, listens on it."""


@dataclass(frozen=True)
class Engine:
    """How the target is served: a name for logs and facts, and the arguments that make the difference."""

    name: str
    arguments: tuple[str, ...] = ()


ACCEPTANCE = ("--per-request-spec-decode-metrics", "detailed")
"""Each answer then says how many tokens of each draft were accepted."""


def plain() -> Engine:
    """No speculation: the baseline of every comparison."""
    return Engine("none")


def ngram(k: int) -> Engine:
    """Prompt look-up: propose the `k` tokens that followed the last match of the current n-gram."""
    return speculating("ngram", ngram_config(k))


def eagle3(drafter: Path, k: int) -> Engine:
    """The trained drafter in `drafter` (speculators' form), proposing `k` tokens a step."""
    return speculating("eagle3", eagle3_config(drafter, k))


def ngram_config(k: int) -> dict[str, Any]:
    """The `--speculative-config` of prompt look-up."""
    return {"method": "ngram", "num_speculative_tokens": k, "prompt_lookup_max": 4}


def eagle3_config(drafter: Path, k: int) -> dict[str, Any]:
    """The `--speculative-config` of a drafter."""
    return {"method": "eagle3", "model": str(drafter), "num_speculative_tokens": k}


def speculating(name: str, config: dict[str, Any], *, or_shorter: bool = False, traces: Path | None = None) -> Engine:
    """Speculation by `config`.

    Args:
        or_shorter: a request may ask for fewer draft tokens (see `scheduler`).
        traces: folder for traces of its steps (see `Server.traced`).
    """
    scheduler = ("--scheduler-cls", "eagle3kit.scheduler.DraftLengthScheduler") if or_shorter else ()
    profiler = step_trace.arguments(traces) if traces else ()
    return Engine(name, (*_speculate(config), *ACCEPTANCE, *scheduler, *profiler))


def extraction(layers: Sequence[int], store: Path, device: str, storage: str = "native") -> Engine:
    """Hidden-state extraction of `layers` (vLLM ids, the last one the final layer's output before the norm) into `store`.

    What is written is `native`, in the target's number type, or `fp8` (`storage`, see `state_files`).

    Prefix caching is off: a position served from the cache is never computed, so it would have no hidden state.
    """
    connector = {"kv_connector": "ExampleHiddenStatesConnector"}
    if storage == "fp8":
        connector = {
            "kv_connector": "FP8HiddenStatesConnector",
            "kv_connector_module_path": "hs_connectors.fp8_hidden_states_connector",
        }
    options = {"shared_storage_path": str(store)}
    scheduler: tuple[str, ...] = ()
    if device == "cpu":
        connector = {"kv_connector": "CpuHiddenStatesConnector", "kv_connector_module_path": "eagle3kit.connector"}
        options |= {"storage": storage} if storage != "native" else {}
        scheduler = ("--scheduler-cls", "eagle3kit.connector.CpuScheduler")
    transfer = {**connector, "kv_role": "kv_producer", "kv_connector_extra_config": options}
    speculate = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": list(layers)}},
    }
    return Engine(
        "extraction",
        ("--no-enable-prefix-caching", *scheduler, "--kv-transfer-config", json.dumps(transfer), *_speculate(speculate)),
    )


def _speculate(config: dict[str, Any]) -> tuple[str, ...]:
    return ("--speculative-config", json.dumps(config))


def cores(params: Params) -> int:
    """How many CPU cores the kit may use."""
    return params.threads or len(os.sched_getaffinity(0))


def preload() -> list[str]:
    """Libraries for LD_PRELOAD on a CPU: vLLM's decode and drafting are several times slower without Intel's OpenMP."""
    library = Path(sysconfig.get_path("data")) / "lib" / "libiomp5.so"
    return [str(library)] if library.exists() else []


def arithmetic(params: Params) -> dict[str, str]:
    """Variables of any process that computes on a CPU.

    glibc gives a tensor of megabytes back to the system when it is freed, and the next one is mapped and cleared page by page
    again: 8 % of a training step. Kept, memory is taken from what was used before.
    """
    kept = [item for item in os.environ.get("LD_PRELOAD", "").split(":") if item]
    return {
        "OMP_NUM_THREADS": str(cores(params)),
        "LD_PRELOAD": ":".join([*preload(), *kept]),
        "GLIBC_TUNABLES": "glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=17179869184",
    }


def environment(params: Params, device: str) -> dict[str, str]:
    """Variables of a server process."""
    common = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_LOGGING_COLOR": "0", "TOKENIZERS_PARALLELISM": "false"}
    common["VLLM_CUSTOM_SCOPES_FOR_PROFILING"] = "1"  # names in a trace; a microsecond each while none is written
    if device != "cpu":
        return common
    own = {
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0))[: cores(params)])),
        "VLLM_CPU_KVCACHE_SPACE": str(max(1, round(params.serve_kv_cache_gb))),
        # With MLA's compressed cache vLLM finds no block size for target and drafter together; without, the tokens are the same.
        "VLLM_MLA_DISABLE": "1",
    }
    return common | arithmetic(params) | own


def command(params: Params, model: str | Path, engine: Engine, port: int, device: str) -> list[str]:
    """The command line that serves `model` the way `engine` says.

    The module behind `vllm serve` is started by name: the `vllm` command looks for a distribution called `vllm` and fails beside
    `vllm-cpu`, which is the same server under another name.
    """
    arguments = ["--model", str(model), "--host", LOOPBACK, "--port", str(port), "--middleware", "eagle3kit.access.RequireKey"]
    arguments += ["--dtype", params.target_dtype, "--max-model-len", str(params.serve_max_model_len)]
    arguments += ["--max-num-seqs", str(params.serve_max_num_seqs), "--seed", str(params.seed)]
    if device == "cpu":
        arguments += ["--enforce-eager"]  # compiling takes longer than these runs
        if "--no-enable-prefix-caching" not in engine.arguments:
            arguments += ["--block-size", "32"]  # a prompt shorter than a block is never found in the cache; usual here is 128
        arguments += ["--worker-extension-cls", "eagle3kit.cpu_sampling.WholeTemperature"]
        # The worker inside the engine's process, asked for by its class: vLLM turns "uni" into "mp" on a CPU, because it sets the
        # number of threads for a new process; `environment` does that here. A third less time to start, 16 % more tokens/s.
        arguments += ["--distributed-executor-backend", "vllm.v1.executor.uniproc_executor.UniProcExecutor"]
    else:
        arguments += ["--tensor-parallel-size", str(params.serve_tensor_parallel)]
        arguments += ["--gpu-memory-utilization", str(params.serve_gpu_memory_utilization)]
    if not Path(model).is_dir():
        arguments += ["--revision", params.target_revision]
    if params.trust_remote_code:
        arguments += ["--trust-remote-code"]
    arguments += [*engine.arguments, *params.serve_extra_args]
    return [sys.executable, "-W", "ignore", "-m", "vllm.entrypoints.openai.api_server", *arguments]


def free_port() -> int:
    """A loopback port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        port: int = probe.getsockname()[1]
        return port


class Server(AbstractContextManager["Server"]):
    """One running server. Start it with a `with` block; it is ended on every way out.

    Args:
        run: the run it works for; its log is `logs/server_<engine>.log`.
        model: the folder (or hub id) to serve; it is also the name that requests use.
        engine: how to serve it.
        device: `cpu` or `cuda`.
        say: called with a line of progress now and then.

    Attributes:
        variables: further ones of its environment.
    """

    def __init__(self, run: Run, model: str | Path, engine: Engine, device: str, say: Callable[[str], None] = print) -> None:
        self.run, self.model, self.engine, self.device, self._say = run, str(model), engine, device, say
        self.variables: dict[str, str] = {}
        self._child: Child | None = None
        self._key = access.run_key()
        self.seconds_to_ready = 0.0

    @property
    def url(self) -> str:
        """Address without a path, for example `http://127.0.0.1:8123`."""
        return f"http://{LOOPBACK}:{self.port}"

    def begin(self) -> None:
        """Start the process without waiting for it."""
        self.port = free_port()
        self._began = time.monotonic()
        self._child = Child(
            f"server_{self.engine.name}",
            command(self.run.params, self.model, self.engine, self.port, self.device),
            self.run.path("logs"),
            environment(self.run.params, self.device) | self.variables | self.secret,
        )

    @property
    def secret(self) -> dict[str, str]:
        """The key in the environment variable that the server and the tools read it from, and no proxy to tell it to."""
        direct = ",".join(filter(None, [os.environ.get("no_proxy") or os.environ.get("NO_PROXY"), LOOPBACK]))
        return {access.KEY: self._key, "no_proxy": direct, "NO_PROXY": direct}

    def tool(self, *options: str) -> list[str]:
        """How a command line of one of speculators' tools begins; run with `secret` in its environment, it sends the key."""
        trust = ["--trust-remote-code"] if self.run.params.trust_remote_code else []
        return [sys.executable, "-W", "ignore", "-m", "eagle3kit.access", *options, *trust, "--"]

    def _open(self, path: str, timeout_s: float, data: bytes | None = None) -> Any:
        """The reply to a request with the key, straight from the server: a proxy of the environment never gets to see it."""
        headers = {"Content-Type": "application/json"} | access.header(self._key)
        request = urllib.request.Request(self.url + path, data, headers)  # noqa: S310 - a loopback address
        return urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=timeout_s)

    def _started(self) -> Child:
        if self._child is None:
            raise RuntimeError("the server was not started: begin() comes first")
        return self._child

    @property
    def running(self) -> bool:
        """Whether it was started and has not ended."""
        return self._child is not None and self._child.status is None

    def ensure(self) -> None:
        """Start it if it does not run yet, and wait until it answers: servers start only when a step needs one."""
        if not self.running:
            self.begin()
            try:
                self.wait_ready()
            except BaseException:
                self.stop()
                raise

    def wait_ready(self) -> None:
        """Wait until it answers.

        Raises:
            KitError: it ended, or did not answer within `serve_start_timeout_s`.
        """
        limit = self.run.params.serve_start_timeout_s
        told, ports_left = 0.0, PORTS_TRIED - 1
        while not (healthy := self.healthy()) or self._shares_port():
            child, waited = self._started(), time.monotonic() - self._began
            if healthy or child.status is not None:
                taken = healthy or "address already in use" in child.log.read_text(errors="replace").lower()
                self.stop()
                if taken and ports_left:
                    self._say(f"  port {self.port} was taken meanwhile: trying another")
                    ports_left -= 1
                    self.begin()
                    continue
                raise KitError(
                    f"the vLLM server '{self.engine.name}' ended while starting",
                    seen=f"another process listens on port {self.port} too" if healthy else self.explain(),
                    fix=f"read {child.log}",
                )
            if waited > limit:
                self.stop()
                raise KitError(
                    f"the vLLM server '{self.engine.name}' was not ready in time",
                    seen=f"{waited:.0f} s",
                    wanted=f"at most {limit} s (serve_start_timeout_s)",
                    fix=f"read {child.log}, free the machine or raise serve_start_timeout_s",
                )
            if waited - told >= 15:
                told = waited
                self._say(f"  waiting for the server '{self.engine.name}': {waited:.0f} s")
            time.sleep(0.3)
        self.seconds_to_ready = time.monotonic() - self._began
        self._say(f"server '{self.engine.name}' ready after {self.seconds_to_ready:.0f} s")

    def require_alive(self) -> None:
        """Called while a tool talks to it: the tools go on without a server, and count what they miss as errors.

        Raises:
            KitError: the server has ended.
        """
        if self._started().status is not None:
            self.stop()  # part of it may still be there
            raise KitError(
                f"the vLLM server '{self.engine.name}' ended",
                seen=self.explain(),
                fix="run the notebook again: it goes on where it stopped; read " + str(self._started().log),
            )

    def healthy(self) -> bool:
        """Whether it answers its health check: it, and not somebody else's server on the same port."""
        try:
            with self._open("/health", 2) as reply:
                return bool(reply.status == 200) and self._listens()
        except (OSError, http.client.HTTPException):
            return False

    def _listens(self) -> bool:
        session = self._started().session
        return not self._listeners().isdisjoint(supervise.session_members(session) if session else [])

    def _shares_port(self) -> bool:
        """Whether a process that is not the server's listens on its port too.

        vLLM asks for `SO_REUSEPORT`: two servers of one user can listen on a port, and each request goes to either. Two of this
        run have the same key, so the answers of one contestant would pass for another's.
        """
        session = self._started().session
        return bool(self._listeners() - set(supervise.session_members(session) if session else []))

    def _listeners(self) -> set[int | None]:
        """Processes that listen on the server's port; None for one that this user may not look at."""
        local = (one for one in psutil.net_connections("tcp") if one.status == psutil.CONN_LISTEN)
        return {one.pid for one in local if one.laddr.port == self.port}

    def explain(self) -> str:
        """Why it ended, as far as is known: the last line of its log that names an error, or the signal."""
        child = self._started()
        lines = child.log.read_text(errors="replace").splitlines()
        named = re.compile(r"\w(Error|Exception): ")
        errors = [line.split("] ")[-1].strip() for line in lines if named.search(line) and "WARNING" not in line]
        if errors:
            return errors[-1][:400]
        status = child.status or 0
        return f"it {how_ended(status)}" if status > 128 else child.tail(3)

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Send a JSON request and return the JSON reply, `{}` where there is none.

        Raises:
            KitError: the server is gone, refuses the request, or has not answered within `stall_timeout_s`.
        """
        with self._posted(path, body) as reply:
            answer: dict[str, Any] = json.loads(reply.read() or b"{}")
            return answer

    def arrivals(self, path: str, body: dict[str, Any]) -> list[float]:
        """Send a JSON request and return when each piece of the streamed answer came, in seconds of `time.monotonic`.

        A step of the engine gives one piece, with as many tokens as it yielded.

        Raises:
            KitError: as `post`, or the stream breaks off: with an error, without its last line, or before its first piece.
        """
        times, last = [], b"nothing"
        with self._posted(path, {**body, "stream": True}) as reply:
            for line in filter(bytes.strip, reply):
                last = line
                if line.startswith(b'data: {"error"'):
                    break
                if line.startswith(b"data: {"):
                    times.append(time.monotonic())
        if not times or last.strip() != b"data: [DONE]":
            raise KitError(
                f"the server '{self.engine.name}' broke off {path}",
                seen=last[:300].decode(errors="replace"),
                fix=f"read {self._child.log if self._child else 'its log'}; run the notebook again: it goes on where it stopped",
            )
        return times

    @contextlib.contextmanager
    def _posted(self, path: str, body: dict[str, Any]) -> Iterator[Any]:
        try:
            with self._open(path, self.run.params.stall_timeout_s, json.dumps(body).encode()) as reply:
                yield reply
        except urllib.error.HTTPError as error:
            raise KitError(
                f"the server '{self.engine.name}' refused {path}",
                seen=f"{error.code} {error.read()[:300].decode(errors='replace')}",
                fix=f"read {self._child.log if self._child else 'its log'}",
            ) from None
        except (OSError, http.client.HTTPException) as error:
            raise self._silent(path, error) from None

    @contextlib.contextmanager
    def traced(self) -> Iterator[None]:
        """Every step inside is traced, into the folder that `speculating` named.

        Raises:
            KitError: the server is gone, was started without such a folder, or took longer than `stall_timeout_s`.
        """
        self.post("/start_profile", {})
        try:
            yield
        finally:
            self.post("/stop_profile", {})

    def metrics(self) -> str:
        """The counters, in Prometheus' text form.

        Raises:
            KitError: the server is gone, or has not answered within `stall_timeout_s`.
        """
        try:
            with self._open("/metrics", self.run.params.stall_timeout_s) as reply:
                text: str = reply.read().decode()
                return text
        except (OSError, http.client.HTTPException) as error:
            raise self._silent("/metrics", error) from None

    def _silent(self, path: str, error: Exception) -> KitError:
        return KitError(
            f"the server '{self.engine.name}' does not answer {path}",
            seen=error,
            wanted=f"an answer within {self.run.params.stall_timeout_s} s (stall_timeout_s)",
            fix="run the notebook again: it goes on where it stopped",
        )

    def stop(self) -> None:
        """End it. Harmless when it has ended already."""
        if self._child is not None:
            self._child.stop()

    def __enter__(self) -> Server:
        self.ensure()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()


def versions() -> dict[str, str]:
    """Installed versions of the packages a result depends on."""
    found = {}
    for name in (
        "vllm",
        "vllm-cpu",
        "speculators",
        "torch",
        "transformers",
        "papermill",
        "jupyterlab",
        "ipywidgets",
        "matplotlib",
    ):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
