"""Further checks of the extracted states, beyond the last layer of a few rows: every slot, every row, and no prefix cache.

cross_check/layers.json     each slot of a few rows against every layer of the same weights run by transformers
cross_check/answers.json    the last layer of every row against the answer that the target wrote
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3kit import hidden_states, reference, state_files
from eagle3kit.data import MADE_BY, load_origin, load_rows, load_tokens
from eagle3kit.errors import KitError
from eagle3kit.hidden_states import CAPTURE, head_and_norm, kept_rows, load_states, reopen_for_new, state_file
from eagle3kit.hub import local_folder
from eagle3kit.rundir import Run, file_digest, read_json, write_json
from eagle3kit.server import Server

if TYPE_CHECKING:
    import torch


def require_uncached(server: Server, spoiled: Sequence[str] = ("hidden_states", CAPTURE)) -> None:
    """Refuse to extract from a server with a prefix cache: a position found there is not computed, so nothing records its state.

    `serve_extra_args` come after the engine's own arguments and win; a running server's counters have the last word. They are
    gone with the server, so what was made with it is deleted: the next run would take it for good.

    Args:
        server: the server that extracts. spoiled: folders of the run that hold what was made with its states.

    Raises:
        KitError: prefix caching is on, or positions came out of it.
    """
    engine, extra = server.engine, server.run.params.serve_extra_args
    if engine.name != "extraction":
        return
    metrics = server.metrics() if server.running else ""
    last = [word for word in (*engine.arguments, *extra) if re.fullmatch(r"--(no-)?enable[-_]prefix[-_]caching", word)][-1:]
    hits = sum(float(number) for number in re.findall(r"^vllm:prefix_cache_hits_total(?:\{.*\})? (\S+)$", metrics, re.MULTILINE))
    for name in spoiled if hits else ():
        shutil.rmtree(server.run.root / name, ignore_errors=True)
    if hits or last != ["--no-enable-prefix-caching"]:
        raise KitError(
            "hidden states would be extracted with prefix caching on: states of cached positions are not computed",
            seen=f"{hits:.0f} positions from the cache; {' and '.join(spoiled)} of the run deleted"
            if hits
            else " ".join(last) or "neither on nor off, and on is vLLM's default",
            wanted="--no-enable-prefix-caching",
            fix="take it out of serve_extra_args and run the notebook again",
        )


def cross_check(
    run: Run, model: str | Path, layers: Sequence[int], eps: float, say: Callable[[str], None] = print
) -> dict[str, Any]:
    """Every slot of a few rows against transformers, and the last layer of every row against its own answer.

    Args:
        model: the target. layers: vLLM ids of the slots. eps: of the target's final norm.

    Returns:
        `{"layers": see reference.score, "answers": see answers}`; either is `{"reason": ...}` where it could not be made.

    Raises:
        KitError: a slot holds another layer, or rows hold states that are not theirs.
    """
    p = run.params
    step = run.step("cross_check", {"hidden_states": run.digest("hidden_states", MADE_BY), "samples": p.golden_samples})
    reopen_for_new(run, step)
    if not step.done:
        with step:
            folder = local_folder(model, p.target_revision)
            head, norm = head_and_norm(folder)
            write_json(step.folder / "layers.json", against_transformers(run, folder, layers, head, norm, eps))
            write_json(step.folder / "answers.json", answers(run, head, norm, eps))
            judge(run, step.folder)  # a failed check is not finished
            _record(run, step.folder)
            step.outputs = {"files": file_digest(run.path("hidden_states", "files.json"))}
    for name, found in (results := judge(run, step.folder)).items():
        passed = f"passed at {found['positions']:,} positions"
        say(f"cross-check of the {name}: {found.get('reason') or passed}")
    return results


def judge(run: Run, folder: Path) -> dict[str, Any]:
    """The results of both checks, if they pass. Raises as `cross_check` does."""
    results: dict[str, Any] = {name: read_json(folder / f"{name}.json", MADE_BY) for name in ("layers", "answers")}
    if "reason" not in results["layers"]:
        reference.judge(results["layers"], run.params.golden_max_layer_error)
    if "reason" not in results["answers"]:
        require_own_answers(results["answers"])
    return results


def _record(run: Run, folder: Path) -> None:
    layers, own = (read_json(folder / f"{name}.json", MADE_BY) for name in ("layers", "answers"))
    if "reason" not in layers:
        worst = max(row[layer] for layer, row in zip(layers["layers"], layers["errors"], strict=True))
        source = f"{len(layers['layers'])} slots at {layers['positions']} positions against transformers"
        run.record("extraction.layer_error", worst, "relative L2", source)
    if "reason" not in own:
        run.record("extraction.own_answers", own["agree"], "share", f"{own['positions']} positions of {own['rows']} rows")
    elif "agree" in own and not run.params.data_regenerate:
        source = f"tokens that are not the target's most likely ones, at {own['positions']} positions of {own['rows']} rows"
        run.record("data.off_policy_tokens", 1 - own["agree"], "share", source)


def against_transformers(
    run: Run, folder: Path, layers: Sequence[int], head: torch.Tensor, norm: torch.Tensor, eps: float
) -> dict[str, Any]:
    """Hold the slots of the shortest rows against transformers, as far as memory allows: `reference.score`, or `{"reason"}`.

    Args:
        head: `[vocab, hidden]`. norm: `[hidden]`, RMSNorm weight with `eps`.

    Raises:
        KitError: a file is damaged.
    """
    import psutil

    p, available = run.params, psutil.virtual_memory().available
    if (reason := reference.why_not(folder, p.target_dtype, available)) is not None:
        return {"reason": f"not made: {reason}"}
    rows, _ = load_rows(run)
    tokens = load_tokens(run)
    shortest = sorted(kept_rows(p, rows), key=lambda index: rows[index].length)[: min(p.golden_samples, REFERENCE_ROWS)]
    samples = []
    for index in shortest:
        ids = tokens[index]["input_ids"]
        states, wrong = load_states(state_file(run.path("hidden_states"), index), ids, len(layers), head.shape[1])
        if states is None:
            raise KitError(f"hidden states of row {index}: {wrong}", fix=f"run notebook {MADE_BY} again")
        samples.append((ids, states))
    predict = partial(hidden_states.predictions, head=head, norm=norm, eps=eps)
    return reference.score(folder, p.target_dtype, samples, layers, predict, p.trust_remote_code)


REFERENCE_ROWS = 3
"""Rows that transformers runs too, the shortest ones: a layer that is off is off in every row."""


# ---- each row's own answer

GLANCE, LOOK = 4, 32
"""Positions of a row that are looked at, and of a row that then looks suspicious."""
LEAST_AGREEMENT = 0.5
"""A row's own states predict nearly every token of a greedy answer, another row's hardly any."""


def answers(run: Run, head: torch.Tensor, norm: torch.Tensor, eps: float) -> dict[str, Any]:
    """Whether the last-layer states of every row that has a file predict the tokens that the target then wrote.

    The golden check reads a sample of rows. States that got under another row's name anywhere else pass every check of shape and
    number; but the target's greedy answer is the most likely token of its own states, in every row.

    Args:
        head: `[vocab, hidden]`. norm: `[hidden]`, RMSNorm weight with `eps`.

    Returns:
        `{"rows", "positions", "agree": share, "nll": nats a token, "poor": [{"row", "id", "agree"}]}`. With a `reason` nothing is
        judged: sampled answers are not scored; of those that the target did not write, `agree` and `nll` say how far they are
        from what it would write.
    """
    p = run.params
    if p.data_temperature and p.data_regenerate:
        return {"reason": f"not made: answers sampled at temperature {p.data_temperature:g} are not the most likely tokens"}
    rows, _ = load_rows(run)
    counted = score_rows(run, kept_rows(p, rows), GLANCE, head, norm, eps)
    hits, positions, nll = (sum(column) for column in zip(*counted.values(), strict=True))
    found: dict[str, Any] = {"rows": len(counted), "positions": positions, "agree": hits / positions, "nll": nll / positions}
    if not p.data_regenerate:
        return found | {
            "reason": f"not judged: the target did not write these answers; {100 * hits / positions:.1f} % are its own tokens"
        }
    penalty = (load_origin(run).get("sampling") or {}).get("repetition_penalty", 1)
    if penalty != 1:
        of_all = f"{100 * hits / positions:.1f} % of the tokens are the most likely ones"
        return found | {"reason": f"not judged: the target's own repetition_penalty ({penalty:g}) chooses other tokens; {of_all}"}
    suspicious = [index for index, (right, of, _) in counted.items() if right < LEAST_AGREEMENT * of]
    looked = score_rows(run, suspicious, LOOK, head, norm, eps)
    poor = {index: right / of for index, (right, of, _) in looked.items() if right < LEAST_AGREEMENT * of}
    return found | {"poor": [{"row": index, "id": rows[index].id, "agree": share} for index, share in poor.items()]}


def score_rows(
    run: Run, indices: Iterable[int], count: int, head: torch.Tensor, norm: torch.Tensor, eps: float
) -> dict[int, tuple[int, int, float]]:
    """How the target rates the answers of rows: by row, the tokens that are its most likely ones, those looked at, and their
    negative log-likelihood in nats, summed. From the last hidden states: `log_softmax(lm_head(norm(h)))`.

    Args:
        count: supervised tokens of a row to look at, at most. head: `[vocab, hidden]`. norm: `[hidden]`, RMSNorm with `eps`.
    """
    tokens = load_tokens(run)
    found: dict[int, tuple[int, int, float]] = {}
    for index in indices:
        row = tokens[index]
        at = spread([at for at in row["loss_mask"].nonzero()[:, 0].tolist() if at > 0], count)
        states = state_files.read(state_file(run.path("hidden_states"), index), [position - 1 for position in at])[
            "hidden_states"
        ][:, -1]
        logprobs, written = hidden_states.predictions(states, head, norm, eps), row["input_ids"][at]
        nll = -float(logprobs.gather(1, written[:, None]).sum())
        found[index] = int((logprobs.argmax(-1) == written).sum()), len(at), nll
    return found


def spread(positions: Sequence[int], count: int) -> list[int]:
    """At most `count` of the positions, first and last among them, evenly spread."""
    count = min(count, len(positions))
    return [positions[round(i * (len(positions) - 1) / max(1, count - 1))] for i in range(count)]


def require_own_answers(result: Mapping[str, Any]) -> None:
    """Raise where rows hold states that are not theirs.

    Raises:
        KitError: the states of some rows do not predict the answer that the target wrote there.
    """
    poor = result["poor"]
    if poor:
        named = ", ".join(str(row["row"]) for row in poor[:6])
        raise KitError(
            f"the hidden states of {len(poor)} of {result['rows']} rows are not those of their answers",
            seen=f"rows {named}: the target's own tokens are most likely at {100 * poor[0]['agree']:.0f} % of the positions",
            wanted=f"at least {100 * LEAST_AGREEMENT:.0f} % in every row",
            fix=f"were files swapped, or rows made with another target? Then {state_files.AGAIN}",
        )
