"""The training process: speculators' own trainer, with a CPU device where there is no GPU, and its metrics as JSON lines.

    python -m eagle3kit.trainer [--cpu] [--store FOLDER] --metrics FILE -- ARGUMENTS OF `speculators train`

With a store it asks the run's server for the states of rows that have no file, and reads them there (`access.open_loader`).

Run as a process of its own, alone or under torchrun, so that it can be killed, resumed and spread over GPUs without the notebook.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3kit import access

if TYPE_CHECKING:
    import torch


_BEGAN = time.monotonic()


class JsonLines(logging.Handler):
    """Writes each record of the `speculators.metrics` logger as one line of JSON.

    A line: `{"split", "step", "epoch", "loss", "acc", "cond", "lr", "tokens_per_s", "part", "time"}`, and of a validation
    `simulated_al` too; `acc[i]` is the share of positions where the draft of TTT step i is the target's most likely token,
    `cond[i]` the same where all earlier steps were right. `part` names the process, `time` is its age in seconds: the clock on
    the wall may be set back.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", buffering=1)
        self._part = os.urandom(4).hex()

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record."""
        message = record.msg
        if not isinstance(message, dict):
            return
        for split in ("train", "val"):
            if isinstance(metrics := message.get(split), dict):
                row = row_of(split, metrics, message, getattr(record, "step", None))
                row |= {"part": self._part, "time": round(time.monotonic() - _BEGAN, 2)}
                self._file.write(json.dumps(row) + "\n")


def row_of(split: str, metrics: dict[str, float], message: dict[str, Any], step: int | None) -> dict[str, Any]:
    """One line of the metrics file from what speculators logged; validation metrics carry the suffix `_epoch` there."""
    suffix = "_epoch" if split == "val" else ""

    def series(name: str) -> list[float]:
        values: list[float] = []
        while (value := metrics.get(f"{name}_{len(values)}{suffix}")) is not None:
            values.append(round(float(value), 6))
        return values

    lr, cond = message.get("lr"), series("cond_acc")
    return {
        "split": split,
        "step": step,
        "epoch": message.get("epoch"),
        "loss": round(float(metrics[f"loss{suffix}"]), 6),
        "acc": series("full_acc"),
        "cond": cond,
        **({"simulated_al": round(simulated_al(cond), 6)} if split == "val" else {}),
        "lr": lr if not isinstance(lr, dict) else next(iter(lr.values())),
        "tokens_per_s": round((message.get("profile") or {}).get("tokens_per_s", 0.0), 1),
    }


def simulated_al(cond: Sequence[float]) -> float:
    """Acceptance length in tokens per target forward that conditional accuracies predict: `1 + sum_i prod_{j<=i} cond_j`.

    The formula of Leviathan et al. (arXiv 2211.17192), with per-position rates in place of one constant rate.
    """
    return 1 + sum(math.prod(cond[: i + 1]) for i in range(len(cond)))


def orthogonalize(grad: torch.Tensor, ns_coefficients: Sequence[float], ns_steps: int, eps: float) -> torch.Tensor:
    """Muon's Newton-Schulz iteration in float32: `X <- aX + (b XX' + c (XX')^2) X`, from the gradient scaled to a norm of 1.

    torch does it in bfloat16, which a CPU without AMX emulates: 25 s a step of a SmolLM2 drafter on two cores, here 0.3 s. Each
    iteration multiplies X from the left by a polynomial of XX'. So the iterations run on XX', which is small where X is long, and
    X is multiplied once, at the end: the same result in four fifths of the time.

    Args:
        grad: a matrix `[rows, columns]`.
        ns_coefficients: a, b and c.
        ns_steps: iterations.
        eps: least norm that the gradient is divided by.

    Returns:
        A matrix `[rows, columns]` with the gradient's singular vectors and singular values near 1.

    Source of the formula: Jordan et al., "Muon: an optimizer for hidden layers in neural networks" (2024).
    """
    import torch

    a, b, c = ns_coefficients
    tall = grad.size(0) > grad.size(1)
    x: torch.Tensor = grad.float().T if tall else grad.float()
    x = x / x.norm().clamp(min=eps)
    gram, eye = x @ x.T, torch.eye(len(x), device=x.device)
    total = eye
    for left in range(ns_steps, 0, -1):
        step = a * eye + b * gram + c * gram @ gram
        total = step @ total
        if left > 1:
            gram = step @ gram @ step
    x = total @ x
    return x.T if tall else x


CPU_ITERATIONS = 3
"""Of Muon's iteration, in place of five: a twentieth less of a step of a SmolLM2 drafter, and the same accuracy after it."""


def use_cpu() -> None:
    """Give speculators' trainer a CPU, for it otherwise asks for device 0 of an accelerator, and Muon a float32 iteration."""
    import speculators.train.checkpointer as checkpointer
    import speculators.train.cli as cli
    import speculators.train.trainer as trainer
    import torch
    import torch.optim._muon as muon

    class CpuTrainer(trainer.Trainer):  # type: ignore[misc]  # speculators ships no types
        def setup_trainer(self) -> None:
            self.local_rank = torch.device("cpu")
            self.device_type = "cpu"
            super().setup_trainer()

    def synchronize(*_: object) -> None:
        """On a CPU every operation is finished when it returns."""

    def zeropower(grad: torch.Tensor, ns_coefficients: Sequence[float], ns_steps: int, eps: float) -> torch.Tensor:
        return orthogonalize(grad, ns_coefficients, min(ns_steps, CPU_ITERATIONS), eps)

    torch.accelerator.synchronize = synchronize
    muon._zeropower_via_newtonschulz = zeropower
    checkpointer.get_current_device = lambda: "cpu"  # where a resumed training loads its checkpoint
    cli.Trainer = CpuTrainer


def main(arguments: list[str]) -> None:
    """Train with `arguments`; see the module's docstring."""
    parser = argparse.ArgumentParser(prog="eagle3kit.trainer")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--store", type=Path)
    parser.add_argument("--metrics", type=Path, required=True)
    own, rest = parser.parse_known_args(arguments)
    if own.cpu:
        use_cpu()
    if own.threads:
        import torch

        torch.set_num_threads(own.threads)

    import speculators.train.cli as cli
    from speculators.train.config import TrainConfig

    if own.store:
        access.open_loader(own.store)
    write_metrics(cli, own.metrics)
    unmark_before_saving(cli.Trainer)
    cli.main(TrainConfig.resolve([item for item in rest if item != "--"]))


def unmark_before_saving(trainer: Any) -> None:
    """Have a trainer class delete a checkpoint's `training_state.json` before it saves over that checkpoint.

    It writes that file last. With the old one out of the way, a checkpoint that has one is whole, whatever was killed meanwhile
    and whatever the files' dates say.
    """
    save = trainer.maybe_save_checkpoint

    def unmark_and_save(self: Any, epoch: int | str, local_step: int = 0) -> None:
        if os.environ.get("RANK", "0") == "0":
            self._training_state_path(epoch).unlink(missing_ok=True)
        save(self, epoch, local_step)

    trainer.maybe_save_checkpoint = unmark_and_save


def write_metrics(cli: Any, path: Path) -> None:
    """Add our handler whenever speculators sets up its metric logger, which removes the handlers it finds."""
    setup = cli.setup_metric_logger

    def setup_and_add(*args: Any, **kwargs: Any) -> None:
        setup(*args, **kwargs)
        if os.environ.get("RANK", "0") == "0":  # the process group is set up later
            logging.getLogger("speculators.metrics").addHandler(JsonLines(path))

    cli.setup_metric_logger = setup_and_add


if __name__ == "__main__":
    main(sys.argv[1:])
