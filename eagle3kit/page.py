"""The report's HTML: sections, tables and pictures of one run, within a size that mail and chat take.

The page opens offline: no script, no address that a browser would fetch, and a Content-Security-Policy that would stop one. Model
output, file contents and error messages reach it only through `widgets.tag`, which escapes.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from eagle3kit.evidence import (
    GLOSSARY,
    LIMIT_BYTES,
    STAGES,
    Check,
    Evidence,
    Picture,
    Stage,
    mapping,
    moment,
    number,
    numbers,
    percent,
    rows,
    short,
)
from eagle3kit.findings import (
    LONGEST,
    al_line,
    check_steps,
    checks,
    interval_text,
    lossless_line,
    machine_sentence,
    speed_line,
    speed_verdict,
    speedup,
    summary,
    target,
)
from eagle3kit.widgets import SYMBOLS, Markup, clean, fmt, fmt_bytes, fmt_duration, join, tag

# ---- pieces of the page


@dataclass(frozen=True)
class Bounds:
    """How much of long things the page takes, so that it stays within its size whatever a file holds."""

    text: int
    rows: int


def state_mark(state: str) -> Markup:
    """The symbol of a check's state."""
    return tag("span", SYMBOLS.get(state, "?"), cls=f"state {state}", role="img", aria_label=state)


_LONGEST_NUMBER = 40  # with its unit, in one line; what is longer is a sentence, and wraps


def data_table(
    head: Sequence[str], body: Iterable[Sequence[object]], right: Iterable[int] = (), bounds: Bounds | None = None
) -> Markup:
    """A table; the columns `right` are aligned right, except sentences. Rows beyond the bounds are counted, not shown."""
    lines, ends = list(body), set(right)
    limit = bounds.rows if bounds else len(lines)
    look = ["r" if i in ends else None for i in range(len(head))]
    made = [
        tag("tr", *(tag("td", cell, cls=look[i] if len(str(cell)) <= _LONGEST_NUMBER else None) for i, cell in enumerate(line)))
        for line in lines[:limit]
    ]
    if len(lines) > limit:
        made.append(tag("tr", tag("td", f"… and {len(lines) - limit:,} more rows in the run's folder", colspan=len(head))))
    top = tag("tr", *(tag("th", name, cls=look[i], scope="col") for i, name in enumerate(head)))
    return tag("div", tag("table", tag("thead", top), tag("tbody", *made)), cls="wide")


def fact_text(fact: Mapping[str, Any], bounds: Bounds) -> str:
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
            fact_text(e.facts[name], bounds),
            short(e.facts[name].get("source") or "", bounds.text),
        )
        for name in names
    ]
    return data_table(("Fact", "Value", "How it was measured"), body, right=(1,), bounds=bounds)


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
        tag("h2", state_mark("fail"), f" Failed: {short(stage, 60)}", id="failure"),
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
    parts = data_table(
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
        data_table(("Stage", "Minutes", "Share", "Peak GB", ""), body, right=(1, 2, 3)),
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
        status = f"Took {fmt_duration(60 * spent)}."
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
        *([tag("h3", "What was checked"), check_table(made)] if made and not nothing else []),
        *([tag("h3", "Chosen automatically"), _choices(e, chosen, bounds)] if chosen else []),
        *([tag("h3", "Facts"), _facts_table(e, names, bounds)] if names else []),
    )


def _choices(e: Evidence, names: Sequence[str], bounds: Bounds) -> Markup:
    body = [
        (
            tag("code", short(name[7:], bounds.text)),
            fact_text(e.facts[name], bounds),
            short(e.facts[name].get("source"), bounds.text),
        )
        for name in names
    ]
    return data_table(("What", "Value", "Why"), body, bounds=bounds)


def check_table(made: Iterable[Check]) -> Markup:
    """Checks as a list, each with its symbol."""
    return tag("ul", *(tag("li", state_mark(check.state), " ", check.text) for check in made), cls="checks")


# ---- what each stage says, from its facts


def _say(*sentences: str) -> Markup:
    return tag("p", " ".join(filter(None, sentences)))


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
                "" if field.get("source") == "dropped" else short(param_text(field.get("value")), bounds.text),
                told.get(str(field.get("source")), short(field.get("source"), 40)),
                short(field.get("reason"), bounds.text),
            )
            for field in fields
        ]
        made += [
            tag("h3", "Every field of the config, and why"),
            data_table(("Field", "Value", "From", "Reason"), body, bounds=bounds),
        ]
    return made


def _prose_03(e: Evidence, bounds: Bounds) -> list[Markup]:
    size, rate = e.number("extraction.bytes"), e.number("extraction.tokens_per_s")
    form = ", rounded to one byte a number" if e.param("extraction_storage") == "fp8" else ""
    online = e.value("extraction.mode") == "online"
    said = _say(
        f"The target's own answers gave {e.count('data.train_tokens', 'training tokens')} and",
        f"{e.count('data.heldout_prompts', 'held-out prompts')}.",
        f"Hidden states were recorded for {e.count('extraction.tokens', 'tokens')},",
        f"of unknown size on disk{form}." if size is None else f"{fmt_bytes(size)} on disk{form}.",
        "A server makes those of the training rows while it trains, in each epoch anew." if online else "",
        "At what rate is unknown."
        if rate is None
        else f"Answers {'' if online else 'and states '}came at {rate:,.0f} tokens a second.",
    )
    dropped = {str(why): number(n) for why, n in mapping(mapping(e.json("data/rows.json")).get("dropped")).items()}
    made = [said]
    if dropped:
        lost = [(short(why, bounds.text), fmt(None if n is None else int(n))) for why, n in dropped.items()]
        made += [tag("h3", "What was dropped"), data_table(("Reason", "Conversations"), lost, right=(1,), bounds=bounds)]
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
            data_table(("Slot", "Same most likely token", "Mean error (nats)"), body, right=(1, 2), bounds=bounds),
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
    return [said, data_table(("Draft vocabulary", "Held-out covered", "Training covered"), body, right=(0, 1, 2), bounds=bounds)]


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
    made = [_say(f"{line.label}: {line.text}.") for line in (al_line(e), lossless_line(e), speed_line(e))]
    shares, reached = e.positions(), e.positions("conditional")
    if shares:
        body = [
            (f"{i + 1}", percent(share), percent(reached[i]) if i < len(reached) else "unknown") for i, share in enumerate(shares)
        ]
        made += [
            tag("h3", "Acceptance by position"),
            data_table(("Position", "Of all drafts", "Of drafts accepted up to there"), body, right=(0, 1, 2), bounds=bounds),
        ]
    kinds = e.by_kind()
    if kinds:
        ordered = sorted(kinds.items(), key=lambda item: -(number(item[1].get("al")) or 0))
        kind_rows = [
            (short(kind, bounds.text), two_digits(entry.get("al")), fmt(entry.get("prompts"))) for kind, entry in ordered
        ]
        made += [
            tag("h3", "Acceptance by kind of prompt"),
            data_table(("Kind", "Acceptance length", "Prompts"), kind_rows, right=(1, 2), bounds=bounds),
        ]
    return made + _groups_table(e, bounds) + _speed_table(e, bounds) + _drafting(e) + _differences(e, bounds)


def _swept(e: Evidence) -> Mapping[str, Any]:
    """What the sweep measured, unless it was of another drafter than the run's: then the advice does not rest on it either."""
    return mapping(e.json("eval/sweep.json")) if e.value("advice.from_sweep") is True else {}


def _groups_table(e: Evidence, bounds: Bounds) -> list[Markup]:
    """The sweep's acceptance by group: length, and each position's share of all drafts and of those accepted up to there."""

    def shares(value: Any) -> str:
        return ", ".join(map(percent, numbers(value))) or "unknown"

    body = [
        (
            f"{short(row.get('by'), bounds.text)}: {short(row.get('group'), bounds.text)}",
            f"{two_digits(row.get('al'))}{interval_text(number(row.get('low')), number(row.get('high')))}",
            shares(row.get("unconditional")),
            shares(row.get("conditional")),
        )
        for row in rows(_swept(e).get("groups"))
    ]
    if not body:
        return []
    head = ("Group", "Acceptance length", "By position, of all drafts", "Of drafts accepted up to there")
    return [tag("h3", "Acceptance by group, from the sweep"), data_table(head, body, bounds=bounds)]


def _drafting(e: Evidence) -> list[Markup]:
    found = mapping(_swept(e).get("drafting"))
    if not found:
        return []
    shares = numbers(found.get("share"))
    text = f"{percent(shares[0])} ({percent(shares[1])} to {percent(shares[2])})" if len(shares) == 3 else "unknown, none is seen"
    return [_say(f"Share of a speculative step that drafting takes: {text} in vLLM's own trace of one request's steps.")]


_CONTESTANTS: dict[Any, str] = {"none": "no speculation", "ngram": "n-gram", "eagle3": "EAGLE-3"}


def two_digits(value: Any) -> str:
    """A number with two digits, or the word unknown."""
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
            against = f"{two_digits(ratio.get('ratio'))} x{interval_text(low, high)}: {speed_verdict(low, high)[1]}"
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
    if record.get("in_turn") is True:
        said += " The contestants took turns."
    elif record.get("in_turn") is False:
        said += " One contestant was measured after the other: how the machine changed in between is in no interval."
    head = ("Contestant", "Median tokens/s", "Each repeat", "Against no speculation")
    return [tag("h3", "Speed"), _say(said), data_table(head, body, right=(1,), bounds=bounds)]


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
        made += [tag("h3", f"{title} ({len(found)})"), _say(note), data_table(head, body, right=(2, 4, 6), bounds=bounds)]
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
            tag("li", state_mark("warn"), f" {short(name, 60)}: {short('; '.join(by), bounds.text)}")
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
            short(param_text(row.get("value")), bounds.text) + (f" {short(unit, 30)}" if unit and unit != "share" else ""),
            short(row.get("origin"), 60),
            short(param_text(row.get("default")), bounds.text),
            short(row.get("description"), bounds.text),
        )
        body.append(tag("tr", *(tag("td", cell) for cell in cells), cls="changed" if name in changed else None))
    top = tag("tr", *(tag("th", name, scope="col") for name in head))
    return [*made, tag("div", tag("table", tag("thead", top), tag("tbody", *body), cls="params"), cls="wide")]


def param_text(value: Any) -> str:
    """A parameter's value as a params file has it; JSON is YAML for scalars and lists."""
    return value if isinstance(value, str) and value else json.dumps(value, ensure_ascii=False)


def _named(e: Evidence, prefix: str, what: str, missing: str, bounds: Bounds) -> Markup:
    names = [name for name in e.facts if name.startswith(prefix)]
    if not names:
        return tag("p", f"Unknown: the run recorded no {missing}.")
    body = [(short(name[len(prefix) :].replace("_", " "), bounds.text), fact_text(e.facts[name], bounds)) for name in names]
    return data_table((what.capitalize(), "Found"), body, bounds=bounds)


def _steps_table(e: Evidence, bounds: Bounds) -> Markup:
    body = [
        (short(name, 60), "done", moment(m.get("finished")) or "unknown", _seconds(m.get("seconds")))
        for name, m in e.manifests.items()
    ]
    body += [(short(name, 60), "begun, not finished", "", "") for name in e.begun if name not in e.manifests]
    if not body:
        return tag("p", "Unknown: no step has left a manifest.")
    return data_table(("Step", "State", "Finished", "Took"), body, right=(3,), bounds=bounds)


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


def whole_report(e: Evidence, pictures: Sequence[Picture], left_out: set[str], bounds: Bounds) -> bytes:
    """The page of one run, without the pictures `left_out`."""
    title = f"{e.name}: an EAGLE-3 drafter for {short(target(e), 80)}"
    lines = summary(e)
    finished = e.finished()
    across = check_steps(e)
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
            *(tag("li", state_mark(line.state), tag("b", line.label), tag("span", short(line.text, LONGEST))) for line in lines),
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
        tag("section", tag("h2", "Steps", id="steps"), _steps_table(e, bounds), check_table(across) if across else None),
        tag("section", tag("h2", "How to reproduce", id="reproduce"), *_reproduce_section(e)),
        tag(
            "section",
            tag("h2", "Glossary", id="glossary"),
            tag("dl", *(join([tag("dt", term), tag("dd", meaning)]) for term, meaning in GLOSSARY.items())),
        ),
    ]
    if e.problems:
        told = (tag("li", state_mark("warn"), " ", short(problem, bounds.text)) for problem in dict.fromkeys(e.problems))
        body.append(tag("section", tag("h2", "What could not be read"), tag("ul", *list(told)[: bounds.rows], cls="checks")))
    about = {
        "run": e.name,
        "target": short(target(e), 80),
        "state": lines[0].state,
        "outcome": short(lines[0].text),
        "al": None if e.stale("06") else e.number("acceptance.al"),
        "ratio": None if e.stale("06") else speedup(e)[0],
        "minutes": sum(spent for key, spent in e.minutes().items() if not e.stale(key)) or None,
        "finished": finished,
    }
    return whole_page(title, body, about)
