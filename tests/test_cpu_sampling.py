"""Speculation at a temperature on a CPU: what is drawn follows the target's distribution."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from vllm.platforms import current_platform
from vllm.triton_utils import HAS_TRITON
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.sample import rejection_sampler

from eagle3kit import server
from eagle3kit.params import Params

REQUESTS, TOKENS = 20_000, 20


@pytest.fixture
def mended() -> Iterator[None]:
    """As in a worker: the platform's stand-ins, then ours over them; the platform's again at the end."""
    assert not HAS_TRITON, "on this machine vLLM runs its own kernels, and nothing is mended"
    current_platform.register_triton_kernel_overrides()
    importlib.reload(importlib.import_module("eagle3kit.cpu_sampling"))
    yield
    current_platform.register_triton_kernel_overrides()


def spread(temperatures: torch.Tensor) -> list[float]:
    """The temperatures of four requests with 3, 0, 3 and 1 drafted tokens, one a token."""
    ends = torch.tensor([3, 3, 6, 7], dtype=torch.int32)
    found: list[float] = rejection_sampler.expand_batch_to_tokens(temperatures, ends, 7, replace_from=0, replace_to=1).tolist()
    return found


def drawn(temperature: float, drafts: torch.Tensor, probabilities: torch.Tensor | None, logits: torch.Tensor) -> torch.Tensor:
    """How often vLLM's sampler puts each token first, with one drafted token a request."""
    metadata = SimpleNamespace(
        all_greedy=False,
        all_random=True,
        temperature=torch.full((REQUESTS,), temperature),
        top_k=None,
        top_p=None,
        generators={},
    )
    ends = torch.arange(1, REQUESTS + 1, dtype=torch.int32)
    target = rejection_sampler.apply_sampling_constraints(logits.repeat(REQUESTS, 1), ends, metadata)
    tokens = rejection_sampler.rejection_sample(
        drafts.to(torch.int32),
        [1] * REQUESTS,
        1,
        ends,
        probabilities,
        target,
        torch.zeros(REQUESTS, 1, dtype=torch.long),
        metadata,
    )
    return torch.bincount(tokens[:, 0].long(), minlength=TOKENS) / REQUESTS


def test_each_drafted_token_gets_its_requests_temperature(mended: None) -> None:
    assert spread(torch.tensor([0.7, 9.0, 0.0, 1.5])) == pytest.approx([0.7] * 3 + [1.0] * 3 + [1.5])


def test_without_the_mend_this_vllm_divides_by_memory_nobody_wrote() -> None:
    """The guard off. Should this fail, vLLM was mended, and the module can go."""
    current_platform.register_triton_kernel_overrides()
    values = torch.tensor([0.3, 8.0, 2.5, 4.5])  # found nowhere else: freed memory may hold what an earlier test wrote
    assert spread(values) != pytest.approx([0.3] * 3 + [2.5] * 3 + [4.5])


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
@pytest.mark.parametrize("probable", [False, True], ids=["one draft for all", "drafts from a distribution"])
def test_what_is_drawn_follows_the_target(mended: None, temperature: float, probable: bool) -> None:
    torch.manual_seed(0)
    logits, drafter = torch.randn(TOKENS) * 1.5, torch.softmax(torch.randn(TOKENS), 0)
    wanted = torch.softmax(logits / temperature, 0)
    if probable:
        found = drawn(temperature, torch.multinomial(drafter, REQUESTS, True), drafter.repeat(REQUESTS, 1), logits)
    else:
        found = drawn(temperature, torch.full((REQUESTS,), int(wanted.argsort()[-2])), None, logits)
    # Sampling alone leaves about half the sum over tokens of sqrt(2 p (1 - p) / (pi n)).
    noise = float((2 * wanted * (1 - wanted) / (torch.pi * REQUESTS)).sqrt().sum() / 2)
    assert float((found - wanted).abs().sum() / 2) < 2 * noise


def test_every_server_on_a_cpu_is_told_to_load_it_and_none_on_a_gpu() -> None:
    """Without these words the worker never imports the module, and nothing says so."""
    told = {device: server.command(Params(), "/model", server.plain(), 1, device) for device in ("cpu", "cuda")}
    assert "eagle3kit.cpu_sampling.WholeTemperature" in told["cpu"]
    assert hasattr(importlib.import_module("eagle3kit.cpu_sampling"), "WholeTemperature")
    assert resolve_obj_by_qualname(told["cpu"][told["cpu"].index("--distributed-executor-backend") + 1])
    assert not {"--worker-extension-cls", "--distributed-executor-backend"} & set(told["cuda"])
