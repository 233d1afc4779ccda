"""Hidden states captured while the target answers, against a second pass over the finished rows. Quiet machine; not a test.

    python benchmarks/capture.py params/local.yaml [--rows 64]

Both ways run on one server in turns, so that a machine that drifts does so for both. A: answers with their states. B: the
same answers without, then a prefill of every row, which is what speculators' `generate-offline-data` asks for.
"""

import argparse
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from eagle3kit import data, devices, hidden_states, layers, materialize, target
from eagle3kit.params import load_file
from eagle3kit.rundir import Run
from eagle3kit.server import Server


def ask(server: Server, bodies: Sequence[dict[str, Any]], path: str) -> tuple[list[dict[str, Any]], float]:
    """Send all requests, 64 at a time. Returns the replies and the seconds."""
    began = time.monotonic()
    with ThreadPoolExecutor(64) as pool:
        replies = list(pool.map(lambda body: server.post(path, body), bodies))
    return replies, time.monotonic() - began


def main() -> None:
    """Measure both ways three times."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--rows", type=int, default=64)
    options = parser.parse_args()
    params = load_file(options.file, {"run_name": "benchmark_capture"})
    run = Run(params, "benchmark")
    model, _ = materialize.materialize(params)
    shape, _ = target.describe(params.target_model, params.target_revision)
    ids = layers.extraction_ids(layers.default_aux_layers(shape.n_layers), shape.n_layers)
    prompts = data.load_prompts(params)[0][: options.rows]
    chat = [{"model": model, "messages": [{"role": "user", "content": prompt.turns[-1][1]}]} for prompt in prompts]
    limits = {"max_completion_tokens": params.data_max_response_tokens, "temperature": 0, "return_token_ids": True}
    with hidden_states.extraction_server(run, model, ids, devices.device(params)[0]) as server:
        for _ in range(3):
            capture = [body | limits | {"kv_transfer_params": {"include_output_tokens": True}} for body in chat]
            replies, one_pass = ask(server, capture, "/v1/chat/completions")
            replies, answers = ask(server, [body | limits for body in chat], "/v1/chat/completions")
            rows = [reply["prompt_token_ids"] + reply["choices"][0]["token_ids"] for reply in replies]
            _, prefill = ask(server, [{"model": model, "prompt": row, "max_tokens": 1} for row in rows], "/v1/completions")
            print(
                f"captured {one_pass:.1f} s; answers {answers:.1f} s and second pass {prefill:.1f} s; "
                f"ratio {(answers + prefill) / one_pass:.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
