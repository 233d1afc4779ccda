"""Acceptance, losslessness and speed: the same held-out prompts with no speculation, with n-gram, with the trained drafter.

Every contestant gets the same token ids (the held-out rows up to their answer), greedy, and is asked twice over: all prompts at
once for acceptance and losslessness, and a few prompts of different kinds one after the other, several times, for speed.

    eval/<contestant>.json    its answers (token ids), counters and timings
    eval/acceptance.json, eval/lossless.json, eval/speed.json    what they say
"""

from __future__ import annotations

import random
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Any

from eagle3kit import server as serving
from eagle3kit import simulate, train, verdicts
from eagle3kit.data import MADE_BY as ROWS_MADE_BY
from eagle3kit.data import load_rows, load_tokens
from eagle3kit.errors import KitError
from eagle3kit.rundir import Run, Step, read_json, write_json
from eagle3kit.server import Engine, Server

MADE_BY = "06_evaluate"
CONTESTANTS = ("none", "ngram", "eagle3")

TIE_NATS = {"float32": 1e-3, "bfloat16": 0.13, "auto": 0.13}
"""Two next tokens closer than this, in log-probability, count as tied: sums in another order can swap them. For bfloat16 it is
the spacing of its numbers around 16, a usual size of a logit."""


@dataclass(frozen=True)
class Question:
    """A held-out prompt as token ids: everything up to the answer."""

    id: str
    kind: str
    ids: tuple[int, ...]


def questions(run: Run) -> list[Question]:
    """The held-out rows' prompts, at most `eval_prompts` of them, in an order in which any prefix mixes the kinds."""
    rows, _ = load_rows(run)
    tokens = load_tokens(run)
    found = []
    for index, row in enumerate(rows):
        if row.split == "heldout":
            item = tokens[index]
            start = int(item["loss_mask"].int().argmax())
            found.append(Question(row.id, row.kind, tuple(item["input_ids"][:start].tolist())))
    return found[: run.params.eval_prompts or None]


def spread(kinds: Sequence[str], count: int) -> list[int]:
    """Places of `count` prompts in a list: evenly over it, and of kinds that were not chosen before where there are such.

    The first prompts of a list need not be like the others, and speed goes with what is accepted.

    Args:
        kinds: of all prompts, in their order.
        count: how many to choose; all where there are fewer.
    """
    every, count = len(kinds), min(count, len(kinds))
    chosen: list[int] = []
    for i in range(count):
        start = (2 * i + 1) * every // (2 * count)
        free = [place % every for place in range(start, start + every) if place % every not in chosen]
        had = {kinds[place] for place in chosen}
        chosen.append(next((place for place in free if kinds[place] not in had), free[0]))
    return chosen


def speed_questions(run: Run, asked: Sequence[Question]) -> list[Question]:
    """Those that speed is measured with."""
    return [asked[place] for place in spread([question.kind for question in asked], run.params.eval_speed_prompts)]


def engines(run: Run) -> dict[str, Engine]:
    """How each contestant serves the target."""
    p = run.params
    return {
        "none": serving.plain(),
        "ngram": serving.ngram(p.eval_ngram_k),
        "eagle3": serving.eagle3(train.drafter_folder(run), p.eval_k),
    }


# ---- measuring


def measure(run: Run, model: Path | str, device: str, say: Callable[[str], None] = print) -> dict[str, dict[str, Any]]:
    """Serve every contestant and ask it everything; one resumable step `eval/<name>` for each.

    With `eval_side_by_side` the servers run at the same time and take turns: repeat 1 of each, repeat 2
    of each, so that a machine that gets slower or faster meanwhile does so for all of them. A target that fills the machine's
    memory is served by one contestant after the other.

    Returns:
        By contestant: `{"answers": {id: token ids}, "accepted": {id: counts}, "counters": counters, "tokens_per_s": [...],
        "differences": {...}, "ready_s": s, "paired": whether repeats were taken in turns}`.

    Raises:
        KitError: a server failed. Contestants of an earlier call are kept; of those served side by side, none.
    """
    asked = questions(run)
    few = speed_questions(run, asked)
    steps = {name: run.step(f"eval/{name}", _inputs(run, name, few)) for name in CONTESTANTS}
    missing = [name for name in CONTESTANTS if not steps[name].done]
    for group in [missing] if run.params.eval_side_by_side else [[name] for name in missing]:
        with ExitStack() as stack:
            for name in group:
                stack.enter_context(steps[name])
            servers = {name: Server(run, model, engines(run)[name], device, say) for name in group}
            for server in servers.values():
                stack.callback(server.stop)
                server.begin()
            for server in servers.values():
                server.wait_ready()
            _measure_group(run, servers, steps, asked, few, say)
    return {name: read_json(step.folder / "result.json", MADE_BY) for name, step in steps.items()}


def _inputs(run: Run, name: str, few: Sequence[Question]) -> dict[str, Any]:
    p = run.params
    return {
        "checkpoints": run.digest("checkpoints", train.MADE_BY) if name == "eagle3" else "",
        "data": run.digest("data", ROWS_MADE_BY),
        **p.subset(("target_dtype", "eval_prompts", "eval_max_tokens", "eval_concurrency", "eval_repeats")),
        "eval_speed_concurrency": p.eval_speed_concurrency,
        "speed_prompts": [question.id for question in few],
        "k": {"none": 0, "ngram": p.eval_ngram_k, "eagle3": p.eval_k}[name],
    }


def _measure_group(
    run: Run,
    servers: Mapping[str, Server],
    steps: Mapping[str, Step],
    asked: Sequence[Question],
    few: Sequence[Question],
    say: Callable[[str], None],
) -> None:
    p = run.params
    results: dict[str, dict[str, Any]] = {}
    for name, server in servers.items():
        results[name] = _answers(run, server, asked, say)
        if name != "none":
            base = results.get("none") or read_json(run.path("eval", "none", "result.json"), MADE_BY)
            differences = first_differences(server, asked, base["answers"], results[name]["answers"], p.eval_max_tokens)
            results[name]["differences"] = differences
    for repeat in range(p.eval_repeats):
        for name, server in servers.items():
            began = time.monotonic()
            answers = ask(server, few, p.eval_max_tokens, p.eval_speed_concurrency)
            tokens = sum(len(answer.tokens) for answer in answers.values())
            results[name]["tokens_per_s"].append(round(tokens / (time.monotonic() - began), 3))
            say(f"repeat {repeat + 1} of {p.eval_repeats}, '{name}': {results[name]['tokens_per_s'][-1]:.1f} tokens/s")
    for name, result in results.items():
        write_json(steps[name].folder / "result.json", result | {"paired": len(servers) == len(CONTESTANTS)})
        steps[name].outputs = {"prompts": len(asked)}


def _answers(run: Run, server: Server, asked: Sequence[Question], say: Callable[[str], None]) -> dict[str, Any]:
    p = run.params
    ask(server, asked[: p.eval_speed_concurrency], 8, p.eval_speed_concurrency)  # warm-up: first requests build caches
    began, before = time.monotonic(), spec_counters(server.metrics())
    answers = ask(server, asked, p.eval_max_tokens, p.eval_concurrency)
    seconds, after = time.monotonic() - began, spec_counters(server.metrics())
    tokens = sum(len(answer.tokens) for answer in answers.values())
    say(f"'{server.engine.name}': {tokens} tokens for {len(asked)} prompts in {seconds:.0f} s")
    return {
        "answers": {name: answer.tokens for name, answer in answers.items()},
        "accepted": {name: answer.accepted for name, answer in answers.items()},
        "counters": {key: after[key] - before.get(key, 0.0) for key in after},
        "tokens_per_s": [],
        "differences": {},
        "ready_s": round(server.seconds_to_ready, 1),
    }


@dataclass(frozen=True)
class Answer:
    """What the server wrote: token ids, and how many tokens of each draft it accepted, in order (none without speculation)."""

    tokens: list[int]
    accepted: list[int]


def ask(
    server: Server, asked: Sequence[Question], max_tokens: int, concurrency: int, extra: Mapping[str, Any] | None = None
) -> dict[str, Answer]:
    """Answers by question id, `concurrency` requests at a time; greedy unless `extra` fields of the request say otherwise."""

    def one(question: Question) -> Answer:
        body = {
            "model": server.model,
            "prompt": list(question.ids),
            "max_tokens": max_tokens,
            "temperature": 0,
            "return_token_ids": True,
            **(extra or {}),
        }
        reply = server.post("/v1/completions", body)
        choice = reply["choices"][0]
        if not choice.get("token_ids"):
            raise KitError(
                "the server returned no token ids", seen=str(choice)[:200], fix="check the vLLM version with 00_preflight"
            )
        drafted = (reply.get("metrics") or {}).get("speculative_decoding") or {}
        return Answer(list(choice["token_ids"]), list(drafted.get("per_step_accepted") or []))

    pool = ThreadPoolExecutor(concurrency)
    try:
        return dict(zip([question.id for question in asked], pool.map(one, asked), strict=True))
    finally:
        pool.shutdown(cancel_futures=True)  # an interrupt does not wait for questions that were not asked yet


_COUNTER = re.compile(r"^vllm:spec_decode_num_(\w+?)_total\{(.*)\} ([0-9.e+]+)$")


def spec_counters(metrics: str) -> dict[str, float]:
    """The engine's speculation counters: `drafts`, `draft_tokens`, `accepted_tokens`, `accepted_1`, `accepted_2`, ..."""
    found: dict[str, float] = {}
    for line in metrics.splitlines():
        if match := _COUNTER.match(line):
            name, labels, value = match.groups()
            position = re.search(r'position="(\d+)"', labels)
            key = f"accepted_{int(position.group(1)) + 1}" if position else name
            found[key] = found.get(key, 0.0) + float(value)
    return found


def first_differences(
    server: Server,
    asked: Sequence[Question],
    baseline: Mapping[str, Sequence[int]],
    answers: Mapping[str, Sequence[int]],
    max_tokens: int,
) -> dict[str, dict[str, Any]]:
    """Where answers leave the baseline, with the target's log-probability of both tokens there.

    An answer that is shorter than the baseline's, or longer, differs at its end.
    """
    found: dict[str, dict[str, Any]] = {}
    for question in asked:
        expected, got = list(baseline[question.id])[:max_tokens], list(answers[question.id])[:max_tokens]
        if expected == got:
            continue
        pairs = zip(expected, got, strict=False)
        position = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(expected), len(got)))
        entry: dict[str, Any] = {"prompt_id": question.id, "position": position}
        for name, tokens in (("expected", expected), ("got", got)):
            entry[name] = tokens[position] if position < len(tokens) else None
            entry[f"logprob_{name}"] = None
        if entry["expected"] is not None and entry["got"] is not None:
            context = [*question.ids, *got[:position]]
            for name in ("expected", "got"):
                entry[f"logprob_{name}"] = logprob_of(server, context, entry[name])
        found[question.id] = entry
    return found


def logprob_of(server: Server, context: Sequence[int], token: int) -> float:
    """The target's log-probability, in nats, of `token` after `context`: a forward pass without speculation."""
    body = {"model": server.model, "prompt": [*context, token], "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}
    entry = server.post("/v1/completions", body)["choices"][0]["prompt_logprobs"][-1]
    return float(entry[str(token)]["logprob"])


# ---- what the figures say


def acceptance(
    counters: Mapping[str, float], accepted: Mapping[str, Sequence[int]], kinds: Mapping[str, str], k: int
) -> dict[str, Any]:
    """Acceptance length and per-position acceptance from the engine's counters, by kind of prompt and with an interval.

    AL, in tokens per target forward, is `1 + accepted / drafts`; the positions' acceptance is as in `positions`.

    Args:
        counters: the whole server's, over all prompts (see `spec_counters`).
        accepted: by prompt id, how many tokens of each draft were accepted.
        kinds: by prompt id, its kind.
        k: tokens drafted at each step.

    Raises:
        KitError: the engine drafted nothing.
    """
    drafts = counters.get("drafts", 0.0)
    if drafts <= 0:
        raise KitError("the engine counted no draft", fix="read the server's log: speculation was not on")
    drafting = {name: counts for name, counts in accepted.items() if counts}
    of_kind = {kind: [drafting[name] for name in drafting if kinds[name] == kind] for kind in sorted(set(kinds.values()))}
    low, high = interval(list(drafting.values()))
    return {
        "k": k,
        "al": 1 + counters["accepted_tokens"] / drafts,
        "al_low": low,
        "al_high": high,
        "drafts": drafts,
        "prompts": len(drafting),
        **positions([counters.get(f"accepted_{i}", 0.0) for i in range(1, k + 1)], drafts),
        "by_kind": {kind: {"al": length(found), "prompts": len(found)} for kind, found in of_kind.items() if found},
    }


def positions(reached: Sequence[float], drafts: float) -> dict[str, list[float]]:
    """Acceptance by position: n_i / n_0 unconditional, n_i / n_(i-1) conditional. AL is 1 plus the sum of the unconditional.

    Args:
        reached: n_i, how many drafts had their first i tokens all accepted, for i = 1, 2, ...
        drafts: n_0, how many there were.
    """
    before = [drafts, *reached]
    return {
        "unconditional": [count / drafts for count in reached],
        "conditional": [count / of if of else 0.0 for count, of in zip(reached, before, strict=False)],
    }


def length(answers: Sequence[Sequence[int]]) -> float:
    """Acceptance length in tokens per target forward: one, and the mean number of accepted tokens of a draft."""
    return 1 + sum(map(sum, answers)) / sum(map(len, answers))


def interval(answers: Sequence[Sequence[int]]) -> tuple[float | None, float | None]:
    """95 % interval of the acceptance length (see `_bootstrap`)."""
    low, high = _bootstrap([(sum(counts), len(counts)) for counts in answers])
    return (None, None) if low is None or high is None else (1 + low, 1 + high)


def first_interval(answers: Sequence[Sequence[int]]) -> tuple[float | None, float | None]:
    """95 % interval of the first position's acceptance (see `_bootstrap`)."""
    return _bootstrap([(sum(count > 0 for count in counts), len(counts)) for counts in answers])


def _bootstrap(sums: Sequence[tuple[int, int]], draws: int = 2000) -> tuple[float | None, float | None]:
    """95 % interval of a mean over drafts. Prompts are drawn, not drafts: those of one answer hang together.

    Args:
        sums: of each prompt, its total and its drafts.
        draws: how often as many prompts are drawn with replacement.
    """
    if len(sums) < 2:
        return None, None
    chance = random.Random(0)  # noqa: S311 - a reproducible interval, not a secret
    found = []
    for _ in range(draws):
        drawn = chance.choices(sums, k=len(sums))
        found.append(sum(n for n, _ in drawn) / sum(n for _, n in drawn))
    found.sort()
    return found[round(0.025 * (draws - 1))], found[round(0.975 * (draws - 1))]


def losslessness(results: Mapping[str, Mapping[str, Any]], tie_nats: float) -> dict[str, Any]:
    """How many answers with speculation equal those without, ties told apart from true differences."""
    compared = 0
    ties: list[dict[str, Any]] = []
    differences: list[dict[str, Any]] = []
    for name, result in results.items():
        if name == "none":
            continue
        compared += len(result["answers"])
        for entry in result["differences"].values():
            gap = _gap(entry)
            (ties if gap is not None and gap <= tie_nats else differences).append({"contestant": name, "gap": gap, **entry})
    same = compared - len(ties) - len(differences)
    return {
        "share": (same + len(ties)) / compared if compared else 0.0,
        "identical": same,
        "compared": compared,
        "tie_nats": tie_nats,
        "ties": ties,
        "differences": differences,
    }


def _gap(entry: Mapping[str, Any]) -> float | None:
    if entry["logprob_expected"] is None or entry["logprob_got"] is None:
        return None
    return abs(float(entry["logprob_expected"]) - float(entry["logprob_got"]))


def speed(results: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Tokens per second of each contestant and its speed-up over the baseline (see `verdicts.speedups`).

    Repeats count as taken in turns where all contestants were measured in one go; one that was measured anew alone was not.
    """
    rates = {name: list(result["tokens_per_s"]) for name, result in results.items()}
    in_turn = all(result.get("paired") for result in results.values())
    contestants = {name: {"tokens_per_s": found} for name, found in rates.items()}
    return {"contestants": contestants, "ratios": verdicts.speedups(rates, in_turn), "in_turn": in_turn}


def at_heldout(ratio: float, al: float | None, heldout: float | None) -> dict[str, float | None]:
    """What a speed-up would be at another acceptance length: a step takes as long, whatever is accepted of it.

    Reckoned, and of decoding: that prompts take as long as before is left out.

    Args:
        ratio: the measured speed-up.
        al: acceptance length of the prompts it was measured with.
        heldout: that of the held-out prompts.
    """
    return {"al": al, "heldout_al": heldout, "at_heldout": ratio * heldout / al if al and heldout else None}


def in_turn_text(in_turn: bool) -> str:
    """What an interval of a speed-up holds, in words."""
    if in_turn:
        return "contestants in turn, each repeat against that of no speculation in the same round"
    return "one contestant after the other: how the machine changed in between is in no interval"


def conclude(run: Run, results: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Turn the contestants' results into `acceptance`, `lossless` and `speed`, save them and record the facts.

    Raises:
        KitError: an answer with speculation differs from the one without by more than a tie.
    """
    p = run.params
    asked = questions(run)
    few, mine = speed_questions(run, asked), results["eagle3"]
    accepted = acceptance(mine["counters"], mine["accepted"], {question.id: question.kind for question in asked}, p.eval_k)
    distinct = verdicts.unique_bigrams(list(mine["answers"].values()))
    profile = verdicts.read_profile(accepted["conditional"], accepted["drafts"], distinct)
    fast = speed(results) | {"prompts": len(few), "concurrency": p.eval_speed_concurrency}
    drafting = [mine["accepted"][question.id] for question in few if mine["accepted"][question.id]]
    ratio = fast["ratios"]["eagle3"]
    ratio |= at_heldout(ratio["ratio"], length(drafting) if drafting else None, accepted["al"])
    said = {
        "acceptance": accepted | {"profile": profile._asdict()},
        "lossless": losslessness(results, TIE_NATS[p.target_dtype]),
        "speed": fast,
    }
    for name, value in said.items():
        write_json(run.path("eval", f"{name}.json"), value)
    _record(run, said, results)
    if said["lossless"]["differences"]:
        first = said["lossless"]["differences"][0]
        raise KitError(
            "speculation changed an answer at temperature 0",
            seen=f"{first['contestant']}, prompt {first['prompt_id']}, token {first['position']}: gap {first['gap']} nats",
            wanted=f"the same tokens, or a tie within {said['lossless']['tie_nats']} nats",
            fix="look at eval/lossless.json; a wrong drafter cannot do this, a wrong vLLM build can",
        )
    return said


def _record(run: Run, said: Mapping[str, Mapping[str, Any]], results: Mapping[str, Mapping[str, Any]]) -> None:
    accepted, lossless, fast = said["acceptance"], said["lossless"], said["speed"]
    source = f"engine counters, k = {accepted['k']}, temperature 0, {accepted['prompts']} held-out rows"
    facts: dict[str, tuple[Any, str]] = {
        f"acceptance.{name.replace('_', '.')}": (round(accepted[name], 4), "tokens/forward")
        for name in ("al", "al_low", "al_high")
        if accepted[name] is not None
    }
    for name in ("unconditional", "conditional"):
        label = "position" if name == "unconditional" else name
        facts |= {f"acceptance.{label}_{i + 1}": (round(rate, 6), "share") for i, rate in enumerate(accepted[name])}
    facts |= {f"acceptance.kind.{kind}": (round(v["al"], 4), "tokens/forward") for kind, v in accepted["by_kind"].items()}
    ngram = results["ngram"]["counters"]  # text that repeats nothing gives it nothing to draft
    ngram_al = 1 + ngram["accepted_tokens"] / ngram["drafts"] if ngram.get("drafts") else 1.0
    facts["acceptance.ngram_al"] = (round(ngram_al, 4), "tokens/draft")
    facts["acceptance.profile"] = (accepted["profile"]["name"], "pattern of the positions' acceptance")
    run.record_all(facts, source)
    run.record_all(
        {"lossless.share": (lossless["share"], "share"), "lossless.ties": (len(lossless["ties"]), "answers")},
        f"{lossless['compared']} answers of ngram and eagle3 against no speculation, token by token",
    )
    timing: dict[str, tuple[Any, str]] = {}
    for name, value in fast["contestants"].items():
        rates = value["tokens_per_s"]
        for suffix, number in (("", statistics.median(rates)), (".low", min(rates)), (".high", max(rates))):
            timing[f"speed.{name}.tokens_per_s{suffix}"] = (round(number, 2), "tokens/s")
    for name, ratio in fast["ratios"].items():
        timing |= ratio_facts(f"speed.{name}", ratio)
    repeats = len(fast["contestants"]["none"]["tokens_per_s"])
    run.record_all(timing, f"{repeats} repeats, concurrency {fast['concurrency']}, {in_turn_text(fast['in_turn'])}")
    run.record_all({f"time.server_{n}_ready_s": (r["ready_s"], "s") for n, r in results.items()}, "server start-up")


def ratio_facts(name: str, ratio: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
    """The facts of a speed-up; what is unknown is recorded as None, for an earlier value not to stay."""
    facts = {f"{name}.ratio": (ratio["ratio"], "x"), f"{name}.ratio.low": (ratio["low"], "x")}
    facts[f"{name}.ratio.high"] = (ratio["high"], "x")
    if "al" in ratio:
        facts[f"{name}.al"] = (ratio["al"], "tokens/forward, of the prompts that speed was measured with")
        facts[f"{name}.heldout_al"] = (ratio["heldout_al"], "tokens/forward, of the held-out prompts")
        facts[f"{name}.ratio.at_heldout"] = (ratio["at_heldout"], "x, reckoned for the acceptance length of held-out prompts")
    return {key: (value if value is None else round(value, 3), unit) for key, (value, unit) in facts.items()}


# ---- for the notebook


def simulated(run: Run) -> dict[str, list[int]]:
    """What serving should accept, by held-out row (see `simulate`); the resumable step `eval/simulated`.

    Raises:
        KitError: serving accepts far less than that: trainer and server do not run the same drafter.
    """
    k = run.params.eval_k
    step = run.step("eval/simulated", {"checkpoints": run.digest("checkpoints", train.MADE_BY), "k": k})
    if not step.done:
        with step:
            accepted = simulate.heldout(run, train.drafter_folder(run), [k])[k]
            write_json(step.folder / "result.json", accepted)
            step.outputs = {"rows": len(accepted)}
    found: dict[str, list[int]] = read_json(step.folder / "result.json", MADE_BY)
    if not any(found.values()):
        raise KitError(
            "the held-out answers are too short to simulate a draft",
            wanted=f"over {k} tokens",
            fix="raise data_max_response_tokens",
        )
    promised = length(list(found.values()))
    run.record("acceptance.simulated_al", round(promised, 4), "tokens/forward", "chain drafts over captured states, no server")
    require_served(read_json(run.path("eval", "eagle3", "result.json"), MADE_BY)["accepted"], found)
    return found


def require_served(served: Mapping[str, Sequence[int]], simulated: Mapping[str, Sequence[int]]) -> None:
    """Raise when serving accepts far fewer tokens than the drafter gets right offline, over the drafts that both have.

    Raises:
        KitError: it does; with fewer than `LEAST_COUNTED` tokens right offline nothing is said.
    """
    pairs = [pair for name in simulated for pair in zip(served.get(name, ()), simulated[name], strict=False)]
    got, wanted = sum(a for a, _ in pairs), sum(b for _, b in pairs)
    if wanted >= LEAST_COUNTED and got < LEAST_SERVED * wanted:
        raise KitError(
            "serving accepts far less than the drafter gets right offline",
            seen=f"{got} tokens in {len(pairs)} drafts",
            wanted=f"about {wanted}",
            fix="hold aux_layers, d2t and the norms of the served config.json against the trained one's",
        )


LEAST_SERVED, LEAST_COUNTED = 0.7, 10
"""Share of the simulated tokens that serving must accept: ties move it, a real mismatch ends it. Too few tokens say nothing."""
LEAST_SIMULATED = 0.6
"""Share of what training promises that the simulation must reach. Drafts start where the last one failed, in harder places."""


def promised(run: Run) -> list[float]:
    """Unconditional acceptance by position as training saw it, after the epoch that is served: cumulative products.

    Its factors are the trainer's conditional accuracies on the held-out rows; there are as many as training unrolled steps.
    """
    served = int(train.drafter_folder(run).name)
    log = train.read_log(run.path("checkpoints", "log.jsonl"))
    conditional: list[float] = next((row["cond"] for row in log if row["split"] == "val" and row["epoch"] == served), [])
    return list(accumulate(conditional, mul))


def train_against_serve(
    promised: Sequence[float], accepted: Mapping[str, Any], simulated: Mapping[str, Sequence[int]]
) -> list[dict[str, Any]]:
    """Per draft position what training promised, what drafting over captured states gives, and what serving gave; for a table.

    Training scores every supervised position (teacher forcing), in the draft vocabulary; the other two only where a draft starts,
    right after the last accepted token, and in the target's vocabulary. So training agrees roughly, the others closely. An alarm
    is raised where serving reaches less than `LEAST_SERVED` of the simulation, or that less than `LEAST_SIMULATED` of training.

    Args:
        promised: see `promised`.
        accepted: see `acceptance`.
        simulated: by prompt id, one count a draft.
    """
    counts = [count for row in simulated.values() for count in row]
    drafted = [sum(count > i for count in counts) / len(counts) for i in range(len(accepted["unconditional"]))]

    def row(position: str, of_training: float | None, of_simulation: float, got: float) -> dict[str, Any]:
        alarms = ["serving is far below the simulation"] if got < LEAST_SERVED * of_simulation else []
        if of_training is not None and len(counts) * of_training >= LEAST_COUNTED:
            alarms += ["the simulation is far below training"] if of_simulation < LEAST_SIMULATED * of_training else []
        plus = 0 if position.isdigit() else 1
        return {
            "position": position,
            "training, chained": "unknown" if of_training is None else round(plus + of_training, 4),
            "simulated": round(plus + of_simulation, 4),
            "served": round(plus + got, 4),
            "served, conditional": "" if plus else round(accepted["conditional"][int(position) - 1], 4),
            "served less simulated": round(got - of_simulation, 4),
            "simulated less training": "unknown" if of_training is None else round(of_simulation - of_training, 4),
            "alarm": "; ".join(alarms),
        }

    served, steps = accepted["unconditional"], len(promised)
    known: list[float | None] = [*promised, *[None] * len(served)]
    rows = [row(str(i + 1), known[i], drafted[i], rate) for i, rate in enumerate(served)]
    if 0 < steps < len(served):
        rows.append(row(f"AL, up to {steps}", sum(promised), sum(drafted[:steps]), sum(served[:steps])))
    whole = sum(promised[: len(served)]) if steps >= len(served) else None
    return [*rows, row("AL", whole, sum(drafted), accepted["al"] - 1)]


def lossless_rows(lossless: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One row of totals, then one a tie or difference; for a table."""
    total = {"answers": f"{lossless['identical']} of {lossless['compared']} identical", "kind": "", "gap (nats)": ""}
    return [total] + [
        {
            "answers": f"{entry['contestant']}, {entry['prompt_id']}, token {entry['position']}",
            "kind": kind,
            "expected": entry["logprob_expected"],
            "got": entry["logprob_got"],
            "gap (nats)": entry["gap"],
        }
        for kind, entries in (("tie", lossless["ties"]), ("difference", lossless["differences"]))
        for entry in entries
    ]


def speed_rows(fast: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Median and range of each contestant's tokens per second, and its speed-up over no speculation; for a table."""
    rows = []
    for name, value in fast["contestants"].items():
        rates = value["tokens_per_s"]
        ratio = fast["ratios"].get(name)
        rows.append(
            {
                "contestant": name,
                "tokens/s": round(statistics.median(rates), 2),
                "range": f"{min(rates):.2f} to {max(rates):.2f}",
                "speed-up": verdicts.speedup_text(ratio) if ratio else "",
                "verdict": verdicts.outcome(ratio) if ratio else "baseline",
                **heldout_columns(ratio or {}),
            }
        )
    return rows


def heldout_columns(ratio: Mapping[str, Any]) -> dict[str, str]:
    """What a speed-up says of other prompts than those that it was measured with, for a table; empty without a drafter."""

    def shown(key: str, unit: str = "") -> str:
        return "" if ratio.get(key) is None else f"{ratio[key]:.2f}{unit}"

    return {
        "AL of its prompts": shown("al"),
        "AL held-out": shown("heldout_al"),
        "speed-up at AL held-out, reckoned": shown("at_heldout", " x"),
    }


def verdict(fast: Mapping[str, Any]) -> str:
    """One sentence: whether EAGLE-3 is faster here, slower, or inside the noise."""
    ratio = fast["ratios"]["eagle3"]
    return f"EAGLE-3 here: {verdicts.outcome(ratio)}, {verdicts.speedup_text(ratio)}; {in_turn_text(fast['in_turn'])}"
