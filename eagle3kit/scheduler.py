"""What vLLM loads to draft another number of tokens from one measurement to the next, without a new server.

vLLM can choose the length of a draft at every step, from a table by batch size (`num_speculative_tokens_per_batch_size`). This
scheduler fills that table with what the requests ask for, so that one server, started with the longest draft, gives the figures
of every shorter one: its start costs a minute, and its weights a gigabyte.

This module is imported inside the server process only (`--scheduler-cls`); nothing else in the kit imports it.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler


class DraftLengthScheduler(Scheduler):  # type: ignore[misc]  # vLLM ships no types
    """vLLM's scheduler, with the draft length that a request's `vllm_xargs: {"draft_tokens": k}` asks for.

    Requests that run together should ask for the same length: the shortest one counts for all of them. A request that asks for
    nothing gets the server's own.
    """

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Schedule one step; arguments and result are vLLM's."""
        asked = [_draft_tokens(request) for request in (*self.running, *self.waiting)]
        length = min((tokens for tokens in asked if tokens is not None), default=self.num_spec_tokens)
        self.dynamic_sd_lookup = [length] * (self.scheduler_config.max_num_seqs + 1)
        return super().schedule(*args, **kwargs)


def _draft_tokens(request: Any) -> int | None:
    extra = (request.sampling_params and request.sampling_params.extra_args) or {}
    return int(extra["draft_tokens"]) if "draft_tokens" in extra else None
