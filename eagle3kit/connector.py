"""What vLLM loads to extract hidden states on a machine without a GPU: a connector, and a scheduler.

vLLM ships `ExampleHiddenStatesConnector`, which copies hidden states out of its cache on a CUDA stream into pinned memory.
Neither exists on a CPU, so this subclass replaces that one method by a plain copy and keeps everything else: which file a
request gets, the lock a client waits on, and when the scheduler may free the blocks. On a GPU the stock classes are used, or for
`extraction_storage: fp8` hs_connectors' subclass of it.

This module is imported inside the server process only (`kv_connector_module_path`, `--scheduler-cls`); nothing else in the kit
imports it.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
from safetensors.torch import save_file
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
    PendingSave,
    extract_from_kv_cache,
)
from vllm.v1.core.sched.scheduler import Scheduler

from eagle3kit import state_files


class _Copied:
    """Stands where the parent keeps a CUDA event: a copy made on the spot is always complete."""

    def query(self) -> bool:
        return True


class CpuHiddenStatesConnector(ExampleHiddenStatesConnector):  # type: ignore[misc]  # vLLM ships no types
    """`ExampleHiddenStatesConnector` for tensors that already live in host memory."""

    def _submit_async_write(self, pending: PendingSave) -> None:
        """Write the hidden states `[T, n_layers, hidden]` and token ids `[T]` of one finished request (see `state_files`).

        The file appears under its final name only when complete (temporary name, then rename); the lock that the parent took
        when the request arrived is released after that, so a waiting client never sees half a file.
        """
        if not self._is_tp_rank_zero:
            return
        blocks = torch.tensor(pending.block_ids, dtype=torch.long)
        offsets = torch.arange(self._block_size, dtype=torch.long)
        slots = (offsets[None, :] + blocks[:, None] * self._block_size).flatten()
        lock: int | None = self._lock_fds.pop(pending.req_id, None)
        states = extract_from_kv_cache(self._kv_cache, slots, pending.token_ids.shape[0]).contiguous()
        storage = self._kv_transfer_config.get_from_extra_config("storage", "native")
        tensors = state_files.tensors(states, pending.token_ids.clone(), storage)
        final = Path(pending.filename)
        partial = final.with_suffix(".partial")
        try:
            final.parent.mkdir(parents=True, exist_ok=True)
            save_file(tensors, partial)
            partial.replace(final)
        finally:
            partial.unlink(missing_ok=True)  # of a full disk
            if lock is not None:
                os.close(lock)
        self._req_copy_events[pending.req_id] = _Copied()


class CpuScheduler(Scheduler):  # type: ignore[misc]
    """vLLM's scheduler without the drafts of the extraction method.

    That method calls every sampled token a draft of the next one, only to get its hidden states stored. To verify it the target
    would run over two tokens a request and step: nothing on a GPU, which waits for memory meanwhile, but twice the work here.
    """

    def update_draft_token_ids(self, draft_token_ids: object) -> None:
        """Take no draft: the next step runs over the sampled tokens alone."""
