"""Run one command and end everything it started when its owner goes away.

    python supervise.py COMMAND [ARG ...]

The owner holds the write end of this process's standard input. When the owner ends, however it ends (also by SIGKILL), the pipe
closes, and the command's whole session is ended: first asked, then killed. Run as a script, on the standard library alone, so
that it costs nothing to start and nothing it imports can break it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time

GRACE_S = 10.0
"""Seconds between asking (SIGTERM) and killing (SIGKILL)."""


def session_members(session: int) -> list[int]:
    """Process ids of a session, zombies left out. Reads /proc: a child that left the process group is still found."""
    members = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            with open(f"/proc/{entry}/stat", "rb") as file:
                state, _, _, its_session = file.read().rpartition(b")")[2].split()[:4]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(its_session) == session and state not in (b"Z", b"X"):
            members.append(int(entry))
    return members


def end_session(session: int, grace_s: float = GRACE_S) -> None:
    """Ask every process of a session to end; kill what is left after `grace_s` seconds."""
    deadline = time.monotonic() + grace_s
    number = signal.SIGTERM
    while members := session_members(session):
        for pid in members:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        asked_until = time.monotonic() + (1.0 if number == signal.SIGKILL else max(0.0, deadline - time.monotonic()))
        while session_members(session) and time.monotonic() < asked_until:
            time.sleep(0.05)
        number = signal.SIGKILL


def children(parent: int) -> list[int]:
    """Process ids of a process's own children, zombies left out."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError), open(f"/proc/{entry}/stat", "rb") as file:
                state, its_parent = file.read().rpartition(b")")[2].split()[:2]
                if int(its_parent) == parent and state not in (b"Z", b"X"):
                    found.append(int(entry))
    return found


def adopt_orphans() -> None:
    """Have descendants whose parent ends become children of this process (Linux: PR_SET_CHILD_SUBREAPER)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)


def close_input(*_: object) -> None:
    """Close standard input, which ends the loop in `main`; harmless a second time."""
    with contextlib.suppress(OSError):
        os.close(0)


def main(command: list[str]) -> int:
    """Run `command` in a session of its own until it ends or standard input closes. Returns its exit status."""
    adopt_orphans()
    signal.signal(signal.SIGTERM, close_input)  # the owner's stop: treated like the owner's end
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt in the notebook is the owner's to handle
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    while child.poll() is None:
        try:
            if select.select([0], [], [], 0.2)[0] and not os.read(0, 1):
                break
        except (OSError, ValueError):
            break
    end_session(child.pid)
    status = child.wait()
    for orphan in children(os.getpid()):  # what left the session, as torchrun's workers do, came to us when its parent ended
        with contextlib.suppress(ProcessLookupError):
            end_session(os.getsid(orphan))
    return status


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.exit(status if status >= 0 else 128 - status)
