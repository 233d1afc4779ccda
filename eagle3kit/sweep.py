"""The evaluation in depth: draft lengths, loads, temperatures, and another drafter or two. On request (`eval_sweep`).

Every measurement is a cell, a resumable step of its own under `eval/sweep/`; an interrupted sweep measures what is missing.

    answers/<contestant>     greedy answers: the same as without speculation? Accepted tokens of each draft
    bench/<contestant>       `vllm bench serve`: acceptance from the engine's counters, for every length of `CURVE`
    sampled/<contestant>     the drafter at the target's own temperature
    first/<contestant>       many samples of the first tokens at temperature 1
    traced/<contestant>      what share of a step drafting takes
    timed/r<repeat>          seconds of decode steps and prompts, for the speed-up model of this machine (see `calibrate`)
    speed/c<load>-r<repeat>  `vllm bench serve`, every contestant in turn; of one contestant without `eval_side_by_side`

Every load is measured with the same few prompts, each as often as the others, so that acceptance is the same at all loads. Copies
of a prompt also decode the same tokens: a mixture of experts reads fewer experts for them than for as many different prompts.

On a CPU one server a drafter gives every draft length (see `scheduler`). On a GPU each length whose speed is measured has one of
its own: there vLLM captures graphs for one length, and would be slower with several.
"""

from __future__ import annotations

import json
import re
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, chain, cycle, islice, product
from pathlib import Path
from typing import Any

from eagle3kit import calibrate, evaluate, plan, simulate, train, verdicts
from eagle3kit import server as serving
from eagle3kit.bench import Bench
from eagle3kit.data import MADE_BY as ROWS_MADE_BY
from eagle3kit.data import Prompt, load_prompts
from eagle3kit.errors import KitError
from eagle3kit.evaluate import MADE_BY, Question
from eagle3kit.hub import local_folder
from eagle3kit.rundir import Json, Run, Step, file_digest, project_path, read_json, value_digest, write_atomic, write_json
from eagle3kit.server import Engine, Server
from eagle3kit.speedup import hardware_presets
from eagle3kit.target import describe

CURVE = tuple(range(1, 9))
"""Draft lengths whose acceptance is asked for."""

FIRST_PROMPTS, FIRST_SAMPLES, FIRST_TOKENS = 4, 48, 4
ANSWERS, SPEED_PROMPTS = 20, 4
"""Prompts whose answers are compared and whose acceptance is counted at each draft length, and those of speed at every load."""
ALPHA = 0.001
"""At temperature 1: a test that finds this probability says that speculation changed the distribution."""


@dataclass(frozen=True)
class Contestant:
    """One way of decoding: its name, the server that does it, and how.

    Attributes:
        config: its `--speculative-config`, empty for no speculation.
        k: tokens a draft, 0 for no speculation.
        extra: what its requests carry beside the prompt.
        drafter: digest of its weights, so that other weights are measured anew.
    """

    name: str
    engine: Engine
    config: str = ""
    k: int = 0
    extra: str = "{}"
    drafter: str = ""

    @property
    def request(self) -> dict[str, Any]:
        """Fields of its requests."""
        found: dict[str, Any] = json.loads(self.extra)
        return found


def contestants(run: Run, device: str) -> list[Contestant]:
    """No speculation, n-gram, and every drafter at every draft length: the trained one, and those of `eval_drafters`.

    Raises:
        KitError: a drafter of `eval_drafters` is not to be had, or two of them have the same name.
    """
    p = run.params
    ngram = serving.ngram_config(p.eval_ngram_k)
    found = [
        Contestant("none", Engine("sweep_none")),
        Contestant("ngram", serving.speculating("sweep_ngram", ngram), json.dumps(ngram), p.eval_ngram_k),
    ]
    folders = {"eagle3": train.drafter_folder(run)}
    for name in p.eval_drafters:
        folders[re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-")[-40:]] = local_folder(name)
    if len(folders) <= len(p.eval_drafters):
        raise KitError("two drafters of eval_drafters have the same name", seen=p.eval_drafters, fix="name each once")
    for name, folder in folders.items():
        weights = value_digest({path.name: file_digest(path) for path in sorted(folder.glob("*.safetensors"))})
        for k in p.eval_sweep_k:
            config = serving.eagle3_config(folder, k)
            if device == "cpu":
                longest = serving.eagle3_config(folder, max(*p.eval_sweep_k, *CURVE))
                engine = serving.speculating(f"sweep_{name}", longest, or_shorter=True, traces=_traces(run))
                extra = json.dumps({"vllm_xargs": {"draft_tokens": k}})
            else:
                engine, extra = serving.speculating(f"sweep_{name}-k{k}", config, traces=_traces(run)), "{}"
            found.append(Contestant(f"{name}-k{k}", engine, _shown(config), k, extra, weights))
    return found


def further_lengths(found: Sequence[Contestant], drafter: Path, device: str) -> list[Contestant]:
    """The trained drafter at the lengths of `CURVE` that are no contestants: only what it accepts is asked of them.

    On a GPU one more server gives them all. It is slower than one of a single length, which changes nothing about acceptance; no
    machine with GPUs has tried it yet.

    Args:
        found: the contestants. drafter: the trained drafter's folder.
    """
    trained = {c.k: c for c in found if c.name == f"eagle3-k{c.k}"}
    like = next(iter(trained.values()))
    if device != "cpu":
        longest = serving.eagle3_config(drafter, max(CURVE))
        like = replace(like, engine=serving.speculating("sweep_eagle3_lengths", longest, or_shorter=True))
    return [
        replace(like, name=f"eagle3-k{k}", k=k, extra=json.dumps({"vllm_xargs": {"draft_tokens": k}}))
        for k in CURVE
        if k not in trained
    ]


def _traces(run: Run) -> Path:
    return run.path("logs", "traces")


def _shown(config: Mapping[str, Any]) -> str:
    """A `--speculative-config` to print: a drafter in this checkout by its path from there."""
    path = Path(config.get("model", ""))
    here = project_path(".")
    return json.dumps({**config, "model": str(path.relative_to(here))} if path.is_relative_to(here) else dict(config))


# ---- cells


@dataclass(frozen=True)
class Cell:
    """One measurement.

    Attributes:
        step: where its result is kept.
        engines: the servers it needs.
        tokens: how many it lets the target write, at most.
        streams: how many requests at a time.
        measure: does it, given the servers, and returns what is kept.
    """

    step: Step
    engines: tuple[Engine, ...]
    tokens: int
    streams: int
    measure: Callable[[Mapping[Engine, Server]], Json]


def work(
    groups: Sequence[Sequence[Cell]], opened: Callable[[Sequence[Engine]], AbstractContextManager[Mapping[Engine, Server]]]
) -> Iterator[Cell]:
    """Measure the cells that are missing, in their order, and yield each when it is kept.

    Args:
        groups: cells that are measured while the same servers run.
        opened: starts servers, and ends them when it is left.
    """
    for group in groups:
        missing = [cell for cell in group if not cell.step.done]
        engines = list(dict.fromkeys(engine for cell in missing for engine in cell.engines))
        with opened(engines) as servers:
            for cell in missing:
                with cell.step:
                    write_json(cell.step.folder / "result.json", cell.measure(servers))
                yield cell


def mingled(*kinds: Sequence[Cell]) -> list[Cell]:
    """Cells of several kinds, each kind spread evenly over the time of all: what a machine does for a minute is then in no one
    kind alone.
    """
    placed = [(i / len(cells), which, i) for which, cells in enumerate(kinds) for i in range(len(cells))]
    return [kinds[which][i] for _, which, i in sorted(placed)]


Asked = tuple[Question, str]
"""A question, and the text that the chat endpoint makes it from."""


def single_questions(asked: Sequence[Question], prompts: Sequence[Prompt]) -> list[Asked]:
    """Of the held-out questions those that are their conversation's only turn, with its text."""
    texts = {f"{prompt.id}_gen0": prompt.turns[0][1] for prompt in prompts if len(prompt.turns) == 1}
    return [(question, texts[question.id]) for question in asked if question.id in texts]


class Sweep:
    """The cells of a run's sweep, and what they ask.

    Args:
        run: the run; its evaluation is finished.
        device: `cpu` or `cuda`.
        bench: measures speed; None to look at the cells only.
    """

    def __init__(self, run: Run, device: str, bench: Bench | None = None) -> None:
        self.run, self.bench = run, bench
        self.contestants = contestants(run, device)
        self.asked = evaluate.questions(run)
        single = single_questions(self.asked, load_prompts(run.params)[0])
        if not single:
            raise KitError("no held-out prompt is a single question", fix="vllm bench sends no other: give some in data_source")
        kinds = [question.kind for question, _ in single]
        self.fast = [single[place] for place in evaluate.spread(kinds, SPEED_PROMPTS)]
        self.answers = [single[place] for place in evaluate.spread([""] * len(single), ANSWERS)]  # enough to be mixed as all are
        apart = {question.id for question, _ in self.fast}  # what speed is measured with is predicted from others
        self.timed = [question for question in self.asked if question.id not in apart] or self.asked
        by_turns = run.params.eval_side_by_side
        self.groups = [self._group(some) for some in ([self.contestants] if by_turns else [[c] for c in self.contestants])]
        self.lengths = further_lengths(self.contestants, train.drafter_folder(run), device)
        lengths = [self._acceptance(c) for c in self.lengths]
        served_already = by_turns and device == "cpu"
        self.groups = [self.groups[0] + lengths] if served_already else [*self.groups, lengths]

    def requests(self, load: int) -> int:
        """How many requests one measurement of speed sends: the few prompts in rounds, until there are as many as in flight."""
        return len(self.fast) * -(-load // len(self.fast))

    @property
    def cells(self) -> list[Cell]:
        """All of them, in order."""
        return [cell for group in self.groups for cell in group]

    def result(self, name: str) -> Json:
        """What the cell `name` measured."""
        return read_json(self.run.path("eval", "sweep", name, "result.json"), MADE_BY)

    def repeats(self, kind: str, label: str = "") -> dict[str, list[Json]]:
        """By contestant, what the cells `<kind>/...<label>r<repeat>` measured, in order."""
        found: dict[str, list[Json]] = {}
        for cell in self.cells:
            if re.search(rf"/{kind}/.*{label}r\d+$", cell.step.name):
                for name, result in self.result(cell.step.name.removeprefix("eval/sweep/")).items():
                    found.setdefault(name, []).append(result)
        return found

    def _cell(
        self,
        name: str,
        some: Sequence[Contestant],
        tokens: int,
        streams: int,
        inputs: Mapping[str, Json],
        measure: Callable[[Contestant, Server], Json],
    ) -> Cell:
        """A cell that measures `some` contestants one after the other; the result is by contestant."""
        p = self.run.params
        conditions = {
            "data": self.run.digest("data", ROWS_MADE_BY),
            "contestants": [[c.name, c.k, c.drafter] for c in some],
            **p.subset(("target_dtype", "eval_prompts")),
            **inputs,
        }
        return Cell(
            self.run.step(f"eval/sweep/{name}", conditions),
            tuple(dict.fromkeys(c.engine for c in some)),
            tokens * len(some),
            streams,
            lambda servers: {c.name: measure(c, servers[c.engine]) for c in some},
        )

    def _group(self, some: Sequence[Contestant]) -> list[Cell]:
        """The cells of contestants whose servers run at the same time."""
        p, count = self.run.params, len(self.answers)
        asked: dict[str, Json] = {
            "prompts": [question.id for question, _ in self.answers],
            "eval_sweep_tokens": p.eval_sweep_tokens,
        }
        cells = []
        for c in some:
            long, short = p.eval_max_tokens, p.eval_sweep_tokens
            wide: dict[str, Json] = {"eval_concurrency": p.eval_concurrency}
            cells.append(self._cell(f"answers/{c.name}", [c], count * short, count, asked | wide, self._answers))
            if c.drafter:
                cells.append(self._acceptance(c))
            if c.name == f"eagle3-k{p.eval_k}":
                inputs = {"eval_max_tokens": long, **wide}
                cells.append(
                    self._cell(f"sampled/{c.name}", [c], len(self.asked) * long, p.eval_concurrency, inputs, self._sampled)
                )
            streams = min(FIRST_SAMPLES * FIRST_PROMPTS, p.serve_max_num_seqs)
            first = FIRST_PROMPTS * FIRST_SAMPLES * FIRST_TOKENS
            cells.append(self._cell(f"first/{c.name}", [c], first, streams, {}, self._first))
            if c.name == f"eagle3-k{p.eval_k}":
                cells.append(self._cell(f"traced/{c.name}", [c], calibrate.TRACED, 1, {}, self._drafting))
        whose = "" if p.eval_side_by_side else f"{some[0].name}-"
        modelled = [c for c in some if c.name in ("none", f"eagle3-k{p.eval_k}")]
        gaps: Json = {"requests": list(calibrate.TOKENS), "prompts": list(calibrate.PROMPTS), "gaps": calibrate.STEPS}
        gaps |= {"speculative": list(calibrate.SPECULATIVE), "asked": [question.id for question in self.timed]}
        same: Json = {
            "eval_sweep_tokens": p.eval_sweep_tokens,
            "prompts": [q.id for q, _ in self.fast],
            "steps": "timed and counted",
        }
        timed, speed = [], []
        for repeat in range(calibrate.REPEATS if modelled else 0):
            tokens = (calibrate.STEPS + 4) * sum((*calibrate.TOKENS, *calibrate.SPECULATIVE)) // 2  # of each contestant
            timed.append(self._cell(f"timed/{whose}r{repeat + 1}", modelled, tokens, 8, gaps, self._steps))
        for repeat, load in product(range(p.eval_repeats), p.eval_sweep_concurrency):
            count = self.requests(load)
            measure = partial(self._speed, asked=self.fast, count=count, tokens=p.eval_sweep_tokens, load=load)
            name = f"speed/{whose}c{load}-r{repeat + 1}"
            speed.append(self._cell(name, some, count * p.eval_sweep_tokens, load, same, measure))
        return cells + mingled(timed, speed)

    def _acceptance(self, c: Contestant) -> Cell:
        p, count = self.run.params, len(self.answers)
        inputs: Json = {"prompts": [q.id for q, _ in self.answers], **p.subset(("eval_sweep_tokens", "eval_concurrency"))}
        measure = partial(self._speed, asked=self.answers, count=count, tokens=p.eval_sweep_tokens, load=p.eval_concurrency)
        return self._cell(f"bench/{c.name}", [c], count * p.eval_sweep_tokens, p.eval_concurrency, inputs, measure)

    # ---- one contestant, one measurement

    def _answers(self, c: Contestant, server: Server) -> Json:
        p, few = self.run.params, [question for question, _ in self.answers]
        answers = evaluate.ask(server, few, p.eval_sweep_tokens, p.eval_concurrency, c.request)
        tokens = {name: answer.tokens for name, answer in answers.items()}
        base = tokens if not c.k else self.result("answers/none")["none"]["answers"]
        differences = evaluate.first_differences(server, few, base, tokens, p.eval_sweep_tokens)
        return {"answers": tokens, "accepted": {n: a.accepted for n, a in answers.items()}, "differences": differences}

    def _sampled(self, c: Contestant, server: Server) -> Json:
        """At the temperature that the server takes when a request names none: the target's own."""
        p = self.run.params
        extra = c.request | {"temperature": None}
        answers = evaluate.ask(server, self.asked, p.eval_max_tokens, p.eval_concurrency, extra)
        return {name: answer.accepted for name, answer in answers.items()}

    def _first(self, c: Contestant, server: Server) -> Json:
        """Samples of the first tokens, by prompt.

        vLLM on a CPU knows no seed of a request. All servers start from one seed, and samples from equal random numbers would
        hang together: so each contestant first draws another number of tokens that nobody looks at.
        """
        body = {"model": server.model, "n": FIRST_SAMPLES, "max_tokens": FIRST_TOKENS, "temperature": 1, "return_token_ids": True}
        few = self.asked[:FIRST_PROMPTS]
        ahead = {"n": 1, "max_tokens": 1 + self.contestants.index(c), "prompt": list(few[0].ids)}
        server.post("/v1/completions", body | ahead | c.request)

        def samples(question: Question) -> list[list[int]]:
            reply = server.post("/v1/completions", body | {"prompt": list(question.ids)} | c.request)
            return [choice["token_ids"] for choice in reply["choices"]]

        with ThreadPoolExecutor(len(few)) as pool:
            return list(pool.map(samples, few))

    def _steps(self, c: Contestant, server: Server) -> Json:
        prompts = [q.ids for q in self.timed]
        if c.k:
            tokens = round(calibrate.STEPS * calibrate.YIELD)
            return calibrate.step_times(server, prompts, calibrate.SPECULATIVE, c.request, tokens)
        timed = calibrate.step_times(server, prompts, calibrate.TOKENS, c.request)
        return timed | {"prompts": calibrate.prompt_times(server, list(chain(*prompts)))}

    def _drafting(self, c: Contestant, server: Server) -> Json:
        return calibrate.drafting_shares(server, self.asked[0].ids, c.request, _traces(self.run))

    def _speed(self, c: Contestant, server: Server, asked: Sequence[Asked], count: int, tokens: int, load: int) -> Json:
        if self.bench is None:
            raise RuntimeError("this sweep was made to look at")
        lines = (json.dumps({"prompt": text}) + "\n" for _, text in islice(cycle(asked), count))
        file = write_atomic(self.run.path("eval", "sweep", "prompts.jsonl"), "".join(lines))
        return self.bench.measure(server, file, count=count, tokens=tokens, concurrency=load, extra=c.request)


@contextmanager
def served(
    run: Run, model: Path | str, device: str, asked: Sequence[Question], engines: Sequence[Engine]
) -> Iterator[dict[Engine, Server]]:
    """Servers of `engines`, started together and warm: every prompt was asked once, so its prefix is cached in every repeat."""
    with ExitStack() as stack:
        servers = {engine: Server(run, model, engine, device) for engine in engines}
        for server in servers.values():
            stack.callback(server.stop)
            server.begin()
        for server in servers.values():
            server.wait_ready()
        for server in servers.values():
            evaluate.ask(server, asked, 4, run.params.eval_concurrency)
        yield servers


def estimate(run: Run, cells: Sequence[Cell]) -> tuple[float, float]:
    """Seconds that the cells which are missing will take: (server starts, measuring).

    From this run's own evaluation: how long its servers took to start, and its tokens a second without speculation, which at
    other loads are scaled as the plan's rates are. No gain from speculation is counted.
    """
    p = run.params
    missing = [cell for cell in cells if not cell.step.done]
    about, hardware = describe(p.target_model, p.target_revision)[0], hardware_presets()[p.hardware]
    one = plan.generation_rate(about, hardware, p, p.eval_speed_concurrency)[0]
    measured = float(run.fact("speed.none.tokens_per_s"))
    engines = {engine for cell in missing for engine in cell.engines}
    ready = [float(run.fact(f"time.server_{name}_ready_s")) for name in evaluate.CONTESTANTS]
    starts = max(ready) / (len(ready) if p.eval_side_by_side else 1) * len(engines)
    seconds = sum(cell.tokens / (measured * plan.generation_rate(about, hardware, p, cell.streams)[0] / one) for cell in missing)
    return starts, seconds


def measure(run: Run, model: Path | str, device: str, say: Callable[[str], None] = print) -> dict[str, Any] | None:
    """Measure what is missing of the sweep, and conclude from it; without `eval_sweep` say how to get it.

    Returns:
        See `conclude`; None where the sweep was not asked for and has not been measured whole before.

    Raises:
        KitError: a server or vllm bench failed; speculation changed answers at temperature 0 or their distribution at 1.
    """
    p, file = run.params, run.path("eval", "sweep.json")
    if not p.eval_sweep:
        if file.exists() and run.fact("sweep.drafter", "") == run.digest("checkpoints", train.MADE_BY):
            return _advised(run, read_json(file, MADE_BY))
        say("Draft lengths, loads and temperatures were not swept: `make sweep` does it, in about fifteen minutes on two cores.")
        ngram, eagle3 = serving.ngram_config(p.eval_ngram_k), serving.eagle3_config(train.drafter_folder(run), p.eval_k)
        ratios = read_json(run.path("eval", "speed.json"), MADE_BY)["ratios"]
        words = verdicts.advice({p.eval_speed_concurrency: ratios}, {"ngram": _shown(ngram), "eagle3": _shown(eagle3)})
        run.record("advice.speculate", f"{words} (other loads: make sweep)", "", "speed-up that exceeds its noise, at one load")
        run.record("advice.from_sweep", False, "", "the advice rests on the speed of one load")
        return None
    with Bench(run) as bench:
        sweep = Sweep(run, device, bench)
        missing = [cell for cell in sweep.cells if not cell.step.done]
        starts, seconds = estimate(run, sweep.cells)
        say(
            f"the sweep: {len(sweep.cells)} cells, {len(missing)} of them to measure; about {(starts + seconds) / 60:.0f} min, "
            f"{starts / 60:.1f} of them for server starts"
        )
        began, left = time.monotonic(), len(missing)
        for cell in work(sweep.groups, lambda engines: served(run, model, device, sweep.asked, engines)):
            left -= 1
            say(f"{cell.step.name.removeprefix('eval/sweep/')} measured, {left} to go, {time.monotonic() - began:.0f} s")
        if missing:
            run.record("sweep.minutes", round((time.monotonic() - began) / 60, 2), "min", f"{len(missing)} cells, wall time")
    return _advised(run, conclude(run, sweep, local_folder(model, p.target_revision)))


def _advised(run: Run, said: dict[str, Any]) -> dict[str, Any]:
    run.record("advice.speculate", said["advice"], "", "speed-ups of the sweep that exceed their noise")
    run.record("advice.from_sweep", True, "", "the advice rests on the sweep")
    return said


# ---- what the cells say


def conclude(run: Run, sweep: Sweep, target: Path) -> dict[str, Any]:
    """Put the cells together, save them as `eval/sweep.json` and record the facts.

    Returns:
        As `eval/sweep.json` has it: `curve` by draft length, `groups` of drafts with their acceptance and intervals, `speed` and
        `ratios` by load and contestant, `in_turn`, `advice`, `lossless` (see `evaluate.losslessness`), `first` by contestant.

    Raises:
        KitError: speculation changed an answer at temperature 0, or the distribution of the first tokens at temperature 1.
    """
    p = run.params
    said: dict[str, Any] = {
        "curve": (curve := _curve(run, sweep)),
        "groups": _groups(run, sweep, target),
        **_speed(sweep, {row["k"]: row["simulated"] for row in curve}),
        "lossless": evaluate.losslessness(
            {c.name: sweep.result(f"answers/{c.name}")[c.name] for c in sweep.contestants}, evaluate.TIE_NATS[p.target_dtype]
        ),
        "first": _first(sweep),
    }
    said |= _local(run, sweep, said)
    write_json(run.path("eval", "sweep.json"), said)
    facts: dict[str, tuple[Any, str]] = {"sweep.drafter": (run.digest("checkpoints", train.MADE_BY), "")}
    for load, ratios in said["ratios"].items():
        for name, ratio in ratios.items():
            facts |= evaluate.ratio_facts(f"sweep.c{load}.{name}", ratio)
        for name, found in said["speed"][load].items():
            facts[f"sweep.c{load}.{name}.tokens_per_s"] = (round(statistics.median(found["tokens_per_s"]), 2), "tokens/s")
    for row in said["curve"]:
        name = f"sweep.k{row['k']}"
        facts[f"{name}.simulated_al"] = (round(row["simulated"], 4), "tokens/forward")
        if row["served"] is not None:
            for suffix, key in (("", "served"), (".low", "served_low"), (".high", "served_high")):
                facts[f"{name}.al{suffix}"] = (row[key] and round(row[key], 4), "tokens/forward")
            for what in ("unconditional", "conditional"):
                facts[f"{name}.{what}"] = ([round(rate, 4) for rate in row[what]], "share by position")
    for row in said["groups"]:
        name = re.sub(r"[^A-Za-z0-9_.]+", "_", f"sweep.{row['by'].split(',')[0]}.{row['group'].split(' (')[0]}")
        facts[f"{name}.al"] = (round(row["al"], 4), "tokens/forward")
        for what in ("unconditional", "conditional"):
            facts[f"{name}.{what}"] = ([round(rate, 4) for rate in row[what]], "share by position")
    for name, test in said["first"].items():
        facts[f"sweep.{name}.first_tokens_p"] = (round(test["p"], 4), "p value")
    for suffix, share in zip(("", ".low", ".high"), said["drafting"]["share"] or [None] * 3, strict=True):
        facts[f"sweep.drafting_share{suffix}"] = (share and round(share, 3), "share of a step, from vLLM's trace")
    if said["local"]:
        for prefix in ("", "answers_"):
            errors = [abs(row[f"{prefix}error"]) for row in said["local"]]
            facts[f"model.local.{prefix}median_error"] = (round(statistics.median(errors), 3), "share")
            facts[f"model.local.{prefix}worst_error"] = (round(max(errors), 3), "share")
    facts["sweep.lossless.share"] = (said["lossless"]["share"], "share")
    how = f"{p.eval_repeats} repeats, {evaluate.in_turn_text(said['in_turn'])}"
    run.record_all(facts, f"{how}; {p.eval_sweep_tokens} tokens an answer, temperature 0 unless named")
    _require_lossless(said)
    return dict(read_json(run.path("eval", "sweep.json"), MADE_BY))  # with the keys of JSON, as a later look will find it


def _require_lossless(said: Mapping[str, Any]) -> None:
    for entry in said["lossless"]["differences"]:
        raise KitError(
            "speculation changed an answer at temperature 0",
            seen=f"{entry['contestant']}, prompt {entry['prompt_id']}, token {entry['position']}: gap {entry['gap']} nats",
            fix="look at eval/sweep.json; a wrong drafter cannot do this, a wrong vLLM build can",
        )
    for name, test in said["first"].items():
        if test["p"] < ALPHA:
            raise KitError(
                "speculation changed what is sampled at temperature 1",
                seen=f"{name}: distance {test['statistic']:.3f}, p = {test['p']:.4f}",
                wanted=f"about {test['expected']:.3f}, p of at least {ALPHA}",
                fix="look at eval/sweep.json; a wrong drafter cannot do this, a wrong vLLM build can",
            )


def _curve(run: Run, sweep: Sweep) -> list[dict[str, Any]]:
    """Acceptance length by draft length: simulated from captured states for all, served for those that were.

    What was served is counted by the engine, over all answers together. Where the same prompts were also asked one by one
    (`answers/<contestant>`), their counts give the intervals.
    """
    folder = train.drafter_folder(run)
    step = run.step("eval/sweep/simulated", {"checkpoints": run.digest("checkpoints", train.MADE_BY), "lengths": list(CURVE)})
    if not step.done:
        with step:
            write_json(step.folder / "result.json", simulate.heldout(run, folder, CURVE))
    rows = []
    asked = {c.name for c in sweep.contestants}
    served_at = {c.k: c.name for c in (*sweep.contestants, *sweep.lengths) if c.name == f"eagle3-k{c.k}"}
    for k, accepted in sweep.result("simulated").items():
        answers = [counts for counts in accepted.values() if counts]
        low, high = evaluate.interval(answers)
        name = served_at.get(int(k))
        counters = sweep.result(f"bench/{name}")[name]["counters"] if name else {}
        by_prompt = sweep.result(f"answers/{name}")[name]["accepted"] if name in asked else {}
        row = {"k": int(k), "simulated": evaluate.length(answers), "low": low, "high": high}
        rows.append(row | _served(counters, by_prompt, int(k)))
    return rows


def _served(counters: Mapping[str, float], by_prompt: Mapping[str, Sequence[int]], k: int) -> dict[str, Any]:
    drafts = counters.get("drafts", 0.0)
    drafting = [counts for counts in by_prompt.values() if counts]
    served_low, served_high = evaluate.interval(drafting)
    first_low, first_high = evaluate.first_interval(drafting)
    reached = [counters[f"accepted_{i}"] for i in range(1, k + 1)] if drafts else []
    return {
        "served": _al([counters]),
        "served_low": served_low,
        "served_high": served_high,
        "first_low": first_low,
        "first_high": first_high,
        **evaluate.positions(reached, drafts),
    }


def _al(counted: Sequence[Mapping[str, float]]) -> float | None:
    """Acceptance length over the counters of several measurements; None where nothing was drafted."""
    drafts = sum(counters.get("drafts", 0.0) for counters in counted)
    return 1 + sum(counters["accepted_tokens"] for counters in counted) / drafts if drafts else None


def by_context(prompt_lengths: Mapping[str, int], accepted: Mapping[str, Sequence[int]]) -> dict[str, dict[str, list[int]]]:
    """Sort drafts into bins by how many tokens stood before them: up to 64, then doubling.

    Args:
        prompt_lengths: by prompt id, tokens of the prompt.
        accepted: by prompt id, how many tokens of each draft were accepted, in order.

    Returns:
        By bin, by prompt id, the counts of the drafts that fall into it. The first draft follows the first token of the answer,
        each later one what the draft before it gave and the target's own token.
    """
    found: dict[int, dict[str, list[int]]] = {}
    for name, counts in accepted.items():
        starts = accumulate((count + 1 for count in counts), initial=prompt_lengths[name] + 1)
        for start, count in zip(starts, counts, strict=False):
            top = max(64, 1 << (start - 1).bit_length())
            found.setdefault(top, {}).setdefault(name, []).append(count)
    return {f"{top // 2 + 1 if top > 64 else 1} to {top}": found[top] for top in sorted(found)}


def own_temperature(target: Path) -> str:
    """The temperature that the server takes where a request names none, in words."""
    file = target / "generation_config.json"
    config: dict[str, Any] = json.loads(file.read_bytes()) if file.exists() else {}
    if (given := config.get("temperature")) is not None:
        return f"{given} (its generation_config.json)"
    return "1 (vLLM's default: its generation_config.json names none)"


def _groups(run: Run, sweep: Sweep, target: Path) -> list[dict[str, Any]]:
    """Acceptance of the trained drafter at `eval_k` by kind of prompt, by context and by temperature, one row a group.

    Its positions' rates are those of `evaluate.positions`, counted over the group's drafts.
    """
    greedy = read_json(run.path("eval", "eagle3", "result.json"), MADE_BY)["accepted"]
    kinds, lengths = {q.id: q.kind for q in sweep.asked}, {q.id: len(q.ids) for q in sweep.asked}
    found = {("kind", kind): {n: greedy[n] for n in greedy if kinds[n] == kind} for kind in sorted(set(kinds.values()))}
    found |= {("context, tokens", name): drafts for name, drafts in by_context(lengths, greedy).items()}
    found["temperature", "0"] = greedy
    name = f"eagle3-k{run.params.eval_k}"
    found["temperature", own_temperature(target)] = sweep.result(f"sampled/{name}")[name]
    rows = []
    for (what, group), accepted in found.items():
        if answers := [counts for counts in accepted.values() if counts]:
            low, high = evaluate.interval(answers)
            row = {"by": what, "group": group, "prompts": len(answers), "al": evaluate.length(answers), "low": low, "high": high}
            counts = [count for answer in answers for count in answer]
            reached = [sum(count >= i for count in counts) for i in range(1, run.params.eval_k + 1)]
            rows.append(row | evaluate.positions(reached, len(counts)))
    return rows


def _speed(sweep: Sweep, simulated: Mapping[int, float]) -> dict[str, Any]:
    """Throughput and latencies by load and contestant, and the speed-ups.

    Beside the speed-up of a drafter stands what it would be at the acceptance length of held-out prompts (`evaluate.at_heldout`):
    for the trained drafter the simulated one, which is over all of them, for others what `bench/<contestant>` counted.

    Args:
        simulated: acceptance length of the trained drafter by draft length.
    """
    p = sweep.run.params
    fast: dict[int, dict[str, Any]] = {}
    ratios: dict[int, dict[str, Any]] = {}
    for load in p.eval_sweep_concurrency:
        of = "most_steps" if sweep.requests(load) == load else "steps"  # begun together, they last as long as the slowest
        fast[load] = {
            name: {
                "tokens_per_s": [repeat["output_throughput"] for repeat in found],
                "paired": p.eval_side_by_side,
                "al": _al([repeat["counters"] for repeat in found]),
                "decode": [_decoding(repeat) for repeat in found],
                "a_step": statistics.median(repeat["tokens_a_step"] or 0 for repeat in found),
                "steps": statistics.median(repeat[of] for repeat in found),
                **{key: statistics.median(repeat[key] for repeat in found) for key in found[0] if key.endswith("_ms")},
            }
            for name, found in sweep.repeats("speed", f"c{load}-").items()
        }
        ratios[load] = evaluate.speed(fast[load])["ratios"]
        for c in (c for c in sweep.contestants if c.drafter):
            ratio, heldout = ratios[load][c.name], simulated.get(c.k) if c.name == f"eagle3-k{c.k}" else None
            heldout = heldout or _al([sweep.result(f"bench/{c.name}")[c.name]["counters"]])
            ratio |= evaluate.at_heldout(ratio["ratio"], fast[load][c.name]["al"], heldout)
    words = verdicts.advice(ratios, {c.name: c.config for c in sweep.contestants})
    words += f"; with answers of at most {p.eval_sweep_tokens} tokens, the wait for the first one included"
    return {"speed": fast, "ratios": ratios, "in_turn": p.eval_side_by_side, "advice": words}


def _local(run: Run, sweep: Sweep, said: Mapping[str, Any]) -> dict[str, Any]:
    """What the timed steps say.

    Returns:
        `drafting`: the timed contestant, and drafting's `share` of its steps (median, lowest, highest; None where the trace shows
        none); `local`: the speed-up model fitted to this machine, beside the trained drafter's measured speed-ups, of decoding
        alone (`_decoding`) and of whole answers (`calibrate.compare`).
    """
    k = run.params.eval_k
    timed = f"eagle3-k{k}"
    repeats = sweep.repeats("timed")
    plain, speculative = repeats["none"], repeats[timed]
    usual = {what: {int(n): statistics.median(each[what][n] for each in plain) for n in plain[0][what]} for what in plain[0]}
    # the ratio of neighbours: a machine that slows down for a minute slows both
    drafted = {
        what: {
            int(n): usual[what][int(n)]
            * statistics.median(s[what][n] / each[what][n] for s, each in zip(speculative, plain, strict=True))
            for n in speculative[0][what]
        }
        for what in speculative[0]
    }
    shares = sweep.result(f"traced/{timed}")[timed]
    share = [statistics.median(shares), min(shares), max(shares)] if shares else None
    here = calibrate.fit(run, usual["steps"], usual["prompts"], drafted["steps"], k, share[0] if share else 0.0)
    measured = []
    for load, found in said["speed"].items():
        if not (ratios := _decoding_ratios(found)):
            continue
        mine = [c for c in sweep.contestants if c.name.startswith("eagle3-k")]
        for c in mine:
            answers, mean = said["ratios"][load][c.name], found[c.name]
            steps = mean["steps"], found["none"]["steps"]
            measured.append(calibrate.Measured(load, c.k, mean["a_step"], *steps, ratios[c.name], answers))
    local = calibrate.compare(here, usual["first"], drafted["first"], measured)
    return {"drafting": {"contestant": timed, "share": share}, "local": local}


def _decoding(measured: Mapping[str, Any]) -> float:
    """Tokens a second of a request between its first and its last, from what `bench.read` kept; 0 for answers of one token.

    The tokens of a step by the median time of one: the step that reads another request's prompt does not count.
    """
    return 1e3 * measured["tokens_a_step"] / measured["step_ms"] if measured["step_ms"] else 0.0


def _decoding_ratios(found: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Speed-ups of decoding alone at one load, see `verdicts.speedups`; none where answers had one token."""
    if not all(rate for c in found.values() for rate in c["decode"]):
        return {}
    rates = {name: {"tokens_per_s": c["decode"], "paired": c["paired"]} for name, c in found.items()}
    ratios: dict[str, dict[str, Any]] = evaluate.speed(rates)["ratios"]
    return ratios


def _first(sweep: Sweep) -> dict[str, dict[str, float]]:
    off = sweep.result("first/none")["none"]
    return {c.name: verdicts.two_sample(sweep.result(f"first/{c.name}")[c.name], off) for c in sweep.contestants if c.k}


# ---- for the notebook


def curve_rows(said: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Acceptance length by draft length; for a table."""
    return [
        {
            "k": row["k"],
            "simulated": round(row["simulated"], 3),
            "simulated, 95 %": _range(row["low"], row["high"]),
            "served (vllm bench)": "not served" if row["served"] is None else round(row["served"], 3),
            "served, 95 %": _range(row["served_low"], row["served_high"]),
            "served, by position, of all drafts": _rates(row["unconditional"]),
            "of those accepted up to there": _rates(row["conditional"]),
            "position 1, 95 %": _range(row["first_low"], row["first_high"], 3),
        }
        for row in said["curve"]
    ]


def group_rows(said: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Acceptance length and the positions' acceptance by kind, context and temperature; for a table."""
    return [
        {
            "by": row["by"],
            "group": row["group"],
            "prompts": row["prompts"],
            "AL": round(row["al"], 3),
            "95 %": _range(row["low"], row["high"]) + ("" if row["low"] is None else _short_of(row["prompts"])),
            "by position, of all drafts": _rates(row["unconditional"]),
            "of those accepted up to there": _rates(row["conditional"]),
        }
        for row in said["groups"]
    ]


def _rates(shares: Sequence[float]) -> str:
    return ", ".join(f"{share:.3f}" for share in shares)


def _short_of(prompts: int) -> str:
    """What an interval over so few prompts is short of its 95 %, in words; nothing where it need not be.

    Prompts that are drawn again never leave the range of those that are there, and n values have the middle of their
    distribution between their ends with probability 1 - 2^(1 - n): below 95 % up to five.
    """
    sure = 1 - 2.0 ** (1 - prompts)
    return f", {100 * sure:.0f} % at most" if sure < 0.95 else ""


def _range(low: float | None, high: float | None, digits: int = 2) -> str:
    """An interval over prompts; there is none of one prompt, or where the engine counted all of them together."""
    return "unknown" if low is None or high is None else f"{low:.{digits}f} to {high:.{digits}f}"


def speed_rows(said: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Throughput, speed-up and latencies by load and contestant; for a table."""
    rows = []
    for load, contestants in said["speed"].items():
        decoding = _decoding_ratios(contestants)
        for name, found in contestants.items():
            ratio = said["ratios"][load].get(name)
            rates = found["tokens_per_s"]
            row = {"requests": load, "contestant": name, "tokens/s": f"{statistics.median(rates):.1f}"}
            row["range"] = f"{min(rates):.1f} to {max(rates):.1f}"
            row["speed-up"] = verdicts.speedup_text(ratio) if ratio else ""
            row["verdict"] = verdicts.outcome(ratio) if ratio else "baseline"
            row["speed-up of decoding alone"] = verdicts.speedup_text(decoding[name]) if name in decoding else ""
            row |= evaluate.heldout_columns(ratio or {})
            row["drafting"] = ""
            if (str(load), name) == ("1", said["drafting"]["contestant"]):
                row["drafting"] = drafting_share(said["drafting"]["share"])
            for what in ("ttft", "tpot"):
                row[f"{what.upper()} p50 / p99 (ms)"] = f"{found[f'median_{what}_ms']:.0f} / {found[f'p99_{what}_ms']:.0f}"
            rows.append(row)
    return rows


def drafting_share(share: Sequence[float] | None) -> str:
    """What share of a step drafting takes, in words."""
    return (
        "unknown: not in the trace"
        if share is None
        else "{:.0f} % of a step ({:.0f} to {:.0f} %)".format(*(100 * each for each in share))
    )


def local_rows(said: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What the speed-up model, fitted to this machine, says of the sweep's speed-ups; for a table."""
    rows = []
    for found in said["local"]:
        row = {"requests": found["requests"], "k": found["k"], "tokens a step": round(found["a_step"], 2)}
        for what, prefix in (("decoding", ""), ("answers", "answers_")):
            ratio = {key: found[f"{prefix}{key}"] for key in ("low", "high")} | {"ratio": found[f"{prefix}measured"]}
            row[f"{what}, predicted"] = round(found[f"{prefix}predicted"], 2)
            row[f"{what}, measured"] = verdicts.speedup_text(ratio)
            row[f"{what}, error"] = f"{100 * found[f'{prefix}error']:+.0f} %"
        rows.append(row)
    return rows


def lossless_rows(said: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The tests at temperature 1; for a table beside `evaluate.lossless_rows`."""
    return [
        {
            "contestant": name,
            "distance of the first tokens": round(test["statistic"], 4),
            "expected of equal distributions": round(test["expected"], 4),
            "p": round(test["p"], 4),
            "verdict": "differs" if test["p"] < ALPHA else "no difference seen",
        }
        for name, test in said["first"].items()
    ]
