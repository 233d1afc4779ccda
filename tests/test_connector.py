"""The CPU connector writes what the cache holds, whole, and lets go of the lock."""

import fcntl
import os
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import load_file

BLOCK, LAYERS, HIDDEN = 4, 3, 5


def test_slots_are_copied_in_order_and_the_lock_is_released(tmp_path: Path) -> None:
    from eagle3kit.connector import CpuHiddenStatesConnector

    cache = torch.arange(6 * LAYERS * BLOCK * HIDDEN, dtype=torch.float32).view(6, LAYERS, BLOCK, HIDDEN)
    path = tmp_path / "deeper" / "request.safetensors"
    lock = tmp_path / "lock"
    held = os.open(lock, os.O_CREAT | os.O_WRONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    connector = CpuHiddenStatesConnector.__new__(CpuHiddenStatesConnector)
    connector._is_tp_rank_zero, connector._block_size, connector._kv_cache = True, BLOCK, cache
    connector._lock_fds, connector._req_copy_events = {"r": held}, {}
    pending = SimpleNamespace(req_id="r", filename=str(path), token_ids=torch.arange(6), block_ids=[4, 1])
    connector._submit_async_write(pending)

    found = load_file(path)
    expected = torch.cat([cache[4].transpose(0, 1), cache[1].transpose(0, 1)])[:6]
    assert torch.equal(found["hidden_states"], expected)
    assert found["token_ids"].tolist() == list(range(6))
    assert connector._req_copy_events["r"].query()
    assert [file.name for file in path.parent.iterdir()] == ["request.safetensors"]
    with lock.open() as again:
        fcntl.flock(again, fcntl.LOCK_SH | fcntl.LOCK_NB)
