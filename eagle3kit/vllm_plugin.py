"""A vLLM plugin that lets few cores work instead of wait; vLLM loads it in each of its processes (`vllm.general_plugins`).

vLLM's engine process waits for its worker in a busy loop for up to a second after each message. With a core to spare that saves
microseconds. On a machine whose every core is needed for the model's own arithmetic it takes up to half a core from it for the
whole of every step. On a CPU the loop is therefore cut short, and the waiting process sleeps until it is notified.
"""

from __future__ import annotations

BUSY_WAIT_S = 0.0005
"""How long to go on spinning after a message before sleeping. Waking up takes about a tenth of a millisecond, a step of the
smallest model here 50 of them."""


def register() -> None:
    """Cut vLLM's busy waiting short when it runs on a CPU. Does nothing on other platforms."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

    SpinCondition.__init__.__defaults__ = (BUSY_WAIT_S,)
