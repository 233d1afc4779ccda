"""The sweep's cells: resumable, made of the right drafts, and read as what they are."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle3kit import bench, evaluate, sweep
from eagle3kit.data import Prompt
from eagle3kit.errors import KitError
from eagle3kit.evaluate import Question
from eagle3kit.params import Params
from eagle3kit.rundir import Run, write_json
from eagle3kit.server import Engine
from eagle3kit.sweep import Cell

PLAIN, DRAFTING = Engine("none"), Engine("eagle3")


class Machine:
    """Stands for servers and measuring; `fails_at` is the cell at which the machine goes down."""

    def __init__(self) -> None:
        self.measured: list[str] = []
        self.started: list[Engine] = []
        self.fails_at = ""

    @contextmanager
    def opened(self, engines: Sequence[Engine]) -> Iterator[Mapping[Engine, Any]]:
        self.started += engines
        yield {engine: engine.name for engine in engines}

    def cell(self, run: Run, name: str, *engines: Engine, **inputs: Any) -> Cell:
        def measure(servers: Mapping[Engine, Any]) -> Any:
            if name == self.fails_at:
                raise KeyboardInterrupt
            self.measured.append(name)
            return [servers[engine] for engine in engines]

        return Cell(run.step(f"eval/sweep/{name}", inputs), engines, 8, 1, measure)

    def groups(self, run: Run) -> list[list[Cell]]:
        return [
            [self.cell(run, "answers/none", PLAIN), self.cell(run, "answers/eagle3", DRAFTING)],
            [self.cell(run, "speed/c1-r1", PLAIN, DRAFTING)],
        ]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(Params(run_name="unit", runs_dir=str(tmp_path)), "06_evaluate")


def test_an_interrupted_sweep_measures_what_is_missing_and_starts_no_other_server(run: Run) -> None:
    machine = Machine()
    machine.fails_at = "answers/eagle3"
    with pytest.raises(KeyboardInterrupt):
        list(sweep.work(machine.groups(run), machine.opened))
    assert (machine.measured, machine.started) == (["answers/none"], [PLAIN, DRAFTING])

    again = Machine()
    done = list(sweep.work(again.groups(run), again.opened))
    assert again.measured == ["answers/eagle3", "speed/c1-r1"]
    assert again.started == [DRAFTING, PLAIN, DRAFTING]
    assert [cell.step.name for cell in done] == ["eval/sweep/answers/eagle3", "eval/sweep/speed/c1-r1"]
    assert json.loads(run.path("eval/sweep/speed/c1-r1/result.json").read_text()) == ["none", "eagle3"]


def test_a_finished_sweep_starts_nothing(run: Run) -> None:
    list(sweep.work(Machine().groups(run), Machine().opened))
    machine = Machine()
    assert list(sweep.work(machine.groups(run), machine.opened)) == []
    assert (machine.measured, machine.started) == ([], [])


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_length_of_the_curve_is_served_once(device: str) -> None:
    found = [sweep.Contestant("none", PLAIN), *(sweep.Contestant(f"eagle3-k{k}", DRAFTING, k=k) for k in (1, 3))]
    found.append(sweep.Contestant("other-k2", PLAIN, k=2))
    more = sweep.further_lengths(found, Path("drafter"), device)
    assert sorted([1, 3, *(c.k for c in more)]) == list(sweep.CURVE)
    assert all((c.name, c.request["vllm_xargs"]["draft_tokens"]) == (f"eagle3-k{c.k}", c.k) for c in more)
    (engine,) = {c.engine for c in more}  # one server gives them all
    if device == "cpu":
        assert engine == DRAFTING
    else:
        assert "eagle3kit.scheduler.DraftLengthScheduler" in engine.arguments
        assert json.loads(engine.arguments[engine.arguments.index("--speculative-config") + 1])["num_speculative_tokens"] == 8


def test_drafts_are_sorted_by_what_stood_before_them() -> None:
    # 63 tokens of prompt and the first of the answer; 1 accepted and the target's own; then 0, then 2
    found = sweep.by_context({"a": 63, "b": 200}, {"a": [1, 0, 2], "b": [3]})
    assert found == {"1 to 64": {"a": [1]}, "65 to 128": {"a": [0, 2]}, "129 to 256": {"b": [3]}}


@given(st.dictionaries(st.sampled_from("abcd"), st.lists(st.integers(0, 5), max_size=40)), st.integers(1, 3000))
def test_every_draft_is_in_one_bin(accepted: dict[str, list[int]], length: int) -> None:
    bins = sweep.by_context(dict.fromkeys(accepted, length), accepted)
    for name, counts in accepted.items():
        assert [count for drafts in bins.values() for count in drafts.get(name, [])] == counts


def test_the_targets_own_temperature_is_named_with_its_source(tmp_path: Path) -> None:
    file = tmp_path / "generation_config.json"
    assert sweep.own_temperature(tmp_path).startswith("1 (vLLM's default")
    file.write_text('{"eos_token_id": 2}')
    assert sweep.own_temperature(tmp_path).startswith("1 (vLLM's default")
    file.write_text('{"temperature": 0.6}')
    assert sweep.own_temperature(tmp_path) == "0.6 (its generation_config.json)"


def test_an_interval_over_few_prompts_is_not_called_one_of_95_percent() -> None:
    group = {"by": "kind", "group": "math", "al": 1.6, "low": 1.2, "high": 1.8, **evaluate.positions([40], 100)}
    rows = sweep.group_rows({"groups": [group | {"prompts": prompts} for prompts in (2, 5, 6)]})
    assert [row["95 %"] for row in rows] == ["1.20 to 1.80, 50 % at most", "1.20 to 1.80, 94 % at most", "1.20 to 1.80"]


def test_the_table_of_groups_has_both_rates_of_every_position() -> None:
    group = {"by": "temperature", "group": "0", "prompts": 2, "al": 1.6, "low": None, "high": None}
    (row,) = sweep.group_rows({"groups": [group | evaluate.positions([40, 20], 100)]})
    assert (row["by position, of all drafts"], row["of those accepted up to there"]) == ("0.400, 0.200", "0.400, 0.500")


def test_the_reckoned_speed_up_is_held_against_decoding_alone(run: Run) -> None:
    slower = (1.0, 1.3, 1.0)  # the machine was busy in the second repeat
    plain = [
        {
            "steps": {str(n): x * (0.08 + 0.007 * n) for n in (1, 2, 4, 8, 16)},
            "prompts": {"16": x * 0.1, "128": x * 0.4},
            "first": {"1": x * 0.2, "16": x * 0.5},
        }
        for x in slower
    ]
    timed = {"none": plain, "eagle3-k3": [{"steps": {"1": x * 0.14}, "first": {"1": x * 0.3, "16": x * 0.9}} for x in slower]}
    traced = {"traced/eagle3-k3": {"eagle3-k3": [0.2, 0.3, 0.25]}}
    drafter = sweep.Contestant("eagle3-k3", DRAFTING, k=3)
    measured = {
        "none": {"decode": [1 / 0.08, 1 / 0.09], "paired": True, "steps": 23},
        "eagle3-k3": {"decode": [1 / 0.064, 1 / 0.060], "paired": True, "al": 2.0, "a_step": 1.8, "steps": 13},
    }
    of_one_token = {name: found | {"decode": [0.0, 0.0]} for name, found in measured.items()}
    stand_in: Any = SimpleNamespace(repeats=lambda _: timed, result=traced.__getitem__, contestants=[drafter])
    answers = {"eagle3-k3": {"ratio": 1.2, "low": 1.1, "high": 1.3}}
    found = sweep._local(run, stand_in, {"speed": {1: measured, 2: of_one_token}, "ratios": {1: answers, 2: answers}})
    (row,) = found["local"]
    assert row["measured"] == pytest.approx((1.25 * 1.5) ** 0.5)
    assert row["low"] < 1.25 < 1.5 < row["high"]  # two repeats: one degree of freedom
    assert row["predicted"] == pytest.approx(1.8 * 0.087 / 0.14)
    assert row["answers_predicted"] == pytest.approx((0.2 + 23 * 0.087) / (0.3 + 13 * 0.14))
    assert row["answers_error"] == pytest.approx(row["answers_predicted"] / 1.2 - 1)
    assert found["drafting"]["share"] == [0.25, 0.2, 0.3]


def test_the_reckoned_speed_up_stands_beside_both_that_were_measured() -> None:
    row = {"predicted": 1.1, "measured": 1.0, "low": 0.9, "high": 1.2, "error": 0.1}
    row |= {f"answers_{key}": value - 0.05 for key, value in row.items()}
    (shown,) = sweep.local_rows({"local": [row | {"requests": 4, "k": 3, "a_step": 1.6}]})
    assert (shown["decoding, predicted"], shown["answers, predicted"]) == (1.1, 1.05)
    assert (shown["decoding, measured"], shown["answers, measured"]) == ("1.00 x (0.90 to 1.20)", "0.95 x (0.85 to 1.15)")
    assert (shown["decoding, error"], shown["answers, error"]) == ("+10 %", "+5 %")


RESULT = {
    "completed": 4,
    "duration": 2.0,
    "total_output_tokens": 64,
    "output_throughput": 32.0,
    "median_ttft_ms": 50.0,
    "p99_ttft_ms": 70.0,
    "median_tpot_ms": 9.0,
    "p99_tpot_ms": 11.0,
    "itls": [[0.0, *[0.012] * 10]] * 4,
    "spec_decode_num_drafts": 40,
    "spec_decode_accepted_tokens": 24,
    "spec_decode_per_position_acceptance_rates": [0.4, 0.2],
    "generated_texts": ["a", "b", "c", "d"],
}


def test_a_benchmark_is_read_with_its_counters() -> None:
    found = bench.read(RESULT, 4)
    assert found["counters"] == {"drafts": 40, "accepted_tokens": 24, "accepted_1": 16, "accepted_2": 8}
    assert found["output_throughput"] == 32
    assert found["tokens_a_step"] == (64 - 4) / 40
    assert (found["steps"], found["most_steps"]) == (10, 10)
    longer = bench.read(RESULT | {"itls": [[0.0, *[0.012] * 14], *[[0.0, *[0.012] * 10]] * 3]}, 4)
    assert (longer["steps"], longer["most_steps"]) == (11, 14)
    assert not {"generated_texts", "itls"} & set(found)


def test_decoding_is_told_by_the_steps_between_first_and_last_token() -> None:
    """The counters know 1.6 tokens a step, of which the answers' ends cut some off."""
    assert sweep._decoding(bench.read(RESULT, 4)) == pytest.approx(1.5 / 0.012)
    one_token = RESULT | {"itls": [[0.0]] * 4, "total_output_tokens": 4}
    assert sweep._decoding(bench.read(one_token, 4)) == 0


def test_a_benchmark_without_speculation_counts_nothing() -> None:
    plain = {key: value for key, value in RESULT.items() if not key.startswith("spec_decode")}
    assert bench.read(plain, 4)["counters"] == {"drafts": 0, "accepted_tokens": 0}


def test_failed_requests_of_a_benchmark_are_an_error() -> None:
    with pytest.raises(KitError, match="requests of vllm bench failed; seen 3 of 4 answered"):
        bench.read(RESULT | {"completed": 3}, 4)


DECODING = {"decode": [10.0, 11.0, 10.0], "paired": True}
FASTER = {"decode": [15.0, 16.5, 15.0], "paired": True}
SAID: dict[str, Any] = {
    "speed": {
        "4": {
            "none": {"al": None, "tokens_per_s": [40.0, 44.0, 42.0], **DECODING, **{key: RESULT[key] for key in bench.LATENCIES}},
            "eagle3-k3": {
                "al": 1.6,
                "tokens_per_s": [50.0, 52.0, 51.0],
                **FASTER,
                **{key: RESULT[key] for key in bench.LATENCIES},
            },
        }
    },
    "ratios": {
        "4": {
            "eagle3-k3": {"ratio": 1.21, "low": 1.18, "high": 1.25, "al": 1.6, "heldout_al": 1.4, "at_heldout": 1.21 * 1.4 / 1.6}
        }
    },
    "drafting": {"contestant": "eagle3-k3", "share": [0.13, 0.1, 0.2]},
}


def test_the_table_of_speed_names_baseline_and_outcome() -> None:
    none, eagle3 = sweep.speed_rows(SAID)
    assert (none["tokens/s"], none["range"], none["speed-up"], none["verdict"]) == ("42.0", "40.0 to 44.0", "", "baseline")
    assert (eagle3["speed-up"], eagle3["verdict"]) == ("1.21 x (1.18 to 1.25)", "faster")
    assert (none["AL of its prompts"], eagle3["AL of its prompts"], eagle3["AL held-out"]) == ("", "1.60", "1.40")
    assert eagle3["speed-up at AL held-out, reckoned"] == "1.06 x"
    assert eagle3["TTFT p50 / p99 (ms)"] == "50 / 70"
    decoding = "speed-up of decoding alone"  # beside that of short answers, which mostly wait
    assert (none[decoding], eagle3[decoding]) == ("", "1.50 x (1.50 to 1.50)")
    assert (none["drafting"], eagle3["drafting"]) == ("", "")  # four requests: not timed


SHARES = ([0.13, 0.1, 0.2], "13 % of a step (10 to 20 %)"), (None, "unknown: not in the trace")


@pytest.mark.parametrize(("share", "words"), SHARES)
def test_the_table_of_speed_says_what_share_drafting_takes(share: list[float] | None, words: str) -> None:
    timed = {"drafting": {"contestant": "eagle3-k3", "share": share}}
    at_one = {key: {"1": SAID[key]["4"]} for key in ("speed", "ratios")}
    none, eagle3 = sweep.speed_rows(SAID | at_one | timed)
    assert (none["drafting"], eagle3["drafting"]) == ("", words)


KINDS = ("math", "code", "story", "list", "explain", "rewrite")


@pytest.fixture
def asked(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Prompt]:
    """A run that was evaluated: a drafter, and 60 held-out prompts, of which each tenth has two turns."""
    folder = tmp_path / "trained"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights")
    prompts = [
        Prompt(f"heldout-{i}", KINDS[i % 2 if i < 10 else i % 6], "heldout", (("user", f"text {i}"),) * (2 if i % 10 == 9 else 1))
        for i in range(60)
    ]
    questions = [Question(f"{prompt.id}_gen0", prompt.kind, (1, 2)) for prompt in prompts]
    monkeypatch.setattr("eagle3kit.train.drafter_folder", lambda run: folder)
    monkeypatch.setattr(evaluate, "questions", lambda run: questions)
    monkeypatch.setattr(sweep, "load_prompts", lambda params: (prompts, {}))
    monkeypatch.setattr(Run, "digest", lambda run, name, made_by: "digest")
    return prompts


class Counting:
    """Stands for `vllm bench serve`: keeps what it was sent."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, list[str]]] = []

    def measure(self, server: Any, prompts: Path, *, count: int, concurrency: int, **rest: Any) -> Any:
        lines = [json.loads(line)["prompt"] for line in prompts.read_text().splitlines()]
        self.sent.append((concurrency, lines[:count]))
        assert len(lines) == count  # vllm bench draws at random what is missing
        return {}


def test_every_load_is_measured_with_the_same_prompts_equally_often(run: Run, asked: list[Prompt]) -> None:
    counting = Counting()
    made = sweep.Sweep(run, "cpu", counting)  # type: ignore[arg-type]
    cells = [cell for cell in made.cells if "/speed/" in cell.step.name]
    for cell in cells:
        cell.measure(dict.fromkeys(cell.engines))  # type: ignore[arg-type]
    assert {load for load, _ in counting.sent} == {1, 4, 16}
    for load, texts in counting.sent:
        assert len(texts) >= load
        assert {texts.count(text) for text in texts} == {len(texts) // sweep.SPEED_PROMPTS}
        assert set(texts) == set(counting.sent[0][1])
    kinds = {prompt.turns[0][1]: prompt.kind for prompt in asked}
    few = set(counting.sent[0][1])
    assert len(few) == len({kinds[text] for text in few}) == sweep.SPEED_PROMPTS
    assert not few & {prompt.turns[0][1] for prompt in asked[: sweep.SPEED_PROMPTS]}
    names = [c.name for c in made.contestants]
    assert names == ["none", "ngram", "eagle3-k1", "eagle3-k3", "eagle3-k5"]
    # two prompts at one request, 4 and 16 at the others, with 32 tokens each: as long as that it must not take
    assert sum(cell.tokens for cell in cells) <= (2 + 4 + 16) * 32 * len(names) * run.params.eval_repeats


def test_acceptance_at_every_draft_length_is_of_the_prompts_that_are_asked_one_by_one(run: Run, asked: list[Prompt]) -> None:
    counting = Counting()
    made = sweep.Sweep(run, "cpu", counting)  # type: ignore[arg-type]
    cells = [cell for cell in made.cells if "/bench/" in cell.step.name]
    assert len(cells) == len(sweep.CURVE)
    for cell in cells:
        cell.measure(dict.fromkeys(cell.engines))  # type: ignore[arg-type]
    texts = [text for _, text in made.answers]
    assert all(sent == texts for _, sent in counting.sent)
    assert [question.id for question, _ in made.answers] == [f"heldout-{text.split()[1]}_gen0" for text in texts]
    assert len(texts) == sweep.ANSWERS
    assert all(int(text.split()[1]) % 10 != 9 for text in texts)  # single questions


def test_without_single_questions_there_is_no_sweep(run: Run, asked: list[Prompt], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "load_prompts", lambda params: ([prompt for prompt in asked if len(prompt.turns) > 1], {}))
    with pytest.raises(KitError, match="no held-out prompt is a single question"):
        sweep.Sweep(run, "cpu")


def further(tmp_path: Path, *names: str) -> list[str]:
    """Folders of drafters with weights of their own."""
    for name in names:
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "model.safetensors").write_bytes(name.encode())
    return [str(tmp_path / name) for name in names]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_further_drafters_are_contestants_at_every_length(run: Run, asked: list[Prompt], tmp_path: Path, device: str) -> None:
    run.params = run.params.replace(eval_drafters=further(tmp_path, "published-a", "published-b"), eval_sweep_k=[1, 3])
    found = sweep.contestants(run, device)
    drafters = [c for c in found if c.drafter]
    assert [c.name for c in found[:4]] == ["none", "ngram", "eagle3-k1", "eagle3-k3"]
    assert [c.name.endswith(("published-a-k1", "published-a-k3")) for c in found[4:6]] == [True, True]
    assert [c.name.endswith(("published-b-k1", "published-b-k3")) for c in found[6:]] == [True, True]
    assert len({c.name for c in found}) == len(found) == 8
    assert len({c.drafter for c in drafters}) == 3  # the weights
    assert len({c.engine for c in drafters}) == (3 if device == "cpu" else 6)
    assert [json.loads(c.config)["num_speculative_tokens"] for c in drafters] == [1, 3] * 3
    assert all(json.loads(c.config)["model"].endswith("published-a") for c in found[4:6])


def test_drafters_of_equal_names_are_refused(run: Run, asked: list[Prompt], tmp_path: Path) -> None:
    further(tmp_path, "a/drafter", "a.drafter")  # both are named a-drafter, after where they lie
    run.params = run.params.replace(eval_drafters=[str(tmp_path / "a/drafter"), str(tmp_path / "a.drafter")])
    with pytest.raises(KitError, match="same name"):
        sweep.contestants(run, "cpu")
    (twice,) = further(tmp_path, "twice")
    run.params = run.params.replace(eval_drafters=[twice, twice])
    with pytest.raises(KitError, match="same name"):
        sweep.contestants(run, "cpu")


COUNTERS = {"drafts": 100.0, "accepted_tokens": 60.0, "accepted_1": 40.0, "accepted_2": 20.0}


def test_served_acceptance_has_both_rates_and_intervals_where_prompts_were_counted_one_by_one() -> None:
    by_prompt = {"a": [0] * 10, "b": [2] * 10, "c": [0, 1] * 5, "d": []}
    counted = sweep._served(COUNTERS, by_prompt, 2)
    assert (counted["unconditional"], counted["conditional"]) == ([0.4, 0.2], [0.4, 0.5])
    assert counted["served"] == 1.6
    assert counted["served_low"] < 1.6 < counted["served_high"]
    assert counted["first_low"] < 0.5 < counted["first_high"]
    simulated = {"k": 2, "simulated": 1.62, "low": 1.5, "high": 1.7}
    uncounted, unserved = sweep._served(COUNTERS, {}, 2), sweep._served({}, {}, 2)
    rows = sweep.curve_rows({"curve": [simulated | found for found in (counted, uncounted, unserved)]})
    assert [row["served (vllm bench)"] for row in rows] == [1.6, 1.6, "not served"]
    assert [row["served, 95 %"] == "unknown" for row in rows] == [False, True, True]
    assert [row["of those accepted up to there"] for row in rows] == ["0.400, 0.500", "0.400, 0.500", ""]
    assert [row["position 1, 95 %"] == "unknown" for row in rows] == [False, True, True]


@pytest.mark.parametrize("by_turns", [True, False])
def test_speed_ups_say_whether_contestants_took_turns(run: Run, by_turns: bool) -> None:
    run.params = run.params.replace(eval_side_by_side=by_turns, eval_sweep_concurrency=[1])

    def repeats(*rates: float, **counters: float) -> list[Any]:
        return [bench.read(RESULT, 4) | {"output_throughput": rate, "counters": counters} for rate in rates]

    drafting = repeats(15.1, 29.9, 45, drafts=10, accepted_tokens=10)
    found = {"none": repeats(10, 20, 30), "eagle3-k3": drafting, "other-k3": drafting}
    drafters = [sweep.Contestant(name, DRAFTING, "{}", 3, drafter="weights") for name in ("eagle3-k3", "other-k3")]
    stand_in: Any = SimpleNamespace(
        run=run,
        contestants=[sweep.Contestant("none", PLAIN), *drafters],
        repeats=lambda kind, label: found,
        requests=lambda load: 4,
        result=lambda name: {"other-k3": {"counters": {"drafts": 10, "accepted_tokens": 5}}},
    )
    said = sweep._speed(stand_in, {3: 1.8})
    ratio, other = said["ratios"][1].values()
    assert said["in_turn"] is ratio["paired"] is by_turns
    assert said["advice"].startswith("by requests in flight: at 1 speculate" if by_turns else "do not speculate")
    assert said["advice"].endswith("; with answers of at most 24 tokens, the wait for the first one included")
    assert (ratio["al"], ratio["heldout_al"], other["heldout_al"]) == (2.0, 1.8, 1.5)
    assert ratio["at_heldout"] == pytest.approx(ratio["ratio"] * 0.9)


def test_measured_cells_are_put_together_and_shown(
    run: Run, asked: list[Prompt], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every cell with a made-up result of its form; the trained drafter at k = 3 is half as fast again."""
    made = sweep.Sweep(run, "cpu", Counting())  # type: ignore[arg-type]
    accepted = {question.id: [1, 0, 2, 0] * 5 for question in made.asked}
    answers = {question.id: [1, 2, 3] for question, _ in made.answers}
    counters = {"drafts": 100.0, "accepted_tokens": 75.0, **{f"accepted_{i}": 50.0 / i for i in range(1, 9)}}

    def result(kind: str, name: str, repeat: int) -> Any:
        rate = (15.0 if name == "eagle3-k3" else 10.0) * repeat * (1 + 0.001 * (repeat % 2) * len(name))
        speed = bench.read(RESULT, 4) | {"output_throughput": rate, "counters": counters if "eagle3" in name else {}}
        drafted: dict[str, Any] = {"steps": {"1": 0.14}}
        plain = {"steps": {str(n): 0.08 + 0.007 * n for n in (1, 2, 4, 8, 16)}, "prompts": {"16": 0.1, "128": 0.4}}
        plain["first"] = drafted["first"] = {"1": 0.2, "16": 0.5}
        return {
            "answers": {"answers": answers, "accepted": accepted, "differences": {}},
            "bench": speed,
            "sampled": accepted,
            "first": [[[1, 2], [3, 4]]] * 4,
            "traced": [0.2, 0.3, 0.25],
            "timed": plain if name == "none" else drafted,
            "speed": speed,
        }[kind]

    for cell in made.cells:
        kind, label = cell.step.name.removeprefix("eval/sweep/").split("/")
        names = [c.name for c in made.contestants] if kind in ("timed", "speed") else [label]
        repeat = int(label.rsplit("r", 1)[1]) if kind in ("timed", "speed") else 1
        write_json(cell.step.folder / "result.json", {name: result(kind, name, repeat) for name in names})
    write_json(run.path("eval", "eagle3", "result.json"), {"accepted": accepted})
    monkeypatch.setattr("eagle3kit.simulate.heldout", lambda run, folder, lengths: dict.fromkeys(lengths, accepted))

    said = sweep.conclude(run, made, tmp_path)
    assert said["advice"].startswith("by requests in flight: at 1 speculate with eagle3-k3, 1.50 x (")
    rows = {(row["requests"], row["contestant"]): row for row in sweep.speed_rows(said)}
    assert len(rows) == 3 * 5
    assert {row["verdict"] for (_, name), row in rows.items() if name == "eagle3-k3"} == {"faster"}
    assert rows["1", "eagle3-k3"]["drafting"] == "25 % of a step (20 to 30 %)"
    curve = sweep.curve_rows(said)
    assert [row["k"] for row in curve] == list(sweep.CURVE)
    assert [row["served, 95 %"] != "unknown" for row in curve] == [k in (1, 3, 5) for k in sweep.CURVE]
    assert {row["by"] for row in sweep.group_rows(said)} == {"kind", "context, tokens", "temperature"}
    assert len(sweep.local_rows(said)) == 3 * 3
    assert {row["verdict"] for row in sweep.lossless_rows(said)} == {"no difference seen"}
    assert run.fact("sweep.c16.eagle3-k3.ratio.low") > 1
    assert run.fact("sweep.k3.conditional") == [0.5, 0.5, 0.6667]


def test_answers_that_begin_together_last_as_long_as_the_slowest(run: Run) -> None:
    """Of four requests one needs 14 steps and the others 10: with one in flight they follow each other."""
    run.params = run.params.replace(eval_sweep_concurrency=[1, 4])
    measured = bench.read(RESULT | {"itls": [[0.0, *[0.012] * 14], *[[0.0, *[0.012] * 10]] * 3]}, 4) | {"counters": {}}
    stand_in: Any = SimpleNamespace(
        run=run,
        contestants=[sweep.Contestant("none", PLAIN)],
        repeats=lambda kind, label: {"none": [measured] * 2},
        requests=lambda load: 4,
    )
    said = sweep._speed(stand_in, {})
    assert [said["speed"][load]["none"]["steps"] for load in (1, 4)] == [11, 14]


def test_kinds_of_cells_are_spread_over_the_time_of_all() -> None:
    some: Any = [list("ab"), list("1234"), []]
    assert "".join(map(str, sweep.mingled(*some))) == "a12b34"
