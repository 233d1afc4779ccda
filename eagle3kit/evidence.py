"""What a report can know of a run: facts, files, pictures and stages, read so that nothing missing or damaged stops it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from eagle3kit.errors import KitError
from eagle3kit.params import SPECS
from eagle3kit.widgets import clean, fmt, fmt_bytes, is_number

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
