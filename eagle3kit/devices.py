"""Where the models run: the GPUs of this machine, found without importing torch, and the choice between them and the CPU."""

from __future__ import annotations

import csv
import os
import subprocess
from dataclasses import dataclass
from typing import Literal

from eagle3kit.errors import KitError
from eagle3kit.params import Params


@dataclass(frozen=True)
class Gpu:
    """One GPU as nvidia-smi reports it; `memory_gb` in units of 1e9 bytes, `compute` for example 10.3."""

    index: int
    name: str
    memory_gb: float
    compute: float
    driver: str


def gpus() -> tuple[list[Gpu], str]:
    """The GPUs of this machine that CUDA_VISIBLE_DEVICES leaves, and how that is known. Asks nvidia-smi; imports nothing."""
    query = "index,uuid,name,memory.total,compute_cap,driver_version"
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except FileNotFoundError:
        return [], "there is no nvidia-smi"
    except (OSError, subprocess.SubprocessError) as error:
        return [], f"nvidia-smi failed ({error})"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    wanted = None if visible is None else [item.strip() for item in visible.split(",") if item.strip()]
    found = []
    for row in csv.reader(answer.splitlines(), skipinitialspace=True):
        try:
            index, uuid, name, memory, compute, driver = row
            gpu = Gpu(int(index), name, int(memory) * 2**20 / 1e9, float(compute), driver)
        except ValueError:  # "[N/A]" of a GPU in a bad state
            continue
        if wanted is None or any(item == index or uuid.startswith(item) for item in wanted):
            found.append(gpu)
    return found, f"nvidia-smi lists {len(found)}" + ("" if visible is None else f" with CUDA_VISIBLE_DEVICES={visible}")


def device(params: Params) -> tuple[Literal["cpu", "cuda"], str]:
    """Where the models run, and why: the parameter `device`, or with `auto` a GPU where nvidia-smi lists one."""
    if params.device != "auto":
        return params.device, f"{params.device}, by device: {params.device}"
    found, how = gpus()
    if found:
        return "cuda", f"cuda, by device: auto: {how} ({found[0].name})"
    return "cpu", f"cpu, by device: auto: {how}"


def at_once(params: Params) -> int:
    """GPUs that a run needs at the same time: those of one server, or of the trainer; with `extraction_mode: online` of both."""
    both = (params.train_processes, params.serve_tensor_parallel)
    return sum(both) if params.extraction_mode == "online" else max(both)


def divide(params: Params) -> tuple[str, str]:
    """CUDA_VISIBLE_DEVICES of the trainer and of the server that run side by side: the first GPUs here, and the next ones.

    Written without a machine with several GPUs; tested is the division alone.

    Raises:
        KitError: there are too few.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    named = [str(gpu.index) for gpu in gpus()[0]] if visible is None else list(filter(None, map(str.strip, visible.split(","))))
    if len(named) < at_once(params):
        raise KitError(
            "too few GPUs for a trainer beside the server that it asks",
            seen=len(named),
            wanted=f"{params.train_processes} (train_processes) and {params.serve_tensor_parallel} (serve_tensor_parallel)",
            fix="lower one of them, or set extraction_mode: offline",
        )
    trainer = params.train_processes
    return ",".join(named[:trainer]), ",".join(named[trainer : trainer + params.serve_tensor_parallel])
