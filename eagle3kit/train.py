"""Training: speculators' trainer as a child process, watched, stopped and resumed from here.

warm_start/drafter/       with `train_from`, what training starts from
checkpoints/<epoch>/      what the trainer saves: config.json, model.safetensors, optimizer and scheduler state
checkpoints/log.jsonl     its metrics, one line a step
captured/                 with `extraction_mode: online`, states on their way from the server to the trainer
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from eagle3kit import convert, devices, golden, hidden_states, vocab
from eagle3kit.data import MADE_BY as ROWS_MADE_BY
from eagle3kit.data import load_rows, load_tokens
from eagle3kit.errors import KitError
from eagle3kit.hub import local_folder
from eagle3kit.process import Child, how_ended
from eagle3kit.rundir import Run, Step, file_digest, read_json, write_json
from eagle3kit.server import Server, arithmetic, cores
from eagle3kit.trainer import simulated_al

MADE_BY = "05_train"
CONFIG_MADE_BY = "02_build_k25_config"

AGAIN = "delete the run's checkpoints folder and run notebook 05_train again"
"""What mends a checkpoint that is whole but wrong."""

TUNED = (
    "train_from",
    "train_epochs",
    "train_lr",
    "train_pack_tokens",
    "train_ttt_steps",
    "train_ttt_decay",
    "train_on_prompts",
    "train_optimizer",
    "train_scheduler",
    "train_warmup_share",
    "train_weight_decay",
    "train_processes",
    "seed",
)
"""Parameters that change the result of training: inputs of its step."""


def command(run: Run, model: Path | str, device: str, server: Server | None = None) -> list[str]:
    """The command line of the trainer.

    The drafter's shape comes whole from `config/` (a folder with a config and no weights: fresh weights of that shape), or with
    the weights from `warm_start/`, so no default of the trainer's decides about it.

    Args:
        server: what the trainer asks for the states of rows without a file; it checks the token ids and numbers of each answer.
            It would go on without a row that it cannot get; told to bear no failure, it ends.
    """
    p = run.params
    rows, _ = load_rows(run)
    train_rows = sum(row.split == "train" for row in rows)
    arguments: dict[str, object] = {
        "verifier-name-or-path": model,
        "from-pretrained": run.path("warm_start", "drafter") if p.train_from else run.path("config"),
        "data-path": run.path("checkpoints", "rows") if p.train_on_prompts else run.path("data", "rows"),
        "hidden-states-path": run.path("hidden_states"),
        "d2t-path": run.path("vocab", "d2t.npy"),
        "t2d-path": run.path("vocab", "t2d.npy"),
        "draft-vocab-size": run.manifest("vocab", vocab.MADE_BY)["outputs"]["size"],
        "save-path": run.path("checkpoints"),
        "log-dir": run.path("logs", "trainer"),
        "total-seq-len": p.train_pack_tokens,
        # The trainer cuts the rows at int(n * ratio); half a row more makes that the border between the splits.
        "train-data-ratio": (train_rows + 0.5) / len(rows),
        "epochs": p.train_epochs,
        "lr": p.train_lr,
        "weight-decay": p.train_weight_decay,
        "muon-weight-decay": p.train_weight_decay,
        "optimizer": p.train_optimizer,
        "scheduler-type": p.train_scheduler,
        "scheduler-warmup-ratio": p.train_warmup_share,
        "ttt-steps": p.train_ttt_steps,
        "ttt-step-loss-decay": p.train_ttt_decay,
        "checkpoint-freq": p.train_save_every,
        "num-workers": p.train_workers,
        "on-missing": "generate" if server else "raise",
        "seed": p.seed,
    }
    if server:
        arguments |= {"vllm-endpoint": f"{server.url}/v1", "request-timeout": p.stall_timeout_s}
        arguments["max-consecutive-generation-failures"] = 1
    if p.extraction_storage == "fp8":
        arguments["hidden-states-backend"] = "fp8"
    if device == "cpu":
        arguments |= {"draft-attn-impl": "sdpa", "loss-implementation": "eager", "hidden-states-dtype": "float32"}
    program = [sys.executable, "-W", "ignore"]
    if p.train_processes > 1:
        program += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={p.train_processes}"]
    program += ["-m", "eagle3kit.trainer", "--metrics", str(run.path("checkpoints", "log.jsonl"))]
    if server:
        program += ["--store", str(run.path(hidden_states.CAPTURE))]
    if device == "cpu":
        program += ["--cpu", "--threads", str(cores(p))]
    flags = [f"--{name}={value}" for name, value in arguments.items()]
    return [*program, "--", *flags, *(["--trust-remote-code"] if p.trust_remote_code else [])]


def open_masks(run: Run, dest: Path) -> None:
    """Write the rows again, with training rows whose loss mask covers the prompt too.

    The trainer's loss is the distance to the target's distribution, which the last hidden state gives at every token, whoever
    wrote it. So a prompt's tokens teach as well, and cost nothing: the trainer computes them in any case. What all training rows
    begin with, a system turn, is left out. The held-out rows stay as they are: they measure the target's answers.

    Args:
        dest: folder of the new rows, replaced if it is there; in the order of the old ones.
    """
    rows = load_rows(run)[0]
    tokens = load_tokens(run)
    before = [ids.tolist() for ids, row in zip(tokens["input_ids"], rows, strict=True) if row.split == "train"]
    alike = itertools.takewhile(lambda column: len(set(column)) == 1, zip(*before, strict=False))
    shared = sum(1 for _ in alike) if len(before) > 1 else 0

    def cover(item: dict[str, Any], index: int) -> dict[str, Any]:
        if rows[index].split == "train":
            item["loss_mask"][shared:] = 1
        return item

    shutil.rmtree(dest, ignore_errors=True)
    tokens.map(cover, with_indices=True, keep_in_memory=True, load_from_cache_file=False).save_to_disk(str(dest))


@contextlib.contextmanager
def online_server(run: Run, model: Path | str, device: str) -> Iterator[Server | None]:
    """The server that extracts the states of rows without a file, ready, and ended on every way out; None offline.

    On GPUs it has those after the trainer's (`devices.divide`), which no machine with GPUs has tried yet.

    Raises:
        KitError: it does not start, there are too few GPUs, or prefix caching is on.
    """
    if run.params.extraction_mode == "offline":
        yield None
        return
    ids = run.manifest("hidden_states", ROWS_MADE_BY)["inputs"]["layers"]
    server = hidden_states.extraction_server(run, model, ids, device)
    if not isinstance(server, Server):
        raise TypeError("extraction_mode: online goes with vLLM")  # a rule of the parameters
    golden.require_uncached(server)
    if device == "cuda":
        server.variables["CUDA_VISIBLE_DEVICES"] = devices.divide(run.params)[1]
    try:
        with server:
            yield server
            golden.require_uncached(server, ["checkpoints"])
    finally:
        shutil.rmtree(run.path(hidden_states.CAPTURE), ignore_errors=True)


def warm_start(run: Run, model: Path | str) -> list[dict[str, Any]]:
    """Build what training starts from: with `train_from` a parent's weights in the new shape; the resumable step `warm_start`.

    Returns:
        One row a tensor, for a table: kept, moved, replaced or new, and why.

    Raises:
        KitError: the parent cannot be read, or does not fit the config or the target (see `convert.warm_start`).
    """
    p = run.params
    if not p.train_from:
        return [{"tensor": "all", "what": "new", "reason": "train_from is empty: fresh weights of the shape in config/"}]
    parent = local_folder(p.train_from)
    files = [path for path in sorted(parent.iterdir()) if path.suffix == ".safetensors" or path.name == "config.json"]
    inputs = {
        "config": run.digest("config", CONFIG_MADE_BY),
        "vocab": run.digest("vocab", vocab.MADE_BY),
        "parent": {path.name: file_digest(path) for path in files},
    }
    step = run.step("warm_start", inputs)
    if not step.done:
        with step:
            dest = step.folder / "drafter"
            shutil.rmtree(dest, ignore_errors=True)
            d2t, t2d = vocab.load_maps(run)
            maps = (None, None) if len(d2t) == len(t2d) else (d2t, t2d)
            target = local_folder(model, run.params.target_revision)
            rows = convert.warm_start(parent, run.path("config"), target, dest, *maps, trust_remote_code=p.trust_remote_code)
            write_json(step.folder / "rows.json", rows)
            step.outputs = {"tensors": len(rows)}
    return list(read_json(step.folder / "rows.json", MADE_BY))


def train(run: Run, model: Path | str, device: str, watch: Callable[[list[dict[str, Any]]], None]) -> list[dict[str, Any]]:
    """Train the drafter, or go on with an interrupted training; the resumable step `checkpoints`.

    Args:
        model: the target (its embeddings and output matrix are used, frozen).
        watch: called now and then with the metrics so far.

    Returns:
        The metrics, one dictionary a logged step (see `trainer.row_of`).

    Raises:
        KitError: an input is missing or damaged, or the trainer failed, or online its server; finished epochs are kept.
    """
    inputs = {
        "config": run.digest("config", CONFIG_MADE_BY),
        "hidden_states": run.digest("hidden_states", ROWS_MADE_BY),
        "vocab": run.digest("vocab", vocab.MADE_BY),
        **run.params.subset(TUNED),
    }
    if run.params.train_from:
        warm_start(run, model)
        inputs["warm_start"] = run.digest("warm_start", MADE_BY)
    step = run.step("checkpoints", inputs)
    log = step.folder / "log.jsonl"
    if step.done and not (drafter_folder(run) / "model.safetensors").exists():
        step.reopen()
    if not step.done:
        hidden_states.require_intact(run)
        with step:
            began, earlier_s = time.monotonic(), seconds_of_parts(log)
            drop_unfinished(step.folder)
            if run.params.train_on_prompts:
                open_masks(run, step.folder / "rows")
            with online_server(run, model, device) as server:
                child = Child("trainer", command(run, model, device, server), run.path("logs"), _environment(run, device, server))
                status = child.wait(partial(_look, log, watch, server), every_s=2, stall_s=run.params.stall_timeout_s)
            if status != 0:
                raise KitError(
                    f"the trainer {how_ended(status)}",
                    seen=f"at the end of {child.log}: {child.tail(4)}",
                    fix="run notebook 05_train again: it goes on from the last finished epoch",
                )
            seconds = time.monotonic() - began
            require_finished(last_checkpoint(step.folder), run.params.train_epochs)
            _record(run, read_log(log), seconds + earlier_s)
            _choose(run, step, read_log(log))
    elif best_checkpoint(step.folder, read_log(log), run.params.train_best_by).name != step.outputs["checkpoint"]:
        with step:  # train_best_by has changed
            _choose(run, step, read_log(log))
    return read_log(log)


def _choose(run: Run, step: Step, log: Sequence[dict[str, Any]]) -> None:
    """Say which checkpoint is served, and record what its validation found."""
    best = best_checkpoint(step.folder, log, run.params.train_best_by)
    step.outputs = {"checkpoint": best.name}
    for row in log:
        if row["split"] == "val" and row["epoch"] == int(best.name):
            facts: dict[str, tuple[Any, str]] = {f"train.val_acc_{i + 1}": (value, "share") for i, value in enumerate(row["acc"])}
            facts["train.val_loss"] = (row["loss"], "nats")
            facts["train.simulated_al"] = (round(simulated_al(row["cond"]), 4), "tokens/forward")
            source = f"teacher-forced on the held-out rows, draft vocabulary, after epoch {int(best.name) + 1}, which is served"
            run.record_all(facts, source)


def _look(log: Path, watch: Callable[[list[dict[str, Any]]], None], server: Server | None) -> tuple[int, int]:
    if server:
        server.require_alive()
    rows = read_log(log)
    watch(rows)
    return len(rows), log.stat().st_size if log.exists() else 0


def seconds_of_parts(log: Path) -> float:
    """How long a training has run in all its parts so far, those that were killed included; up to the last line of each."""
    return sum({row.get("part"): float(row.get("time", 0)) for row in _lines(log) if "part" in row}.values())


def _environment(run: Run, device: str, server: Server | None) -> dict[str, str]:
    common = {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"} | (server.secret if server else {})
    if device == "cpu":
        return common | arithmetic(run.params)
    return common | ({"CUDA_VISIBLE_DEVICES": devices.divide(run.params)[0]} if server else {})


def drop_unfinished(folder: Path) -> None:
    """Delete checkpoints that a kill cut short: the trainer writes `training_state.json` last, and would resume from any."""
    validated = {row["epoch"] for row in read_log(folder / "log.jsonl") if row["split"] == "val"}
    for checkpoint in _checkpoints(folder):
        state = _state(checkpoint)
        # The trainer saves an epoch and validates it after that; resumed from there it would never validate that epoch.
        ended_unseen = state is not None and state.get("local_step") == 0 and int(checkpoint.name) not in validated
        if state is None or ended_unseen:
            shutil.rmtree(checkpoint)
    for link in folder.glob("epoch*_*"):
        if link.is_symlink() and not link.exists():
            link.unlink()


def _state(checkpoint: Path) -> dict[str, Any] | None:
    path = checkpoint / "training_state.json"
    try:
        state: dict[str, Any] = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return state


def require_finished(checkpoint: Path, epochs: int) -> None:
    """Raise unless a checkpoint is the end of the last epoch: asked to stop, the trainer ends with status 0.

    Raises:
        KitError: the training ended early.
    """
    state = _state(checkpoint)
    if state is None or state.get("epoch") != epochs - 1 or state.get("local_step") != 0:
        raise KitError(
            "the training ended before its last epoch",
            seen=f"checkpoint {checkpoint.name}",
            wanted=f"the end of epoch {epochs}",
            fix=f"run notebook {MADE_BY} again: it goes on from there",
        )


def _checkpoints(folder: Path) -> list[Path]:
    return sorted((path for path in folder.iterdir() if path.name.isdigit() and path.is_dir()), key=lambda path: int(path.name))


def last_checkpoint(folder: Path) -> Path:
    """The newest finished checkpoint.

    Raises:
        KitError: there is none.
    """
    found = _checkpoints(folder)
    if not found:
        raise KitError(f"no checkpoint in {folder}", fix=f"run notebook {MADE_BY}")
    return found[-1]


def best_checkpoint(folder: Path, log: Sequence[dict[str, Any]], by: str) -> Path:
    """The checkpoint to serve: of the epochs that were saved and validated the best, the later one of equals.

    Args:
        folder: the step's folder.
        log: see `read_log`.
        by: `acceptance` (highest `simulated_al` on the held-out rows), `loss` (lowest there), or `last`, where the learning-rate
            schedule ends. Without a validation it is the last in any case.

    Raises:
        KitError: there is no checkpoint.
    """
    validated = {int(row["epoch"]): row for row in log if row["split"] == "val"}
    ended = [path for path in _checkpoints(folder) if int(path.name) in validated and (_state(path) or {}).get("local_step") == 0]
    if by == "last" or not ended:
        return last_checkpoint(folder)

    def merit(path: Path) -> tuple[float, int]:
        row = validated[int(path.name)]
        return (simulated_al(row["cond"]) if by == "acceptance" else -row["loss"]), int(path.name)

    return max(ended, key=merit)


def drafter_folder(run: Run) -> Path:
    """The trained drafter in speculators' form: the checkpoint that `train_best_by` chose when training ended."""
    return run.path("checkpoints") / str(run.manifest("checkpoints", MADE_BY)["outputs"]["checkpoint"])


def read_log(path: Path) -> list[dict[str, Any]]:
    """The trainer's metrics. A resumed training repeats steps: the last line of a step counts."""
    rows = {(row["split"], row["step"]): row for row in _lines(path)}
    return sorted(rows.values(), key=lambda row: (row["step"], row["split"]))


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_bytes().splitlines() if path.exists() else []:
        with contextlib.suppress(ValueError):  # the line being written just now, or cut short by a kill
            yield json.loads(line)


def _record(run: Run, log: Sequence[dict[str, Any]], seconds: float) -> None:
    steps = [row for row in log if row["split"] == "train"]
    if not steps:
        raise KitError("the trainer logged no step", fix=f"read {run.path('logs', 'trainer.log')}")
    gaps = sorted(b["time"] - a["time"] for a, b in itertools.pairwise(steps) if a.get("part") == b.get("part"))
    facts: dict[str, tuple[Any, str]] = {
        "train.steps": (len(steps), "steps"),
        "train.seconds_per_step": (round(gaps[len(gaps) // 2], 4) if gaps else None, "s (median)"),
        "train.final_loss": (steps[-1]["loss"], "nats"),
        "time.train_s": (round(seconds, 1), "s"),
    }
    run.record_all(facts, "checkpoints/log.jsonl, over all parts of an interrupted training")


# ---- for the notebook


def outlook(run: Run, device: str) -> dict[str, Any]:
    """What the training will be: rows, tokens, steps, and on a CPU the minutes it will take.

    The trainer packs shuffled rows; here they are packed in their order, which comes to about as many steps.
    """
    p = run.params
    rows, _ = load_rows(run)
    lengths = [row.length for row in rows if row.split == "train"]
    tokens = sum(lengths)
    steps = p.train_epochs * math.ceil(packs(lengths, p.train_pack_tokens) / max(1, p.train_processes))
    minutes = f"about {tokens * p.train_epochs / CPU_TOKENS_PER_S / 60:.0f}" if device == "cpu" else "unknown"
    return {
        "train tokens": tokens,
        "epochs": p.train_epochs,
        "tokens a step": p.train_pack_tokens,
        "steps": steps,
        "minutes": minutes if p.extraction_mode == "offline" else f"{minutes}, and the extraction of each epoch",
    }


CPU_TOKENS_PER_S = 500
"""Rate of a SmolLM2 drafter with 4,096 draft tokens, two TTT steps and Muon on two shared cores (AMD EPYC, AVX2)."""


def packs(lengths: Sequence[int], size: int) -> int:
    """How many packs of `size` tokens rows of these lengths fill, one after the other and none of them cut."""
    count, room = 0, 0
    for length in lengths:
        if length > room:
            count, room = count + 1, size
        room -= length
    return count


def epoch_rows(log: Sequence[dict[str, Any]], served: Path | None = None) -> list[dict[str, Any]]:
    """Held-out loss and accuracy after each epoch, and whether its checkpoint is the one that is `served`; for a table."""
    return [
        {
            "epoch": int(row["epoch"]) + 1,
            "loss": round(row["loss"], 4),
            **{f"step {i + 1}": f"{100 * value:.1f} %" for i, value in enumerate(row["acc"])},
            "simulated AL": round(simulated_al(row["cond"]), 3),
            "served": "yes" if served and row["epoch"] == int(served.name) else "",
        }
        for row in log
        if row["split"] == "val"
    ]


def check(run: Run, model: Path | str) -> list[dict[str, Any]]:
    """Hold the checkpoint that will be served against what it was made from.

    Returns:
        One row a check, for a table.

    Raises:
        KitError: the drafter's first guess is no better than always guessing the most frequent token would be, a weight is not
            finite, the saved vocabulary maps are not those of notebook 04, or a frozen weight is no longer the target's.
    """
    import torch
    from safetensors.torch import load_file

    folder = drafter_folder(run)
    weights = load_file(folder / "model.safetensors")
    broken = [name for name, tensor in weights.items() if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all())]
    if broken:
        raise KitError(
            "the checkpoint holds weights that are not finite",
            seen=broken[0],
            fix=f"lower train_lr and set force: true; or {AGAIN}",
        )
    d2t, t2d = vocab.load_maps(run)
    for name, wanted in (("d2t", d2t), ("t2d", t2d)):
        if name in weights and not torch.equal(weights[name].to(wanted.dtype), wanted):
            raise KitError(f"{name} in the checkpoint is not the one of notebook 04", fix=AGAIN)
    target = local_folder(model, run.params.target_revision)
    origin = convert.verify_origin(folder, target, own_head=bool(run.params.train_from))
    if lost := [row for row in origin if row["state"] == "fail"]:
        raise KitError(f"not so: {lost[0]['name']}", seen=lost[0]["found"], fix=AGAIN)
    first = run.fact("train.val_acc_1", 0.0)
    if first < MIN_FIRST_ACCURACY and run.params.target_model != "tiny-kimi-k2.5":
        raise KitError(
            "the drafter has learnt next to nothing",
            seen=f"first-step accuracy {100 * first:.1f} %",
            wanted=f"at least {100 * MIN_FIRST_ACCURACY:.0f} %",
            fix="train longer or on more prompts; check the golden check of notebook 03",
        )
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    return [
        {"check": "weights finite", "found": f"{len(weights)} tensors, {size / 1e6:.0f} MB"},
        {"check": "vocabulary maps are notebook 04's", "found": f"{len(d2t):,} draft tokens"},
        *({"check": row["name"], "found": row["found"]} for row in origin),
        {"check": "first guess on held-out rows", "found": f"{100 * first:.1f} %"},
    ]


MIN_FIRST_ACCURACY = 0.05
"""The most frequent token of English text makes up about 5 % of it: a drafter below this knows nothing of the context."""
