"""What vLLM's worker loads on a CPU, so that speculation keeps the target's distribution above temperature 0.

vLLM 0.32.0 divides the logits at drafted positions by each request's temperature, spread over the request's tokens. Its CPU build
spreads into a copy in whole numbers and drops the copy: what it then divides by is memory that nobody wrote. Greedy requests
never get there. Found by the sweep's test of the first tokens, which failed with p < 0.001 before and passes with this.

This module is imported inside the worker process only (`--worker-extension-cls`); nothing else in the kit imports it.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.triton_utils import HAS_TRITON
from vllm.triton_utils.dispatcher import register_kernels

KERNEL = "vllm.v1.sample.rejection_sampler.expand_kernel"


def expand(
    output: torch.Tensor, values: torch.Tensor, ends: torch.Tensor, replace_from: int, replace_to: int, *_: Any, **__: Any
) -> None:
    """Write each request's value once for every token of the request, in the values' own type.

    Args:
        output: `[tokens]`, written in place.
        values: `[requests]`.
        ends: `[requests]`, the running total of tokens.
        replace_from: a value that stands for another one (a temperature of 0) ...
        replace_to: ... and that one.
    """
    counts = torch.diff(ends, prepend=ends.new_zeros(1))
    output.copy_(torch.where(values == replace_from, replace_to, values).repeat_interleave(counts))


class WholeTemperature:
    """Adds nothing to the worker; that it is named makes the worker import this module."""


if not HAS_TRITON:
    register_kernels({KERNEL: expand})
