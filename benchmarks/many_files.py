"""What one file a sample costs: time to list, open and read the hidden states of many samples, against the same samples packed.

    python benchmarks/many_files.py [SAMPLES] [FOLDER]

Small states (8 tokens x 4 layers x 64, bfloat16: 4.2 kB a sample) so that the files themselves are measured and not their bytes.
Both are read in random order, as training does, from the page cache. Packed means 1,000 samples a safetensors file, opened once.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

TOKENS, LAYERS, HIDDEN, PACK = 8, 4, 64, 1000


def timed(what: str, samples: int, work: Callable[[], object]) -> float:
    """Run `work`, print how long it took in all and a sample, and return the seconds."""
    began = time.perf_counter()
    work()
    seconds = time.perf_counter() - began
    print(f"{what:34} {seconds:8.2f} s  {seconds / samples * 1e6:8.1f} us a sample", flush=True)
    return seconds


def main(samples: int, folder: Path) -> None:
    """Write both forms, then list, open and read them."""
    import torch
    from safetensors import safe_open
    from safetensors.torch import load_file, save, save_file

    torch.set_num_threads(1)
    sample = {
        "hidden_states": torch.randn(TOKENS, LAYERS, HIDDEN).bfloat16(),
        "token_ids": torch.arange(TOKENS),
    }
    content = save(sample)
    many, packed = folder / "many", folder / "packed"
    many.mkdir()
    packed.mkdir()
    order = list(range(samples))
    random.Random(0).shuffle(order)  # noqa: S311 - the order of a benchmark

    def file(index: int) -> Path:
        return many / f"hs_{index}.safetensors"

    def write_packed() -> None:
        for start in range(0, samples, PACK):
            tensors = {
                f"{name}.{index}": tensor.clone()
                for index in range(start, min(start + PACK, samples))
                for name, tensor in sample.items()
            }
            save_file(tensors, packed / f"{start // PACK}.safetensors")

    def open_each() -> None:
        for index in order:
            with safe_open(file(index), framework="pt"):
                pass

    def read_each() -> None:
        for index in order:  # not kept: a process may map some 65,000 files at a time
            load_file(file(index))

    def read_packed() -> None:
        files = [safe_open(path, framework="pt") for path in sorted(packed.iterdir(), key=lambda path: int(path.stem))]
        for index in order:
            for name in sample:
                files[index // PACK].get_tensor(f"{name}.{index}")

    timed("write, one file a sample", samples, lambda: [file(index).write_bytes(content) for index in range(samples)])
    timed("write, packed", samples, write_packed)
    timed("list with sizes", samples, lambda: [entry.stat().st_size for entry in os.scandir(many)])
    timed("open", samples, open_each)
    apart = timed("read, one file a sample", samples, read_each)
    together = timed("read, packed", samples, read_packed)
    print(f"reading packed takes {together / apart:.2f} of the time; it would save {(apart - together):.1f} s an epoch")


if __name__ == "__main__":
    where = sys.argv[2] if len(sys.argv) > 2 else None
    with tempfile.TemporaryDirectory(dir=where) as name:
        main(int(sys.argv[1]) if len(sys.argv) > 1 else 100_000, Path(name))
