"""What a notebook shows besides pictures: tables, check lists, conversations, and controls that turn into tables when headless.

Everything is escaped on its way into HTML: `tag` escapes each child that is not itself made by `tag`. What is shown carries its
own plain text, so a terminal, a log and a test can read it too. Text keeps the colour of what surrounds it and shades are half
transparent, so a light and a dark theme both work. IPython, ipywidgets and matplotlib are imported only when something is shown.
"""

from __future__ import annotations

import base64
import dataclasses
import html
import math
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar

if TYPE_CHECKING:
    from matplotlib.figure import Figure

T = TypeVar("T")

_LINE = "1px solid rgba(128, 128, 128, .35)"
_FAINT = "rgba(128, 128, 128, .12)"
_UNFIT = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
_NUMBER = re.compile(r"[-+]?\d[\d,]*(\.\d+)?(e[-+]?\d+)?( %| x)?|infinite|not a number|more than 1e300")
_VOID = {"br", "img", "meta", "hr", "col"}

SYMBOLS = {"ok": "✓", "warn": "!", "fail": "✗", "unknown": "?"}
COLOURS = {"ok": "#2E9E6B", "warn": "#C98A00", "fail": "#D5513B", "unknown": "#808080"}
"""Symbols and colours of a check's state: readable on white and on black, and never the only sign."""


# ---- HTML and numbers, shared with the report


class Markup(str):
    """Text that is already HTML. Only `tag` and `join` make it."""

    __slots__ = ()


def clean(text: object) -> str:
    """Text without the characters that a page or a terminal must not get: control characters and broken Unicode."""
    return _UNFIT.sub("\ufffd", str(text))


def escape(text: object) -> Markup:
    """Text as HTML, unless it is HTML already."""
    return text if isinstance(text, Markup) else Markup(html.escape(clean(text), quote=True))


def join(parts: Iterable[object], between: str = "") -> Markup:
    """Several pieces after each other; each is escaped unless it is HTML already."""
    return Markup(html.escape(between).join(escape(part) for part in parts))


def tag(name: str, /, *children: object, **attributes: object) -> Markup:
    """An HTML element. Children are escaped unless made by `tag`; None is left out. `cls` stands for `class`, `_` for `-`."""
    written = "".join(
        f' {"class" if key == "cls" else key.rstrip("_").replace("_", "-")}="{html.escape(clean(value), quote=True)}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in _VOID:
        return Markup(f"<{name}{written}>")
    return Markup(f"<{name}{written}>{join(child for child in children if child is not None)}</{name}>")


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether a value is an int or float, and not a truth value."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def fmt(value: object, unit: str = "") -> str:
    """A value as a reader wants it: thousands separated, four significant digits, bytes in GB, lists in one line."""
    if value is None:
        return "unknown"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        if unit in {"B", "bytes"} and abs(value) >= 1000:
            return fmt_bytes(value)
        text = f"{value:,}" if abs(value) < 10**15 else f"{float(value):.3e}" if abs(value) < 10**300 else "more than 1e300"
    elif isinstance(value, float):
        if not math.isfinite(value):
            return "not a number" if math.isnan(value) else "infinite"
        if unit in {"B", "bytes"}:
            return fmt_bytes(value)
        size = abs(value)
        if value == 0:
            text = "0"
        elif size >= 1000:
            text = f"{value:,.0f}" if size < 1e15 else f"{value:.3e}"
        elif size >= 1e-3:
            text = f"{value:.4g}"
        else:
            text = f"{value:.3g}"
    elif isinstance(value, list | tuple):
        text = ", ".join(fmt(item) for item in value)
    else:
        text = clean(value)
    return f"{text} {unit}" if unit else text


def fmt_bytes(count: float) -> str:
    """Bytes in decimal units, as disks are sold."""
    for size, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if abs(count) >= size:
            return f"{count / size:.3g} {unit}" if abs(count) < 999.5 * size else f"{count / size:,.0f} {unit}"
    return f"{count:,.0f} B"


def fmt_duration(seconds: float) -> str:
    """Seconds as `48 s`, `3 min 14 s` or `2 h 05 min`."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600:,} h {whole % 3600 // 60:02d} min"


# ---- showing


@dataclasses.dataclass(frozen=True)
class Shown:
    """Something to look at: HTML for a notebook, plain text for everything else."""

    html: str
    text: str

    def _repr_html_(self) -> str:
        return self.html

    def __repr__(self) -> str:
        return self.text


def _display(shown: object) -> None:
    """Show it: rich in a notebook, as plain text elsewhere."""
    from IPython.display import display

    display(shown)


def picture(png: bytes, caption: str = "", alt: str = "") -> None:
    """Show a PNG with its caption."""
    _display(as_picture(png, caption, alt))


def as_picture(png: bytes, caption: str = "", alt: str = "") -> Shown:
    """What `picture` shows."""
    source = "data:image/png;base64," + base64.b64encode(png).decode()
    image = tag("img", src=source, alt=alt, style="max-width: 100%; height: auto")
    note = tag("figcaption", caption, style="margin-top: .3em; opacity: .85") if caption else None
    return Shown(tag("figure", image, note, style="margin: .5em 0"), f"[picture: {clean(alt or caption)}]")


def table(
    rows: Iterable[Mapping[str, Any]],
    caption: str = "",
    columns: Sequence[str] | None = None,
    colours: Mapping[str, str] | None = None,
) -> None:
    """Show rows as a table; a column whose values are all numbers is aligned right.

    Args:
        rows: one mapping a row.
        caption: a line above the table.
        columns: which keys, in which order; by default every key in the order of its first appearance.
        colours: words that a whole cell may consist of, and the state (a key of `COLOURS`) in whose colour they are written.
    """
    _display(as_table(rows, caption, columns, colours))


def as_table(
    rows: Iterable[Mapping[str, Any]],
    caption: str = "",
    columns: Sequence[str] | None = None,
    colours: Mapping[str, str] | None = None,
) -> Shown:
    """What `table` shows."""
    given = list(rows)
    names = list(columns) if columns is not None else list(dict.fromkeys(key for row in given for key in row))
    columned = [_column([row.get(name) for row in given]) for name in names]
    cells = [list(row) for row in zip(*(column for column, _ in columned), strict=True)]
    right = [numbers for _, numbers in columned]

    def look(i: int, head: bool) -> str:
        weight = "font-weight: 600; border-bottom: 2px solid rgba(128, 128, 128, .5)" if head else f"border-bottom: {_LINE}"
        lines = "pre-wrap; overflow-wrap: break-word" if head or not right[i] else "nowrap; font-variant-numeric: tabular-nums"
        side = "right" if right[i] else "left"
        return f"text-align: {side}; padding: .25em .8em; vertical-align: top; {weight}; white-space: {lines}"

    head = tag("tr", *(tag("th", name, scope="col", style=look(i, True)) for i, name in enumerate(names)))

    def colour(cell: str) -> str:
        state = (colours or {}).get(cell)
        return f"; color: {COLOURS[state]}; border-left: 4px solid {COLOURS[state]}; font-weight: 600" if state else ""

    body = [tag("tr", *(tag("td", cell, style=look(i, False) + colour(cell)) for i, cell in enumerate(row))) for row in cells]
    if not given:
        body = [tag("tr", tag("td", "nothing to show", colspan=max(len(names), 1), style="padding: .25em .8em; opacity: .7"))]
    style = "border-collapse: collapse; margin: .4em 0" + ("; min-width: min(100%, 24rem)" if caption else "")  # as its caption
    whole = tag(
        "table",
        _caption(caption),
        tag("thead", head),
        tag("tbody", *body),
        style=style,
    )
    return Shown(tag("div", whole, style="overflow-x: auto"), _plain_table(names, cells, right, caption))


def _caption(text: str) -> Markup | None:
    return tag("caption", text, style="caption-side: top; text-align: left; padding: .3em 0; font-weight: 600") if text else None


def _column(values: Sequence[object]) -> tuple[list[str], bool]:
    """The cells of one column, and whether they are numbers: those that were rounded alike are shown with the same decimals."""
    cells = [_cell(value) for value in values]
    numbers = [value for value in values if is_number(value)]
    digits = next((n for n in range(5) if all(abs(value) < 1000 and round(value, n) == value for value in numbers)), None)
    if digits and not all(isinstance(value, int) for value in numbers):
        cells = [f"{value + 0:.{digits}f}" if is_number(value) else cell for value, cell in zip(values, cells, strict=True)]
    filled = [cell for cell in cells if cell not in {"", "-", "unknown"}]
    return cells, bool(filled) and all(_NUMBER.fullmatch(cell) for cell in filled)


def _cell(value: object) -> str:
    return "" if value is None else fmt(value)


def _plain_table(names: Sequence[str], cells: Sequence[Sequence[str]], right: Sequence[bool], caption: str) -> str:
    """The table for a terminal; a cell is cut after 60 characters."""
    lines = [[clean(name) for name in names], *([" ".join(cell.split()) for cell in row] for row in cells)]
    lines = [[cell if len(cell) <= 60 else cell[:59] + "…" for cell in row] for row in lines]
    widths = [max(len(row[i]) for row in lines) for i in range(len(names))]
    placed = [[c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, right, strict=True)] for row in lines]
    shown = ["  ".join(row).rstrip() for row in placed]
    rule = "  ".join("-" * width for width in widths)
    return "\n".join([*([clean(caption)] if caption else []), shown[0], rule, *(shown[1:] or ["nothing to show"])])


def check_list(checks: Iterable[object], caption: str = "") -> None:
    """Show checks, the failed ones first, each with what mends it.

    Args:
        checks: mappings or dataclasses with `name`, `state` or `status` (`ok`, `warn`, `fail`, or a truth value) and, where they
            apply, `found`, `wanted` and `fix`.
        caption: a line above; by default how many there are of each state.
    """
    _display(as_check_list(checks, caption))


def as_check_list(checks: Iterable[object], caption: str = "") -> Shown:
    """What `check_list` shows."""
    rows = [_check(check) for check in checks]
    rows.sort(key=lambda row: {"fail": 0, "warn": 1, "unknown": 2, "ok": 3}[row["state"]])
    counts = {state: sum(row["state"] == state for row in rows) for state in SYMBOLS}
    words = {"fail": "failed", "warn": "to look at", "unknown": "unknown", "ok": "fine"}
    caption = caption or (", ".join(f"{counts[state]} {words[state]}" for state in words if counts[state]) or "no checks")
    extra = [key for key in ("found", "wanted", "fix") if any(row[key] for row in rows)]
    look = f"text-align: left; padding: .25em .8em; vertical-align: top; overflow-wrap: break-word; border-bottom: {_LINE}"
    head = tag("tr", *(tag("th", name, scope="col", style=look) for name in ("", "check", *extra)))
    body = []
    for row in rows:
        mark = tag("span", SYMBOLS[row["state"]], style=f"color: {COLOURS[row['state']]}; font-weight: 700")
        first = tag("td", mark, " ", tag("span", row["state"], style="font-size: .85em"), style=look + "; white-space: nowrap")
        body.append(tag("tr", first, *(tag("td", row[key], style=look) for key in ("name", *extra))))
    whole = tag(
        "table", _caption(caption), tag("thead", head), tag("tbody", *body), style="border-collapse: collapse; margin: .4em 0"
    )
    lines = [caption]
    for row in rows:
        about = "; ".join(f"{key} {row[key]}" if key != "fix" else f"fix: {row[key]}" for key in extra if row[key])
        lines.append(f"  {SYMBOLS[row['state']]} {row['state']:<4} {row['name']}" + (f": {about}" if about else ""))
    return Shown(tag("div", whole, style="overflow-x: auto"), clean("\n".join(lines)))


def _check(check: object) -> dict[str, str]:
    """One check as strings."""
    if isinstance(check, Mapping):
        found: Mapping[str, Any] = check
    elif dataclasses.is_dataclass(check) and not isinstance(check, type):
        found = {field.name: getattr(check, field.name) for field in dataclasses.fields(check)}
    else:
        found = vars(check)
    state = found.get("state", found.get("status"))
    state = {True: "ok", False: "fail"}.get(state, "fail") if isinstance(state, bool) else str(state)
    row = {key: _cell(found.get(key)) for key in ("name", "found", "wanted", "fix")}
    return row | {"state": state if state in SYMBOLS else "unknown"}


def conversation(rows: Iterable[object], caption: str = "") -> None:
    """Show samples token by token, those that training learns from marked.

    An unshifted or inverted loss mask trains, and shows nowhere but here: the marked text must be exactly the assistant's.

    Args:
        rows: the tokens of one sample, or a list of samples. A token is a `(text, supervised)` pair or a mapping with `text`,
            `supervised` and perhaps `special`: a special token, which is framed to tell it from text that only looks like one.
        caption: a line above.
    """
    _display(as_conversation(rows, caption))


def as_conversation(rows: Iterable[object], caption: str = "") -> Shown:
    """What `conversation` shows."""
    samples: list[list[tuple[str, bool, bool]]] = []
    loose = False  # whether the last sample is made of tokens that stood there by themselves
    for row in rows:
        token = _token(row)
        if token is None and isinstance(row, Iterable) and not isinstance(row, str | bytes | Mapping):
            tokens = [_token(item) for item in row]
            if None in tokens:
                raise TypeError(f"a token must be (text, supervised) or a mapping with both, not {row!r}")
            samples.append([found for found in tokens if found is not None])
            loose = False
        elif token is None:
            raise TypeError(f"a token must be (text, supervised) or a mapping with both, not {row!r}")
        elif loose:
            samples[-1].append(token)
        else:
            samples.append([token])
            loose = True
    shown = [_sample(tokens) for tokens in samples]
    title = tag("div", caption, style="font-weight: 600") if caption else None
    return Shown(
        tag("div", title, *(Markup(sample.html) for sample in shown)),
        "\n\n".join([*([clean(caption)] if caption else []), *(sample.text for sample in shown)]),
    )


def _token(row: object) -> tuple[str, bool, bool] | None:
    """One token with whether it is supervised and special, or None if `row` is something else."""
    if isinstance(row, Mapping) and "text" in row and "supervised" in row:
        return clean(row["text"]), bool(row["supervised"]), bool(row.get("special"))
    if isinstance(row, Sequence) and len(row) == 2 and isinstance(row[0], str) and isinstance(row[1], int):
        return clean(row[0]), bool(row[1]), False
    return None


def _sample(tokens: Sequence[tuple[str, bool, bool]]) -> Shown:
    """One sample in a box, with how much of it is supervised."""
    runs: list[tuple[list[Markup], list[str], bool]] = []
    for text, supervised, special in tokens:
        drawn = tag("span", text, style=f"border: {_LINE}; border-radius: .3em") if special else escape(text)
        if runs and runs[-1][2] == supervised:
            runs[-1][0].append(drawn)
            runs[-1][1].append(text)
        else:
            runs.append(([drawn], [text], supervised))
    count = sum(supervised for _, supervised, _ in tokens)
    share = f" ({100 * count / len(tokens):.0f} %)" if tokens else ""
    legend = f"{len(tokens):,} tokens, {count:,} supervised{share}"
    mark = "background: rgba(0, 114, 178, .22); color: inherit; border-bottom: 2px solid #56B4E9; padding: .05em 0"
    body = join(tag("mark", *drawn, style=mark) if on else join(drawn) for drawn, _, on in runs)
    box = f"white-space: pre-wrap; overflow-wrap: break-word; padding: .6em; border: {_LINE}; max-height: 28em; overflow-y: auto"
    made = tag(
        "div",
        tag("div", f"{legend}: those underlined and shaded", style="opacity: .85; margin: .5em 0 .3em"),
        tag("div", body, style=f"font-family: var(--jp-code-font-family, monospace); font-size: .9em; {box}"),
    )
    plain = "".join(f"[[{''.join(texts)}]]" if on else "".join(texts) for _, texts, on in runs)
    return Shown(made, f"{legend}: those in [[ ]]\n{plain}")


def expect(text: str, took: str = "") -> None:
    """Show what a step should have given and how long it takes on named hardware, to hold against what is above."""
    _display(as_expect(text, took))


def as_expect(text: str, took: str = "") -> Shown:
    """What `expect` shows."""
    box = f"border-left: 4px solid {COLOURS['ok']}; background: {_FAINT}; padding: .5em .9em; margin: .4em 0"
    body = [tag("b", "Expect: "), text] + ([tag("br"), tag("b", "Takes: "), took] if took else [])
    return Shown(tag("div", *body, style=box), f"Expect: {clean(text)}" + (f"\nTakes: {clean(took)}" if took else ""))


# ---- controls


def choose(
    options: Mapping[str, T] | Sequence[T], render: Callable[[T], object], interactive: bool, label: str = "show", first: int = 3
) -> None:
    """Let the reader pick what to look at; headless, show the first ones below each other.

    Args:
        options: what to pick from: `{name: option}`, or a list; its texts and numbers name themselves, other items are numbered.
        render: called with an option; shows it itself, or returns something to show.
        interactive: a dropdown when true; a fixed sequence otherwise, which is what an executed notebook keeps.
        label: what stands beside the dropdown.
        first: how many options are shown when headless.
    """
    named: dict[str, T]
    if isinstance(options, Mapping):
        named = {str(name): option for name, option in options.items()}
    else:
        plain = all(isinstance(option, str | int | float) for option in options) and len({*map(str, options)}) == len(options)
        named = {str(option) if plain else f"{i + 1} of {len(options)}": option for i, option in enumerate(options)}

    def show(name: str) -> None:
        made = render(named[name])
        if made is not None:
            _display(made)

    if not named:
        _display(Shown(tag("p", f"{label}: nothing to choose from"), f"{clean(label)}: nothing to choose from"))
        return
    if not interactive:
        for name in list(named)[:first]:
            _display(Shown(tag("p", tag("b", f"{label}: {name}")), f"{clean(label)}: {clean(name)}"))
            show(name)
        if len(named) > first:
            rest = f"{len(named) - first} more can be chosen with interactive: true"
            _display(Shown(tag("p", rest, style="opacity: .7"), rest))
        return

    import ipywidgets

    dropdown = ipywidgets.Dropdown(options=list(named), description=label, style={"description_width": "initial"})
    output = ipywidgets.Output()

    def render_chosen(_: object = None) -> None:
        with output:
            output.clear_output(wait=True)
            show(dropdown.value)

    dropdown.observe(render_chosen, names="value")
    _display(ipywidgets.VBox([dropdown, output]))
    render_chosen()


def choose_two(
    options: Mapping[str, T],
    render: Callable[[T, T], object],
    interactive: bool,
    label: str = "compare",
    pairs: Sequence[tuple[str, str]] = (),
) -> None:
    """Let the reader pick two things to hold against each other; headless, show some pairs below each other.

    Args:
        options: what to pick from.
        render: called with the two options; shows them itself, or returns something to show.
        interactive: two dropdowns when true; the fixed pairs otherwise.
        label: what stands before a pair.
        pairs: names of the pairs shown when headless, the first of them to begin with; by default the first two options.
    """
    names = list(options)
    pairs = list(pairs) or [(names[0], names[-1 if len(names) < 2 else 1])]

    def show(one: str, other: str) -> None:
        made = render(options[one], options[other])
        if made is not None:
            _display(made)

    if not interactive:
        for one, other in pairs:
            what = f"{label}: {one} and {other}"
            _display(Shown(tag("p", tag("b", what)), clean(what)))
            show(one, other)
        return

    import ipywidgets

    first, second = (
        ipywidgets.Dropdown(options=names, value=value, description=word, style={"description_width": "initial"})
        for word, value in zip((label, "and"), pairs[0], strict=True)
    )
    output = ipywidgets.Output()

    def render_chosen(_: object = None) -> None:
        with output:
            output.clear_output(wait=True)
            show(first.value, second.value)

    for dropdown in (first, second):
        dropdown.observe(render_chosen, names="value")
    _display(ipywidgets.VBox([ipywidgets.HBox([first, second]), output]))
    render_chosen()


def controls(
    choices: Mapping[str, tuple[Sequence[Any], Any]],
    render: Callable[..., object],
    interactive: bool,
    otherwise: Callable[[], object],
) -> None:
    """Several dropdowns over one answer, which follows them; headless, a static answer.

    Args:
        choices: by name, what there is to pick from, and what is picked at first.
        render: called with the picked values by name; returns something to show.
        interactive: dropdowns when true.
        otherwise: called when headless; returns something to show.
    """
    if not interactive:
        _display(otherwise())
        return

    import ipywidgets

    look = {"style": {"description_width": "initial"}}
    dropdowns = {
        name: ipywidgets.Dropdown(options=options, value=first, description=name.replace("_", "-"), **look)
        for name, (options, first) in choices.items()
    }
    output = ipywidgets.Output()

    def render_chosen(_: object = None) -> None:
        with output:
            output.clear_output(wait=True)
            _display(render(**{name: dropdown.value for name, dropdown in dropdowns.items()}))

    for dropdown in dropdowns.values():
        dropdown.observe(render_chosen, names="value")
    _display(ipywidgets.VBox([ipywidgets.HBox(list(dropdowns.values()), layout={"flex_flow": "row wrap"}), output]))
    render_chosen()


class LivePlot:
    """The training curves while training runs: redrawn in place when interactive, a line of text now and then when headless.

    Use as a context manager; what came last is always shown at its end, also when the block ends with an error.

    Args:
        interactive: redraw a picture; otherwise print.
        total: optimizer steps of the whole training, for the share done and the time left.
        every_s: at most one redraw or line in so many seconds; by default 3 for a picture and 10 for a line.
    """

    def __init__(self, interactive: bool, total: int | None = None, every_s: float | None = None) -> None:
        self.interactive, self.total = interactive, total
        self.every_s = every_s if every_s is not None else (3.0 if interactive else 10.0)
        self._shown = -math.inf
        self._rows: Sequence[Mapping[str, Any]] = ()
        self._pending = False
        self._handle: Any = None

    def __enter__(self) -> LivePlot:
        self._began = time.monotonic()
        self._from: int | None = None
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._pending:
            self._show()

    def update(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Take the rows logged so far (all of them, `checkpoints/log.jsonl`); shows them unless it has just done so."""
        if self._from is None:  # a resumed training starts at a step above 0, and its rate is not counted from there
            self._from = _last_step(rows)
        self._rows, self._pending = rows, True
        if time.monotonic() - self._shown >= self.every_s:
            self._show()

    def _show(self) -> None:
        self._shown, self._pending = time.monotonic(), False
        if not self.interactive:
            print(self.line(), flush=True)
            return
        from IPython.display import display

        from eagle3kit import plots

        shown = as_picture(_png(plots.training_curves(self._rows)), self.line(), "training curves so far")
        if self._handle is None:
            self._handle = display(shown, display_id=True)
        else:
            self._handle.update(shown)

    def line(self) -> str:
        """The state of training on one line: step, share and time left, loss and accuracies of the last rows of each split."""
        step = _last_step(self._rows)
        parts = []
        if self.total:
            done = step - (self._from or 0)
            text = f"step {step}/{self.total} {min(100, step * 100 // self.total)} %"
            elapsed = time.monotonic() - self._began
            if done > 0 and elapsed > 0 and step < self.total:
                text += f", {fmt_duration((self.total - step) * elapsed / done)} left"
            parts.append(text)
        else:
            parts.append(f"step {step}")
        for split, name in (("train", "train"), ("val", "held out")):
            row = next((row for row in reversed(self._rows) if row.get("split") == split), None)
            if row is not None:
                accuracies = row.get("acc")
                shown = " ".join(f"{acc:.3f}" for acc in accuracies if is_number(acc)) if isinstance(accuracies, Sequence) else ""
                loss = row.get("loss")
                parts.append(f"{name} loss {fmt(loss) if is_number(loss) else 'unknown'}" + (f" acc {shown}" if shown else ""))
                if is_number(al := row.get("simulated_al")):
                    parts[-1] += f" simulated AL {al:.3f}"
        return "  ".join(["", "; ".join(parts)])


def _last_step(rows: Sequence[Mapping[str, Any]]) -> int:
    return max((int(step) for row in rows if is_number(step := row.get("step")) and math.isfinite(step)), default=0)


def _png(figure: Figure) -> bytes:
    from eagle3kit import plots

    return plots.png(figure)


class Progress:
    """Prints how far a piece of work is: at once, then at most every `every_s` seconds, and at its end.

    Call it with what is done and how many there are: `progress(120, 744)`. What was done at the first call, by an earlier run,
    does not count towards the rate.

    Args:
        unit: what is counted, in the plural.
        every_s: seconds between two lines.
    """

    def __init__(self, unit: str, every_s: float = 10.0) -> None:
        self.unit, self.every_s = unit, every_s
        self._shown = -math.inf
        self._last: tuple[int, int] | None = None

    def __call__(self, done: int, total: int) -> None:
        """Take the state of the work."""
        if self._last is None or done < self._last[0]:
            self._began, self._already, self._shown = time.monotonic(), done, -math.inf
        ended = done >= total and self._last != (done, total)
        self._last = (done, total)
        if ended or (done < total and time.monotonic() - self._shown >= self.every_s):
            self._shown = time.monotonic()
            print(progress_line(done, total, self.unit, self._began, already=self._already), flush=True)


def progress_line(done: int, total: int, unit: str, started: float, *, already: int = 0, now: float | None = None) -> str:
    """How far a piece of work is: `  120/744 prompts 16 %  3.2/s  3 min 15 s left`.

    Args:
        done: how many are done.
        total: how many there are.
        unit: what is counted, in the plural.
        started: `time.monotonic()` when this work began.
        already: how many of those done were done before it began; they do not count towards the rate.
        now: the present on the same clock; for tests.
    """
    elapsed = (time.monotonic() if now is None else now) - started
    parts = [f"{done:,}/{total:,} {unit} {done * 100 // total} %" if total else f"{done:,} {unit}"]
    if done > already and elapsed > 0:
        rate = (done - already) / elapsed
        parts.append(f"{rate:.3g}/s" if rate < 1000 else f"{rate:,.0f}/s")
        if total <= done:
            parts.append(f"done in {fmt_duration(elapsed)}")
        elif (done - already) * 20 >= total - already:  # the first of many at once say nothing about the rate
            parts.append(f"{fmt_duration((total - done) / rate)} left")
    return "  " + "  ".join(parts)
