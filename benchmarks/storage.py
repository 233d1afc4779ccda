"""What `extraction_storage: fp8` costs: the states of a finished run written again in one byte a number, and trained on.

    python benchmarks/storage.py params/local.yaml

Nothing is computed anew but the training, with the run's own parameters and seed: ten minutes for `params/local.yaml` on two
cores. Quiet machine; not a test. The second run is RUN_NAME-fp8 beside the first; called again it goes on from there.

Both drafters are held against the native states of the held-out rows, because that is what a drafter reads in service.
"""

import argparse
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eagle3kit import devices, evaluate, hidden_states, hub, materialize, reference, simulate, state_files, target, train
from eagle3kit.data import MADE_BY, load_rows, load_tokens
from eagle3kit.hidden_states import state_file
from eagle3kit.params import FP8_LIMITS, load_file
from eagle3kit.rundir import Run

STAGE = "benchmark"


def rounded_run(native: Run, model: str | Path, layers: Sequence[int], hidden_size: int, device: str) -> Run:
    """A run with the same rows, config and vocabulary, and the states of `native` in fp8, adopted as if a server wrote them."""
    run = Run(native.params.replace(run_name=f"{native.name}-fp8", extraction_storage="fp8", **FP8_LIMITS), STAGE)
    for step in ("config", "data", "vocab"):
        shutil.copytree(native.root / step, run.root / step, dirs_exist_ok=True)
    if not (run.root / "hidden_states" / "manifest.json").exists():
        import torch
        from safetensors.torch import save_file

        captured = hidden_states.capture_folder(run, model, layers)
        captured.mkdir(parents=True, exist_ok=True)
        for index, ids in enumerate(load_tokens(run)["input_ids"]):
            states, reason = hidden_states.load_states(
                state_file(native.path("hidden_states"), index), ids, len(layers), hidden_size
            )
            if states is None:
                raise SystemExit(f"row {index} of run {native.name}: {reason}")
            save_file(state_files.tensors(states, torch.as_tensor(ids), "fp8"), captured / f"{index}.safetensors")
    server = hidden_states.extraction_server(run, model, layers, device)  # not started: every row is there
    hidden_states.extract(run, server, layers, hidden_size, lambda *_: None)
    return run


def agreement(native: Run, run: Run, model: str | Path, layers: Sequence[int], eps: float, count: int) -> dict[str, Any]:
    """The golden check of the states in fp8 against the native ones, over `count` rows spread over the run.

    Returns:
        `{"positions", "top1", "mae", "layers"}`: share of positions with the same most likely token, mean error of the next
        token's log-probability in nats, relative L2 error of each slot.
    """
    import torch

    rows, tokens = load_rows(run)[0], load_tokens(run)
    head, norm = hidden_states.head_and_norm(hub.local_folder(model, run.params.target_revision))
    hits, error, positions, seen, slots = 0, 0.0, 0, 0, torch.zeros(len(layers))
    for index in sorted({round(i * (len(rows) - 1) / max(1, count - 1)) for i in range(count)}):
        ids = tokens[index]["input_ids"]
        exact, eight = (state_files.read(state_file(r.path("hidden_states"), index))["hidden_states"] for r in (native, run))
        logprobs = hidden_states.predictions(exact[:-1, -1], head, norm, eps)
        served = zip(logprobs.argmax(-1).tolist(), logprobs.gather(1, ids[1:, None])[:, 0].tolist(), strict=True)
        row_hits, row_error = hidden_states.compare(eight[:, -1], head, norm, eps, ids, served)
        hits, error, positions = hits + row_hits, error + row_error, positions + len(ids) - 1
        slots += reference.errors(eight, exact.transpose(0, 1)).diagonal() * len(ids)
        seen += len(ids)
    return {"positions": positions, "top1": hits / positions, "mae": error / positions, "layers": (slots / seen).tolist()}


def epochs(run: Run) -> list[str]:
    """Held-out accuracy of each TTT step and the acceptance length that it promises, after each epoch."""
    log = train.read_log(run.path("checkpoints", "log.jsonl"))
    return [
        f"{' '.join(f'{share:.1%}' for share in row['acc'])}, AL {train.simulated_al(row['cond']):.3f}"
        for row in log
        if row["split"] == "val"
    ]


def main() -> None:
    """Write, compare, train, and print both runs side by side."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--rows", type=int, default=64, help="rows of the golden comparison")
    options = parser.parse_args()
    native = Run(load_file(options.file), STAGE)
    made = native.manifest("checkpoints", train.MADE_BY)["inputs"]
    tuned = native.params.subset(train.TUNED)
    if changed := [name for name, value in tuned.items() if made.get(name) != value]:
        raise SystemExit(f"run {native.name} was trained with another {', '.join(changed)}")
    model, _ = materialize.materialize(native.params)
    shape, _ = target.describe(native.params.target_model, native.params.target_revision)
    device, _ = devices.device(native.params)
    layers = native.manifest("hidden_states", MADE_BY)["inputs"]["layers"]

    run = rounded_run(native, model, layers, shape.hidden_size, device)
    golden = agreement(native, run, model, layers, shape.rms_norm_eps, options.rows)
    print(f"{golden['positions']} positions compared; training {run.name}", flush=True)
    train.train(run, model, device, lambda log: print(f"\r{len(log)} steps", end="", flush=True))
    print()

    k = native.params.eval_k
    both = (native, run)
    walks = [list(simulate.heldout(native, train.drafter_folder(r), [k])[k].values()) for r in both]
    limits = [evaluate.interval(walk) for walk in walks]
    exact = [native.fact("extraction.golden_top1"), native.fact("extraction.golden_mae")]
    errors = ", ".join(f"{layer}: {error:.1e}" for layer, error in zip(layers, golden["layers"], strict=True))
    sizes = [r.manifest("hidden_states", MADE_BY)["outputs"]["bytes"] for r in both]
    table = [
        ("", "native", "fp8"),
        ("bytes of hidden states", *(f"{size / 1e6:,.0f} MB" for size in sizes)),
        ("most likely token equal", f"{exact[0]} (to the engine)", f"{golden['top1']:.4f} (to native)"),
        ("mean error, nats", f"{exact[1]:.2g} (to the engine)", f"{golden['mae']:.4f} (to native)"),
        ("relative L2 error by layer", "0", errors),
        *(
            (f"held-out accuracy, own states, epoch {number}", *pair)
            for number, pair in enumerate(zip(*map(epochs, both), strict=True), start=1)
        ),
        ("epoch served", *(str(int(train.drafter_folder(r).name) + 1) for r in both)),
        (
            f"simulated AL, native held-out states, k = {k}",
            *(f"{evaluate.length(walk):.4f} ({low:.3f} to {high:.3f})" for walk, (low, high) in zip(walks, limits, strict=True)),
        ),
    ]
    for what, one, other in table:
        print(f"{what:46} {one:34} {other}")
    print(f"fp8 costs {evaluate.length(walks[0]) - evaluate.length(walks[1]):+.4f} tokens a forward (one training of each)")


if __name__ == "__main__":
    main()
