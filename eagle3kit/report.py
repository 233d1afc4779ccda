"""The pages a colleague is sent, each a self-contained HTML file made from what runs recorded.

    build(run_root, reports_dir)      reports/<run_name>.html, also for a run that failed or has only begun; the summary first
    compare(run_roots, reports_dir)   the facts of several runs side by side
    index(reports_dir)                reports/index.html, which lists what is there

They read recorded facts, files and pictures (`evidence`) and never cell output; `findings` says what those allow to say, `page`
how it looks. What is missing is called unknown; a file that cannot be read is named and passed over, because the report is needed
most after something went wrong. The same run folder gives the same bytes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import quote

from eagle3kit.errors import KitError
from eagle3kit.evidence import LIMIT_BYTES, Check, Evidence, mapping, number, short
from eagle3kit.findings import machine_sentence, summary
from eagle3kit.page import (
    Bounds,
    check_table,
    data_table,
    fact_text,
    param_text,
    state_mark,
    two_digits,
    whole_page,
    whole_report,
)
from eagle3kit.rundir import project_path, write_atomic
from eagle3kit.widgets import join, tag


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
    page = whole_report(e, pictures, left_out, bounds)
    while len(page) > LIMIT_BYTES and by_size:
        left_out.add(by_size.pop().name)
        page = whole_report(e, pictures, left_out, bounds)
    if len(page) > LIMIT_BYTES:
        page = whole_report(e, pictures[:50], left_out, Bounds(text=120, rows=60))
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
        check_table(_comparable(runs, names)),
        tag("h2", "Summary"),
        data_table(
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
        (tag("code", name), *(short(param_text(e.param(name)), 200) if name in e.params else "unknown" for e in runs))
        for name in unlike
    ]
    body.append(data_table(("Parameter", *names), cells, bounds=bounds) if cells else tag("p", "None."))
    facts = sorted({name for e in runs for name in e.facts})
    body.append(tag("h2", "Facts"))
    head = ("Fact", *names, *(["Change"] if len(runs) == 2 else []))
    lines = [
        (
            tag("code", short(name, 100)),
            *(fact_text(e.facts[name], bounds) if name in e.facts else "unknown" for e in runs),
            *([_change(runs[0].number(name), runs[1].number(name))] if len(runs) == 2 else []),
        )
        for name in facts
    ]
    body.append(
        data_table(head, lines, right=range(1, len(head)), bounds=bounds) if lines else tag("p", "No facts are recorded.")
    )
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
    return f"{100 * (b - a) / abs(a):+.1f} %" if a else f"{b - a:+.3g}"


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
                two_digits(about.get("al")),
                "unknown" if ratio is None else f"{ratio:.2f} x",
                "unknown" if minutes is None else f"{minutes:.1f}",
                tag("span", short(about.get("finished") or "unknown", 40), style="white-space:nowrap"),
                join([state_mark(str(about.get("state"))), " ", short(about.get("outcome"), 200)]),
            )
        )
    head = ("Run", "Target", "AL", "Speed", "Minutes", "Finished", "Outcome")
    listed = data_table(head, body, right=(2, 3, 4)) if body else tag("p", "There is no report yet: make one with eagle3kit run.")
    note = tag(
        "p",
        "AL: tokens gained per forward pass of the target, 1 when nothing is accepted. Speed: against no speculation.",
        cls="soft",
    )
    return write_atomic(folder / "index.html", whole_page("Reports", [tag("h1", "Reports"), listed, note]))
