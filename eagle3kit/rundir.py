"""A run's folder: where things lie, how they are written, what is finished, and the facts that were measured.

    runs/<run_name>/
        config/ target/ data/ hidden_states/ vocab/ checkpoints/ eval/    one folder a step, each with its manifest.json
        notebooks/    executed notebooks
        figures/      pictures for the report
        logs/         logs of servers and tools
        locks/        which process works on a step
        facts.json    {name: {"value", "unit", "stage", "source"}}

A step writes into its own folder and its manifest last. Started again with the same inputs it does nothing; with other inputs
it refuses and names the input that differs, unless `force` is set. A step that was killed left `started.json` behind and goes
on from what it had.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from eagle3kit.errors import KitError
from eagle3kit.params import Params, schema_rows

Json = Any
"""A value that `json.dumps` takes."""


def project_path(path: str | Path) -> Path:
    """An absolute path; a relative one starts at the checkout, not at the working directory.

    JupyterLab starts a kernel in the notebook's own folder, papermill and the command line start where the shell is: all of them
    must find the same `runs/`. The checkout is the nearest folder upwards that holds `notebooks/` and `params/`.
    """
    path = Path(path).expanduser()
    for folder in (Path.cwd(), *Path.cwd().parents):
        if (folder / "notebooks").is_dir() and (folder / "params").is_dir():
            return (folder / path).resolve()
    return path.resolve()


def write_atomic(path: Path, data: str | bytes) -> Path:
    """Write `data` under a temporary name beside `path`, then rename: a reader sees the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_bytes(data.encode() if isinstance(data, str) else data)
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise cannot_write(path, error) from error
    return path


def cannot_write(path: Path, error: OSError) -> KitError:
    """The error to raise when the system refuses a write: as a rule the disk is full."""
    fix = "free disk space, or set runs_dir to another disk"
    return KitError(f"cannot write {path}", seen=error.strerror or str(error), fix=fix)


def write_json(path: Path, value: Json) -> Path:
    """Write `value` as indented JSON, atomically."""
    return write_atomic(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def read_json(path: Path, made_by: str) -> Json:
    """Read a JSON file that an earlier step made.

    Raises:
        KitError: the file is missing or is not JSON; the message names `made_by`, the notebook that makes it.
    """
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        raise KitError(f"{path} is missing", fix=f"run notebook {made_by} first") from None
    except (ValueError, OSError) as error:
        raise KitError(f"{path} cannot be read", seen=error, fix=f"delete it and run notebook {made_by} again") from None


def file_digest(path: Path) -> str:
    """BLAKE2b of a file's bytes, 128 bit, as hex. Fast enough (about 1 GB/s) for every hidden-state file of a run."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def value_digest(value: Json) -> str:
    """Digest of a JSON value, independent of the order of its keys."""
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=16).hexdigest()


@contextlib.contextmanager
def locked(path: Path, *, wait: bool, busy: str, say: Callable[[str], object] = print) -> Iterator[None]:
    """Hold an exclusive lock on `path`. The kernel lets go of it when the process ends, however it ends.

    The file says which process has it: `flock` alone tells nobody whom to wait for.

    Args:
        wait: whether to wait for a process that holds it, which `say` is told.
        busy: what that process is doing.

    Raises:
        KitError: another process holds it and `wait` is false; `busy` says what that process is doing.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b", buffering=0) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = path.read_text() or "unknown"
            if not wait:
                raise KitError(busy, seen=f"process {owner}", fix="wait for it, stop it, or choose another run_name") from None
            say(f"waiting for process {owner}: {busy}")
            fcntl.flock(file, fcntl.LOCK_EX)
        with contextlib.suppress(OSError):  # a full disk must not keep the step from saying so itself
            file.truncate(0)
            file.write(str(os.getpid()).encode())
        yield


@dataclass
class Step:
    """One resumable piece of work with a folder of its own. Made by `Run.step`; use as a context manager around the work.

    Attributes:
        state: `done` (equal inputs, finished), `resume` (equal inputs, was interrupted) or `fresh`.
        outputs: what the step says of its result; set before the block ends. It is part of `digest`.
    """

    run: Run
    name: str
    folder: Path
    inputs: dict[str, Json]
    state: Literal["done", "resume", "fresh"]
    outputs: dict[str, Json] = field(default_factory=dict)

    @property
    def done(self) -> bool:
        """Whether there is nothing left to do."""
        return self.state == "done"

    def reopen(self) -> None:
        """Take back `done`: a check found that an output is damaged or gone. What is still good is kept."""
        write_json(self.folder / "started.json", {"inputs": self.inputs})
        (self.folder / "manifest.json").unlink(missing_ok=True)
        self.state = "resume"

    def __enter__(self) -> Step:
        self._lock = self.run.lock(self.name)
        self._lock.__enter__()
        write_json(self.folder / "started.json", {"inputs": self.inputs})
        self._began = time.monotonic()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if kind is None:
                manifest = {
                    "step": self.name,
                    "inputs": self.inputs,
                    "outputs": self.outputs,
                    "seconds": round(time.monotonic() - self._began, 2),
                    "finished": datetime.now(UTC).isoformat(timespec="seconds"),
                }
                write_json(self.folder / "manifest.json", manifest)
                (self.folder / "started.json").unlink(missing_ok=True)
                self.state = "done"
                self.run.worked = True
        finally:
            self._lock.__exit__(None, None, None)


class Run:
    """One run: its folder, its parameters and the facts recorded so far.

    Args:
        params: the parameters; `runs_dir` and `run_name` say where the folder is.
        stage: the notebook that opens it, for example `03_extract_hidden_states`; facts are recorded under this name.
    """

    def __init__(self, params: Params, stage: str) -> None:
        self.params = params
        self.stage = stage
        self.name = params.run_name
        self.root = project_path(params.runs_dir) / params.run_name
        self.root.mkdir(parents=True, exist_ok=True)
        self.worked = False
        self._began = time.monotonic()
        write_json(self.path("params", f"{stage}.json"), [row._asdict() for row in schema_rows(params)])

    def path(self, *parts: str) -> Path:
        """A path inside the run folder; its parent folder exists afterwards."""
        path = self.root.joinpath(*parts)
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    # ---- steps

    def step(self, name: str, inputs: Mapping[str, Json]) -> Step:
        """Open the step that owns the folder `name`.

        Raises:
            KitError: the folder holds the work of other inputs and `force` is off; the message names what differs.
        """
        folder = self.path(name)
        wanted: dict[str, Json] = json.loads(json.dumps(dict(inputs)))
        for file, state in (("manifest.json", "done"), ("started.json", "resume")):
            if not (folder / file).exists():
                continue
            found = read_json(folder / file, self.stage)
            differs = sorted(k for k in {*wanted, *found["inputs"]} if wanted.get(k) != found["inputs"].get(k))
            if not differs:
                return Step(self, name, folder, wanted, "done" if state == "done" else "resume", found.get("outputs", {}))
            if not self.params.force:
                key = differs[0]
                raise KitError(
                    f"step {name} of run {self.name} was {'made' if state == 'done' else 'begun'} with another {key}",
                    seen=_short(found["inputs"].get(key)),
                    wanted=_short(wanted.get(key)),
                    fix="set force: true to do it again, or choose another run_name",
                )
        with self.lock(name):
            if folder.exists():  # forced, or files without a record: nothing there can be trusted
                shutil.rmtree(folder)
            folder.mkdir(parents=True)
        return Step(self, name, folder, wanted, "fresh")

    def lock(self, name: str) -> contextlib.AbstractContextManager[None]:
        """The right to write into the step `name`. It lies outside the step's folder, which `force` deletes.

        Raises:
            KitError: another process has it; names the process.
        """
        path = self.path("locks", name.replace("/", "."))
        return locked(path, wait=False, busy=f"another process is working on step {name} of run {self.name}")

    def manifest(self, name: str, made_by: str) -> dict[str, Json]:
        """The manifest of a finished step.

        Raises:
            KitError: the step is not finished; the message names the notebook that makes it.
        """
        path = self.root / name / "manifest.json"
        if not path.exists():
            raise KitError(f"step {name} of run {self.name} is not finished", fix=f"run notebook {made_by} first")
        manifest: dict[str, Json] = read_json(path, made_by)
        return manifest

    def digest(self, name: str, made_by: str) -> str:
        """Digest of a finished step's inputs and outputs: an input of every step that builds on it."""
        manifest = self.manifest(name, made_by)
        return value_digest([manifest["inputs"], manifest["outputs"]])

    # ---- facts

    def record(self, name: str, value: Json, unit: str = "", source: str = "") -> None:
        """Record a measured fact. `source` says how it was measured; reports and tests read facts, never cell output."""
        self.record_all({name: (value, unit)}, source)

    def record_all(self, facts: Mapping[str, tuple[Json, str]], source: str = "") -> None:
        """Record several facts `{name: (value, unit)}` that share a source, in one write."""
        with locked(self.root / ".facts.lock", wait=True, busy="it records facts", say=lambda _: None):
            known = self.facts()
            for name, (value, unit) in facts.items():
                known[name] = {"value": value, "unit": unit, "stage": self.stage, "source": source}
            write_json(self.root / "facts.json", dict(sorted(known.items())))

    def facts(self) -> dict[str, dict[str, Json]]:
        """Every fact recorded so far: `{name: {"value", "unit", "stage", "source"}}`."""
        path = self.root / "facts.json"
        if not path.exists():
            return {}
        facts: dict[str, dict[str, Json]] = read_json(path, self.stage)
        return facts

    def fact(self, name: str, default: Json = None) -> Json:
        """The value of one fact, or `default` where it was not recorded."""
        return self.facts().get(name, {}).get("value", default)

    def finish(self) -> None:
        """End the stage: record how long it took, unless it only found its work done by an earlier run."""
        name = f"stage.{self.stage[:2]}"
        if self.worked or self.fact(f"{name}.minutes") is None:
            minutes = round((time.monotonic() - self._began) / 60, 3)
            self.record(f"{name}.minutes", minutes, "min", "wall time of the notebook, the last time it had work to do")
            self.record(f"{name}.worked", self.fact(f"{name}.worked", 0) + 1, "times", "how often it had work to do")
        self.clear_failure()

    # ---- failures

    def record_failure(self, stage: str, message: str) -> None:
        """Note that a stage failed and why, for the report."""
        write_json(self.root / "failure.json", {"stage": stage, "message": message})

    def clear_failure(self) -> None:
        """Forget this stage's failure: it has now come to its end."""
        failure = self.failure()
        if failure and failure["stage"] == self.stage:
            (self.root / "failure.json").unlink(missing_ok=True)

    def failure(self) -> dict[str, str] | None:
        """The stage that failed last and why, or None."""
        path = self.root / "failure.json"
        return read_json(path, self.stage) if path.exists() else None


def _short(value: Json, limit: int = 80) -> str:
    text = json.dumps(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def total_bytes(paths: Iterable[Path]) -> int:
    """Sum of the files' sizes, in bytes."""
    return sum(path.stat().st_size for path in paths)
