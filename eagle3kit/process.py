"""Child processes that never outlive the kit: servers, the trainer, speculators' tools.

Every child runs under `supervise.py`, which ends the child's whole session when this process ends. Should the supervisor itself
be killed, the record it left in `logs/<name>.pid` lets the next start find and end what it left behind.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from eagle3kit import supervise
from eagle3kit.errors import KitError
from eagle3kit.rundir import write_json


def started_at(pid: int) -> str | None:
    """When a process started (clock ticks since boot), or None if there is none. With the pid it names a process for ever."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[19].decode()
    except OSError:
        return None


def child_of(pid: int) -> int | None:
    """The first child of a process, or None."""
    with contextlib.suppress(OSError, IndexError):
        return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])
    return None


class Child:
    """A command that is running, its log, and how to end it.

    Args:
        name: what it is called in messages; its log is `<logs>/<name>.log`.
        command: program and arguments; no shell is involved.
        logs: folder of the run's logs.
        env: variables added to this process's environment.
    """

    def __init__(self, name: str, command: Sequence[str], logs: Path, env: Mapping[str, str] | None = None) -> None:
        self.name, self.log = name, logs / f"{name}.log"
        self._record = logs / f"{name}.pid"
        logs.mkdir(parents=True, exist_ok=True)
        end_leftover(self._record)
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-I", supervise.__file__, *command],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(env or {})},
                start_new_session=True,
            )
        self._note_session()

    def _note_session(self) -> None:
        deadline = time.monotonic() + 10
        session = None
        while session is None and self._process.poll() is None and time.monotonic() < deadline:
            session = child_of(self._process.pid)
            time.sleep(0.005)
        self.session = session
        if session is not None:
            write_json(self._record, {"session": session, "started": started_at(session)})

    @property
    def status(self) -> int | None:
        """The exit status, or None while it runs."""
        return self._process.poll()

    def wait(self, progress: Callable[[], object] = lambda: None, every_s: float = 1.0, *, stall_s: float) -> int:
        """Wait for its end, calling `progress` every `every_s` seconds; ends it if interrupted. Returns the exit status.

        Raises:
            KitError: what `progress` returns has not changed for `stall_s` seconds: it, or the server it talks to, hangs.
        """
        seen, since = None, time.monotonic()
        try:
            while (status := self.status) is None:
                if (now := progress()) != seen:
                    seen, since = now, time.monotonic()
                elif time.monotonic() - since > stall_s:
                    raise KitError(
                        f"{self.name} has come no further for {stall_s:.0f} s",
                        seen=f"at the end of {self.log}: {self.tail(3)}",
                        wanted="some progress within that time (stall_timeout_s)",
                        fix="run the notebook again: it goes on where it stopped; or raise stall_timeout_s",
                    )
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(every_s)
            progress()
            return status
        finally:
            self.stop()

    def stop(self) -> None:
        """End it and everything it started. Harmless when it has ended already."""
        if self._process.stdin:
            self._process.stdin.close()
        try:
            self._process.wait(supervise.GRACE_S + 5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        end_leftover(self._record)

    def tail(self, lines: int = 8) -> str:
        """The last lines of its log that say something, joined by ` | `."""
        text = self.log.read_text(errors="replace").replace("\r", "\n")
        return " | ".join([line.strip() for line in text.splitlines() if line.strip()][-lines:])[-1500:]


def end_leftover(record: Path) -> None:
    """End the session that a `.pid` record names, and delete the record.

    When the session's first process is gone, whoever is still in the session is ours: the system gives its number to nobody else
    before the last of them ends. When a process with that number lives but began at another time, the session is somebody else's.
    """
    with contextlib.suppress(FileNotFoundError, ValueError, KeyError):
        note = json.loads(record.read_bytes())
        if started_at(note["session"]) in (None, note["started"]):
            supervise.end_session(note["session"])
    record.unlink(missing_ok=True)


def run_tool(
    name: str,
    command: Sequence[str],
    logs: Path,
    *,
    env: Mapping[str, str] | None = None,
    progress: Callable[[], object] = lambda: None,
    stall_s: float,
    fix: str,
) -> Child:
    """Run a command to its end; see `Child.wait`.

    Raises:
        KitError: it hangs, or it ended with another status than 0; the message carries the end of its log and `fix`.
    """
    child = Child(name, command, logs, env)
    status = child.wait(progress, stall_s=stall_s)
    if status != 0:
        raise KitError(f"{name} {how_ended(status)}", seen=f"at the end of {child.log}: {child.tail()}", fix=fix)
    return child


def how_ended(status: int) -> str:
    """For a message: `was ended by SIGKILL`, or `ended with status 1`."""
    by_signal = status - 128 in signal.valid_signals()
    return f"was ended by {signal.Signals(status - 128).name}" if by_signal else f"ended with status {status}"


@contextlib.contextmanager
def terminate_like_interrupt() -> Iterator[None]:
    """Turn SIGTERM into KeyboardInterrupt inside the block, so that `finally` parts run when a job is asked to stop."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
