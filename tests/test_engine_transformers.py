"""The engine without vLLM: states of the right layers, answers that padding does not change, and rows that resume."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from test_data import conversation

from eagle3kit import data, hidden_states, state_files
from eagle3kit.engine_transformers import TransformersEngine, load, states
from eagle3kit.errors import KitError
from eagle3kit.params import Params
from eagle3kit.rundir import Run

LAYERS = [1, 2, 3, 4]
ROWS = [[5, 6, 7, 8, 9, 10], [11, 12], [20, 21, 22]]
TEMPLATE = "{% for m in messages %}{{ m.role }} {{ m.content }} . {% endfor %}{% if add_generation_prompt %}assistant{% endif %}"
UNKNOWN, END = "<unk>", "."
WORDS = [UNKNOWN, END, "user", "assistant", "system", *(f"w{i}" for i in range(59))]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of four layers with random weights, and a tokenizer of 64 words with a chat template."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("target")
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 8}
    config = LlamaConfig(vocab_size=64, num_key_value_heads=2, eos_token_id=1, bos_token_id=0, initializer_range=0.2, **shape)
    model = LlamaForCausalLM(config)
    model.lm_head.weight.data[1] = 0  # the end is never the likeliest: every answer has its full length
    model.save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, unk_token=UNKNOWN)
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    return folder


def test_layer_ids_are_vllms_and_the_last_is_before_the_norm(target: Path) -> None:
    model = load(target)
    found = states(model, ROWS[:1], [0, *LAYERS])[0]
    own = model(input_ids=torch.tensor(ROWS[:1]), output_hidden_states=True).hidden_states
    assert found.shape == (6, 5, 32)
    for layer in range(4):
        torch.testing.assert_close(found[:, layer], own[layer][0])
    torch.testing.assert_close(model.model.norm(found[:, 4]), own[4][0])
    assert not torch.allclose(found[:, 4], own[4][0], atol=0.1)


def test_a_row_has_the_same_states_alone_and_in_a_batch(target: Path) -> None:
    model = load(target)
    for row, together in zip(ROWS, states(model, ROWS, LAYERS), strict=True):
        torch.testing.assert_close(together, states(model, [row], LAYERS)[0], rtol=1e-4, atol=1e-5)


def test_latent_norms_have_the_configs_epsilon_as_in_vllm(tmp_path: Path) -> None:
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    config = DeepseekV3Config(
        vocab_size=64, hidden_size=32, intermediate_size=32, moe_intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1, first_k_dense_replace=1,
        q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8, rms_norm_eps=1e-3,
    )  # fmt: skip
    DeepseekV3ForCausalLM(config).save_pretrained(tmp_path)
    attention = load(tmp_path).model.layers[0].self_attn
    assert attention.q_a_layernorm.variance_epsilon == 1e-3
    assert attention.kv_a_layernorm.variance_epsilon == 1e-3


def opened(target: Path, folder: Path, **changes: Any) -> tuple[Run, TransformersEngine]:
    source = folder / "source.jsonl"
    if not source.exists():
        rows = [conversation(" ".join(f"w{(i + j) % 59}" for j in range(1 + i % 5))) for i in range(12)]
        rows[3] = {"messages": [{"role": "user", "content": "w58 w57"}, {"role": "user", "content": "w3"}]}
        source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    values: dict[str, Any] = {
        "runs_dir": str(folder),
        "run_name": "unit",
        "target_model": str(target),
        "data_source": str(source),
    }
    values |= {"extraction_engine": "transformers", "data_max_response_tokens": 6, "data_seq_length": 64, "golden_samples": 3}
    run = Run(Params(**(values | changes)), data.MADE_BY)
    engine = hidden_states.extraction_server(run, target, LAYERS, "cpu")
    assert isinstance(engine, TransformersEngine)
    return run, engine


def answers(run: Run) -> dict[str, Any]:
    rows = [json.loads(line) for line in run.path("data", "responses.jsonl").read_text().splitlines()]
    assert len({row["id"] for row in rows}) == len(rows)
    return {row["id"]: row for row in rows}


def quiet(*_: int) -> None:
    pass


def test_padding_changes_no_answer(target: Path, tmp_path: Path) -> None:
    found = []
    for size in (1, 5):
        run, engine = opened(target, tmp_path, run_name=f"of{size}", data_concurrency=size)
        data.answer(run, engine, quiet)
        found.append({name: row["input_ids"] for name, row in answers(run).items()})
    assert found[0] == found[1]
    assert len(found[0]) == 13


def test_every_question_of_a_conversation_gets_a_row_that_ends_with_its_answer(target: Path, tmp_path: Path) -> None:
    run, engine = opened(target, tmp_path)
    data.answer(run, engine, quiet)
    for row in answers(run).values():
        assert sorted(row["loss_mask"]) == row["loss_mask"]
        assert sum(row["loss_mask"]) == 6
        assert row["metadata"]["finish_reason"] == "length"
    turns = {row["id"]: row for row in answers(run).values() if row["id"].rpartition("_gen")[2] == "1"}
    assert len(turns) == 1
    identity, last = next(iter(turns.items()))
    before = answers(run)[identity.replace("_gen1", "_gen0")]
    assert last["input_ids"][: len(before["input_ids"]) - 1] == before["input_ids"][:-1]  # its own answer is in the prompt
    assert run.fact("extraction.engine") == "transformers"


def test_an_answer_ends_with_the_first_end_token_while_others_go_on(target: Path, tmp_path: Path) -> None:
    _, engine = opened(target, tmp_path)
    engine.ensure()
    prompts = [[2, 5 + i, 1, 3] for i in range(6)]
    whole = [ids for ids, _ in engine._generate(prompts)]
    end = whole[0][2]
    engine._model.generation_config.eos_token_id = [1, end]
    for ids, (cut, reason) in zip(whole, engine._generate(prompts), strict=True):
        expected = ids[: ids.index(end) + 1] if end in ids else ids
        assert cut == expected
        assert reason == ("stop" if end in ids else "length")


def test_what_is_answered_is_not_answered_again(target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, engine = opened(target, tmp_path, data_concurrency=4)
    whole = engine._answer_once
    asked: list[str] = []

    def stop_early(talks: Any) -> None:
        asked.extend(talk.id for talk in talks)
        if len(asked) > 8:
            raise KeyboardInterrupt
        whole(talks)

    monkeypatch.setattr(engine, "_answer_once", stop_early)
    with pytest.raises(KeyboardInterrupt):
        data.answer(run, engine, quiet)
    kept = answers(run)
    assert len({row["primary_id"] for row in kept.values()}) == 4
    run, engine = opened(target, tmp_path, data_concurrency=4)
    data.answer(run, engine, quiet)
    assert kept.items() <= answers(run).items()
    assert len({row["primary_id"] for row in answers(run).values()}) == 12


def test_a_prompt_that_does_not_fit_is_counted(target: Path, tmp_path: Path) -> None:
    rows = [conversation("w1 " * (40 if i == 7 else 2) + f"w{i}") for i in range(60)]
    (tmp_path / "source.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run, engine = opened(target, tmp_path, serve_max_model_len=32, data_seq_length=32, eval_max_tokens=8)
    data.answer(run, engine, quiet)
    assert data.load_rows(run)[1] == {"the target gave no answer": 1}
    assert "serve_max_model_len is 32" in run.path("data", "responses.errors.jsonl").read_text()


def extracted(target: Path, folder: Path) -> tuple[Run, TransformersEngine]:
    run, engine = opened(target, folder)
    data.answer(run, engine, quiet)
    hidden_states.extract(run, engine, LAYERS, 32, quiet)
    return run, engine


def test_its_files_pass_verification_and_the_golden_check(target: Path, tmp_path: Path) -> None:
    run, engine = extracted(target, tmp_path)
    result = hidden_states.golden(run, engine, target, LAYERS, 1e-6)
    assert result["top1"] == 1
    assert result["mae"] < 1e-4
    assert result["slots"][2]["mae"] > 0.1
    assert "model that made them" in run.facts()["extraction.golden_top1"]["source"]


def test_states_of_one_byte_are_another_input_of_the_step(target: Path, tmp_path: Path) -> None:
    limits = {"golden_min_top1": 0.93, "golden_max_mae": 0.1, "golden_max_layer_error": 0.05}
    run, engine = opened(target, tmp_path, extraction_storage="fp8", **limits)
    data.answer(run, engine, quiet)
    hidden_states.extract(run, engine, LAYERS, 32, quiet)
    files = sorted(run.path("hidden_states").glob("hs_*"))
    assert {state_files.storage_of(path) for path in files} == {"fp8"}
    before = [path.stat().st_mtime_ns for path in files]
    hidden_states.extract(run, engine, LAYERS, 32, quiet)
    assert [path.stat().st_mtime_ns for path in files] == before
    native, other = opened(target, tmp_path)
    with pytest.raises(KitError, match=r"made with another extraction_storage; seen .fp8."):
        hidden_states.extract(native, other, LAYERS, 32, quiet)


def test_states_of_the_wrong_layer_fail_its_golden_check(target: Path, tmp_path: Path) -> None:
    run, engine = opened(target, tmp_path)
    engine.layers = [1, 2, 3, 3]
    data.answer(run, engine, quiet)
    hidden_states.extract(run, engine, LAYERS, 32, quiet)
    with pytest.raises(KitError, match="golden check failed"):
        hidden_states.golden(run, engine, target, LAYERS, 1e-6)


def test_only_missing_files_are_made(target: Path, tmp_path: Path) -> None:
    run, engine = extracted(target, tmp_path)
    folder = run.path("hidden_states")
    before = {path.name: path.stat().st_mtime_ns for path in folder.glob("hs_*")}
    (folder / "hs_2.safetensors").write_bytes(b"")
    hidden_states.extract(run, engine, LAYERS, 32, quiet)
    after = {path.name: path.stat().st_mtime_ns for path in folder.glob("hs_*")}
    assert {name for name in before if after[name] != before[name]} == {"hs_2.safetensors"}


def test_a_full_disk_is_one_line_and_what_was_written_is_kept(target: Path, small_disk: Path) -> None:
    run, engine = opened(target, small_disk, extraction_concurrency=2)
    data.answer(run, engine, quiet)
    room = os.statvfs(small_disk)
    (small_disk / "filler").write_bytes(bytes(room.f_bavail * room.f_frsize - 64 * 1024))
    with pytest.raises(KitError, match=r"cannot write .*hs_\d+.safetensors; seen No space left on device; fix: free disk space"):
        hidden_states.extract(run, engine, LAYERS, 32, quiet)
    folder = run.path("hidden_states")
    kept = {path.name: path.stat().st_mtime_ns for path in folder.glob("hs_*")}
    assert 0 < len(kept) < 13
    assert not list(folder.glob(".*.partial"))
    (small_disk / "filler").unlink()
    hidden_states.extract(run, engine, LAYERS, 32, quiet)
    after = {path.name: path.stat().st_mtime_ns for path in folder.glob("hs_*")}
    assert len(after) == 13
    assert kept.items() <= after.items()


def test_a_disk_that_is_full_while_answering_loses_no_answer(target: Path, small_disk: Path) -> None:
    rows = [conversation(f"w{i} w1") for i in range(50)]
    (small_disk / "source.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run, engine = opened(target, small_disk, data_concurrency=2)
    engine.ensure()
    prompts = data.load_prompts(run.params)[0]
    asked = data.write_prompts(run.path("data", "prompts.jsonl"), prompts)
    responses = run.path("data", "responses.jsonl")
    room = os.statvfs(small_disk)
    (small_disk / "filler").write_bytes(bytes(room.f_bavail * room.f_frsize - room.f_frsize))
    with pytest.raises(KitError, match="cannot write .*responses.jsonl; seen No space left on device"):
        engine.answer(asked, responses, quiet)
    (small_disk / "filler").unlink()
    data.repair_responses(responses, prompts)
    kept = answers(run)
    assert 0 < len(kept) < 50
    engine.answer(asked, responses, quiet)
    assert kept.items() <= answers(run).items()
    assert len(answers(run)) == 50
