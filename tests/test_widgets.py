"""What notebooks show: escaped, readable without a browser, and the same content with and without controls."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
import time
from html.parser import HTMLParser
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle3kit import widgets

EVIL = "<script>alert('x')</script>\"'&<img onerror=1>"


class Tags(HTMLParser):
    """Tags and text of a piece of HTML; complains where they do not match."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags, self.text, self.open = list[str](), "", list[str]()
        self.attributes = list[tuple[str, str | None]]()
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in {"br", "img"}:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def assert_harmless(shown: widgets.Shown) -> None:
    seen = Tags(shown.html)
    assert not {"script", "style", "link", "iframe"} & set(seen.tags)
    assert not [name for name, _ in seen.attributes if name.startswith("on")]


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was displayed."""
    seen: list[Any] = []
    monkeypatch.setattr(widgets, "_display", seen.append)
    return seen


# ---- HTML


@given(st.text(alphabet=st.characters(), max_size=50), st.text(alphabet=st.characters(), max_size=50))
def test_tag_escapes_children_and_attributes(child: str, attribute: str) -> None:
    made = widgets.tag("div", child, widgets.tag("b", child), title=attribute)
    seen = Tags(made)
    assert seen.tags == ["div", "b"]
    assert seen.text == 2 * widgets.clean(child)
    assert seen.attributes == [("title", widgets.clean(attribute))]
    made.encode()  # no broken Unicode is left


def test_tag_names_attributes_as_html_does() -> None:
    assert widgets.tag("p", None, "a", cls="x", aria_label="y", for_="z", id=None) == '<p class="x" aria-label="y" for="z">a</p>'
    assert widgets.tag("meta", name="viewport") == '<meta name="viewport">'


@pytest.mark.parametrize(
    ("value", "unit", "wanted"),
    [
        (None, "", "unknown"),
        (True, "", "yes"),
        (52114, "tokens", "52,114 tokens"),
        (564019200, "bytes", "564 MB"),
        (999_999_999, "bytes", "1,000 MB"),
        (512, "bytes", "512 bytes"),
        (0.41234567, "s", "0.4123 s"),
        (7.5e-06, "nats", "7.5e-06 nats"),
        (0.0, "", "0"),
        (12345.678, "", "12,346"),
        (float("nan"), "", "not a number"),
        (float("inf"), "", "infinite"),
        (10**400, "", "more than 1e300"),
        ([2, 15, 27], "", "2, 15, 27"),
        ("text", "", "text"),
    ],
)
def test_fmt(value: object, unit: str, wanted: str) -> None:
    assert widgets.fmt(value, unit) == wanted


@pytest.mark.parametrize(
    ("seconds", "wanted"),
    [(0, "0 s"), (59.4, "59 s"), (194, "3 min 14 s"), (3600, "1 h 00 min"), (-3, "0 s"), (90061, "25 h 01 min")],
)
def test_fmt_duration(seconds: float, wanted: str) -> None:
    assert widgets.fmt_duration(seconds) == wanted


# ---- tables and boxes


def test_table_aligns_numbers_right_and_escapes() -> None:
    rows = [{"kind": EVIL, "al": 1.5, "n": 10}, {"kind": "story", "al": 1.25, "n": None}]
    made = widgets.as_table(rows, caption=EVIL)
    assert_harmless(made)
    cells = re.findall(r"<td style=\"text-align: (\w+)[^>]*>([^<]*)</td>", made.html)
    assert [side for side, _ in cells] == ["left", "right", "right"] * 2
    assert cells[1][1] == "1.50" and cells[5][1] == ""
    assert "story" in repr(made) and EVIL in repr(made)
    assert len({len(line) for line in repr(widgets.as_table([{"a": 1, "b": 22}, {"a": 333, "b": 4}])).splitlines()}) == 1


def test_a_column_of_numbers_is_one_whether_or_not_they_carry_a_sign_or_a_unit() -> None:
    """Rounded alike they have the same decimals, and shares and ratios stand under each other as plain numbers do."""
    columns: dict[str, list[object]] = {
        "rounded": [1.25, 0.9, 1.0, -0.0],
        "raw": [0.018913, 105.23471, 1.0, 0.0],
        "share": ["+10 %", "unknown", "-", "-2.5 %"],
        "word": ["1 to 64", "2", "3", "4"],
    }
    made = widgets.as_table([dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)])
    cells = re.findall(r"<td style=\"text-align: (\w+)[^>]*>([^<]*)</td>", made.html)
    assert [side for side, _ in cells] == ["right", "right", "right", "left"] * 4
    assert made.html.count("nowrap") == 12  # a number is not parted from its unit
    heads = re.findall(r"<th [^>]*>", made.html)
    assert len([head for head in heads if "pre-wrap" in head]) == 4  # a long name over short numbers does not widen the page
    assert [text for _, text in cells[::4]] == ["1.25", "0.90", "1.00", "0.00"]
    assert [text for _, text in cells[1::4]] == ["0.01891", "105.2", "1", "0"]


def test_a_caption_is_not_squeezed_into_a_narrow_table() -> None:
    assert "min-width" in widgets.as_table([], caption="disagreements with its target: 0").html


def test_table_takes_columns_and_nothing() -> None:
    made = widgets.as_table([{"a": 1, "b": 2}], columns=["b", "c"])
    assert re.findall(r"<th [^>]*>([^<]*)<", made.html) == ["b", "c"]
    empty: list[list[dict[str, Any]]] = [[], [{}]]
    for rows in empty:
        assert_harmless(widgets.as_table(rows))
        assert "nothing to show" in repr(widgets.as_table([]))


def test_table_uses_no_fixed_colours() -> None:
    """Text must stay readable in JupyterLab's dark theme: nothing sets a text colour or an opaque background."""
    html = (
        widgets.as_table([{"a": 1}], caption="c").html + widgets.as_conversation([("a", True)]).html + widgets.as_expect("x").html
    )
    assert not re.search(r"[^-]color: (?!inherit)", html)
    assert all(value.startswith("rgba(") for value in re.findall(r"background: ([^;\"]*)", html))


@dataclasses.dataclass
class Check:
    name: str
    status: str
    wanted: str = ""
    found: str = ""
    fix: str = ""


def test_check_list_puts_failures_first_with_their_fix() -> None:
    checks = [
        Check("python", "ok", "3.11 or newer", "3.11.4"),
        {"name": EVIL, "state": "fail", "found": "3 GB", "fix": "free memory"},
        {"name": "port", "state": True},
        {"name": "odd", "state": "whatever"},
        Check("cores", "warn", "4", "2"),
    ]
    made = widgets.as_check_list(checks)
    assert_harmless(made)
    lines = repr(made).splitlines()
    assert lines[0] == "1 failed, 1 to look at, 1 unknown, 2 fine"
    assert lines[1].startswith("  ✗ fail") and lines[1].endswith("fix: free memory")
    assert [line.split()[1] for line in lines[1:]] == ["fail", "warn", "unknown", "ok", "ok"]
    assert repr(widgets.as_check_list([])) == "no checks"


def test_conversation_marks_supervised_tokens() -> None:
    tokens = [("<|im_start|>", False), {"text": "Hi", "supervised": 1}, (" <b>", True), ("\n", False)]
    made = widgets.as_conversation(tokens, "row 1")
    assert_harmless(made)
    assert re.findall(r"<mark[^>]*>([^<]*)</mark>", made.html) == ["Hi &lt;b&gt;"]
    assert "4 tokens, 2 supervised (50 %)" in Tags(made.html).text
    assert repr(made).endswith("<|im_start|>[[Hi <b>]]\n")


def test_conversation_takes_samples() -> None:
    made = widgets.as_conversation([[("a", True)], [("b", False), ("c", True)]])
    assert repr(made).count("supervised") == 2
    assert "0 tokens" in repr(widgets.as_conversation([[]]))
    assert repr(widgets.as_conversation([])) == ""
    for wrong in ("text", 3, {"text": "no mask"}, ["a"], [3]):
        with pytest.raises(TypeError, match="a token must be"):
            widgets.as_conversation([wrong])


def test_expect() -> None:
    made = widgets.as_expect(EVIL, took="2 min on 2 cores")
    assert_harmless(made)
    assert repr(made) == f"Expect: {EVIL}\nTakes: 2 min on 2 cores"


def test_public_calls_display(shown: list[Any]) -> None:
    widgets.table([{"a": 1}])
    widgets.check_list([])
    widgets.conversation([("a", True)])
    widgets.expect("x")
    widgets.picture(b"\x89PNG", "caption", "alt")
    assert [type(item) for item in shown] == [widgets.Shown] * 5
    assert 'alt="alt"' in shown[-1].html and "data:image/png;base64,iVBORw==" in shown[-1].html


def test_shown_is_text_outside_a_notebook(capsys: pytest.CaptureFixture[str]) -> None:
    widgets.table([{"a": 1, "b": "x"}])
    assert capsys.readouterr().out.split() == ["a", "b", "-", "-", "1", "x"]


# ---- controls


def test_choose_headless_shows_the_first(shown: list[Any]) -> None:
    widgets.choose(
        {"one": 1, "two": 2, EVIL: 3, "four": 4}, lambda n: widgets.Shown(f"<p>{n}</p>", f"{n}"), False, label="row", first=3
    )
    assert [repr(item) for item in shown] == [
        "row: one", "1", "row: two", "2", f"row: {EVIL}", "3", "1 more can be chosen with interactive: true",
    ]  # fmt: skip
    for item in shown:
        assert_harmless(item)


def test_choose_numbers_what_has_no_name(shown: list[Any]) -> None:
    seen: list[object] = []
    widgets.choose([["a"], ["b"]], seen.append, False)
    assert seen == [["a"], ["b"]]
    assert [repr(item) for item in shown] == ["show: 1 of 2", "show: 2 of 2"]
    widgets.choose([], seen.append, False)
    assert "nothing to choose from" in repr(shown[-1])
    widgets.choose([5, 7], seen.append, False)
    assert repr(shown[-1]) == "show: 7"


def test_choose_interactive_is_a_dropdown(shown: list[Any]) -> None:
    import ipywidgets

    rendered: list[int] = []
    widgets.choose({"one": 1, "two": 2}, rendered.append, True)
    (box,) = shown
    dropdown, output = box.children
    assert isinstance(dropdown, ipywidgets.Dropdown) and isinstance(output, ipywidgets.Output)
    assert rendered == [1]
    dropdown.value = "two"
    assert rendered == [1, 2]


def test_choose_two_headless_shows_the_pairs(shown: list[Any]) -> None:
    seen: list[tuple[int, int]] = []
    widgets.choose_two({"one": 1, "two": 2, "three": 3}, lambda *pair: seen.append(pair), False, pairs=[("one", "three")])
    widgets.choose_two({"one": 1, "two": 2}, lambda *pair: widgets.Shown("<p></p>", f"{pair}"), False)
    assert seen == [(1, 3)]
    assert [repr(item) for item in shown] == ["compare: one and three", "compare: one and two", "(1, 2)"]


def test_choose_two_interactive_has_two_dropdowns(shown: list[Any]) -> None:
    seen: list[tuple[int, int]] = []
    widgets.choose_two({"one": 1, "two": 2, "three": 3}, lambda *pair: seen.append(pair), True)
    (box,) = shown
    first, second = box.children[0].children
    first.value, second.value = "two", "three"
    assert seen == [(1, 2), (2, 2), (2, 3)]


def test_words_in_colour(shown: list[Any]) -> None:
    made = widgets.as_table([{"a": "bad"}, {"a": "bad too"}], colours={"bad": "fail"})
    assert made.html.count(f"color: {widgets.COLOURS['fail']}; ") == 1
    assert "bad" in made.text


# ---- progress


ROWS = [
    {"split": "train", "step": 10, "loss": 8.5, "acc": [0.1, 0.05]},
    {"split": "val", "step": 10, "loss": 8.0, "acc": [0.2, 0.1], "simulated_al": 1.25},
    {"split": "train", "step": 20, "loss": float("nan"), "acc": None},
]


def test_live_plot_headless_prints_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    with widgets.LivePlot(False, total=100, every_s=1000) as live:
        live.update([])
        for at in range(1, len(ROWS) + 1):
            live.update(ROWS[:at])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2  # at once, and the last state at the end
    assert lines[0].startswith("  step 0/100 0 %")
    held_out = "held out loss 8 acc 0.200 0.100 simulated AL 1.250"
    assert re.fullmatch(rf"  step 20/100 20 %, .* left; train loss not a number; {held_out}", lines[1])


def test_live_plot_shows_the_end_of_a_failed_training(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ZeroDivisionError), widgets.LivePlot(False, every_s=1000) as live:
        live.update(ROWS[:1])
        live.update([*ROWS[:1], {"split": "val", "step": 10, "loss": 8.0, "acc": [0.2, 0.1]}])  # an older log
        raise ZeroDivisionError
    assert "held out loss 8" in capsys.readouterr().out


def test_live_plot_redraws_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    import IPython.display

    class Handle:
        updates = 0

        def update(self, shown: widgets.Shown) -> None:
            assert_harmless(shown)
            self.updates += 1

    handle, displayed = Handle(), list[Any]()

    def display(shown: widgets.Shown, display_id: bool) -> Handle:
        displayed.append(shown)
        return handle

    monkeypatch.setattr(IPython.display, "display", display)
    with widgets.LivePlot(True, every_s=0) as live:
        live.update([])
        live.update(ROWS)
    assert len(displayed) == 1 and "data:image/png;base64" in displayed[0].html
    assert handle.updates == 1


@pytest.mark.parametrize(
    ("done", "total", "already", "wanted"),
    [
        (120, 744, 0, "  120/744 prompts 16 %  3.2/s  3 min 15 s left"),
        (0, 744, 0, "  0/744 prompts 0 %"),
        (744, 744, 0, "  744/744 prompts 100 %  19.8/s  done in 38 s"),
        (743, 744, 743, "  743/744 prompts 99 %"),
        (743, 744, 623, "  743/744 prompts 99 %  3.2/s  0 s left"),
        (3, 0, 0, "  3 prompts  0.08/s  done in 38 s"),
        (4, 971, 0, "  4/971 prompts 0 %  0.107/s"),
    ],
)
def test_progress_line(done: int, total: int, already: int, wanted: str) -> None:
    assert widgets.progress_line(done, total, "prompts", 100.0, already=already, now=137.5) == wanted


def test_progress_prints_at_once_rarely_and_at_the_end_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    progress = widgets.Progress("rows")
    for second in range(26):
        now[0] = float(second)
        progress(100 + second * 4, 200)
    progress(200, 200)
    progress(200, 200)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "  100/200 rows 50 %"
    assert lines[1] == "  140/200 rows 70 %  4/s  15 s left"  # the 100 that were done before do not count
    assert lines[-1] == "  200/200 rows 100 %  4/s  done in 25 s"
    assert len(lines) == 4
    progress(0, 5)  # another piece of work with the same object
    assert capsys.readouterr().out == "  0/5 rows 0 %\n"


def test_imports_nothing_slow() -> None:
    code = (
        "import sys, eagle3kit.widgets; print([m for m in ('matplotlib', 'IPython', 'ipywidgets', 'torch') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "evil", [EVIL, "</td></table><script>1</script>", "' onmouseover='alert(1)", '\\"><img src=x onerror=1>', "&lt;b&gt;"]
)
def test_hostile_text_is_shown_as_text_wherever_it_stands(shown: list[Any], evil: str) -> None:
    """Every function, every argument that text of a model, a data row or an error can reach."""
    widgets.picture(b"png", caption=evil, alt=evil)
    widgets.table([{evil: evil, "n": 1}], caption=evil, columns=[evil, "n"], colours={evil: "ok"})
    widgets.check_list([dict.fromkeys(("name", "state", "found", "wanted", "fix"), evil)], caption=evil)
    widgets.conversation([[(evil, True), (evil, False)], [{"text": evil, "supervised": True}]], caption=evil)
    widgets.expect(evil, took=evil)
    widgets.choose({evil: evil}, lambda text: widgets.as_expect(text), interactive=False, label=evil)
    widgets.choose_two({evil: 1, "b": 2}, lambda *_: None, interactive=False, label=evil)
    assert len(shown) >= 8
    for each in shown:
        assert_harmless(each)
        assert evil in Tags(each.html).text + "".join(value or "" for _, value in Tags(each.html).attributes)
