"""Ctrl-C in a cell of a real kernel: what it waited for ends, and the same cell run again goes on."""

import json
from collections.abc import Iterator
from pathlib import Path
from queue import Empty
from typing import Any

import pytest
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager, start_new_kernel
from pipeline import wait_for

from eagle3kit import supervise

SETUP = """
import sys
from pathlib import Path
from eagle3kit import Params, Run, server as serving
from eagle3kit.process import Child
run = Run(Params(run_name="unit", runs_dir={folder!r}), "03_extract_hidden_states")
sleep = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(99)"]
serving.command = lambda *_: sleep
"""

CELLS = {
    "server_none": 'with run.step("data", {"n": 1}):\n    serving.Server(run, "m", serving.plain(), "cpu").ensure()',
    "trainer": 'with run.step("data", {"n": 1}):\n    Child("trainer", sleep, run.path("logs")).wait(stall_s=99)',
}


@pytest.fixture(scope="module")
def kernel() -> Iterator[tuple[KernelManager, BlockingKernelClient]]:
    manager, client = start_new_kernel(kernel_name="python3", startup_timeout=300)
    yield manager, client
    client.stop_channels()
    manager.shutdown_kernel(now=True)


def answer(client: BlockingKernelClient, message: str) -> Any:
    """The kernel's reply to one request."""
    while True:
        try:
            reply = client.get_shell_msg(timeout=120)
        except Empty:
            pytest.fail("the kernel does not answer")
        if reply["parent_header"].get("msg_id") == message:
            return reply["content"]


@pytest.mark.parametrize("child", CELLS)
def test_an_interrupted_cell_ends_its_child_and_can_be_run_again(
    kernel: tuple[KernelManager, BlockingKernelClient], tmp_path: Path, child: str
) -> None:
    manager, client = kernel
    assert answer(client, client.execute(SETUP.format(folder=str(tmp_path))))["status"] == "ok"
    waiting = client.execute(CELLS[child], stop_on_error=False)  # else the kernel turns away what comes right after
    logs = tmp_path / "unit" / "logs"
    assert wait_for(lambda: (logs / f"{child}.pid").exists() and "up" in (logs / f"{child}.log").read_text(), 60)
    session = json.loads((logs / f"{child}.pid").read_bytes())["session"]
    manager.interrupt_kernel()
    reply = answer(client, waiting)
    assert (reply["status"], reply["ename"]) == ("error", "KeyboardInterrupt")
    assert supervise.session_members(session) == []
    assert not (logs / f"{child}.pid").exists()
    again = client.execute('assert run.step("data", {"n": 1}).state == "resume"\nwith run.step("data", {"n": 1}): pass')
    assert answer(client, again)["status"] == "ok"
