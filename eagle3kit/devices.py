"""Where the models run: the GPUs of this machine, found without importing torch, and the choice between them and the CPU."""

from __future__ import annotations

import csv
import os
import subprocess
from dataclasses import dataclass
from typing import Literal

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
        return params.device, f"device: {params.device} is set"
    found, how = gpus()
    if found:
        return "cuda", f"device: auto, and {how} ({found[0].name})"
    return "cpu", f"device: auto, and {how}"
