"""Children end with their owner, however it ends."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from pipeline import wait_for

from eagle3kit import supervise
from eagle3kit.errors import KitError
from eagle3kit.process import Child, end_leftover, run_tool, started_at
from eagle3kit.rundir import write_json

FAMILY = """
import subprocess, sys, time
deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(99)"
grandchild = subprocess.Popen([sys.executable, "-c", deaf], process_group=0)
print("up", flush=True)
time.sleep(99)
"""


def family(logs: Path) -> Child:
    """A child with a grandchild that left the process group and ignores SIGTERM: the worst that a server could do."""
    child = Child("family", [sys.executable, "-c", FAMILY], logs)
    assert wait_for(lambda: "up" in child.log.read_text(), 10)
    assert child.session is not None
    return child


def test_stop_ends_the_whole_family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervise, "GRACE_S", 1.0)
    child = family(tmp_path)
    session = child.session
    assert session is not None
    assert len(supervise.session_members(session)) == 2
    child.stop()
    child.stop()
    assert supervise.session_members(session) == []
    assert not (tmp_path / "family.pid").exists()


def test_killing_the_owner_ends_the_family(tmp_path: Path) -> None:
    owner = textwrap.dedent(f"""
        import sys, time
        from pathlib import Path
        from eagle3kit.process import Child
        child = Child("sleeper", [sys.executable, "-c", "import time; time.sleep(99)"], Path({str(tmp_path)!r}))
        print(child.session, flush=True)
        time.sleep(99)
    """)
    with subprocess.Popen([sys.executable, "-c", owner], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        session = int(process.stdout.readline())
        process.send_signal(signal.SIGKILL)
    assert wait_for(lambda: supervise.session_members(session) == [], 15)


def test_what_a_killed_supervisor_left_is_ended_by_the_next_start(tmp_path: Path) -> None:
    child = Child("sleeper", [sys.executable, "-c", "import time; time.sleep(99)"], tmp_path)
    assert child.session is not None
    os.kill(child._process.pid, signal.SIGKILL)
    child._process.wait()
    assert supervise.session_members(child.session) == [child.session]
    second = Child("sleeper", [sys.executable, "-c", "pass"], tmp_path)
    assert supervise.session_members(child.session) == []
    second.stop()


def test_stop_ends_what_is_left_when_supervisor_and_first_process_were_killed(tmp_path: Path) -> None:
    child = family(tmp_path)
    assert child.session is not None
    os.kill(child._process.pid, signal.SIGKILL)
    os.kill(child.session, signal.SIGKILL)
    session = child.session
    assert wait_for(lambda: len(supervise.session_members(session)) == 1, 5)
    child.stop()
    assert supervise.session_members(child.session) == []


def test_a_record_of_another_process_with_the_same_pid_is_left_alone(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(99)"], start_new_session=True) as bystander:
        write_json(tmp_path / "x.pid", {"session": bystander.pid, "started": "1"})
        end_leftover(tmp_path / "x.pid")
        assert started_at(bystander.pid) is not None
        assert not (tmp_path / "x.pid").exists()
        bystander.kill()


def test_run_tool_tells_the_end_of_the_log(tmp_path: Path) -> None:
    with pytest.raises(KitError, match="tool ended with status 3; seen .* it went wrong; fix: mend it"):
        run_tool("tool", [sys.executable, "-c", "print('it went wrong'); exit(3)"], tmp_path, stall_s=60, fix="mend it")


def test_run_tool_names_a_signal(tmp_path: Path) -> None:
    with pytest.raises(KitError, match="tool was ended by SIGKILL"):
        run_tool("tool", [sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"], tmp_path, stall_s=60, fix="")


def test_a_tool_without_progress_is_ended_and_the_message_says_what_was_waited_for(tmp_path: Path) -> None:
    code = "import time; print('asking the server', flush=True); time.sleep(99)"
    steps = iter([1, 2, *[3] * 999])
    with pytest.raises(KitError, match=r"tool has come no further for 2 s; seen .* asking the server; .*stall_timeout_s"):
        run_tool("tool", [sys.executable, "-c", code], tmp_path, progress=lambda: next(steps), stall_s=2, fix="")
    assert not (tmp_path / "tool.pid").exists()


def test_a_tool_that_comes_further_may_take_its_time(tmp_path: Path) -> None:
    code = "import time; time.sleep(3)"
    began = time.monotonic()
    run_tool("tool", [sys.executable, "-c", code], tmp_path, progress=time.monotonic, stall_s=1, fix="")
    assert time.monotonic() - began > 2


def test_an_error_in_progress_ends_the_tool(tmp_path: Path) -> None:
    def fail() -> None:
        raise KitError("enough")

    began = time.monotonic()
    with pytest.raises(KitError, match="enough"):
        run_tool("tool", [sys.executable, "-c", "import time; time.sleep(99)"], tmp_path, progress=fail, stall_s=60, fix="")
    assert time.monotonic() - began < 30
