"""What training learns from: conversations rendered to rows, positions that the trainer takes, and degenerate masks refused."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_data import answer, prompt, write_answers

from eagle3kit import data, masks, origin, template, tiny, widgets
from eagle3kit.errors import KitError
from eagle3kit.rundir import Run

KIMI_MARKS = [*tiny.SPECIAL_TOKENS.values(), "<|im_end|>"]


class Words:
    """A tokenizer of whole words, with the shipped Kimi-K2.5-style template and one token for each of its marks."""

    def __init__(self, source: str = tiny.TEMPLATE.read_text()) -> None:
        self.chat_template, self.words = source, list(KIMI_MARKS)
        self.all_special_ids, self.added_tokens_decoder = list(range(len(KIMI_MARKS))), dict[int, str]()

    def encode(self, text: str) -> list[int]:
        import re

        found = re.findall("|".join(map(re.escape, sorted(KIMI_MARKS, key=len, reverse=True))) + r"|\s*[^\s<]+|\s+|<", text)
        self.words += [word for word in dict.fromkeys(found) if word not in self.words]
        return [self.words.index(word) for word in found]

    def apply_chat_template(self, messages: list[Any], tools: Any, add_generation_prompt: bool, return_dict: bool) -> list[int]:
        from transformers.utils.chat_template_utils import render_jinja_template

        texts, _ = render_jinja_template(
            [messages], tools, chat_template=self.chat_template, add_generation_prompt=add_generation_prompt
        )
        return self.encode(texts[0])

    def get_vocab(self) -> dict[str, int]:
        return {word: at for at, word in enumerate(self.words)}

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return "".join(self.words[at] for at in ids)


def supervised(tokenizer: Words, row: dict[str, list[int]]) -> str:
    return tokenizer.decode([token for token, on in zip(row["input_ids"], row["loss_mask"], strict=True) if on])


def whole(tokenizer: Words, row: dict[str, list[int]]) -> str:
    return tokenizer.decode(row["input_ids"])


# ---- the template


def test_a_system_prompt_is_context() -> None:
    words = Words()
    (row,) = template.rows_of(words, masks.CASES["system prompt"])
    assert whole(words, row).startswith(
        "<|im_system|>system<|im_middle|>Answer in one word.<|im_end|><|im_user|>user<|im_middle|>"
    )
    assert supervised(words, row) == "</think>Paris.<|im_end|>"


def test_thoughts_are_kept_in_the_last_turn_and_dropped_before_it() -> None:
    words = Words()
    first, last = template.rows_of(words, masks.CASES["several turns, thinking"])
    assert supervised(words, first) == "Two and two make four.</think>4<|im_end|>"
    assert supervised(words, last) == "Four times three is twelve.</think>12<|im_end|>"
    assert "Two and two" not in whole(words, last)
    assert "<think></think>4<|im_end|>" in whole(words, last)


def test_a_tool_call_is_an_answer_and_its_result_is_not() -> None:
    words = Words()
    call, answered = template.rows_of(words, masks.CASES["tool call"])
    assert supervised(words, call) == (
        "I have to look.</think><|tool_calls_section_begin|><|tool_call_begin|>weather:0<|tool_call_argument_begin|>"
        '{"city": "Oslo"}<|tool_call_end|><|tool_calls_section_end|><|im_end|>'
    )
    assert supervised(words, answered) == "The tool says rain.</think>Yes, it is.<|im_end|>"
    assert "I have to look." in whole(words, answered)  # the question is still the same, so its thoughts are kept


def test_thoughts_inside_the_content_are_treated_like_those_beside_it() -> None:
    words = Words()
    beside, inside = (
        template.rows_of(words, [{"role": "user", "content": "q"}, {"role": "assistant", **said}])
        for said in ({"reasoning_content": "hm", "content": "a"}, {"content": "<think>hm</think>a"})
    )
    assert beside == inside


def test_a_template_that_rewrites_history_is_refused() -> None:
    rewriting = "{% for m in messages %}{{ loop.revindex0 if not add_generation_prompt else 0 }} {{ m.content }} {% endfor %}"
    conversation = [{"role": role, "content": role} for role in ("user", "assistant", "user", "assistant")]
    with pytest.raises(KitError, match="renders the history of turn 1 differently"):
        template.rows_of(Words(rewriting), conversation)


def test_a_template_that_fails_is_one_line() -> None:
    with pytest.raises(KitError, match="refuses a conversation; seen only users"):
        template.rows_of(Words("{{ raise_exception('only users') }}"), masks.CASES["system prompt"])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["user", "assistant", "system", "tool"]), st.text("ab <>/", max_size=12)), max_size=7))
def test_the_mask_is_one_run_at_the_end_of_each_row(turns: list[tuple[str, str]]) -> None:
    conversation = [{"role": role, "content": text} for role, text in turns]
    for row in template.rows_of(Words(), conversation):
        mask = row["loss_mask"]
        assert len(mask) == len(row["input_ids"])
        assert mask == sorted(mask)
        assert 0 < sum(mask) < len(mask)


# ---- what the trainer makes of a mask


def test_the_second_token_of_the_answer_is_learned_first() -> None:
    # positions   0 1 2 | 3 4 5 6      the answer is 3 4 5 6; 3 is written by the target itself, 7 lies behind the row
    mask = [0, 0, 0, 1, 1, 1, 1]
    assert masks.predicted(mask, 0) == [4, 5, 6, 7]
    assert masks.predicted(mask, 1) == [4, 5, 6, 7]
    assert masks.predicted([0, 1, 0, 0, 1, 1], 0) == [2, 5, 6]
    assert masks.predicted([1, 1, 0], 0) == [2]  # nothing comes before the first token
    assert masks.predicted([1, 1, 1], 1) == [3]  # a second draft starts one token later


def test_a_trainer_that_shifts_differently_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import speculators.models.eagle3.data as trainer

    mask = [0, 0, 1, 1, 1]
    assert masks.require_second_token([mask])["state"] == "ok"
    shift = trainer.shift_batch
    monkeypatch.setattr(trainer, "shift_batch", lambda row: {**shift(row), "loss_mask": row["loss_mask"][:-1]})
    with pytest.raises(
        KitError, match=r"another token of row 0 than the second of the answer; seen position \[4\]; wanted position 3"
    ):
        masks.require_second_token([mask])


@pytest.mark.parametrize(("mask", "reason"), [([0, 0, 0], "all zeros"), ([1, 1, 1], "all ones"), ([], "all zeros")])
def test_a_full_or_empty_mask_is_refused(mask: list[int], reason: str) -> None:
    good = [0, 1, 1]
    with pytest.raises(KitError, match=f"the first is row 1; seen {reason}"):
        masks.require_masks([good, mask])
    assert masks.require_masks([good])["state"] == "ok"


def test_one_full_mask_among_many_passes_the_check_of_the_total_alone() -> None:
    many = [[0, 1, 1]] * 50 + [[1, 1, 1]]
    data.check_masks(many)
    with pytest.raises(KitError, match="1 loss masks are degenerate"):
        masks.require_masks(many)


# ---- the ids that the server saw


KIMI = "<|im_user|>user<|im_middle|>{}<|im_end|><|im_assistant|>assistant<|im_middle|><think>"


def served(run: Run, tokenizer: Words, rendering: str) -> tuple[list[list[int]], list[list[int]]]:
    """Ids and masks of a run of two rows whose prompts the server rendered in some way."""
    prompts = [prompt("a"), prompt("h", split="heldout")]
    data.write_prompts(run.path("data", "prompts.jsonl"), prompts)
    asked = {p.id: tuple(tokenizer.encode(rendering.format(p.turns[0][1]))) for p in prompts}
    write_answers(run, [answer(p.id, prompt_ids=asked[p.id], generated=(0, 1, 2)) for p in prompts])
    data.build_rows(run, prompts, Counter(), captured=False)
    tokens = data.load_tokens(run).with_format(None)
    return tokens["input_ids"][:], tokens["loss_mask"][:]


def test_ids_of_the_targets_own_template_agree(run: Run) -> None:
    words = Words()
    assert masks.require_same_ids(run, words, *served(run, words, KIMI))["found"] == "2 prompts"


def test_a_server_with_another_template_is_found(run: Run) -> None:
    words = Words()
    ids, mask = served(run, words, KIMI + "</think>")
    with pytest.raises(KitError, match="the server saw other tokens in row 0"):
        masks.require_same_ids(run, words, ids, mask)
    assert masks.require_same_ids(run, words, ids, mask, count=0)["state"] == "unknown"  # without the check it passes


# ---- thinking


def test_shares_of_thoughts() -> None:
    words = Words()
    opened, closed = words.words.index("<think>"), words.words.index("</think>")
    space, word = words.encode(" \n")[0], words.encode("hm")[0]
    full, empty, blank = [opened, word, closed, word], [opened, closed, word], [opened, space, closed]
    assert origin.thought([word, opened, word, word], opened, closed) == [[word, word]]  # cut off while thinking
    assert origin.thinking(words, [full, empty, [word]]) == {"thinking": "on", "rows_with_thoughts": 1, "empty_thoughts": 0.5}
    assert origin.thinking(words, [empty, blank])["thinking"] == "off"
    assert masks.thinking_check(origin.thinking(words, [empty]))["state"] == "warn"
    words.words = ["no", "marks"]
    assert origin.thinking(words, [[0, 1]])["thinking"] == "none"
    assert masks.thinking_check({})["state"] == "unknown"


# ---- the page


def test_special_tokens_are_framed_and_all_text_is_escaped() -> None:
    words = Words()
    conversation = [{"role": "user", "content": "<script>x</script>"}, {"role": "assistant", "content": "<b>y</b>"}]
    (row,) = template.rows_of(words, conversation)
    shown = widgets.as_conversation([masks.marked(words, row["input_ids"], row["loss_mask"])])
    assert "<script>" not in shown.html
    assert "&lt;script&gt;" in shown.html.replace("</span>", "")
    assert shown.html.count("border-radius") == 8  # four marks of each turn
    assert "[[</think><b>y</b><|im_end|>]]" in shown.text


def test_the_shipped_template_is_the_miniatures(tmp_path: Path) -> None:
    source = tmp_path / "smol"
    source.mkdir()
    vocabulary = {f"<s{at}>" if at < 17 else f"w{at}": at for at in range(tiny.VOCAB_SIZE)}
    added = [{"id": at, "content": f"<s{at}>"} for at in range(17)]
    (source / "tokenizer.json").write_text(json.dumps({"added_tokens": added, "model": {"vocab": vocabulary}}))
    (source / "tokenizer_config.json").write_text(json.dumps({"chat_template": "another"}))
    tiny._write_tokenizer(source, tmp_path)
    assert (tmp_path / "chat_template.jinja").read_bytes() == tiny.TEMPLATE.read_bytes()
    assert "chat_template" not in json.loads((tmp_path / "tokenizer_config.json").read_bytes())
    assert json.loads((tmp_path / "tokenizer.json").read_bytes())["model"]["vocab"]["<|im_user|>"] == 9
