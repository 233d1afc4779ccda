"""The page a colleague is sent: one self-contained HTML file made from what a run recorded, the summary first.

    build(run_root, reports_dir)      reports/<run_name>.html, also for a run that failed or has only begun
    summary_lines(run_root)           its summary as ten lines of plain text
    compare(run_roots, reports_dir)   the facts of several runs side by side
    index(reports_dir)                reports/index.html, which lists what is there

It reads recorded facts, files and pictures and never cell output. What is missing is called unknown; a file that cannot be read
is named and passed over, because the report is needed most after something went wrong. The same run folder gives the same bytes.

The page opens offline: no script, no address that a browser would fetch, and a Content-Security-Policy that would stop one. Model
output, file contents and error messages reach it only through `widgets.tag`, which escapes.
"""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple
from urllib.parse import quote

from eagle3kit.errors import KitError
from eagle3kit.params import SPECS
from eagle3kit.rundir import project_path, value_digest, write_atomic
from eagle3kit.widgets import SYMBOLS, Markup, clean, fmt, fmt_bytes, fmt_duration, is_number, join, tag

LIMIT_BYTES = 2_000_000
"""Largest report, in bytes: what a mail server and a chat take without complaint."""


class Stage(NamedTuple):
    """One notebook, as the report speaks of it."""

    number: str
    title: str
    purpose: str
    steps: tuple[str, ...]


STAGES = (
    Stage("00", "Preflight", "Is this machine able to run these parameters, and what will that take?", ()),
    Stage("01", "A published drafter, explained", "What each field of a published EAGLE-3 drafter means for the target.", ()),
    Stage("02", "The drafter's config", "The drafter that fits this target, field by field.", ("target", "config")),
    Stage(
        "03",
        "Answers and hidden states",
        "The target answers the prompts, and its hidden states are recorded for training.",
        ("data", "hidden_states", "golden"),
    ),
    Stage("04", "The draft vocabulary", "Which of the target's tokens the drafter may propose.", ("vocab",)),
    Stage("05", "Training", "The drafter learns to continue its own guesses over several TTT steps.", ("checkpoints",)),
    Stage("06", "Evaluation", "What the drafter is worth when vLLM serves it.", ("eval",)),
)

GLOSSARY = {
    "target": "The large model whose answers are wanted. Its weights are not changed.",
    "drafter": "A small model that guesses the target's next tokens. The target checks all guesses in one forward pass.",
    "speculative decoding": "Decoding with a drafter. A guess is kept where it is what the target itself would have said, so the "
    "output stays the target's own; only the speed changes.",
    "EAGLE-3": "A kind of drafter that reads hidden states from inside the target besides the tokens so far.",
    "AL, acceptance length": "Tokens gained per forward pass of the target: 1 plus the accepted guesses. 1.0 means that the "
    "drafter never helps, k + 1 is the most there is.",
    "k": "How many tokens the drafter guesses at each step.",
    "acceptance by position": "Share of drafts whose guess at this position was accepted: of all drafts (unconditional), or of "
    "those whose earlier guesses were accepted too (conditional).",
    "auxiliary layers": "The target's layers whose hidden states the drafter reads. A list that is off by one trains and loads, "
    "and acceptance stays near 1.0.",
    "TTT step": "Training-time test: in training the drafter continues its own guess, as it must when serving. Step 1 is the "
    "first guess, step 2 builds on it.",
    "full accuracy": "Share of positions where the drafter's guess at a TTT step is the target's most likely token.",
    "simulated AL": "The acceptance length that the held-out accuracies of training would give. The served AL should come close.",
    "draft vocabulary": "The subset of the target's tokens that the drafter can propose. Smaller is faster; a token outside it "
    "is never guessed.",
    "d2t, t2d": "The maps between the two vocabularies: d2t holds, for a draft token, the distance to its target token; t2d "
    "marks the target tokens that the drafter has.",
    "golden check": "The extracted last-layer states, put through the target's own norm and output head, must give the "
    "distribution that the serving engine reports. A wrong layer or a shifted slot fails it by far.",
    "supervised token": "A token that training learns from: those the target wrote, not those of the prompt.",
    "on-policy": "The training text was written by the target itself, so the drafter learns the target's own habits.",
    "lossless": "With speculation the output is, token for token, the one without.",
    "tie": "A place where two tokens have so nearly the same probability that the order of sums decides. A difference there is "
    "arithmetic, not a fault of speculation.",
    "n-gram": "The baseline that needs no drafter: it proposes what followed the same few tokens earlier in the text.",
}

# ---- reading a run


@dataclass(frozen=True)
class Picture:
    """A picture of a run, as it will be embedded."""

    name: str
    data: bytes
    size: int
    caption: str
    alt: str


class Check(NamedTuple):
    """One statement that was held against the facts."""

    state: str
    text: str


class Evidence:
    """Everything a run folder holds that a report can use. Nothing missing or damaged stops it; `problems` says what was.

    Args:
        root: the run's folder.

    Raises:
        KitError: there is no such folder.
    """

    def __init__(self, root: Path) -> None:
        self.root = Path(root).resolve()
        if not self.root.is_dir():
            raise KitError("there is no such run", seen=root, wanted="a folder runs/<run_name>", fix="eagle3kit run PARAMS_FILE")
        self.name = self.root.name
        self.problems: list[str] = []
        self._read: dict[str, Any] = {}
        facts = self.json("facts.json")
        self.facts: dict[str, Mapping[str, Any]] = {
            str(name): fact for name, fact in mapping(facts).items() if isinstance(fact, Mapping)
        }
        failure = mapping(self.json("failure.json"))
        self.failure = (str(failure.get("stage", "unknown")), str(failure.get("message", ""))) if failure else None
        self.failed = self.failure[0][:2] if self.failure else None
        self.manifests = {name: mapping(self.json(f"{name}/manifest.json")) for name in self._steps("manifest.json")}
        self.begun = self._steps("started.json")
        self.params, self.unequal = self._params()

    def _steps(self, file: str) -> list[str]:
        """Names of the steps that have a file of this name; a step may be one of several in a folder, as `eval/none`."""
        paths = [*self.root.glob(f"*/{file}"), *self.root.glob(f"*/*/{file}")]
        return sorted(path.parent.relative_to(self.root).as_posix() for path in paths)

    def json(self, name: str) -> Any:
        """The contents of a JSON file of the run, or None; read once."""
        if name not in self._read:
            self._read[name] = self._load(name)
        return self._read[name]

    def _load(self, name: str) -> Any:
        path = self.root / name
        try:
            if path.stat().st_size > 64_000_000:
                self.problems.append(f"{name} is {fmt_bytes(path.stat().st_size)} and was not read")
                return None
            return json.loads(path.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError) as error:
            self.problems.append(f"{name} cannot be read ({error})")
            return None

    def log(self) -> list[Mapping[str, Any]]:
        """The rows of the training log; a line cut by a kill is passed over."""
        rows = []
        try:
            lines = (self.root / "checkpoints" / "log.jsonl").read_bytes().splitlines()
        except OSError:
            return []
        for line in lines:
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(row, Mapping):
                rows.append(row)
        return rows

    def _params(self) -> tuple[dict[str, Mapping[str, Any]], dict[str, list[str]]]:
        """Every parameter's row, and for a parameter that had several values which notebook had which.

        A notebook knows only the parameters of its own cell and has defaults for the rest, so a value that somebody set wins over
        a default, and among those the latest.
        """
        files = sorted(path.name for path in (self.root / "params").glob("[0-9][0-9]_*.json"))
        if self.failed is not None:  # what lies there for later stages is from an earlier try
            files = [name for name in files if name[:2] <= self.failed] or files
        found: dict[str, Mapping[str, Any]] = {}
        values: dict[str, dict[str, str]] = {}
        for name in files or ["run.json"]:
            for row in _param_rows(self.json(f"params/{name}")):
                key = str(row.get("name"))
                if key not in found or row.get("origin") != "default" or found[key].get("origin") == "default":
                    found[key] = row
                values.setdefault(key, {})[name.removesuffix(".json")] = fmt(row.get("value"))
        quiet = {"interactive", "force"}
        unequal = {
            key: [f"{value} in {stage}" for stage, value in by.items()]
            for key, by in values.items()
            if len(set(by.values())) > 1 and key not in quiet
        }
        return found, unequal

    def value(self, name: str) -> Any:
        """A fact's value, or None."""
        return self.facts.get(name, {}).get("value")

    def number(self, name: str) -> float | None:
        """A fact as a finite number, or None."""
        return number(self.value(name))

    def count(self, name: str, unit: str) -> str:
        """A fact in a sentence: `52,114 tokens`, or `an unknown number of tokens`."""
        found = self.number(name)
        return f"an unknown number of {unit}" if found is None else f"{found:,.0f} {unit}"

    def param(self, name: str) -> Any:
        """A parameter's value, or None."""
        return self.params.get(name, {}).get("value")

    def minutes(self) -> dict[str, float]:
        """Minutes of each timed stage, by its number."""
        found = {stage.number: self.number(f"stage.{stage.number}.minutes") for stage in STAGES}
        return {key: value for key, value in found.items() if value is not None}

    def completed(self) -> list[str]:
        """Numbers of the stages that came to their end, and, where one failed, before it."""
        return [key for key in self.minutes() if self.failed is None or key < self.failed]

    def stale(self, stage: str) -> bool:
        """Whether what a stage left is from an earlier try: a stage before it has failed since."""
        return self.failed is not None and stage[:2].isdigit() and stage[:2] > self.failed

    def finished(self) -> str | None:
        """When the last step finished, as its manifest says."""
        return moment(max((str(m["finished"]) for m in self.manifests.values() if "finished" in m), default=None))

    def pictures(self) -> list[Picture]:
        """The run's pictures, in the order of their names."""
        found = []
        for path in sorted((self.root / "figures").glob("*.png")):
            note = mapping(self.json(f"figures/{path.stem}.json"))
            try:
                size = path.stat().st_size
                data = path.read_bytes() if size < LIMIT_BYTES else b""
            except OSError as error:
                self.problems.append(f"figures/{path.name} cannot be read ({error})")
                continue
            if data and not data.startswith(b"\x89PNG\r\n\x1a\n"):
                self.problems.append(f"figures/{path.name} is not a PNG and was left out")
                continue
            caption = str(note.get("caption") or "")
            found.append(Picture(path.name, data, size, caption, str(note.get("alt") or caption or path.stem)))
        return found

    def by_kind(self) -> dict[str, Mapping[str, Any]]:
        """Acceptance by kind of prompt: `{kind: {"al", "prompts"}}`."""
        found = mapping(mapping(self.json("eval/acceptance.json")).get("by_kind"))
        return {str(kind): mapping(entry) for kind, entry in found.items()}

    def positions(self, what: str = "position") -> list[float]:
        """Acceptance of each position, `position` (of all drafts) or `conditional`, from the facts or else the file."""
        found: list[float] = []
        while (share := self.number(f"acceptance.{what}_{len(found) + 1}")) is not None:
            found.append(share)
        key = {"position": "unconditional"}.get(what, what)
        return found or numbers(mapping(self.json("eval/acceptance.json")).get(key))

    def golden(self) -> Mapping[str, Any]:
        """The golden check's record."""
        return mapping(self.json("golden/golden.json") or self.json("hidden_states/golden.json"))


def _param_rows(value: Any) -> list[Mapping[str, Any]]:
    """The rows of a `params/<stage>.json`, a list or a mapping by name, completed from the declarations where they are short."""
    given = rows(value) or [{"name": name, **mapping(row)} for name, row in mapping(value).items()]
    completed: list[Mapping[str, Any]] = []
    for row in given:
        spec = SPECS.get(str(row.get("name")))
        declared = {} if spec is None else {key: getattr(spec, key) for key in ("default", "unit", "description", "group")}
        completed.append({**declared, **row})
    return completed


def mapping(value: Any) -> Mapping[str, Any]:
    """The value if it is a mapping, else an empty one."""
    return value if isinstance(value, Mapping) else {}


def rows(value: Any) -> list[Mapping[str, Any]]:
    """The mappings of a list."""
    return [row for row in value if isinstance(row, Mapping)] if isinstance(value, list) else []


def number(value: Any) -> float | None:
    """The value as a finite float, or None."""
    try:
        return float(value) if is_number(value) and math.isfinite(value) else None
    except OverflowError:
        return None


def numbers(value: Any) -> list[float]:
    """The finite numbers of a list."""
    return [found for item in value if (found := number(item)) is not None] if isinstance(value, list) else []


def moment(text: Any) -> str | None:
    """`2026-01-02T03:06:00+00:00` as `2026-01-02 03:06 UTC`; other text as it is."""
    if text is None:
        return None
    found = re.fullmatch(r"(\d{4}-\d\d-\d\d)T(\d\d:\d\d)(:[0-9.]+)?(\+00:00|Z)", str(text))
    return f"{found[1]} {found[2]} UTC" if found else short(text, 40)


def percent(share: float | None) -> str:
    """A share in per cent, never rounded up to 100 or down to 0."""
    if share is None:
        return "unknown"
    for digits in (1, 2, 3, 4):
        text = f"{100 * share:.{digits}f}"
        if float(text) not in {0.0, 100.0} or share in {0, 1}:
            return f"{text} %"
    return "just under 100 %" if share < 1 and share > 0.5 else f"{100 * share:.2e} %"


def short(text: object, limit: int = 200) -> str:
    """Text on one line, cut."""
    line = " ".join(clean(str(text)[: 4 * limit + 1000]).split())
    return line if len(line) <= limit else line[: limit - 1] + "…"


# ---- the summary


class Line(NamedTuple):
    """One line of the summary."""

    label: str
    state: str
    text: str


def speed_verdict(low: float | None, high: float | None) -> tuple[str, str]:
    """What a ratio's range allows to say: (`faster`, `slower`, `noise` or `unknown`, the same in words)."""
    if low is None or high is None:
        return "unknown", "whether that is more than noise is unknown, no spread was measured"
    if low > 1:
        return "faster", "faster"
    if high < 1:
        return "slower", "slower"
    return "noise", "inside the noise, neither faster nor slower"


def summary(e: Evidence) -> list[Line]:
    """The ten lines of the summary."""
    lines = [
        _outcome(e),
        _trained(e),
        _data(e),
        _al(e),
        _positions(e),
        _lossless(e),
        _speed(e),
        _golden(e),
        _time(e),
        _memory(e),
    ]
    source = {
        "Trained": "train.steps",
        "Data": "data.train_tokens",
        "Acceptance length": "acceptance.al",
        "By position": "acceptance.position_1",
        "Lossless": "lossless.share",
        "Speed": "speed.eagle3.ratio",
        "Golden check": "extraction.golden_top1",
    }
    marked = []
    for line in lines:
        stage = str(e.facts.get(source.get(line.label, ""), {}).get("stage", ""))
        text, state = line.text, line.state
        if e.stale(stage):
            text = f"From an earlier run of stage {stage[:2]}: {text}"
        elif e.failed is not None and stage[:2] == e.failed:
            text = f"As recorded before stage {stage[:2]} failed, perhaps by an earlier run: {text}"
        old = text != line.text and state == "ok"
        marked.append(line._replace(text=text, state="warn" if old else state))
    return marked


def _outcome(e: Evidence) -> Line:
    done = e.completed()
    if e.failure:
        stage, message = e.failure
        before = f"completed before: {', '.join(done)}" if done else "no stage had completed before"
        first = next((line for line in message.splitlines() if line.strip()), "no message was recorded")
        return Line("Outcome", "fail", f"FAILED in stage {short(stage, 40)}: {short(first)} ({before})")
    if len(done) < len(STAGES):
        missing = ", ".join(stage.number for stage in STAGES if stage.number not in done)
        some = f"completed: {', '.join(done)}" if done else "no stage has completed"
        return Line("Outcome", "warn", f"Unfinished: {some}; still to run: {missing}")
    al, share = e.number("acceptance.al"), e.number("lossless.share")
    verdict, _ = speed_verdict(e.number("speed.eagle3.ratio.low"), e.number("speed.eagle3.ratio.high"))
    if al is not None and al < 1.05:
        return Line("Outcome", "fail", "All seven stages completed, but the drafter's guesses are hardly ever accepted")
    if share is not None and share < 1:
        return Line("Outcome", "fail", "All seven stages completed, but speculation changed outputs: it is not lossless")
    parts = [
        "acceptance is unknown" if al is None else f"the drafter is accepted (AL {al:.2f})",
        "whether it is lossless is unknown" if share is None else "it is lossless",
        {
            "faster": "and on this machine faster than no speculation",
            "slower": "and on this machine slower than no speculation",
            "noise": "and on this machine neither faster nor slower than no speculation",
            "unknown": "and whether it is faster is unknown",
        }[verdict],
    ]
    state = "ok" if al is not None and share is not None and verdict in {"faster", "noise"} else "warn"
    return Line("Outcome", state, f"All seven stages completed: {', '.join(parts)}")


def _trained(e: Evidence) -> Line:
    size = e.count("vocab.size", "tokens")
    steps = e.number("train.steps")
    epochs = e.param("train_epochs")
    took = "training has not finished" if steps is None else f"trained for {steps:,.0f} optimizer steps"
    if steps is not None and epochs is not None:
        took += f" ({fmt(epochs)} epochs)"
    return Line(
        "Trained",
        "ok" if steps is not None else "unknown",
        f"An EAGLE-3 drafter for {short(target(e), 80)}, draft vocabulary of {size}, {took}",
    )


def target(e: Evidence) -> str:
    """The target's name, from the facts or the parameters."""
    return str(e.value("target.name") or e.param("target_model") or "an unknown target")


def _data(e: Evidence) -> Line:
    source = e.param("data_source")
    own = "the prompts that come with the kit"
    where = (
        "prompts of unknown origin" if source is None else own if source == "builtin" else f"the prompts of {short(source, 60)}"
    )
    known = e.number("data.train_tokens") is not None
    dropped = e.number("data.dropped")
    lost = "how many were dropped is unknown" if dropped is None else f"{dropped:,.0f} dropped"
    return Line(
        "Data",
        "ok" if known else "unknown",
        f"{e.count('data.train_tokens', 'training tokens').capitalize()} that the target wrote itself, from {where}; "
        f"{e.count('data.heldout_prompts', 'prompts')} held out; {lost}",
    )


def _interval(low: float | None, high: float | None, digits: int = 2) -> str:
    return "" if low is None or high is None else f" ({low:.{digits}f} to {high:.{digits}f})"


def _k(e: Evidence) -> int | None:
    found = number(mapping(e.json("eval/acceptance.json")).get("k")) or number(e.param("eval_k")) or len(e.positions()) or None
    return None if found is None else int(found)


def _al(e: Evidence) -> Line:
    al, low, high = (e.number(f"acceptance.al{end}") for end in ("", ".low", ".high"))
    if al is None:
        return Line("Acceptance length", "unknown", "unknown: not measured (stage 06 measures it)")
    k = _k(e)
    spread = _interval(low, high) or " (its interval is unknown)"
    most = "" if k is None else f", {k + 1} that every guess is"
    text = f"{al:.2f}{spread} tokens a forward pass at k = {fmt(k)} on held-out prompts; 1 means that nothing is accepted{most}"
    return Line("Acceptance length", "fail" if al < 1.05 else "ok", text)


def _positions(e: Evidence) -> Line:
    shares = e.positions()
    if not shares:
        return Line("By position", "unknown", "unknown: not measured (stage 06 measures it)")
    told = ", ".join(f"{percent(share)} at position {i + 1}" for i, share in enumerate(shares))
    return Line("By position", "ok" if shares[0] >= 0.05 else "fail", f"Of all drafts accepted: {told}")


def _lossless(e: Evidence) -> Line:
    share = e.number("lossless.share")
    if share is None:
        return Line("Lossless", "unknown", "unknown: not measured (stage 06 measures it)")
    record = mapping(e.json("eval/lossless.json"))
    compared = number(record.get("compared"))
    of = "the compared outputs" if compared is None else f"{compared:,.0f} compared outputs"
    ties = e.number("lossless.ties")
    ties = float(len(rows(record.get("ties")))) if ties is None and record else ties
    told = "" if not ties else f", counting {ties:,.0f} that part{'s' if ties == 1 else ''} at a tie"
    return Line(
        "Lossless",
        "ok" if share >= 1 else "fail",
        f"{percent(share)} of {of} equal those without speculation, token for token{told}",
    )


def _speed(e: Evidence) -> Line:
    ratio, low, high = (e.number(f"speed.eagle3.ratio{end}") for end in ("", ".low", ".high"))
    if ratio is None:
        return Line("Speed", "unknown", "unknown: not measured (stage 06 measures it)")
    verdict, words = speed_verdict(low, high)
    plain, with_drafter = e.number("speed.none.tokens_per_s"), e.number("speed.eagle3.tokens_per_s")
    rates = "" if plain is None or with_drafter is None else f" ({with_drafter:.1f} against {plain:.1f} tokens/s)"
    text = f"{ratio:.2f} times{_interval(low, high)} the speed without speculation{rates}: {words}"
    ngram = e.number("speed.ngram.ratio")
    if ngram is not None:
        text += f"; n-gram {ngram:.2f} times{_interval(e.number('speed.ngram.ratio.low'), e.number('speed.ngram.ratio.high'))}"
    if isinstance(advice := e.value("advice.speculate"), str):
        text += f". Advice: {short(advice, 600)}"
    return Line("Speed", {"faster": "ok", "noise": "warn"}.get(verdict, "warn"), text)


def _golden(e: Evidence) -> Line:
    top1, mae = e.number("extraction.golden_top1"), e.number("extraction.golden_mae")
    if top1 is None or mae is None:
        return Line("Golden check", "unknown", "unknown: the extracted hidden states were not checked (stage 03 does it)")
    state, judged = _judge_golden(e, top1, mae)
    return Line(
        "Golden check",
        state,
        f"{judged}: the extracted states give the server's own most likely token at {percent(top1)} of positions, "
        f"mean error {mae:.2g} nats",
    )


def _judge_golden(e: Evidence, top1: float, mae: float) -> tuple[str, str]:
    least, most = number(e.param("golden_min_top1")), number(e.param("golden_max_mae"))
    if least is None or most is None:
        return "unknown", "not judged (its thresholds are unknown)"
    return ("ok", "passed") if top1 >= least and mae <= most else ("fail", "FAILED")


def _time(e: Evidence) -> Line:
    minutes, whole = e.minutes(), e.number("pipeline.minutes")
    if not minutes:
        return Line("Time", "unknown", "unknown: no stage has been timed")
    minutes = {key: value for key, value in minutes.items() if key in e.completed()} or minutes
    total = sum(minutes.values())
    longest = max(minutes, key=lambda key: minutes[key])
    title = next(stage.title for stage in STAGES if stage.number == longest)
    text = f"{total:.1f} minutes of work in {len(minutes)} stage{'s' if len(minutes) > 1 else ''}"
    if e.failed is not None:
        text += " that did not fail"
    else:
        text += f", {whole:.1f} minutes for the run as a whole" if whole is not None else ", the run as a whole was not timed"
    share = f" ({percent(minutes[longest] / total)})" if total > 0 else ""
    return Line("Time", "ok", f"{text}; the longest is {longest} {title} with {minutes[longest]:.1f}{share}")


def _memory(e: Evidence) -> Line:
    peak = e.number("memory.peak_gb")
    on = machine_sentence(e)
    if peak is None:
        return Line("Memory", "unknown", f"unknown: the peak was not recorded; machine: {on}")
    return Line("Memory", "ok", f"At most {peak:.1f} GB in all processes together, on {on}")


def machine_sentence(e: Evidence) -> str:
    """The machine in a few words."""
    cpu = e.value("machine.cpu") or e.value("machine.cpu_model")
    cores, memory = e.number("machine.cores"), e.number("machine.memory_gb")
    gpu = e.value("machine.gpu")
    parts = [
        "an unknown processor" if cpu is None else short(cpu, 80),
        "an unknown number of cores" if cores is None else f"{cores:.0f} core{'s' if cores != 1 else ''}",
        "unknown memory" if memory is None else f"{memory:.0f} GB",
        *([] if gpu is None else [short(gpu, 80)]),
    ]
    return "an unknown machine" if cpu is None and cores is None and memory is None and gpu is None else ", ".join(parts)


def summary_lines(run_root: Path) -> list[str]:
    """The summary as exactly ten lines of plain text, for the terminal.

    Raises:
        KitError: there is no such run folder.
    """
    return [short(f"{line.label}: {line.text}", 600) for line in summary(Evidence(run_root))]


# ---- checks that the report makes itself


def checks(e: Evidence, stage: str) -> list[Check]:
    """What can be held against the facts of a stage, with the verdict; an unknown fact gives an unknown verdict."""
    made = {"02": _check_config, "03": _check_extraction, "04": _check_vocab, "05": _check_training, "06": _check_evaluation}.get(
        stage
    )
    return made(e) if made else []


def _check_steps(e: Evidence) -> list[Check]:
    """Whether each step was built on what now lies in the folders it names: the stale-map failure."""
    digests = {name: value_digest([m.get("inputs"), m.get("outputs")]) for name, m in e.manifests.items()}
    found = []
    for name, manifest in e.manifests.items():
        for key, value in mapping(manifest.get("inputs")).items():
            if key in digests and key != name and isinstance(value, str) and re.fullmatch(r"[0-9a-f]{32}", value):
                found.append((name, key, value == digests[key]))
    told = "Step {} was made from another {} than the one now in the run"
    wrong = [Check("fail", told.format(name, key)) for name, key, same in found if not same]
    if wrong or not found:
        return wrong
    return [Check("ok", f"Every step was made from what the run now holds ({len(found)} links between steps compared)")]


def _check_config(e: Evidence) -> list[Check]:
    """The checks that stage 02 made, and kept."""
    kept = rows(mapping(e.json("config/validation.json")).get("checks"))
    if not kept:
        return [Check("unknown", "Whether speculators and vLLM accept the drafter's config is unknown")]
    found = []
    for check in kept:
        state = str(check.get("state"))
        seen = f": {short(check.get('found'))}" if check.get("found") else ""
        wanted = f" (wanted {short(check.get('wanted'))})" if check.get("wanted") and state != "ok" else ""
        found.append(Check(state if state in SYMBOLS else "unknown", f"{short(check.get('name'))}{seen}{wanted}"))
    return found


def _check_extraction(e: Evidence) -> list[Check]:
    top1, mae = e.number("extraction.golden_top1"), e.number("extraction.golden_mae")
    if top1 is None or mae is None:
        return [Check("unknown", "The golden check has not been made: whether the right layer was recorded is unknown")]
    state, judged = _judge_golden(e, top1, mae)
    least, most = percent(number(e.param("golden_min_top1"))), fmt(e.param("golden_max_mae"))
    found = [
        Check(
            state,
            f"Golden check {judged}: top-1 agreement {percent(top1)} (wanted at least {least}), mean error {mae:.2g} nats "
            f"(wanted at most {most})",
        )
    ]
    found += [*_check_layers(e), *_check_origin(e)]
    slots = rows(e.golden().get("slots"))
    errors = [number(slot.get("mae")) for slot in slots]
    others = [error for error in errors[:-1] if error is not None]
    if others and errors[-1] is not None:
        apart = min(others) > 10 * errors[-1]
        found.append(
            Check(
                "ok" if apart else "warn",
                f"It tells layers apart: the best other slot is off by {min(others):.2g} nats, the right one by {errors[-1]:.2g}"
                if apart
                else "Another slot scores nearly as well as the right one: the check proves little for this target",
            )
        )
    return found


def _check_layers(e: Evidence) -> list[Check]:
    """Each slot against transformers, and each row's states against its own answer."""
    error, most, own = (
        e.number("extraction.layer_error"),
        number(e.param("golden_max_layer_error")),
        e.number("extraction.own_answers"),
    )
    found = []
    if error is None:
        found.append(
            Check(
                "unknown", "The auxiliary layers were not held against transformers: whether they are the right ones is unknown"
            )
        )
    elif most is not None:
        text = f"Every slot against transformers: largest relative error {error:.2g} (wanted at most {fmt(most)})"
        found.append(Check("ok" if error <= most else "fail", text))
    if own is not None:
        found.append(Check("ok", f"The states of every row predict its own answer: {percent(own)} of the positions looked at"))
    return found


def _check_origin(e: Evidence) -> list[Check]:
    """Whether the target wrote the answers, and what it costs where it did not."""
    label = mapping(e.json("data/origin.json"))
    if not label:
        return [Check("unknown", "Who wrote the answers was not recorded")]
    made = f"chat template {short(label.get('chat_template'))}, thinking {short(label.get('thinking'))}"
    if label.get("on_policy") is True:
        sampling = mapping(label.get("sampling"))
        who = f"{short(label.get('model'))} at {short(label.get('revision'))}, temperature {fmt(sampling.get('temperature'))}"
        return [Check("ok", f"On-policy: {who} wrote the answers; {made}")]
    share = e.number("data.off_policy_tokens")
    text = (
        f"Off-policy: the answers are the source's own ({made}). Tokens that the target would most likely not write: "
        f"{percent(share)}. On its own text the drafter accepts less than its accuracy in training says; how much less is not "
        "measured: only a second run with data_regenerate: true shows"
    )
    return [Check("warn", text)]


def _check_vocab(e: Evidence) -> list[Check]:
    share, least = e.number("vocab.heldout_coverage"), number(e.param("vocab_min_coverage"))
    if share is None:
        return [Check("unknown", "The coverage of the held-out answers is unknown")]
    text = f"The draft vocabulary covers {percent(share)} of the held-out answers' tokens"
    if least is None:
        return [Check("unknown", f"{text}; what was wanted is unknown")]
    return [Check("ok" if share >= least else "fail", f"{text} (wanted at least {percent(least)})")]


def _check_training(e: Evidence) -> list[Check]:
    log = e.log()
    if not log:
        return [Check("unknown", "There is no training log")]
    losses = [row.get("loss") for row in log if row.get("split") == "train"]
    bad = sum(number(loss) is None for loss in losses)
    found = [
        Check("fail", f"{bad} of {len(losses)} logged losses are not finite numbers")
        if bad
        else Check("ok", f"All {len(losses)} logged training losses are finite")
    ]
    held_out = [loss for row in log if row.get("split") == "val" and (loss := number(row.get("loss"))) is not None]
    if not held_out:
        found.append(Check("unknown", "No held-out loss was logged"))
    elif held_out[-1] > min(held_out):
        at = held_out.index(min(held_out)) + 1
        found.append(
            Check(
                "warn",
                f"The held-out loss was lowest at validation {at} of {len(held_out)} ({min(held_out):.3f}) and ended at "
                f"{held_out[-1]:.3f}: more epochs of the same data would not help",
            )
        )
    elif len(held_out) > 1:
        found.append(Check("ok", f"The held-out loss fell to its end, from {held_out[0]:.3f} to {held_out[-1]:.3f}"))
    return found


def _check_evaluation(e: Evidence) -> list[Check]:
    al, shares, found = e.number("acceptance.al"), e.positions(), []
    if al is None:
        found.append(Check("unknown", "The acceptance length has not been measured"))
    elif al < 1.05:
        found.append(
            Check(
                "fail",
                "The acceptance length is near 1: the drafter hardly ever helps. Silent causes: shifted auxiliary layers, an "
                "unshifted loss mask, weights lost in the export, another RoPE base, a stale vocabulary map",
            )
        )
    if al is not None and shares:
        gap = abs(al - 1 - sum(shares))
        found.append(
            Check(
                "ok" if gap <= 0.01 + 0.005 * len(shares) else "warn",
                f"The acceptance length is 1 plus the positions' shares: {al:.3f} against {1 + sum(shares):.3f}",
            )
        )
    simulated = e.number("train.simulated_al")
    if al is None or simulated is None:
        found.append(Check("unknown", "Training's simulated acceptance length cannot be compared with the served one"))
    else:
        agree = al - 1 >= 0.6 * (simulated - 1)
        told = f"training simulated an acceptance length of {simulated:.2f}, serving gave {al:.2f}"
        found.append(
            Check("ok", f"Trainer and server agree: {told}")
            if agree
            else Check(
                "warn", f"Serving accepts far less than training promised: {told}. Look at layers, shift, vocabulary map, weights"
            )
        )
    share = e.number("lossless.share")
    if share is None:
        found.append(Check("unknown", "Whether speculation is lossless has not been measured"))
    else:
        found.append(Check("ok" if share >= 1 else "fail", f"Outputs with speculation equal those without: {percent(share)}"))
    contestants = mapping(mapping(e.json("eval/speed.json")).get("contestants"))
    repeats = [len(numbers(mapping(entry).get("tokens_per_s"))) for entry in contestants.values()]
    if repeats:
        enough = min(repeats) >= 3
        found.append(
            Check(
                "ok" if enough else "warn",
                f"Speed was measured {min(repeats)} times" + ("" if enough else ": too few for a spread"),
            )
        )
    else:
        found.append(Check("unknown", "Speed has not been measured"))
    return found


# ---- pieces of the page


@dataclass(frozen=True)
class Bounds:
    """How much of long things the page takes, so that it stays within its size whatever a file holds."""

    text: int
    rows: int


def _state(state: str) -> Markup:
    return tag("span", SYMBOLS.get(state, "?"), cls=f"state {state}", role="img", aria_label=state)


def _table(
    head: Sequence[str], body: Iterable[Sequence[object]], right: Iterable[int] = (), bounds: Bounds | None = None
) -> Markup:
    """A table; the columns `right` are aligned right. Rows beyond the bounds are counted, not shown."""
    lines, ends = list(body), set(right)
    limit = bounds.rows if bounds else len(lines)
    look = ["r" if i in ends else None for i in range(len(head))]
    made = [tag("tr", *(tag("td", cell, cls=look[i]) for i, cell in enumerate(line))) for line in lines[:limit]]
    if len(lines) > limit:
        made.append(tag("tr", tag("td", f"… and {len(lines) - limit:,} more rows in the run's folder", colspan=len(head))))
    top = tag("tr", *(tag("th", name, cls=look[i], scope="col") for i, name in enumerate(head)))
    return tag("div", tag("table", tag("thead", top), tag("tbody", *made)), cls="wide")


def _shown(fact: Mapping[str, Any], bounds: Bounds) -> str:
    """A fact's value with its unit."""
    value, unit = fact.get("value"), str(fact.get("unit") or "")
    if unit == "share" and number(value) is not None:
        return percent(number(value))
    return short(fmt(value, unit), bounds.text)


_ELSEWHERE = ("versions.", "machine.", "stage.", "time.", "pipeline.", "memory.", "choice.")


def _facts_table(e: Evidence, names: Sequence[str], bounds: Bounds) -> Markup | None:
    if not names:
        return None
    body = [
        (
            tag("code", short(name, bounds.text)),
            _shown(e.facts[name], bounds),
            short(e.facts[name].get("source") or "", bounds.text),
        )
        for name in names
    ]
    return _table(("Fact", "Value", "How it was measured"), body, right=(1,), bounds=bounds)


def _figure(picture: Picture, left_out: bool) -> Markup:
    caption = picture.caption or picture.name
    if left_out:
        note = f"Picture left out to keep this page within {fmt_bytes(LIMIT_BYTES)}: "
        where = f"{picture.name} ({fmt_bytes(picture.size)}) is in the figures folder of the run."
        return tag("figure", tag("p", note, where, cls="note"), tag("figcaption", short(caption, 1000)))
    source = "data:image/png;base64," + base64.b64encode(picture.data).decode()
    width, height = (int.from_bytes(picture.data[at : at + 4], "big") for at in (16, 20))
    image = tag("img", src=source, alt=short(picture.alt, 1000), width=width, height=height)
    return tag("figure", image, tag("figcaption", short(caption, 1000)))


def _failure_box(e: Evidence) -> Markup | None:
    if e.failure is None:
        return None
    stage, message = e.failure
    message = clean(re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", message)).strip()
    if len(message) > 8000:
        message = message[:2000] + "\n[…]\n" + message[-6000:]
    done = e.completed()
    titles = {entry.number: entry.title for entry in STAGES}
    before = ", ".join(f"{key} {titles[key]}" for key in done)
    later = [entry.number for entry in STAGES if e.stale(entry.number)]
    old = [key for key in later if key in e.minutes()]
    return tag(
        "section",
        tag("h2", _state("fail"), f" Failed: {short(stage, 60)}", id="failure"),
        tag("pre", message or "no message was recorded"),
        tag("p", f"Completed before it: {before}." if before else "No stage had completed before it."),
        tag("p", f"Not run after it: {', '.join(later)}.") if later and not old else None,
        tag(
            "p",
            tag("b", f"What this page shows of stage{'s' if len(old) > 1 else ''} {', '.join(old)} is from an earlier run"),
            " and does not belong to the one that failed.",
        )
        if old
        else None,
        cls="failure",
    )


def _minutes_section(e: Evidence, bounds: Bounds) -> list[Markup | None]:
    minutes, whole = e.minutes(), e.number("pipeline.minutes")
    if not minutes:
        return [tag("p", "Unknown: no stage has been timed.")]
    total = sum(spent for key, spent in minutes.items() if not e.stale(key))
    largest = max([*minutes.values(), 1e-9])
    body: list[Sequence[object]] = []
    for stage in STAGES:
        name = f"{stage.number} {stage.title}" + (" (earlier run)" if e.stale(stage.number) and stage.number in minutes else "")
        spent = minutes.get(stage.number)
        if spent is None:
            body.append((name, "unknown", "", "", ""))
            continue
        peak = e.number(f"stage.{stage.number}.peak_gb")
        bar = tag("span", style=f"width:{max(0.0, min(1.0, spent / largest)) * 100:.1f}%", cls="bar")
        body.append(
            (
                name,
                f"{spent:.1f}",
                percent(spent / total) if total > 0 and not e.stale(stage.number) else "",
                "" if peak is None else f"{peak:.1f}",
                tag("span", bar, cls="track"),
            )
        )
    said = f"The stages' own work took {total:.1f} minutes."
    if e.failed is not None:
        said += " The run failed, so how long it would have taken as a whole is unknown."
    elif whole is not None and whole >= total:
        said += f" The run as a whole took {whole:.1f}; the other {whole - total:.1f} are kernels starting and notebooks saved."
    elif whole is not None:
        said += f" The last run as a whole took {whole:.1f}: it found work of an earlier one done and used it."
    else:
        said += " How long the run took as a whole is unknown."
    pieces = sorted(
        ((name, seconds) for name in e.facts if name.startswith("time.") and (seconds := e.number(name)) is not None),
        key=lambda item: -item[1],
    )
    parts = _table(
        ("Piece of work", "Time", "Stage"),
        [
            (
                short(name[5:].removesuffix("_s").replace("_", " "), bounds.text),
                fmt_duration(seconds),
                short(e.facts[name].get("stage"), 40),
            )
            for name, seconds in pieces
        ],
        right=(1,),
        bounds=bounds,
    )
    return [
        tag("p", said),
        _table(("Stage", "Minutes", "Share", "Peak GB", ""), body, right=(1, 2, 3)),
        tag("h3", "The longest pieces of work") if pieces else None,
        parts if pieces else None,
    ]


def _stage_section(e: Evidence, stage: Stage, pictures: Sequence[Picture], left_out: set[str], bounds: Bounds) -> Markup:
    spent = e.minutes().get(stage.number)
    if e.failed == stage.number:
        status = "This stage failed; what it recorded before that is below."
    elif e.stale(stage.number):
        status = (
            "What is below is from an earlier run: a stage before this one has failed since." if spent is not None else "Not run."
        )
    elif spent is None:
        status = "This stage has not completed."
    else:
        status = f"Took {spent:.1f} minutes."
    names = [
        name
        for name, fact in e.facts.items()
        if str(fact.get("stage", ""))[:2] == stage.number and not name.startswith(_ELSEWHERE)
    ]
    chosen = [name for name in e.facts if name.startswith("choice.") and str(e.facts[name].get("stage", ""))[:2] == stage.number]
    made = checks(e, stage.number)
    prose = _PROSE.get(stage.number)
    nothing = not names and not pictures and spent is None and e.failed != stage.number
    return tag(
        "section",
        tag("h2", f"{stage.number} {stage.title}", id=f"stage-{stage.number}"),
        tag("p", stage.purpose, " ", tag("span", status, cls="soft")),
        *([] if nothing or prose is None else prose(e, bounds)),
        *(_figure(picture, picture.name in left_out) for picture in pictures),
        *([tag("h3", "What was checked"), _check_rows(made)] if made and not nothing else []),
        *([tag("h3", "Chosen automatically"), _choices(e, chosen, bounds)] if chosen else []),
        *([tag("h3", "Facts"), _facts_table(e, names, bounds)] if names else []),
    )


def _choices(e: Evidence, names: Sequence[str], bounds: Bounds) -> Markup:
    body = [
        (
            tag("code", short(name[7:], bounds.text)),
            _shown(e.facts[name], bounds),
            short(e.facts[name].get("source"), bounds.text),
        )
        for name in names
    ]
    return _table(("What", "Value", "Why"), body, bounds=bounds)


def _check_rows(made: Iterable[Check]) -> Markup:
    return tag("ul", *(tag("li", _state(check.state), " ", check.text) for check in made), cls="checks")


# ---- what each stage says, from its facts


def _say(*sentences: str) -> Markup:
    return tag("p", " ".join(sentences))


def _prose_00(e: Evidence, _: Bounds) -> list[Markup]:
    return [_say(f"The machine: {machine_sentence(e)}.")]


def _prose_02(e: Evidence, bounds: Bounds) -> list[Markup]:
    layers, aux = e.param("drafter_layers"), e.value("drafter.aux_layers") or e.param("aux_layers")
    which = "those that the kit chooses from the target's depth" if aux == [] else fmt(aux)
    many = "layer" if layers == 1 else "layers"
    made = [_say(f"The drafter has {fmt(layers)} {many} of its own and reads the target's auxiliary layers: {which}.")]
    fields = rows(mapping(e.json("config/derivation.json")).get("fields"))
    if fields:
        told = {"target": "the target prescribes it", "parent": "the published drafter", "chosen": "chosen", "dropped": "dropped"}
        order = ["chosen", "target", "parent", "dropped"]
        fields.sort(key=lambda field: order.index(found) if (found := str(field.get("source"))) in order else len(order))
        body = [
            (
                tag("code", short(field.get("name"), 80)),
                "" if field.get("source") == "dropped" else short(_param(field.get("value")), bounds.text),
                told.get(str(field.get("source")), short(field.get("source"), 40)),
                short(field.get("reason"), bounds.text),
            )
            for field in fields
        ]
        made += [
            tag("h3", "Every field of the config, and why"),
            _table(("Field", "Value", "From", "Reason"), body, bounds=bounds),
        ]
    return made


def _prose_03(e: Evidence, bounds: Bounds) -> list[Markup]:
    size, rate = e.number("extraction.bytes"), e.number("extraction.tokens_per_s")
    form = ", rounded to one byte a number" if e.param("extraction_storage") == "fp8" else ""
    said = _say(
        f"The target's own answers gave {e.count('data.train_tokens', 'training tokens')} and",
        f"{e.count('data.heldout_prompts', 'held-out prompts')}.",
        f"Hidden states were recorded for {e.count('extraction.tokens', 'tokens')},",
        f"of unknown size on disk{form}." if size is None else f"{fmt_bytes(size)} on disk{form}.",
        "At what rate is unknown." if rate is None else f"Answers and states came at {rate:,.0f} tokens a second.",
    )
    dropped = {str(why): number(n) for why, n in mapping(mapping(e.json("data/rows.json")).get("dropped")).items()}
    made = [said]
    if dropped:
        lost = [(short(why, bounds.text), fmt(None if n is None else int(n))) for why, n in dropped.items()]
        made += [tag("h3", "What was dropped"), _table(("Reason", "Conversations"), lost, right=(1,), bounds=bounds)]
    slots = rows(e.golden().get("slots"))
    if slots:
        right = len(slots) - 1
        body = [
            (
                tag("b", f"layer {fmt(slot.get('id'))}, the right one") if i == right else f"layer {fmt(slot.get('id'))}",
                percent(number(slot.get("top1"))),
                fmt(number(slot.get("mae"))),
            )
            for i, slot in enumerate(slots)
        ]
        counted = e.golden().get("positions")
        made += [
            tag("h3", "Golden check, every recorded slot"),
            _say(
                f"Each slot went through the target's own output head at {fmt(counted)} positions. Only the right one may agree."
            ),
            _table(("Slot", "Same most likely token", "Mean error (nats)"), body, right=(1, 2), bounds=bounds),
        ]
    return made


def _prose_04(e: Evidence, bounds: Bounds) -> list[Markup]:
    curve = mapping(e.json("vocab/coverage.json"))
    said = _say(
        f"The drafter can propose {e.count('vocab.size', 'tokens')}, the most frequent ones of the training answers.",
        f"They cover {percent(e.number('vocab.heldout_coverage'))} of the held-out answers; the rest can never be guessed right.",
    )
    sizes, held_out, train = (numbers(curve.get(key)) for key in ("sizes", "heldout", "train"))
    if not sizes or len(sizes) != len(held_out) or len(sizes) != len(train):
        return [said]
    chosen = number(curve.get("chosen"))
    body = [
        (tag("b", f"{size:,.0f} (chosen)") if size == chosen else f"{size:,.0f}", percent(a), percent(b))
        for size, a, b in zip(sizes, held_out, train, strict=True)
    ]
    return [said, _table(("Draft vocabulary", "Held-out covered", "Training covered"), body, right=(0, 1, 2), bounds=bounds)]


def _prose_05(e: Evidence, _: Bounds) -> list[Markup]:
    pace, first, simulated = e.number("train.seconds_per_step"), e.number("train.val_acc_1"), e.number("train.simulated_al")
    said = [
        _say(
            f"Training took {e.count('train.steps', 'optimizer steps')},",
            "each of unknown length." if pace is None else f"{pace:.2f} seconds each.",
            f"On held-out text the drafter's first guess is the target's own token at {percent(first)} of positions;",
            "what acceptance length that promises is unknown."
            if simulated is None
            else f"its accuracies promise an acceptance length of {simulated:.2f}.",
        )
    ]
    last = next((row for row in reversed(e.log()) if row.get("split") == "val"), None)
    if last is not None and (accuracies := numbers(last.get("acc"))):
        told = ", ".join(f"{percent(share)} at step {i + 1}" for i, share in enumerate(accuracies))
        said.append(_say(f"Full accuracy by TTT step at the last validation: {told}."))
    return said


def _prose_06(e: Evidence, bounds: Bounds) -> list[Markup]:
    made = [_say(f"{line.label}: {line.text}.") for line in (_al(e), _lossless(e), _speed(e))]
    shares, reached = e.positions(), e.positions("conditional")
    if shares:
        body = [
            (f"{i + 1}", percent(share), percent(reached[i]) if i < len(reached) else "unknown") for i, share in enumerate(shares)
        ]
        made += [
            tag("h3", "Acceptance by position"),
            _table(("Position", "Of all drafts", "Of drafts accepted up to there"), body, right=(0, 1, 2), bounds=bounds),
        ]
    kinds = e.by_kind()
    if kinds:
        ordered = sorted(kinds.items(), key=lambda item: -(number(item[1].get("al")) or 0))
        kind_rows = [(short(kind, bounds.text), _two(entry.get("al")), fmt(entry.get("prompts"))) for kind, entry in ordered]
        made += [
            tag("h3", "Acceptance by kind of prompt"),
            _table(("Kind", "Acceptance length", "Prompts"), kind_rows, right=(1, 2), bounds=bounds),
        ]
    return made + _groups_table(e, bounds) + _speed_table(e, bounds) + _drafting(e) + _differences(e, bounds)


def _groups_table(e: Evidence, bounds: Bounds) -> list[Markup]:
    """The sweep's acceptance by group: length, and each position's share of all drafts and of those accepted up to there."""

    def shares(value: Any) -> str:
        return ", ".join(map(percent, numbers(value))) or "unknown"

    body = [
        (
            f"{short(row.get('by'), bounds.text)}: {short(row.get('group'), bounds.text)}",
            f"{_two(row.get('al'))}{_interval(number(row.get('low')), number(row.get('high')))}",
            shares(row.get("unconditional")),
            shares(row.get("conditional")),
        )
        for row in rows(mapping(e.json("eval/sweep.json")).get("groups"))
    ]
    if not body:
        return []
    head = ("Group", "Acceptance length", "By position, of all drafts", "Of drafts accepted up to there")
    return [tag("h3", "Acceptance by group, from the sweep"), _table(head, body, bounds=bounds)]


def _drafting(e: Evidence) -> list[Markup]:
    found = mapping(mapping(e.json("eval/sweep.json")).get("drafting"))
    if not found:
        return []
    shares = numbers(found.get("share"))
    text = f"at least {percent(shares[0])} ({percent(shares[1])} to {percent(shares[2])})" if len(shares) == 3 else "unknown"
    how = "derived from timed steps of one request; vLLM does not count it"
    return [_say(f"Share of a speculative step that drafting takes: {text}, {how}" + ("." if shares else ": within the noise."))]


_CONTESTANTS: dict[Any, str] = {"none": "no speculation", "ngram": "n-gram", "eagle3": "EAGLE-3"}


def _two(value: Any) -> str:
    found = number(value)
    return "unknown" if found is None else f"{found:.2f}"


def _speed_table(e: Evidence, bounds: Bounds) -> list[Markup]:
    record = mapping(e.json("eval/speed.json"))
    contestants, ratios = mapping(record.get("contestants")), mapping(record.get("ratios"))
    body = []
    for name, entry in contestants.items():
        repeats = numbers(mapping(entry).get("tokens_per_s"))
        ratio = mapping(ratios.get(name))
        low, high = number(ratio.get("low")), number(ratio.get("high"))
        against = "1 (the baseline)" if name == "none" else "unknown"
        if ratio:
            against = f"{_two(ratio.get('median'))}x{_interval(low, high)}: {speed_verdict(low, high)[1]}"
        body.append(
            (
                _CONTESTANTS.get(name, short(name, bounds.text)),
                f"{median(repeats):.1f}" if repeats else "unknown",
                short(", ".join(f"{rate:.1f}" for rate in repeats), bounds.text),
                against,
            )
        )
    if not body:
        return []
    said = f"Every repeat of every contestant: {fmt(record.get('prompts'))} prompts, {fmt(record.get('concurrency'))} at a time."
    head = ("Contestant", "Median tokens/s", "Each repeat", "Against no speculation")
    return [tag("h3", "Speed"), _say(said), _table(head, body, right=(1,), bounds=bounds)]


def _differences(e: Evidence, bounds: Bounds) -> list[Markup]:
    record, made = mapping(e.json("eval/lossless.json")), []
    head = ("Speculation", "Prompt", "At token", "Token without", "Its log-probability", "Token with", "Its log-probability")
    for key, title, note in (
        ("ties", "Ties", "Outputs that part where two tokens are as likely as each other to within arithmetic."),
        ("differences", "Differences", "Outputs that part where the tokens are not tied: these are losses."),
    ):
        found = rows(record.get(key))
        if not found:
            continue
        within = number(record.get("tie_nats"))
        if key == "ties" and within is not None:
            note += f" A tie is a difference of at most {within:g} nats in log-probability."
        body = [
            (
                short(_CONTESTANTS.get(row.get("contestant"), row.get("contestant") or "unknown"), 60),
                short(row.get("prompt_id"), bounds.text),
                fmt(row.get("position")),
                short(_token(row.get("expected")), bounds.text),
                _logprob(row.get("logprob_expected")),
                short(_token(row.get("got")), bounds.text),
                _logprob(row.get("logprob_got")),
            )
            for row in found
        ]
        made += [tag("h3", f"{title} ({len(found)})"), _say(note), _table(head, body, right=(2, 4, 6), bounds=bounds)]
    return made


def _logprob(value: Any) -> str:
    found = number(value)
    return "unknown" if found is None else f"{found:.4f}"


def _token(value: Any) -> str:
    """A token, by its text or its id; none where the answer had ended."""
    return "end of the answer" if value is None else repr(value)


_PROSE: dict[str, Callable[[Evidence, Bounds], list[Markup]]] = {
    "00": _prose_00,
    "02": _prose_02,
    "03": _prose_03,
    "04": _prose_04,
    "05": _prose_05,
    "06": _prose_06,
}


# ---- the page's end: parameters, versions, machine, how to reproduce


def _params_section(e: Evidence, bounds: Bounds) -> list[Markup]:
    if not e.params:
        return [tag("p", "Unknown: the run recorded no parameters.")]
    changed = {name for name, row in e.params.items() if row.get("value") != row.get("default")}
    made = [_say(f"{len(e.params)} parameters, {len(changed)} of them not at their default: marked, and first in their group.")]
    if e.unequal:
        told = [
            tag("li", _state("warn"), f" {short(name, 60)}: {short('; '.join(by), bounds.text)}")
            for name, by in e.unequal.items()
        ]
        made += [
            tag("p", "Not every notebook had the same value; the table shows the one that was set last:"),
            tag("ul", *told, cls="checks"),
        ]
    head = ("Parameter", "Value", "Origin", "Default", "Meaning")
    body, group, ordered = [], None, list(e.params.items())
    order = list(dict.fromkeys(str(row.get("group") or "") for _, row in ordered))
    ordered.sort(key=lambda item: (order.index(str(item[1].get("group") or "")), item[0] not in changed))
    for name, row in ordered[: max(bounds.rows, 120)]:
        if row.get("group") != group:
            group = row.get("group")
            body.append(tag("tr", tag("th", short(group or "other", 60), colspan=len(head), scope="colgroup"), cls="group"))
        unit = str(row.get("unit") or "")
        cells = (
            tag("code", ("● " if name in changed else "") + short(name, 80)),
            short(_param(row.get("value")), bounds.text) + (f" {short(unit, 30)}" if unit and unit != "share" else ""),
            short(row.get("origin"), 60),
            short(_param(row.get("default")), bounds.text),
            short(row.get("description"), bounds.text),
        )
        body.append(tag("tr", *(tag("td", cell) for cell in cells), cls="changed" if name in changed else None))
    top = tag("tr", *(tag("th", name, scope="col") for name in head))
    return [*made, tag("div", tag("table", tag("thead", top), tag("tbody", *body), cls="params"), cls="wide")]


def _param(value: Any) -> str:
    """A parameter's value as a params file has it; JSON is YAML for scalars and lists."""
    return value if isinstance(value, str) and value else json.dumps(value, ensure_ascii=False)


def _named(e: Evidence, prefix: str, what: str, missing: str, bounds: Bounds) -> Markup:
    names = [name for name in e.facts if name.startswith(prefix)]
    if not names:
        return tag("p", f"Unknown: the run recorded no {missing}.")
    body = [(short(name[len(prefix) :].replace("_", " "), bounds.text), _shown(e.facts[name], bounds)) for name in names]
    return _table((what.capitalize(), "Found"), body, bounds=bounds)


def _steps_table(e: Evidence, bounds: Bounds) -> Markup:
    body = [
        (short(name, 60), "done", moment(m.get("finished")) or "unknown", _seconds(m.get("seconds")))
        for name, m in e.manifests.items()
    ]
    body += [(short(name, 60), "begun, not finished", "", "") for name in e.begun if name not in e.manifests]
    if not body:
        return tag("p", "Unknown: no step has left a manifest.")
    return _table(("Step", "State", "Finished", "Took"), body, right=(3,), bounds=bounds)


def _seconds(value: Any) -> str:
    found = number(value)
    return "unknown" if found is None else fmt_duration(found)


def _reproduce_section(e: Evidence) -> list[Markup | None]:
    file = e.value("run.params_file")
    file = file if isinstance(file, str) and file else f"params/{e.name}.yaml"
    changed = {name: row for name, row in e.params.items() if row.get("value") != row.get("default")}
    text = "\n".join(f"{name}: {json.dumps(row.get('value'), ensure_ascii=False)}" for name, row in changed.items())
    by_hand = [name for name, row in e.params.items() if row.get("origin") in {"notebook", "command line"}]
    return [
        tag("pre", f"eagle3kit run {short(file, 200)}"),
        tag("p", f"Set apart from that file: {short(', '.join(by_hand), 600)}.") if by_hand else None,
        tag("p", "The same parameters as a file of their own, defaults left out:") if text else None,
        tag("pre", clean(text)[:20_000]) if text else None,
        tag(
            "p",
            "On another machine the acceptance should come out alike, up to rounding in training; tokens per second and their "
            "ratios belong to the machine they were measured on.",
        ),
    ]


_CSS = """
:root{color-scheme:light dark;--ink:#1b222c;--soft:#586270;--page:#ffffff;--card:#f5f7f9;--line:#dde2e8;--link:#0061a4;
--ok:#177245;--warn:#8a5b00;--fail:#b02a1a;--mark:#fff4d4;--bar:#0072b2}
@media (prefers-color-scheme:dark){:root{--ink:#e4e8ee;--soft:#a2acb9;--page:#14181e;--card:#1d232b;--line:#37404c;--link:#7cc0f5;
--ok:#5ed29b;--warn:#f0b64d;--fail:#ff8a75;--mark:#3a3115;--bar:#56b4e9}}
*{box-sizing:border-box}
body{margin:0 auto;padding:1.2rem 1rem 4rem;max-width:58rem;background:var(--page);color:var(--ink);
font:16px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",sans-serif;overflow-wrap:break-word}
h1{font-size:1.75rem;line-height:1.25;margin:.4rem 0 .2rem}
h2{font-size:1.3rem;line-height:1.3;margin:2.6rem 0 .5rem;padding-top:.9rem;border-top:1px solid var(--line)}
h3{font-size:1.02rem;margin:1.4rem 0 .3rem}
p{margin:.5rem 0}a{color:var(--link)}.soft,figcaption,.note{color:var(--soft)}
code,pre{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;font-size:.86em}
pre{background:var(--card);border:1px solid var(--line);border-radius:6px;padding:.7rem .9rem;white-space:pre-wrap;
overflow-wrap:anywhere}
nav{font-size:.9rem;margin:1.2rem 0 0;color:var(--soft)}nav a{margin-right:.9rem;display:inline-block}
.summary{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:.4rem 1.1rem;margin:1rem 0;list-style:none}
.summary li{display:grid;grid-template-columns:1.3rem 9.6rem 1fr;gap:.5rem;padding:.5rem 0;border-bottom:1px solid var(--line)}
.summary li:last-child{border-bottom:0}.summary b{font-weight:600}
.state{font-weight:700}.state.ok{color:var(--ok)}.state.warn{color:var(--warn)}.state.fail{color:var(--fail)}
.state.unknown{color:var(--soft)}
.failure{border:2px solid var(--fail);border-radius:8px;padding:.2rem 1.1rem .8rem;margin:1rem 0}
.failure h2{border:0;margin:.6rem 0 .4rem;padding:0;color:var(--fail)}
.checks{list-style:none;padding-left:0}.checks li{padding:.15rem 0 .15rem 1.5rem;position:relative}
.checks .state{position:absolute;left:0}
.wide{overflow-x:auto;margin:.6rem 0}
table{border-collapse:collapse;font-size:.9rem;min-width:min(100%,24rem)}
th,td{text-align:left;vertical-align:top;padding:.3rem 1.3rem .3rem 0;border-bottom:1px solid var(--line)}
thead th{border-bottom:2px solid var(--line);white-space:nowrap;font-weight:600}
.r{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
td code{white-space:nowrap}
.group th{padding-top:1.1rem;font-weight:600;color:var(--soft);border-bottom:1px solid var(--line)}
.params td:nth-child(2),.params td:nth-child(4){overflow-wrap:anywhere;min-width:6.8rem}.params td:nth-child(2){min-width:8rem}
.params td:nth-child(5){min-width:14rem}.changed td{background:var(--mark)}.changed td:first-child{font-weight:600}
.track{display:block;width:12rem;height:.8rem;margin-top:.3rem;background:var(--card);border-radius:3px}
.bar{display:block;height:100%;background:var(--bar);border-radius:3px;min-width:2px}
figure{margin:1rem 0}figure img{display:block;max-width:100%;height:auto;background:#fff;border-radius:6px;
border:1px solid var(--line)}
figcaption{font-size:.9rem;margin-top:.35rem}
.note{background:var(--card);border:1px dashed var(--line);border-radius:6px;padding:.6rem .9rem}
dt{font-weight:600;margin-top:.6rem}dd{margin:0 0 0 1rem}
@media (max-width:40rem){body{font-size:15px;padding:.8rem .8rem 3rem}.summary{padding:.2rem .8rem}
.summary li{grid-template-columns:1.2rem 1fr}.summary li span:last-child{grid-column:2}
.track{display:none}td:first-child{min-width:7rem}
th,td{padding-right:.8rem}h1{font-size:1.4rem}}
@media print{:root{color-scheme:light;--ink:#000;--soft:#444;--page:#fff;--card:#f5f5f5;--line:#bbb;--link:#000;--ok:#177245;
--warn:#8a5b00;--fail:#b02a1a;--mark:#fff4d4;--bar:#0072b2}body{max-width:none;font-size:10.5pt;padding:0}nav{display:none}
figure,tr,.summary li,.failure{break-inside:avoid}h2,h3{break-after:avoid}.wide{overflow:visible}td code{white-space:normal}
.track,.bar,.changed td{print-color-adjust:exact;-webkit-print-color-adjust:exact}}
"""


def whole_page(title: str, body: Iterable[object], about: Mapping[str, object] | None = None) -> bytes:
    """A whole page. `about` is what the index shows of it."""
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    head = [
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="referrer", content="no-referrer"),
        tag("meta", name="eagle3kit", content=json.dumps(about)) if about is not None else "",
        tag("title", title),
        tag("style", Markup(_CSS)),
    ]
    html = tag("html", tag("head", join(head, "\n")), "\n", tag("body", join(body, "\n")), lang="en")
    return ("<!DOCTYPE html>\n" + html + "\n").encode("utf-8", "replace")


def _report(e: Evidence, pictures: Sequence[Picture], left_out: set[str], bounds: Bounds) -> bytes:
    """The page of one run, without the pictures `left_out`."""
    title = f"{e.name}: an EAGLE-3 drafter for {short(target(e), 80)}"
    lines = summary(e)
    finished = e.finished()
    across = _check_steps(e)
    sections = [("minutes", "Where the minutes went"), *((f"stage-{s.number}", f"{s.number} {s.title}") for s in STAGES)]
    sections += [
        ("parameters", "Parameters"),
        ("versions", "Versions"),
        ("machine", "Machine"),
        ("steps", "Steps"),
        ("reproduce", "How to reproduce"),
        ("glossary", "Glossary"),
    ]
    known = {stage.number for stage in STAGES}
    others = [picture for picture in pictures if picture.name[:2] not in known]
    loose = [
        name for name, fact in e.facts.items() if str(fact.get("stage", ""))[:2] not in known and not name.startswith(_ELSEWHERE)
    ]
    body: list[object] = [
        tag("h1", title),
        tag("p", f"Run {e.name}; the last step finished {finished or 'at an unknown time'}.", cls="soft"),
        tag(
            "ul",
            *(tag("li", _state(line.state), tag("b", line.label), tag("span", short(line.text, 600))) for line in lines),
            cls="summary",
            id="summary",
        ),
        _failure_box(e) or "",
        tag("nav", *(join([tag("a", name, href=f"#{anchor}"), " "]) for anchor, name in sections), aria_label="Sections"),
        tag("section", tag("h2", "Where the minutes went", id="minutes"), *_minutes_section(e, bounds)),
    ]
    for stage in STAGES:
        own = [picture for picture in pictures if picture.name[:2] == stage.number]
        body.append(_stage_section(e, stage, own, left_out, bounds))
    if others or loose:
        body.append(
            tag(
                "section",
                tag("h2", "Besides"),
                *(_figure(picture, picture.name in left_out) for picture in others),
                _facts_table(e, loose, bounds),
            )
        )
    body += [
        tag("section", tag("h2", "Parameters", id="parameters"), *_params_section(e, bounds)),
        tag("section", tag("h2", "Versions", id="versions"), _named(e, "versions.", "package", "versions", bounds)),
        tag("section", tag("h2", "Machine", id="machine"), _named(e, "machine.", "part", "machine", bounds)),
        tag("section", tag("h2", "Steps", id="steps"), _steps_table(e, bounds), _check_rows(across) if across else None),
        tag("section", tag("h2", "How to reproduce", id="reproduce"), *_reproduce_section(e)),
        tag(
            "section",
            tag("h2", "Glossary", id="glossary"),
            tag("dl", *(join([tag("dt", term), tag("dd", meaning)]) for term, meaning in GLOSSARY.items())),
        ),
    ]
    if e.problems:
        told = (tag("li", _state("warn"), " ", short(problem, bounds.text)) for problem in dict.fromkeys(e.problems))
        body.append(tag("section", tag("h2", "What could not be read"), tag("ul", *list(told)[: bounds.rows], cls="checks")))
    about = {
        "run": e.name,
        "target": short(target(e), 80),
        "state": lines[0].state,
        "outcome": short(lines[0].text),
        "al": None if e.stale("06") else e.number("acceptance.al"),
        "ratio": None if e.stale("06") else e.number("speed.eagle3.ratio"),
        "minutes": sum(spent for key, spent in e.minutes().items() if not e.stale(key)) or None,
        "finished": finished,
    }
    return whole_page(title, body, about)


def build(run_root: Path, reports_dir: Path) -> Path:
    """Write the report of a run and bring the index of reports up to date.

    A page above `LIMIT_BYTES` loses its largest pictures, one by one, each with a note in its place; then long texts and tables
    are cut.

    Args:
        run_root: the run's folder, `runs/<run_name>`.
        reports_dir: where `<run_name>.html` is written.

    Raises:
        KitError: there is no such run, or the disk is full.
    """
    e = Evidence(run_root)
    pictures = e.pictures()
    left_out = {picture.name for picture in pictures if not picture.data}
    by_size = sorted((p for p in pictures if p.name not in left_out), key=lambda p: p.size)
    bounds = Bounds(text=400, rows=300)
    page = _report(e, pictures, left_out, bounds)
    while len(page) > LIMIT_BYTES and by_size:
        left_out.add(by_size.pop().name)
        page = _report(e, pictures, left_out, bounds)
    if len(page) > LIMIT_BYTES:
        page = _report(e, pictures[:50], left_out, Bounds(text=120, rows=60))
    name = e.name if e.name.lower() != "index" else "index_run"  # index.html is the list of reports
    path = write_atomic(Path(reports_dir) / f"{name}.html", page)
    index(reports_dir)
    return path


# ---- several runs


def compare(run_roots: Sequence[Path], reports_dir: Path | None = None) -> Path:
    """Write a page with the facts of several runs side by side.

    It says first whether they may be compared: which parameters differ, and whether the intervals of acceptance overlap.

    Args:
        run_roots: two or more run folders; the first is what the others are held against.
        reports_dir: where `compare_<A>_<B>.html` is written; by default the checkout's `reports/`.

    Raises:
        KitError: fewer than two runs, or one does not exist.
    """
    if len(run_roots) < 2:
        raise KitError("a comparison needs two runs", seen=len(run_roots), wanted="two or more run folders")
    runs = [Evidence(root) for root in run_roots]
    names = [e.name if [o.name for o in runs].count(e.name) == 1 else f"{e.name} ({i + 1})" for i, e in enumerate(runs)]
    bounds = Bounds(text=200, rows=400)
    body: list[object] = [
        tag("h1", "Runs side by side: " + ", ".join(names)),
        tag("h2", "May they be compared?"),
        _check_rows(_comparable(runs, names)),
        tag("h2", "Summary"),
        _table(
            ("", *names),
            [
                (line.label, *(short(other[i].text, 300) for other in map(summary, runs)))
                for i, line in enumerate(summary(runs[0]))
            ],
        ),
    ]
    params = [name for name in dict.fromkeys(name for e in runs for name in e.params) if name != "run_name"]
    unlike = [name for name in params if len({json.dumps(e.param(name)) for e in runs}) > 1]
    body.append(tag("h2", "Parameters that differ"))
    cells = [
        (tag("code", name), *(short(_param(e.param(name)), 200) if name in e.params else "unknown" for e in runs))
        for name in unlike
    ]
    body.append(_table(("Parameter", *names), cells, bounds=bounds) if cells else tag("p", "None."))
    facts = sorted({name for e in runs for name in e.facts})
    body.append(tag("h2", "Facts"))
    head = ("Fact", *names, *(["Change"] if len(runs) == 2 else []))
    lines = [
        (
            tag("code", short(name, 100)),
            *(_shown(e.facts[name], bounds) if name in e.facts else "unknown" for e in runs),
            *([_change(runs[0].number(name), runs[1].number(name))] if len(runs) == 2 else []),
        )
        for name in facts
    ]
    body.append(_table(head, lines, right=range(1, len(head)), bounds=bounds) if lines else tag("p", "No facts are recorded."))
    about = {"run": "compare: " + ", ".join(names), "compare": True}
    page = whole_page("Runs side by side", body, about)
    if len(page) > LIMIT_BYTES:
        page = whole_page("Runs side by side", [*body[:-1], tag("p", "The table of facts is too long for this page.")], about)
    file = "compare_" + "_".join(re.sub(r"[^A-Za-z0-9.-]+", "-", name).strip("-") for name in names)
    folder = project_path("reports") if reports_dir is None else Path(reports_dir)
    path = write_atomic(folder / f"{file[:120]}.html", page)
    index(folder)
    return path


def _change(a: float | None, b: float | None) -> str:
    if a is None or b is None:
        return ""
    if a == b:
        return "same"
    return f"{(b - a) / abs(a):+.1%}".replace("%", " %") if a else f"{b - a:+.3g}"


def _comparable(runs: Sequence[Evidence], names: Sequence[str]) -> list[Check]:
    found = []
    for group, why in (
        ("target", "they have different targets"),
        ("data", "their prompts or answers were made differently"),
        ("evaluation", "they were measured differently"),
        ("serving", "they were served differently, which moves speed"),
        ("hardware", "they ran on different hardware, which moves speed"),
    ):
        of_group = [name for name in runs[0].params if runs[0].params[name].get("group") == group]
        unlike = [name for name in of_group if len({json.dumps(e.param(name)) for e in runs}) > 1]
        if unlike:
            found.append(Check("warn", f"{why[0].upper()}{why[1:]}: {short(', '.join(unlike), 200)}"))
    if not all(e.params for e in runs):
        found.append(Check("unknown", "Not every run recorded its parameters: whether they may be compared is unknown"))
    elif not found:
        found.append(Check("ok", "Same target, data, evaluation, serving and hardware parameters"))
    for e, run_name in zip(runs, names, strict=True):
        if e.failure is not None:
            told = f"{run_name} failed in stage {short(e.failure[0], 40)}: what it has of later stages is from an earlier run"
            found.append(Check("fail", told))
    cpus = {machine_sentence(e) for e in runs}
    if len(cpus) > 1:
        found.append(Check("warn", "Their machines differ: compare acceptance, not speed"))
    for i, e in enumerate(runs[1:], 1):
        low, high = (
            [run.number("acceptance.al.low") for run in (runs[0], e)],
            [run.number("acceptance.al.high") for run in (runs[0], e)],
        )
        if low[0] is None or low[1] is None or high[0] is None or high[1] is None:
            found.append(Check("unknown", f"Whether the acceptance of {names[i]} differs from that of {names[0]} is unknown"))
        elif high[0] < low[1]:
            found.append(
                Check("ok", f"{names[i]} has a higher acceptance length than {names[0]}: their intervals do not overlap")
            )
        elif high[1] < low[0]:
            found.append(Check("ok", f"{names[i]} has a lower acceptance length than {names[0]}: their intervals do not overlap"))
        else:
            found.append(Check("warn", f"{names[i]} and {names[0]} do not differ in acceptance length beyond their intervals"))
    return found


# ---- the index


class _About(HTMLParser):
    """Finds what a report says of itself for the index, and its title."""

    def __init__(self) -> None:
        super().__init__()
        self.about: Mapping[str, Any] = {}

    def handle_starttag(self, name: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if name == "meta" and given.get("name") == "eagle3kit":
            try:
                self.about = mapping(json.loads(given.get("content") or ""))
            except (ValueError, RecursionError):
                self.about = {}


def index(reports_dir: Path) -> Path:
    """Write `index.html`, which lists the reports of a folder, the latest first.

    Raises:
        KitError: the disk is full.
    """
    folder = Path(reports_dir)
    found = []
    for path in sorted(folder.glob("*.html")) if folder.is_dir() else []:
        if path.name == "index.html":
            continue
        parser = _About()
        with path.open("rb") as file:
            parser.feed(file.read(16_384).decode("utf-8", "replace"))
        found.append((path, parser.about))
    found.sort(key=lambda item: str(item[1].get("finished") or ""), reverse=True)
    body = []
    for path, about in found:
        link = tag("a", short(about.get("run") or path.stem, 100), href=quote(path.name))
        if not about or about.get("compare"):
            body.append((link, "", "", "", "", "", "" if about else "not a report of this kit"))
            continue
        ratio, minutes = number(about.get("ratio")), number(about.get("minutes"))
        body.append(
            (
                link,
                short(about.get("target"), 80),
                _two(about.get("al")),
                "unknown" if ratio is None else f"{ratio:.2f}x",
                "unknown" if minutes is None else f"{minutes:.1f}",
                tag("span", short(about.get("finished") or "unknown", 40), style="white-space:nowrap"),
                join([_state(str(about.get("state"))), " ", short(about.get("outcome"), 200)]),
            )
        )
    head = ("Run", "Target", "AL", "Speed", "Minutes", "Finished", "Outcome")
    listed = _table(head, body, right=(2, 3, 4)) if body else tag("p", "There is no report yet: make one with eagle3kit run.")
    note = tag(
        "p",
        "AL: tokens gained per forward pass of the target, 1 when nothing is accepted. Speed: against no speculation.",
        cls="soft",
    )
    return write_atomic(folder / "index.html", whole_page("Reports", [tag("h1", "Reports"), listed, note]))
