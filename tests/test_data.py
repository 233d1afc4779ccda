"""Prompts, responses, rows and masks."""

import json
import re
import unicodedata
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3kit import data, origin, server
from eagle3kit.data import Prompt
from eagle3kit.errors import KitError
from eagle3kit.params import Params
from eagle3kit.rundir import Run
from eagle3kit.server import Engine, Server


def prompt(identity: str, users: int = 1, split: data.Split = "train") -> Prompt:
    return Prompt(identity, "explain", split, tuple(("user", f"{identity} {i}") for i in range(users)))


def answer(
    identity: str, turn: int = 0, prompt_ids: tuple[int, ...] = (1, 2, 3), generated: tuple[int, ...] = (7, 8, 9)
) -> dict[str, Any]:
    return {
        "id": f"{identity}_gen{turn}",
        "primary_id": identity,
        "input_ids": [*prompt_ids, *generated],
        "loss_mask": [0] * len(prompt_ids) + [1] * len(generated),
    }


def write_answers(run: Run, answers: list[dict[str, Any]], end: str = "\n") -> Path:
    path = run.path("data", "responses.jsonl")
    path.write_text("\n".join(json.dumps(row) for row in answers) + end)
    return path


def test_builtin_prompts_load_with_both_splits() -> None:
    prompts, dropped = data.load_prompts(Params())
    assert not dropped
    assert sum(p.split == "train" for p in prompts) >= 600
    assert sum(p.split == "heldout" for p in prompts) >= 80
    assert [p.split for p in prompts] == sorted((p.split for p in prompts), reverse=True)


def test_limits_take_the_first_ones() -> None:
    prompts, _ = data.load_prompts(Params(data_train_prompts=5, data_heldout_prompts=2))
    assert Counter(p.split for p in prompts) == {"train": 5, "heldout": 2}


def source(tmp_path: Path, lines: list[bytes | dict[str, Any]]) -> Params:
    path = tmp_path / "source.jsonl"
    path.write_bytes(b"\n".join(line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines))
    return Params(data_source=str(path), data_heldout_share=0.25)


def conversation(text: str) -> dict[str, Any]:
    return {"conversations": [{"from": "human", "value": text}, {"from": "gpt", "value": "answer"}]}


def test_a_local_source_is_split_and_its_bad_lines_counted(tmp_path: Path) -> None:
    good: list[bytes | dict[str, Any]] = [conversation(f"question {i}") for i in range(20)]
    bad: list[bytes | dict[str, Any]] = [
        b"\xff\xfe",
        b"{",
        b"[]",
        {"messages": "x"},
        {"messages": [{"role": "assistant", "content": "a"}]},
    ]
    prompts, dropped = data.load_prompts(source(tmp_path, [*good, *bad, conversation("Question, 1!")]))
    assert sum(dropped.values()) == 6
    assert dropped["not UTF-8"] == 1
    assert dropped["not JSON"] == 1
    assert dropped["no conversations or messages list"] == 2
    assert dropped["no user turn"] == 1
    assert len(prompts) == 20
    assert dropped["duplicate"] + dropped["also among the held-out prompts"] == 1


def test_the_split_is_the_same_again_and_another_with_another_seed(tmp_path: Path) -> None:
    params = source(tmp_path, [conversation(f"question {i}") for i in range(40)])
    first, second = (data.load_prompts(params)[0] for _ in range(2))
    assert first == second
    assert data.load_prompts(params.replace(seed=1))[0] != first


@pytest.mark.parametrize("lines", [[], [b"{"], [{"messages": []}]])
def test_a_source_without_a_usable_prompt_is_an_error(tmp_path: Path, lines: list[bytes | dict[str, Any]]) -> None:
    with pytest.raises(KitError, match="no .* prompt is left"):
        data.load_prompts(source(tmp_path, lines))


def test_a_missing_source_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(KitError, match="cannot read"):
        data.load_prompts(Params(data_source=str(tmp_path / "none.jsonl")))


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.binary(max_size=60),
            st.recursive(st.none() | st.booleans() | st.floats() | st.text(), st.lists).map(
                lambda value: json.dumps({"messages": value, "conversations": value}).encode()
            ),
        ),
        max_size=8,
    )
)
def test_no_line_makes_a_traceback(tmp_path_factory: pytest.TempPathFactory, lines: list[bytes]) -> None:
    path = tmp_path_factory.mktemp("fuzz") / "x.jsonl"
    path.write_bytes(b"\n".join(lines))
    rows, _ = data.read_conversations(path)
    for row in rows:
        data.turns_of(row)


def test_turns_of_keeps_system_and_user_turns_in_either_form() -> None:
    rows: list[dict[str, Any]] = [
        {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}, {"role": "tool", "content": "t"}]},
        {"conversations": [{"from": "system", "value": "s"}, {"from": "human", "value": "u"}, None, {"from": 3, "value": "x"}]},
    ]
    assert [data.turns_of(row) for row in rows] == [(("system", "s"), ("user", "u"))] * 2


def test_repair_drops_half_a_line_and_a_conversation_cut_short(run: Run) -> None:
    path = write_answers(run, [answer("a"), answer("b"), answer("b"), answer("c", 0)], end='\n{"id": "d_gen0", "prim')
    data.repair_responses(path, [prompt("a"), prompt("b"), prompt("c", users=2), prompt("d")])
    assert [json.loads(line)["id"] for line in path.read_text().splitlines()] == ["a_gen0", "b_gen0"]


def test_repair_keeps_a_conversation_that_the_tool_ended_early(run: Run) -> None:
    path = write_answers(run, [answer("c", 0), answer("a")])
    data.repair_responses(path, [prompt("a"), prompt("c", users=2)])
    assert len(path.read_text().splitlines()) == 2


def test_repair_leaves_a_whole_file_untouched(run: Run) -> None:
    path = write_answers(run, [answer("a")])
    before = path.stat().st_mtime_ns
    data.repair_responses(path, [prompt("a")])
    assert path.stat().st_mtime_ns == before


def rows_of(run: Run, answers: list[dict[str, Any]], prompts: list[Prompt], captured: bool = True) -> list[data.Row]:
    write_answers(run, answers)
    return data.build_rows(run, prompts, Counter(), captured)


def test_rows_come_in_the_order_of_the_prompts_training_first(run: Run) -> None:
    prompts = [prompt("a"), prompt("b"), prompt("h", split="heldout")]
    rows = rows_of(run, [answer("h"), answer("b"), answer("a")], prompts)
    assert [(row.id, row.split) for row in rows] == [("a_gen0", "train"), ("b_gen0", "train"), ("h_gen0", "heldout")]
    assert data.load_rows(run) == (rows, {})


def test_the_mask_is_one_on_what_was_generated_and_the_unread_last_token_is_left_off(run: Run) -> None:
    rows_of(run, [answer("a"), answer("h")], [prompt("a"), prompt("h", split="heldout")])
    first = data.load_tokens(run)[0]
    assert first["input_ids"].tolist() == [1, 2, 3, 7, 8]
    assert first["loss_mask"].tolist() == [0, 0, 0, 1, 1]
    assert int(first["seq_len"]) == 5


def test_without_capture_the_whole_answer_is_kept(run: Run) -> None:
    rows_of(run, [answer("a"), answer("h")], [prompt("a"), prompt("h", split="heldout")], captured=False)
    assert data.load_tokens(run)[0]["input_ids"].tolist() == [1, 2, 3, 7, 8, 9]


TWINS = [
    ("What is Python?", "what is  python"),
    ("Naïve café", "naïve café"),
    ("ﬁle № 5", "FILE No 5"),
    ("ＡＢＣ １２３", "abc 123"),
    ("Straße", "STRASSE"),
    ("It's  a\ttest!", "its a test"),
]


@pytest.mark.parametrize(("one", "other"), TWINS)
def test_texts_that_differ_in_nothing_that_matters_are_equal(one: str, other: str) -> None:
    assert data.normalized(one) == data.normalized(other)


@pytest.mark.parametrize(("one", "other"), [("2 + 2", "2 + 3"), ("नमस्ते", "नमसते"), ("+-+", "***"), ("write C", "write C1")])
def test_texts_that_ask_something_else_are_not(one: str, other: str) -> None:
    assert data.normalized(one) != data.normalized(other)


@given(st.text(max_size=30), st.sampled_from(["NFC", "NFD", "NFKC", "NFKD"]))
def test_no_unicode_form_changes_the_normalized_text(text: str, form: Any) -> None:
    assert data.normalized(unicodedata.normalize(form, text)) == data.normalized(text)


@pytest.mark.parametrize(("one", "other"), TWINS)
def test_a_held_out_prompt_in_other_words_shape_is_not_trained_on(tmp_path: Path, one: str, other: str) -> None:
    lines: list[bytes | dict[str, Any]] = [conversation(f"question {i}") for i in range(10)]
    params = source(tmp_path, [*lines, conversation(one), conversation(other)])
    prompts, dropped = data.load_prompts(params)
    assert sum(p.turns[0][1] in (one, other) for p in prompts) == 1
    assert dropped["duplicate"] + dropped["also among the held-out prompts"] == 1


@pytest.mark.parametrize(
    ("measured", "taught", "overlap"),
    [
        (["q"], ["Q!", "and then?"], True),  # the answer to q would be learnt
        (["q", "and then?"], ["q"], True),  # the first answer that is measured
        (["a", "q"], ["q"], False),  # after another question it is another
        (["q", "a"], ["q", "b"], True),
        (["q"], ["b", "q"], False),
    ],
)
def test_no_answer_that_is_measured_is_learnt_in_a_longer_or_shorter_conversation(
    measured: list[str], taught: list[str], overlap: bool
) -> None:
    one, other = (data.Prompt("p", "any", "train", tuple(("user", text) for text in turns)) for turns in (measured, taught))
    assert (not set(one.asked).isdisjoint(other.asked)) is overlap


def test_a_conversation_that_begins_with_a_held_out_question_is_not_trained_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    longer = {"messages": [{"role": "user", "content": "the question"}, {"role": "user", "content": "and then?"}]}
    rows = {"heldout": [conversation("The question!")], "train": [conversation("another"), longer]}
    monkeypatch.setattr(data, "_split", lambda *_: rows)
    prompts, dropped = data.load_prompts(source(tmp_path, [conversation("x")] * 3))
    assert [p.turns[0][1] for p in prompts] == ["another", "The question!"]
    assert dropped == {"also among the held-out prompts": 1}


def test_no_shipped_prompt_is_in_both_splits() -> None:
    prompts, dropped = data.load_prompts(Params())
    texts = Counter(p.normalized for p in prompts)
    assert not dropped
    assert max(texts.values()) == 1


def test_an_account_that_does_not_add_up_is_an_error() -> None:
    data.require_account("answers", 5, 3, {"a": 1, "b": 1})
    with pytest.raises(KitError, match="account of the answers does not add up; seen 5 came in, 3 are kept, dropped: {'a': 1}"):
        data.require_account("answers", 5, 3, {"a": 1})


def test_a_row_that_is_counted_twice_is_found_by_the_account(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    twice, prompts = [answer("a"), answer("a"), answer("h")], [prompt("a"), prompt("h", split="heldout")]
    with pytest.raises(KitError, match="the account of the answers does not add up; seen 2 came in, 3 are kept"):
        rows_of(run, twice, prompts)
    monkeypatch.setattr(data, "require_account", lambda *_: None)
    assert len(rows_of(run, twice, prompts)) == 3  # without the account it is trained on twice


def test_turns_that_a_conversation_ended_before_are_accounted_for(run: Run) -> None:
    rows_of(run, [answer("c", 0), answer("h")], [prompt("c", users=3), prompt("h", split="heldout")])
    assert data.load_rows(run)[1] == {"the conversation ended before this turn": 2}


@settings(max_examples=15, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.sampled_from([1, 3, 300])), min_size=1, max_size=12))
def test_whatever_comes_back_everything_is_accounted_for(tmp_path_factory: pytest.TempPathFactory, asked: list[Any]) -> None:
    run = Run(Params(run_name="unit", runs_dir=str(tmp_path_factory.mktemp("runs"))), "03_extract_hidden_states")
    prompts = [prompt("t0"), *(prompt(f"p{i}", users + 1) for i, (users, _, _) in enumerate(asked)), prompt("h", split="heldout")]
    answers = [answer("t0"), answer("h")]
    for i, (users, came, length) in enumerate(asked):
        answers += [answer(f"p{i}", turn, generated=(5,) * length) for turn in range(min(users + 1, came))]
    try:
        rows = rows_of(run, answers, prompts)
    except KitError as error:
        assert "too many prompts without an answer" in error.message
        return
    assert sum(p.users for p in prompts) == len(rows) + sum(data.load_rows(run)[1].values())


# ---- answers that the target did not write


class Tags:
    """A tokenizer of characters with a template of one tag a turn."""

    chat_template = "tags"

    def apply_chat_template(self, messages: list[Any], tools: Any, add_generation_prompt: bool, return_dict: bool) -> list[int]:
        text = "".join(f"[{m['role'][0]}]{m['content']}." for m in messages) + ("[a]" if add_generation_prompt else "")
        return [ord(c) for c in text]

    def get_vocab(self) -> dict[str, int]:
        return {}


def test_given_answers_become_rows_labelled_off_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda *_, **__: Tags())
    lines: list[bytes | dict[str, Any]] = [conversation(f"q{i}") for i in range(8)]
    params = source(tmp_path, lines).replace(data_regenerate=False, runs_dir=str(tmp_path / "runs"))
    run = Run(params, "03_extract_hidden_states")
    server: Any = SimpleNamespace(model="target", engine=Engine("extraction"))  # never asked: the answers are there
    rows = data.answer(run, server, lambda *_: None)
    assert len(rows) == 8
    first = data.load_tokens(run)[0]
    asked = "".join(map(chr, first["input_ids"][first["loss_mask"] == 0].tolist()))
    written = "".join(map(chr, first["input_ids"][first["loss_mask"] == 1].tolist()))
    assert re.fullmatch(r"\[u\]q\d\.\[a\]", asked)
    assert written == "answer."
    label = data.load_origin(run)
    assert label["on_policy"] is False
    assert label["sampling"] is None
    assert run.fact("data.on_policy") is False
    with pytest.raises(KitError, match="step data of run .* was made with another"):
        data.answer(Run(params.replace(data_regenerate=True), run.stage), server, lambda *_: None)


def test_online_a_server_that_writes_no_states_answers_and_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    def ensure(self: Server) -> None:
        self.port = 1
        done.append(f"{self.engine.name} starts")

    monkeypatch.setattr(Server, "ensure", ensure)
    monkeypatch.setattr(Server, "stop", lambda self: done.append(f"{self.engine.name} ends"))
    monkeypatch.setattr(data, "run_tool", lambda name, command, *_, **__: done.append(" ".join(command)))
    for mode in ("online", "offline"):
        run = Run(Params(run_name=mode, runs_dir=str(tmp_path), extraction_mode=mode), "unit")
        run.path("data").mkdir()
        data.regenerate(run, Server(run, "m", server.extraction([1, 2], tmp_path, "cpu"), "cpu"), [], lambda *_: None)
    first, asked, last, other, captured = dict.fromkeys(done)
    assert (first, last, other) == ("none starts", "none ends", "extraction starts")
    assert ("include_output_tokens" in asked, "include_output_tokens" in captured) == (False, True)


def test_every_given_answer_is_kept_or_dropped_for_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda *_, **__: Tags())
    tool = [{"role": role, "content": f"{role} says"} for role in ("user", "assistant", "tool", "assistant")]
    lines: list[bytes | dict[str, Any]] = [
        {"messages": [{**m, "content": f"{m['content']} {i}"} for m in tool]} for i in range(8)
    ]
    params = source(tmp_path, [*lines, {"messages": [{"role": "user", "content": "nobody answers"}]}])
    run = Run(params.replace(data_regenerate=False, runs_dir=str(tmp_path / "runs")), "03_extract_hidden_states")
    prompts, dropped = data.load_prompts(run.params)
    data.take_given(run, "target", prompts)
    assert len(data.build_rows(run, prompts, dropped, captured=False)) == 16  # a call and what follows its result
    assert data.load_rows(run)[1] == {"the source gives no answer that the chat template takes": 1}


class Picky(Tags):
    """A template that refuses the role `tool`, and with `nothing` everything."""

    nothing = False

    def apply_chat_template(self, messages: list[Any], tools: Any, add_generation_prompt: bool, return_dict: bool) -> list[int]:
        if self.nothing or any(m["role"] == "tool" for m in messages):
            raise ValueError("unknown role")
        return super().apply_chat_template(messages, tools, add_generation_prompt, return_dict)


def test_a_conversation_that_the_template_refuses_is_dropped_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    tokenizer = Picky()
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda *_, **__: tokenizer)
    refused = {"messages": [{"role": role, "content": f"{role} says"} for role in ("user", "tool", "assistant")]}
    lines: list[bytes | dict[str, Any]] = [*(conversation(f"q{i}") for i in range(8)), refused]
    params = source(tmp_path, lines).replace(data_regenerate=False, runs_dir=str(tmp_path / "runs"))
    run = Run(params, "03_extract_hidden_states")
    prompts, dropped = data.load_prompts(run.params)
    data.take_given(run, "target", prompts)
    assert len(data.build_rows(run, prompts, dropped, captured=False)) == 8
    assert data.load_rows(run)[1] == {"the source gives no answer that the chat template takes": 1}
    tokenizer.nothing = True
    with pytest.raises(KitError, match="the chat template refuses a conversation; seen unknown role"):
        data.take_given(run, "target", prompts)


def test_the_label_names_what_wrote_the_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda *_, **__: Tags())
    label = origin.describe(Params(data_temperature=0.5, target_revision="abc"), "target", [[1, 2]])
    assert label["on_policy"] is True
    assert (label["model"], label["revision"], label["thinking"]) == ("smollm2-135m", "abc", "none")
    assert label["sampling"]["temperature"] == 0.5
    assert label["commit"] == ""
    Tags.chat_template = "others"
    assert origin.describe(Params(), "target", [[1, 2]])["chat_template"] != label["chat_template"]


def test_the_label_has_what_the_target_itself_sets_and_the_commit_of_a_hub_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub
    import transformers

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda *_, **__: Tags())
    folder = tmp_path / "snapshots" / "0123abc"
    folder.mkdir(parents=True)
    own = {"temperature": 0.6, "top_p": 0.95, "repetition_penalty": 1.1, "top_k": None, "bos_token_id": 1}
    (folder / "generation_config.json").write_text(json.dumps(own))
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda _, name, revision: str(folder / name))
    label = origin.describe(Params(data_temperature=0.5), "some/target", [[1, 2]])
    assert label["commit"] == "0123abc"
    asked = {"temperature": 0.5, "max_tokens": 96, "seed": 0}
    assert label["sampling"] == asked | {"top_p": 0.95, "repetition_penalty": 1.1}
    (folder / "generation_config.json").write_text("{")
    assert origin.describe(Params(data_temperature=0.5), str(folder), [[1, 2]])["sampling"] == asked


def test_every_prompt_is_kept_or_dropped_for_a_reason(run: Run) -> None:
    prompts = [prompt("a"), prompt("long"), prompt("short"), prompt("mute"), prompt("h", split="heldout")]
    answers = [answer("a"), answer("long", generated=(5,) * 300), answer("short", generated=(5, 6)), answer("h")]
    rows = rows_of(run, answers, prompts)
    _, dropped = data.load_rows(run)
    assert dropped == {"longer than data_seq_length": 1, "fewer than 2 generated tokens": 1, "the target gave no answer": 1}
    assert len(prompts) == len(rows) + sum(dropped.values())
    assert {row["what"] for row in data.account(rows, dropped)} >= {"train rows", "heldout rows"}


def test_a_target_that_answers_little_is_an_error(run: Run) -> None:
    prompts = [*(prompt(f"p{i}") for i in range(9)), prompt("h", split="heldout")]
    run.path("data", "responses.errors.jsonl").write_text(json.dumps({"id": "p3", "metadata": {"error": "refused"}}) + "\n")
    with pytest.raises(KitError, match="too many prompts without an answer; seen 8 of 10; the first error is refused"):
        rows_of(run, [answer("p0"), answer("h")], prompts)


def test_an_id_is_used_once_over_both_splits(tmp_path: Path) -> None:
    rows: list[bytes | dict[str, Any]] = [conversation(f"question {i}") | {"id": f"id-{i // 2}"} for i in range(40)]
    prompts, dropped = data.load_prompts(source(tmp_path, rows))
    assert len({p.id for p in prompts}) == len(prompts) == 20
    assert dropped["id used twice"] == 20


def test_no_row_of_a_split_is_an_error(run: Run) -> None:
    with pytest.raises(KitError, match="no heldout row is left"):
        rows_of(run, [answer("a")], [prompt("a"), prompt("h", split="heldout")])


@pytest.mark.parametrize("masks", [[[0, 0, 0]], [[1, 1, 1]], [[]], []])
def test_degenerate_masks_are_errors(masks: list[list[int]]) -> None:
    with pytest.raises(KitError, match="degenerate"):
        data.check_masks(masks)


def test_share_of_supervised_tokens() -> None:
    assert data.check_masks([[0, 1], [0, 0, 0, 1]]) == pytest.approx(1 / 3)


# ---- any file at all


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["\ud800", "../../x", "<script>"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
TURNS = st.fixed_dictionaries(
    {}, optional={key: JSON | st.sampled_from(["user", "human", "system"]) for key in ("role", "from", "content", "value")}
)
ROWS = st.fixed_dictionaries(
    {},
    optional={
        "id": JSON,
        "kind": JSON,
        "conversations": st.lists(TURNS | JSON, max_size=3) | JSON,
        "messages": st.lists(TURNS, max_size=2),
    },
)
LINES = st.one_of(
    st.binary(max_size=30).filter(lambda line: b"\n" not in line), (ROWS | JSON).map(lambda row: json.dumps(row).encode())
)
"""Bytes, JSON of any kind, and rows that are nearly right."""


@settings(max_examples=300, deadline=None)
@given(st.lists(LINES, max_size=6))
def test_any_file_is_read_or_refused_in_one_line(tmp_path_factory: pytest.TempPathFactory, lines: list[bytes]) -> None:
    """Two good rows and anything: what is kept can be written and read again, the rest is counted, nothing is a traceback."""
    good = [json.dumps(conversation(text)).encode() for text in ("first", "second")]
    folder = tmp_path_factory.mktemp("fuzz")
    path = folder / "source.jsonl"
    path.write_bytes(b"\n".join([*good, *lines]))
    rows, dropped = data.read_conversations(path)
    filled = sum(bool(line.strip()) for line in path.read_bytes().split(b"\n"))
    assert len(rows) + sum(dropped.values()) == filled
    try:
        prompts, _ = data.load_prompts(Params(data_source=str(path)))
    except KitError:
        return
    written = data.write_prompts(folder / "prompts.jsonl", prompts)
    again, lost = data.read_conversations(written)
    assert [row["id"] for row in again] == [prompt.id for prompt in prompts]
    assert not lost
    assert {file.name for file in folder.iterdir()} == {"source.jsonl", "prompts.jsonl"}


def test_text_that_cannot_be_written_again_is_dropped(tmp_path: Path) -> None:
    rows, dropped = data.read_conversations(
        Path(source(tmp_path, [conversation("half a pair: \ud800"), conversation("fine")]).data_source)
    )
    assert (len(rows), dropped) == (1, Counter({"not UTF-8": 1}))


def test_a_line_that_never_ends_does_not_fill_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "MAX_LINE_BYTES", 2_000_000)
    path = Path(source(tmp_path, [conversation("before"), b"x" * 7_000_000, conversation("after")]).data_source)
    rows, dropped = data.read_conversations(path)
    assert [data.turns_of(row)[0][1] for row in rows] == ["before", "after"]
    assert dropped == {"a line of more than 2 MB": 1}


def test_a_hundred_thousand_turns_are_one_conversation(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": str(i)} for i in range(100_000)]
    prompts, dropped = data.load_prompts(source(tmp_path, [{"messages": turns}, conversation("another")]))
    assert sorted(prompt.users for prompt in prompts) == [1, 100_000]
    assert not dropped


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), min_size=4, max_size=12), st.booleans())
def test_the_mask_is_what_was_generated_and_every_row_is_accounted_for(
    tmp_path_factory: pytest.TempPathFactory, shapes: list[tuple[int, int]], captured: bool
) -> None:
    """Rows of any prompt and answer length: supervised are the generated tokens alone, and in = kept + dropped by reason."""
    run = Run(
        Params(run_name="unit", runs_dir=str(tmp_path_factory.mktemp("mask")), data_seq_length=16, data_max_response_tokens=12),
        "03_extract_hidden_states",
    )
    prompts = [prompt(f"p{i}", split="heldout" if i == 1 else "train") for i in range(len(shapes) + 2)]
    shapes = [(3, 5), (3, 5), *shapes]  # so that neither split is empty
    made = [
        answer(p.id, 0, tuple(range(before)), tuple(range(100, 100 + after)))
        for p, (before, after) in zip(prompts, shapes, strict=True)
    ]
    write_answers(run, made)
    try:
        rows = data.build_rows(run, prompts, Counter(), captured)
    except KitError as error:
        assert "degenerate" in str(error)
        return
    dropped = data.load_rows(run)[1]
    assert len(rows) + sum(dropped.values()) == len(prompts)
    for row, ids, mask in zip(rows, data.load_tokens(run)["input_ids"], data.load_tokens(run)["loss_mask"], strict=True):
        assert [token for token, on in zip(ids.tolist(), mask.tolist(), strict=True) if on] == [
            i for i in ids.tolist() if i >= 100
        ]
        assert row.supervised == int(mask.sum()) >= 2


def test_each_response_says_who_wrote_it() -> None:
    rows: list[dict[str, Any]] = [{"metadata": {"engine": "transformers"}}, {"metadata": {"endpoint": "http://127.0.0.1/v1"}}, {}]
    assert [data.writer(row) for row in rows] == ["transformers", "vllm", "the source"]
