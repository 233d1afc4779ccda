"""The CPU connector writes what the cache holds, whole, and lets go of the lock; the CPU scheduler verifies no draft."""

import fcntl
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from eagle3kit import state_files

BLOCK, LAYERS, HIDDEN = 4, 3, 5


@pytest.mark.parametrize("storage", ["native", "fp8"])
def test_slots_are_copied_in_order_and_the_lock_is_released(tmp_path: Path, storage: str) -> None:
    from eagle3kit.connector import CpuHiddenStatesConnector

    cache = torch.arange(6 * LAYERS * BLOCK * HIDDEN, dtype=torch.float32).view(6, LAYERS, BLOCK, HIDDEN)
    path = tmp_path / "deeper" / "request.safetensors"
    lock = tmp_path / "lock"
    held = os.open(lock, os.O_CREAT | os.O_WRONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    connector = CpuHiddenStatesConnector.__new__(CpuHiddenStatesConnector)
    connector._is_tp_rank_zero, connector._block_size, connector._kv_cache = True, BLOCK, cache
    connector._lock_fds, connector._req_copy_events = {"r": held}, {}
    connector._kv_transfer_config = SimpleNamespace(get_from_extra_config={"storage": storage}.get)
    pending = SimpleNamespace(req_id="r", filename=str(path), token_ids=torch.arange(6), block_ids=[4, 1])
    connector._submit_async_write(pending)

    stored, found = load_file(path), state_files.read(path)
    expected = torch.cat([cache[4].transpose(0, 1), cache[1].transpose(0, 1)])[:6]
    assert set(stored) - set(found) == ({"hidden_states_scales"} if storage == "fp8" else set())
    torch.testing.assert_close(found["hidden_states"], expected, rtol=2**-4 if storage == "fp8" else 0, atol=0)
    assert found["token_ids"].tolist() == list(range(6))
    assert connector._req_copy_events["r"].query()
    assert [file.name for file in path.parent.iterdir()] == ["request.safetensors"]
    with lock.open() as again:
        fcntl.flock(again, fcntl.LOCK_SH | fcntl.LOCK_NB)


def test_the_scheduler_takes_no_draft() -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    from eagle3kit.connector import CpuScheduler

    assert "update_draft_token_ids" in vars(Scheduler)  # else vLLM calls it by another name, and drafts are verified again
    scheduler = CpuScheduler.__new__(CpuScheduler)
    scheduler.requests = {"r": SimpleNamespace(spec_token_ids=[], is_finished=lambda: False, is_prefill_chunk=False)}
    scheduler.update_draft_token_ids(SimpleNamespace(req_ids=["r"], draft_token_ids=[[7]]))
    assert scheduler.requests["r"].spec_token_ids == []
