"""Hidden states of the target at the drafter's layers: extraction, resume, verification, and the golden check.

The server writes one file a sequence: `hidden_states [T, n_aux + 1, hidden]`, `token_ids [T]` (see `state_files`); the last of
the layers is the final layer's output before the norm, which the trainer turns into the target's own next-token distribution.

    hidden_states/hs_<i>.safetensors    row i of data/rows, as speculators' loader expects
    hidden_states/files.json            size and digest of each file, checked again before training
    hidden_states/statistics.json       per layer: mean, deviation, norm
    golden/golden.json                  extracted states against the serving engine's own log-probabilities

With `extraction_mode: online` only the rows that the kit looks at itself have files: the held-out ones, and the golden check's.
The trainer asks a server for the others, in each epoch anew (see `train`).
"""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3kit import checkpoint, state_files
from eagle3kit import server as serving
from eagle3kit.data import MADE_BY, Row, load_rows, load_tokens
from eagle3kit.engine_transformers import TransformersEngine
from eagle3kit.errors import KitError
from eagle3kit.hub import local_folder
from eagle3kit.params import Params
from eagle3kit.process import run_tool
from eagle3kit.rundir import Run, Step, file_digest, read_json, value_digest, write_json
from eagle3kit.server import Server
from eagle3kit.target import describe

if TYPE_CHECKING:
    import torch

CAPTURE = "captured"
"""Folder of the run that the server writes into; on the same disk, so that taking a file over is a rename."""


def state_file(folder: Path, index: int) -> Path:
    """The file of row `index`, by the name that speculators' loader looks for."""
    return folder / f"hs_{index}.safetensors"


def kept_rows(params: Params, rows: Sequence[Row]) -> list[int]:
    """Rows whose states are kept in files: all; online the held-out ones and those of the golden check."""
    if params.extraction_mode == "offline":
        return list(range(len(rows)))
    return sorted({i for i, row in enumerate(rows) if row.split == "heldout"} | set(golden_rows(params, len(rows))))


def golden_rows(params: Params, n: int) -> list[int]:
    """Rows of the golden check, evenly spread over all `n`."""
    count = min(params.golden_samples, n)
    return [round(i * (n - 1) / max(1, count - 1)) for i in range(count)]


def capture_folder(run: Run, model: str | Path, layers: Sequence[int]) -> Path:
    """Where a server writes the states of these layers of this target.

    A file does not say which layers it holds. A folder of its own for each choice keeps those of an interrupted run with other
    layers, weights or number type from being taken for these.
    """
    choice = [str(model), list(layers), *run.params.subset(("target_revision", "target_dtype", "extraction_storage")).values()]
    return run.path(CAPTURE, value_digest(choice)[:12])


def extraction_server(run: Run, model: str | Path, layers: Sequence[int], device: str) -> Server | TransformersEngine:
    """What answers and extracts, by `extraction_engine`. Nothing is started or loaded until a step needs it."""
    if run.params.extraction_engine == "transformers":
        return TransformersEngine(run, model, layers, device)
    store = capture_folder(run, model, layers)
    return Server(run, model, serving.extraction(layers, store, device, run.params.extraction_storage), device)


# ---- extraction


def extract(
    run: Run, server: Server | TransformersEngine, layers: Sequence[int], hidden_size: int, say: Callable[[int, int], None]
) -> None:
    """Bring the hidden states of every row, or online of the `kept_rows`, into `hidden_states/`, verified.

    States that the server captured while it generated the answers are taken over; what is missing is computed by speculators'
    `generate-offline-data`, or by transformers where that is the engine. Called again it does only what is missing or damaged.

    Args:
        layers: vLLM layer ids, the auxiliary ones and then the last.
        hidden_size: width of the target.
        say: called with (rows done, rows in all).

    Raises:
        KitError: a file is still wrong after it was made anew.
    """
    rows, _ = load_rows(run)
    tokens, kept = load_tokens(run), kept_rows(run.params, rows)
    folder, captured = run.path("hidden_states"), capture_folder(run, server.model, layers)
    usual = {"extraction_storage": "native", "extraction_mode": "offline"}
    inputs = {"data": run.digest("data", MADE_BY), "layers": list(layers)}
    chosen = run.params.subset(usual)
    step = run.step("hidden_states", inputs | {name: value for name, value in chosen.items() if value != usual[name]})
    damaged = []
    if step.done:
        damaged = damaged_files(folder)
        if not damaged:
            return
        step.reopen()
    with step:
        began = time.monotonic()
        for path in damaged:
            path.unlink(missing_ok=True)
        adopt(captured, folder, tokens, kept)
        record: dict[str, Any] = {}
        for attempt in range(2):
            report, record = verify(folder, kept, tokens, layers, hidden_size, run.params.extraction_storage)
            if not report:
                break
            if attempt:
                index, reason = next(iter(report.items()))
                raise KitError(
                    f"hidden states of row {index} are wrong after extracting them anew",
                    seen=reason,
                    fix=f"read {run.path('logs', 'server_extraction.log')}",
                )
            for index in report:
                state_file(folder, index).unlink(missing_ok=True)
            missing, done = list(report), len(kept) - len(report)

            def told(more: int, done: int = done) -> None:
                say(done + more, len(kept))

            if isinstance(server, TransformersEngine):
                _compute(server, folder, tokens, missing, told)
            else:
                _generate(run, server, captured, tokens.select(missing), told)
                adopt(captured, folder, tokens, missing)
        say(len(kept), len(kept))
        files = _digests(folder, kept)
        write_json(folder / "files.json", files)
        write_json(folder / "statistics.json", record)
        shutil.rmtree(run.path(CAPTURE), ignore_errors=True)  # the server makes it anew when it needs it
        size = sum(entry[0] for entry in files.values())
        step.outputs = {"files": len(files), "bytes": size, "digest": _files_digest(files)}
        run.record_all(
            {
                "extraction.mode": (run.params.extraction_mode, ""),
                "extraction.tokens": (sum(rows[index].length for index in kept), "tokens"),
                "extraction.bytes": (size, "bytes"),
                "time.hidden_states_s": (round(time.monotonic() - began, 1), "s"),
            },
            "hidden_states/*.safetensors, every file read back",
        )


def adopt(captured: Path, folder: Path, tokens: Any, indices: Sequence[int]) -> int:
    """Move captured files into `folder` under the name of the row of `indices` whose tokens they hold. Returns how many were."""
    from safetensors import safe_open

    wanted: dict[bytes, list[int]] = {}
    for index, ids in zip(indices, tokens.select(indices)["input_ids"], strict=True):
        if not state_file(folder, index).exists():
            wanted.setdefault(ids.numpy().tobytes(), []).append(index)
    adopted = 0
    for path in sorted(captured.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as file:
                key = file.get_tensor("token_ids").numpy().tobytes()
        except Exception:  # safetensors raises its own kinds; a file cut by a kill is no loss, its row is extracted anew
            path.unlink()
            continue
        if alike := wanted.get(key):
            path.rename(state_file(folder, alike.pop()))
            adopted += 1
    return adopted


def _compute(engine: TransformersEngine, folder: Path, tokens: Any, missing: Sequence[int], say: Callable[[int], None]) -> None:
    engine.ensure()
    engine.extract({state_file(folder, index): tokens[index]["input_ids"].tolist() for index in missing}, say)


def _generate(run: Run, server: Server, captured: Path, missing: Any, say: Callable[[int], None]) -> None:
    """Have the states of the rows `missing`, a data set, written into `captured`, where `adopt` finds them."""
    server.ensure()
    rows = run.path(CAPTURE, "rows")
    shutil.rmtree(rows, ignore_errors=True)
    missing.save_to_disk(str(rows))
    for path in captured.glob("hs_*.safetensors"):  # of other rows: the tool would take them for its own
        path.unlink()
    command = [*server.tool("--store", str(run.path(CAPTURE))), "generate-offline-data"]
    command += ["--endpoint", f"{server.url}/v1", "--preprocessed-data", str(rows), "--output", str(captured)]
    command += ["--concurrency", str(run.params.extraction_concurrency), "--fail-on-error"]
    # torch finds no extremes in fp8, so the tool would end here; `verify` reads everything back in either case.
    if run.params.extraction_storage == "native":
        command += ["--validate-outputs"]

    def progress() -> int:
        server.require_alive()
        done = sum(1 for _ in captured.glob("hs_*.safetensors"))
        say(done)
        return done

    run_tool(
        "generate-offline-data",
        command,
        run.path("logs"),
        env=server.secret,
        progress=progress,
        stall_s=run.params.stall_timeout_s,
        fix="run the notebook again: finished rows are kept",
    )


# ---- verification


def verify(
    folder: Path, indices: Iterable[int], tokens: Any, layers: Sequence[int], hidden_size: int, storage: str = "native"
) -> tuple[dict[int, str], dict[str, Any]]:
    """Read the files of the rows `indices` back; compare them with the rows, and with the `storage` that the trainer is told of.

    Returns:
        What is wrong, by row, and the statistics of what is right: per layer mean, standard deviation, mean L2 norm of a
        position and largest magnitude.
    """
    import torch

    wrong: dict[int, str] = {}
    sums = torch.zeros(len(layers), 4, dtype=torch.float64)
    largest = torch.zeros(len(layers))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a row is too small to share: two threads take longer, ten times so beside a busy neighbour
    try:
        for index in indices:
            path = state_file(folder, index)
            states, reason = load_states(path, tokens[index]["input_ids"], len(layers), hidden_size)
            if states is not None and (found := state_files.storage_of(path)) != storage:
                states, reason = None, f"stored as {found}, wanted {storage}"
            if states is None:
                wrong[index] = reason
                continue
            squares = states.float().pow(2).sum(2)  # [T, n_layers]
            sums[:, 0] += states.float().sum((0, 2))
            sums[:, 1] += squares.sum(0)
            sums[:, 2] += squares.sqrt().sum(0)
            sums[:, 3] += states.shape[0]
            largest = torch.maximum(largest, states.abs().amax((0, 2)).float())
    finally:
        torch.set_num_threads(threads)
    positions = sums[:, 3].clamp(min=1)
    mean = sums[:, 0] / positions / hidden_size
    deviation = (sums[:, 1] / positions / hidden_size - mean**2).clamp(min=0).sqrt()
    described = [
        {
            "id": layer,
            "slot": slot,
            "mean": float(mean[slot]),
            "std": float(deviation[slot]),
            "norm_mean": float(sums[slot, 2] / positions[slot]),
            "abs_max": float(largest[slot]),
        }
        for slot, layer in enumerate(layers)
    ]
    return wrong, {"layers": described, "positions": int(positions[0])}


def load_states(path: Path, token_ids: torch.Tensor, n_layers: int, hidden_size: int) -> tuple[torch.Tensor | None, str]:
    """Hidden states `[T, n_layers, hidden]` of one row, or None and what is wrong with the file."""
    import torch

    if not path.exists():
        return None, "missing"
    try:
        found = state_files.read(path)
    except Exception as error:  # safetensors raises its own kinds
        return None, f"unreadable: {error}"
    if set(found) != {"hidden_states", "token_ids"}:
        return None, f"holds {sorted(found)}"
    if not torch.equal(found["token_ids"], token_ids):
        return None, "token ids are not those of the row"
    states = found["hidden_states"]
    if tuple(states.shape) != (len(token_ids), n_layers, hidden_size):
        return None, f"shape {tuple(states.shape)}, wanted {(len(token_ids), n_layers, hidden_size)}"
    if not bool(torch.isfinite(states).all()):
        return None, "not finite"
    return states, ""


def _digests(folder: Path, indices: Iterable[int]) -> dict[str, list[Any]]:
    paths = [state_file(folder, index) for index in indices]
    with ThreadPoolExecutor(4) as pool:  # hashing releases the interpreter lock
        digests = list(pool.map(file_digest, paths))
    return {path.name: [path.stat().st_size, digest] for path, digest in zip(paths, digests, strict=True)}


def _files_digest(files: Mapping[str, Sequence[Any]]) -> str:
    # States of a second extraction differ in the last bits (another batch, another order of sums), so what a later step builds
    # on is the tokens and layers, which are inputs already, and that no file is missing.
    return json.dumps([len(files), sum(size for size, _ in files.values())])


def damaged_files(folder: Path) -> list[Path]:
    """Files that are gone, or whose bytes are no longer those that were verified.

    Raises:
        KitError: the list names a file outside the folder: what is damaged is deleted.
    """
    known = read_json(folder / "files.json", MADE_BY)
    if outside := [name for name in known if name != Path(name).name or name == ".."]:
        raise KitError(
            f"{folder / 'files.json'} names a file that is not in its folder",
            seen=outside[0],
            fix=f"delete {folder} and run notebook {MADE_BY} again",
        )
    bad = []
    with ThreadPoolExecutor(4) as pool:
        for name, (size, digest), now in zip(
            known, known.values(), pool.map(lambda n: _size_and_digest(folder / n), known), strict=True
        ):
            if now != (size, digest):
                bad.append(folder / name)
    return bad


def _size_and_digest(path: Path) -> tuple[int, str]:
    with contextlib.suppress(OSError):
        return path.stat().st_size, file_digest(path)
    return -1, ""


def require_intact(run: Run) -> None:
    """Check every hidden-state file before hours are spent on training from it.

    Raises:
        KitError: a file is damaged or gone.
    """
    if bad := damaged_files(run.path("hidden_states")):
        raise KitError(
            f"{len(bad)} hidden-state file(s) are damaged or gone, the first is {bad[0].name}",
            fix=f"run notebook {MADE_BY} again: it extracts just those anew",
        )


def statistics(run: Run) -> dict[str, Any]:
    """Per-layer statistics of the extracted states, as `verify` counted them."""
    found: dict[str, Any] = read_json(run.path("hidden_states", "statistics.json"), MADE_BY)
    return found


# ---- golden check


def golden(
    run: Run,
    server: Server | TransformersEngine,
    model: str | Path,
    layers: Sequence[int],
    eps: float,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Compare `log_softmax(lm_head(norm(h)))` of the extracted states with the serving engine's own prompt log-probabilities.

    The last slot must agree; the other slots are scored the same way to show how far off a wrong layer is. With transformers as
    the engine the log-probabilities come from the model that made the states: that checks layer, norm, order and files, and not
    whether vLLM computes the same.

    Returns:
        `{"top1", "mae", "positions", "slots": [{"id", "top1", "mae"}]}`: share of positions with the same most likely token,
        and mean absolute difference of the log-probability of the token that follows, in nats.

    Raises:
        KitError: below `golden_min_top1` or above `golden_max_mae`; the message says whether another slot fits better.
    """
    step = run.step("golden", {"hidden_states": run.digest("hidden_states", MADE_BY), "samples": run.params.golden_samples})
    reopen_for_new(run, step)
    if not step.done:
        with step:
            server.ensure()
            result = score(run, server, model, layers, eps)
            write_json(step.folder / "golden.json", result)
            shutil.rmtree(run.path(CAPTURE), ignore_errors=True)
            step.outputs = {"positions": result["positions"], "files": file_digest(run.path("hidden_states", "files.json"))}
            run.record_all(
                {"extraction.golden_top1": (result["top1"], "share"), "extraction.golden_mae": (result["mae"], "nats")},
                f"{result['positions']} positions of {result['sequences']} sequences against the log-probabilities of "
                + ("the transformers model that made them" if isinstance(server, TransformersEngine) else "the server"),
            )
            judge(result, run.params.golden_min_top1, run.params.golden_max_mae)  # a failed check is not finished
    result = read_json(step.folder / "golden.json", MADE_BY)
    judge(result, run.params.golden_min_top1, run.params.golden_max_mae)
    top1 = f"{100 * result['top1']:.1f} % of {result['positions']:,} positions"
    say(f"golden check: top-1 {top1}, mean error {result['mae']:.1e} nats")
    return dict(result)


def reopen_for_new(run: Run, step: Step) -> None:
    """Have a finished check of the states made again where a file was made anew since: `Run.digest` knows only their sizes."""
    if step.done and step.outputs.get("files") != file_digest(run.path("hidden_states", "files.json")):
        step.reopen()


def judge(result: Mapping[str, Any], min_top1: float, max_mae: float) -> None:
    """Raise unless the last slot agrees with the engine well enough.

    Raises:
        KitError: it does not; names the slot that fits best.
    """
    if result["top1"] >= min_top1 and result["mae"] <= max_mae:
        return
    best = min(result["slots"], key=lambda slot: slot["mae"])
    hint = "" if best is result["slots"][-1] else f"; layer id {best['id']} fits better (mean error {best['mae']:.2g})"
    raise KitError(
        "golden check failed: the extracted last-layer states do not give the engine's own distribution",
        seen=f"top-1 {result['top1']:.3f}, mean error {result['mae']:.2g} nats{hint}",
        wanted=f"top-1 at least {min_top1} (golden_min_top1), mean error at most {max_mae} (golden_max_mae)",
        fix=f"check aux_layers and the vLLM version, then {state_files.AGAIN}",
    )


def score(run: Run, server: Server | TransformersEngine, model: str | Path, layers: Sequence[int], eps: float) -> dict[str, Any]:
    """The golden check's figures; see `golden`."""
    rows, _ = load_rows(run)
    tokens = load_tokens(run)
    chosen = golden_rows(run.params, len(rows))
    head, norm = head_and_norm(local_folder(model, run.params.target_revision))
    hits, errors, positions = [0] * len(layers), [0.0] * len(layers), 0
    for index in chosen:
        ids = tokens[index]["input_ids"]
        states, reason = load_states(state_file(run.path("hidden_states"), index), ids, len(layers), head.shape[1])
        if states is None:
            raise KitError(f"hidden states of row {index}: {reason}", fix=f"run notebook {MADE_BY} again")
        served = prompt_logprobs(server, ids.tolist())
        for slot in range(len(layers)):
            top, error = compare(states[:, slot], head, norm, eps, ids, served)
            hits[slot] += top
            errors[slot] += error
        positions += len(ids) - 1
    slots = [{"id": layer, "top1": hits[slot] / positions, "mae": errors[slot] / positions} for slot, layer in enumerate(layers)]
    return {"top1": slots[-1]["top1"], "mae": slots[-1]["mae"], "positions": positions, "sequences": len(chosen), "slots": slots}


def prompt_logprobs(server: Server | TransformersEngine, ids: Sequence[int]) -> list[tuple[int, float]]:
    """For each position but the first: the engine's most likely token before it, and the log-probability of the token there."""
    if isinstance(server, TransformersEngine):
        return server.prompt_logprobs(ids)
    body = {"model": server.model, "prompt": list(ids), "max_tokens": 1, "temperature": 0, "prompt_logprobs": 1}
    entries = server.post("/v1/completions", body)["choices"][0]["prompt_logprobs"]
    found = []
    for position in range(1, len(ids)):
        entry = entries[position]
        best = max(entry, key=lambda token: entry[token]["logprob"])
        found.append((int(best), float(entry[str(ids[position])]["logprob"])))
    return found


def compare(
    states: torch.Tensor,
    head: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    ids: torch.Tensor,
    served: Iterable[tuple[int, float]],
) -> tuple[int, float]:
    """Top-1 hits and summed absolute error of one sequence and one layer.

    Args:
        states: `[T, hidden]`; position t predicts token t + 1.
        head: `[vocab, hidden]`. norm: `[hidden]`, RMSNorm weight with `eps`.
        served: what `prompt_logprobs` returned for `ids [T]`.
    """
    logprobs = predictions(states[:-1], head, norm, eps)
    best = logprobs.argmax(-1).tolist()
    of_next = logprobs.gather(1, ids[1:, None])[:, 0].tolist()
    hits, error = 0, 0.0
    for mine, my_logprob, (theirs, their_logprob) in zip(best, of_next, served, strict=True):
        hits += mine == theirs
        error += min(abs(my_logprob - their_logprob), 1e6) if math.isfinite(their_logprob) else 1e6
    return hits, error


def predictions(states: torch.Tensor, head: torch.Tensor, norm: torch.Tensor, eps: float) -> torch.Tensor:
    """Log-probabilities `[T, vocab]` of the tokens that follow last-layer states `[T, hidden]`: `log_softmax(lm_head(norm(h)))`.

    Args:
        head: `[vocab, hidden]`. norm: `[hidden]`, RMSNorm weight with `eps`.
    """
    import torch

    return (torch.nn.functional.rms_norm(states.float(), norm.shape, norm, eps) @ head.T).log_softmax(-1)


def head_and_norm(folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """The target's output matrix `[vocab, hidden]` and final norm weight `[hidden]`, float32; see `checkpoint.of_target`."""
    theirs = checkpoint.of_target(folder, describe(str(folder))[0], [checkpoint.HEAD, checkpoint.NORM])
    return theirs[checkpoint.HEAD].float(), theirs[checkpoint.NORM].float()
