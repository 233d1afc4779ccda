"""Drafters read strictly, moved between the forms, started from a parent; on a target of 200 tokens with random weights."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from drafters import (
    EVERY_FOURTH,
    HIDDEN,
    LAYER,
    LAYERS,
    VOCAB,
    YARN,
    config_of,
    edit,
    edit_weights,
    maps,
    random,
    write_drafter,
    write_json,
    write_target,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from logits import differences, logits_of, logits_of_specforge, logits_of_speculators
from safetensors.torch import load_file, save_file

from eagle3kit import cli, convert, materialize
from eagle3kit.drafter import AUX
from eagle3kit.errors import KitError
from eagle3kit.params import Params


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return write_target(tmp_path / "target")


@pytest.fixture
def source(tmp_path: Path, target: Path) -> Path:
    return write_drafter(tmp_path / "source", target)


def assert_same_tensors(one: Path, other: Path) -> None:
    a, b = load_file(one / "model.safetensors"), load_file(other / "model.safetensors")
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype, name
        assert torch.equal(a[name].view(torch.uint8), b[name].view(torch.uint8)), name


# ---- the forms


@pytest.mark.parametrize("ids", [EVERY_FOURTH, list(range(VOCAB))], ids=["reduced", "full"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_round_trip_is_bitwise(tmp_path: Path, target: Path, ids: list[int], dtype: torch.dtype) -> None:
    source = write_drafter(tmp_path / "source", target, ids, rope_parameters=YARN, fc_norm=True)
    edit_weights(source, lambda w: w.update({n: t.to(dtype) for n, t in w.items() if t.is_floating_point()}))
    flat = convert.export_llama(source, tmp_path / "flat", LAYERS)
    back = convert.import_llama(flat, tmp_path / "back", target)
    assert_same_tensors(source, back)
    assert {name.replace("midlayer.", "layers.0.") for name in load_file(flat / "model.safetensors")} == set(
        load_file(source / "model.safetensors")
    )
    before, after = (convert.load_drafter(folder).values for folder in (source, back))
    assert {k: v for k, v in after.items() if k in before and k not in ("dtype", "pad_token_id")} == {
        k: v for k, v in before.items() if k != "dtype"
    }


def test_both_readers_of_the_flat_config_find_their_own_numbers(tmp_path: Path, source: Path) -> None:
    config = json.loads((convert.export_llama(source, tmp_path / "flat", LAYERS) / "config.json").read_text())
    assert config[AUX] == [2, 4, 5]
    assert config["eagle_config"][AUX] == [1, 3, 4]


@pytest.mark.parametrize("rope", [LAYER["rope_parameters"], YARN], ids=["plain", "yarn"])
@pytest.mark.parametrize("fc_norm", [False, True])
def test_all_implementations_give_the_same_logits(tmp_path: Path, target: Path, rope: Any, fc_norm: bool) -> None:
    from speculators.models.eagle3 import Eagle3SpeculatorConfig
    from speculators.models.eagle3.core import Eagle3DraftModel

    source = write_drafter(tmp_path / "source", target, rope_parameters=rope, fc_norm=fc_norm)
    example = random(1, 24, 3 * HIDDEN, seed=5), torch.arange(24)[None] * 7 % VOCAB
    config = Eagle3SpeculatorConfig.from_pretrained(source)
    config.transformer_layer_config._attn_implementation = "sdpa"
    model = Eagle3DraftModel(config)
    model.load_state_dict(load_file(source / "model.safetensors"), strict=False)
    wanted = logits_of(model, *example)

    flat = convert.export_llama(source, tmp_path / "flat", LAYERS)
    back = convert.import_llama(flat, tmp_path / "back", target)

    def differs(other: torch.Tensor) -> list[float]:
        return differences(other, wanted)

    assert max(differs(logits_of_speculators(source, *example))) <= 1e-5
    assert max(differs(logits_of_speculators(back, *example))) <= 1e-5
    assert max(differs(logits_of_specforge(flat, *example))) <= 1e-5
    edit(back / "config.json", lambda c: c.update(norm_output=True))  # controls: with another flag it is another drafter
    assert differs(logits_of_speculators(back, *example))[1] > 0.01
    edit(back / "config.json", lambda c: c.update(norm_output=False, norm_before_residual=True))
    assert differs(logits_of_speculators(back, *example))[0] > 0.01


@pytest.mark.parametrize("name", ["norm_before_residual", "norm_before_fc", "norm_output"])
def test_a_norm_that_the_class_does_not_have_is_refused(tmp_path: Path, target: Path, name: str) -> None:
    source = write_drafter(tmp_path / "source", target, **{name: True})
    with pytest.raises(KitError, match=f"cannot express the {name}.*drafter_{name}: false"):
        convert.export_llama(source, tmp_path / "flat", LAYERS)
    assert not list(tmp_path.glob("*flat*"))


def test_two_layers_windows_and_four_states_are_refused(tmp_path: Path, target: Path) -> None:
    changes: list[dict[str, Any]] = [{"layer_types": ["sliding_attention"]}, {"num_hidden_layers": 2}, {AUX: [1, 2, 4, 5]}]
    for n, change in enumerate(changes):
        source = write_drafter(tmp_path / str(n), target, **change)
        with pytest.raises(KitError, match="cannot express"):
            convert.export_llama(source, tmp_path / "flat", LAYERS)


def test_layers_that_sglang_would_misread_are_refused(tmp_path: Path, target: Path) -> None:
    source = write_drafter(tmp_path / "source", target, **{AUX: [3, 4, 5]})
    edit(source / "config.json", lambda c: c["speculators_config"]["verifier"].update(architectures=["KimiK25ForCausalLM"]))
    with pytest.raises(KitError, match="one layer off unless the first is 1"):
        convert.export_llama(source, tmp_path / "flat", LAYERS)


@pytest.mark.parametrize(
    ("ids", "words"),
    [([1, 3, 4], "convention sglang"), ([2, 4, 9], "does not have"), ([2, 4, 4], "repeats"), ([0, 4, 5], "does not have")],
)
def test_layers_in_speculators_form_are_checked(tmp_path: Path, target: Path, ids: list[int], words: str) -> None:
    source = write_drafter(tmp_path / "source", target, **{AUX: ids})
    with pytest.raises(KitError, match=words):
        convert.export_llama(source, tmp_path / "flat", LAYERS)


@pytest.fixture
def flat(tmp_path: Path, source: Path) -> Path:
    return convert.export_llama(source, tmp_path / "flat", LAYERS)


def only_in_block(flat: Path, ids: list[int]) -> None:
    edit(flat / "config.json", lambda c: (c.pop(AUX, None), c["eagle_config"].update({AUX: ids})))


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ([2, 4, 5], "vllm's default"),
        ([2, 4, 5, 7], "fc.weight"),  # speculators 0.4's default has four, and fc is for three
        ([1, 3, 9], "outside the target"),
        ([1, 3, 3], "repeats"),
        ([4, 3, 1], "not increasing"),
    ],
)
def test_layers_of_a_flat_config(tmp_path: Path, target: Path, flat: Path, ids: list[int], words: str) -> None:
    only_in_block(flat, ids)
    with pytest.raises(KitError, match=words):
        convert.import_llama(flat, tmp_path / "back", target)


def test_the_convention_settles_what_the_file_leaves_open(target: Path, flat: Path) -> None:
    only_in_block(flat, [2, 4, 5])
    given = convert.load_drafter(flat)
    assert convert.vllm_ids(given, LAYERS, "vllm") == (2, 4, 5)
    assert convert.vllm_ids(given, LAYERS, "sglang") == (3, 5, 6)
    only_in_block(flat, [1, 3, 4])
    assert convert.vllm_ids(convert.load_drafter(flat), LAYERS) == (2, 4, 5)
    edit(flat / "config.json", lambda c: c.pop("eagle_config"))
    assert convert.vllm_ids(convert.load_drafter(flat), LAYERS) == (2, 4, 5)
    edit(flat / "config.json", lambda c: c.update({AUX: [3, 4, 6]}))
    assert convert.vllm_ids(convert.load_drafter(flat), LAYERS) == (3, 4, 6)
    edit(flat / "config.json", lambda c: c.update({"eagle_config": {AUX: [3, 4, 6]}}))
    with pytest.raises(KitError, match="twice, and differently"):
        convert.vllm_ids(convert.load_drafter(flat), LAYERS)


def test_a_flat_drafter_without_embeddings_gets_the_targets(tmp_path: Path, source: Path, target: Path, flat: Path) -> None:
    edit_weights(flat, lambda w: w.pop("embed_tokens.weight"))
    assert_same_tensors(source, convert.import_llama(flat, tmp_path / "back", target))


@pytest.mark.parametrize("value", [True, False])
def test_norm_output_in_a_flat_config_is_refused(flat: Path, value: bool) -> None:
    edit(flat / "config.json", lambda c: c.update(norm_output=value))
    with pytest.raises(KitError, match="norm_output.*two meanings"):
        convert.load_drafter(flat)


def test_maps_of_a_full_vocabulary_change_nothing(tmp_path: Path, target: Path) -> None:
    source = write_drafter(tmp_path / "source", target, range(VOCAB))
    flat = convert.export_llama(source, tmp_path / "flat", LAYERS)
    edit_weights(flat, lambda w: w.update(d2t=torch.zeros(VOCAB, dtype=torch.long), t2d=torch.ones(VOCAB, dtype=torch.bool)))
    assert_same_tensors(source, convert.import_llama(flat, tmp_path / "back", target))


# ---- strict reading


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda w: w.pop("fc.weight"), r"seen fc.weight missing; wanted fc.weight \[64, 192\] float"),
        (lambda w: w.update(extra=torch.ones(1)), r"seen extra \[1\] float; wanted no extra"),
        (lambda w: w.update({"norm.weight": torch.ones(63)}), r"seen norm.weight \[63\] float; wanted norm.weight \[64\]"),
        (lambda w: w.update(d2t=w["d2t"].int()), r"seen d2t \[50\] I32; wanted d2t \[50\] I64"),
        (lambda w: w["d2t"].neg_(), "not an increasing map.*seen target ids -"),
        (lambda w: w["d2t"].add_(1000), "seen target ids 1000 to 1196.*wanted increasing ids below 200"),
        (lambda w: w["t2d"].fill_(True), "seen 200 marked; wanted 50"),
        (lambda w: w.update(t2d=w["t2d"].roll(1)), "t2d marks other tokens"),
    ],
    ids=["missing", "unexpected", "shape", "type", "decreasing", "out of range", "count", "other tokens"],
)
def test_wrong_tensors_are_named(source: Path, change: Callable[[dict[str, Any]], object], words: str) -> None:
    edit_weights(source, change)
    with pytest.raises(KitError, match=words):
        convert.load_drafter(source)


def test_damaged_and_pickled_files_are_named(source: Path) -> None:
    file = source / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-10])
    with pytest.raises(KitError, match="model.safetensors is cut short"):
        convert.load_drafter(source)
    file.write_bytes(b"PK\x03\x04" + whole[:500])
    with pytest.raises(KitError, match="no safetensors file"):
        convert.load_drafter(source)
    file.rename(source / "pytorch_model.bin")
    with pytest.raises(KitError, match="only pickled weights.*pytorch_model.bin"):
        convert.load_drafter(source)
    (source / "pytorch_model.bin").unlink()
    with pytest.raises(KitError, match="has no weights"):
        convert.load_drafter(source)


def test_shards_need_their_index_and_each_other(source: Path) -> None:
    whole = convert.load_drafter(source).weights
    (source / "model.safetensors").unlink()
    names = sorted(whole)
    places: dict[str, str] = {}
    for n, part in enumerate((names[:5], names[5:]), 1):
        file = f"model-0000{n}-of-00002.safetensors"
        save_file({name: whole[name] for name in part}, source / file)
        places |= dict.fromkeys(part, file)
    with pytest.raises(KitError, match="without an index"):
        convert.load_drafter(source)
    index = source / "model.safetensors.index.json"
    write_json(index, {"weight_map": places})
    assert convert.load_drafter(source).weights.keys() == whole.keys()
    edit(index, lambda value: value["weight_map"].pop(names[0]))
    with pytest.raises(KitError, match=f"seen {names[0]} in a file; wanted {names[0]} in the index"):
        convert.load_drafter(source)
    write_json(index, {"weight_map": places})
    (source / file).unlink()
    with pytest.raises(KitError, match=f"names {file}; seen nothing"):
        convert.load_drafter(source)
    write_json(index, {"weight_map": dict.fromkeys(places, "pytorch_model.bin")})
    with pytest.raises(KitError, match="seen .bin; wanted a safetensors file"):
        convert.load_drafter(source)


def test_code_in_the_folder_is_refused_until_it_is_trusted(flat: Path, source: Path) -> None:
    edit(source / "config.json", lambda c: c.update(auto_map={"": "config.Eagle3SpeculatorConfig"}))  # the trainer's own
    convert.load_drafter(source)
    edit(flat / "config.json", lambda c: c.update(auto_map={"AutoModel": "modeling.MyEagle3"}))
    with pytest.raises(KitError, match="auto_map.*trust_remote_code: true"):
        convert.load_drafter(flat)
    convert.load_drafter(flat, trust_remote_code=True)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda c: c.update(speculators_model_type="dflash"), "no EAGLE-3 drafter.*seen dflash"),
        (lambda c: c["transformer_layer_config"].pop("hidden_size"), "no usable hidden_size"),
        (lambda c: c["transformer_layer_config"].update(hidden_size="64"), "no usable hidden_size.*seen 64; wanted a count"),
    ],
)
def test_a_config_that_does_not_describe_a_drafter(source: Path, change: Callable[[dict[str, Any]], object], words: str) -> None:
    edit(source / "config.json", change)
    with pytest.raises(KitError, match=words):
        convert.load_drafter(source)


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def without_index(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")


def cut_short(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])


def in_config(**changes: Any) -> Callable[[Path], None]:
    return lambda folder: edit(folder / "config.json", lambda config: config.update(changes))


def in_weights(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    return lambda folder: edit_weights(folder, change)


BAD_INPUT: dict[str, tuple[Callable[[Path], None], str]] = {
    "another width": (in_config(hidden_size=128), r"fc.weight \[64, 192\].*wanted.*fc.weight \[128, 384\]"),
    "another vocabulary": (in_config(vocab_size=300), r"embed_tokens.weight \[200, 64\].*wanted embed_tokens.weight \[300, 64\]"),
    "another head count": (in_config(num_attention_heads=8), r"q_proj.weight \[64, 128\].*q_proj.weight \[128, 128\]"),
    "layer out of range": (lambda folder: only_in_block(folder, [1, 3, 9]), "layer id 9 is outside the target"),
    "layer repeated": (lambda folder: only_in_block(folder, [1, 3, 3]), "repeats a layer"),
    "layers in the wrong convention": (lambda folder: only_in_block(folder, [2, 4, 5]), "vllm's default list"),
    "d2t not increasing": (in_weights(lambda w: w["d2t"].neg_()), "not an increasing map"),
    "d2t out of range": (in_weights(lambda w: w["d2t"].add_(1000)), "seen target ids 1000 to"),
    "t2d count": (in_weights(lambda w: w["t2d"].fill_(True)), "t2d of .* does not fit d2t"),
    "truncated": (cut_short, "cut short"),
    "pickle": (pickled, "only pickled weights"),
    "missing index": (without_index, "without an index"),
    "code of its own": (in_config(auto_map={"AutoModel": "modeling.Mine"}), "trust_remote_code"),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_one_line_with_a_remedy_and_leaves_nothing(tmp_path: Path, target: Path, flat: Path, case: str) -> None:
    spoil, words = BAD_INPUT[case]
    spoil(flat)
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(KitError, match=words) as caught:
        convert.import_llama(flat, tmp_path / "back", target)
    assert len(caught.value.message.splitlines()) == 1
    assert caught.value.fix
    assert sorted(path.name for path in tmp_path.iterdir()) == before


@pytest.mark.parametrize("name", ["hidden_size", "vocab_size"])
def test_a_drafter_whose_target_has_another_shape_is_not_imported(tmp_path: Path, target: Path, flat: Path, name: str) -> None:
    edit(target / "config.json", lambda c: c.update({name: c[name] * 2}))
    with pytest.raises(KitError, match=f"{name} of the drafter .*fix: make {name} agree"):
        convert.import_llama(flat, tmp_path / "back", target)
    assert not list(tmp_path.glob("*back*"))


# ---- from a parent


def start(tmp_path: Path, parent: Path, target: Path, ids: list[int], **changes: Any) -> tuple[Path, list[dict[str, Any]]]:
    write_json(tmp_path / "config" / "config.json", config_of(target, **{"draft_vocab_size": len(ids), **changes}))
    dest = tmp_path / "start"
    return dest, convert.warm_start(parent, tmp_path / "config", target, dest, *maps(ids))


@pytest.mark.parametrize("form", ["speculators", "llama"])
def test_warm_start_loads_in_the_trainers_class(tmp_path: Path, target: Path, source: Path, flat: Path, form: str) -> None:
    from speculators.models.eagle3.core import Eagle3DraftModel

    parent = source if form == "speculators" else flat
    edit_weights(parent, lambda w: w.update({n: t.bfloat16() for n, t in w.items() if t.is_floating_point()}))
    edit_weights(parent, lambda w: w["lm_head.weight"].neg_())  # SpecForge trains it
    old = convert.load_drafter(parent).weights
    ids = sorted({*EVERY_FOURTH[:-5], 1, 2, 3})  # 45 that the parent has, 3 that it has not
    dest, rows = start(tmp_path, parent, target, ids)

    model = Eagle3DraftModel.from_pretrained(dest)
    theirs, new = load_file(target / "model.safetensors"), model.state_dict()
    for tensors in (new, load_file(dest / "model.safetensors")):
        assert {t.dtype for t in tensors.values() if t.is_floating_point()} == {torch.float32}
    assert torch.equal(new["embed_tokens.weight"], theirs["model.embed_tokens.weight"])
    assert torch.equal(new["verifier_norm.weight"], theirs["model.norm.weight"])
    for draft, token in enumerate(ids):
        wanted = old["lm_head.weight"][token // 4].float() if token % 4 == 0 else theirs["lm_head.weight"][token]
        assert torch.equal(new["lm_head.weight"][draft], wanted)
    kept = [row["tensor"] for row in rows if row["what"] == "kept"]
    assert {"fc.weight", "norm.weight", "layers.0.hidden_norm.weight"} <= set(kept)
    assert all(torch.equal(new[name], old[name].float()) for name in kept)
    by_name = {row["tensor"]: row for row in rows}
    assert [by_name["lm_head.weight"][key] for key in ("what", "rows moved", "new rows")] == ["moved", 45, 3]
    assert by_name["embed_tokens.weight"]["what"] == by_name["verifier_norm.weight"]["what"] == "replaced"
    assert by_name["d2t"]["what"] == "new"
    assert all(row["reason"] for row in rows)
    assert set(by_name) == {*load_file(dest / "model.safetensors"), "verifier_norm.weight"}


def test_a_frozen_head_is_the_targets_again_bit_for_bit(tmp_path: Path, target: Path, source: Path) -> None:
    edit_weights(source, lambda w: w.update({n: t.bfloat16() for n, t in w.items() if t.is_floating_point()}))
    dest, _ = start(tmp_path, source, target, [*EVERY_FOURTH[:-1], 199])
    assert [row["state"] for row in convert.verify_origin(dest, target)] == ["ok", "ok"]


@settings(max_examples=100, deadline=None)
@given(st.sets(st.integers(0, 99), min_size=1), st.sets(st.integers(0, 99), min_size=1))
def test_rows_follow_their_target_ids(old: set[int], new: set[int]) -> None:
    d2t_old, d2t_new = (torch.tensor(sorted(ids)) - torch.arange(len(ids)) for ids in (old, new))
    old_ids, new_ids = convert.target_ids(d2t_old, len(old)), convert.target_ids(d2t_new, len(new))
    assert new_ids.tolist() == sorted(new)
    rows, moved = convert.move_rows(old_ids[:, None].float(), old_ids, new_ids, -1 - new_ids[:, None].float())
    assert rows[:, 0].tolist() == [token if token in old else -1 - token for token in sorted(new)]
    assert moved == len(old & new)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_size": 32}, "hidden_size of the config .* target.*seen 32; wanted 64"),
        ({"vocab_size": 300}, "vocab_size of the config .* target"),
        ({"num_attention_heads": 8}, "num_attention_heads of the parent .*seen 4; wanted 8"),
        ({"norm_before_residual": True}, "norm_before_residual of the parent"),
        ({AUX: [2, 4]}, "number of auxiliary layers of the parent"),
        ({AUX: [2, 4, 9]}, "does not have as auxiliary layers"),
        ({AUX: [2, 4, 4]}, "repeats"),
        ({AUX: [1, 3, 4]}, "default list of the convention sglang"),
        ({"draft_vocab_size": 49}, "d2t does not fit draft_vocab_size"),
    ],
)
def test_warm_start_refuses_what_does_not_fit(
    tmp_path: Path, source: Path, target: Path, change: dict[str, Any], words: str
) -> None:
    with pytest.raises(KitError, match=words):
        start(tmp_path, source, target, EVERY_FOURTH, **change)
    assert not list(tmp_path.glob("*start*"))


def test_a_failure_leaves_nothing_behind(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        Path(args[1]).write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr("safetensors.torch.save_file", fail)
    with pytest.raises(OSError, match="disk full"):
        convert.export_llama(source, tmp_path / "flat", LAYERS)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source", "target"]


def test_a_folder_that_exists_is_left_alone(tmp_path: Path, source: Path) -> None:
    (tmp_path / "flat").mkdir()
    with pytest.raises(KitError, match="is there already"):
        convert.export_llama(source, tmp_path / "flat", LAYERS)
    assert not list((tmp_path / "flat").iterdir())


# ---- against the target


def test_origin_holds_after_every_conversion_and_names_what_changed(
    tmp_path: Path, source: Path, target: Path, flat: Path
) -> None:
    edit_weights(flat, lambda w: w.update({n: t.bfloat16() for n, t in w.items() if t.is_floating_point()}))
    for folder in (source, flat):
        rows = convert.verify_origin(folder, target)
        assert [row["state"] for row in rows] == ["ok", "ok"]
    edit_weights(source, lambda w: (w["lm_head.weight"][7].neg_(), w.update({"verifier_norm.weight": torch.ones(HIDDEN)})))
    rows = convert.verify_origin(source, target)
    assert [row["state"] for row in rows] == ["ok", "fail", "fail"]
    assert rows[1]["found"].startswith("49 of 50 rows")
    assert [row["state"] for row in convert.verify_origin(source, target, own_head=True)] == ["ok", "note", "fail"]


def test_an_imported_drafter_may_have_an_output_matrix_of_its_own_but_no_other_embeddings(
    tmp_path: Path, target: Path, flat: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    looked_up: list[object] = []
    found = materialize.materialize

    def look_up(params: Params) -> tuple[str, str]:
        looked_up.append(params)
        return found(params)

    monkeypatch.setattr(materialize, "materialize", look_up)
    (tmp_path / "params.yaml").write_text(f"target_model: {target}")
    edit_weights(flat, lambda w: w["lm_head.weight"].neg_())
    assert cli.main(["import", str(tmp_path / "params.yaml"), str(flat), str(tmp_path / "back")]) == 0
    assert "note  lm_head.weight is the target's: 0 of 50 rows equal" in capsys.readouterr().out
    assert len(looked_up) == 1
    edit_weights(flat, lambda w: w["embed_tokens.weight"].neg_())
    assert cli.main(["import", str(tmp_path / "params.yaml"), str(flat), str(tmp_path / "other")]) == 1
    assert "fail  embed_tokens.weight" in capsys.readouterr().out


def test_tied_and_prefixed_targets(tmp_path: Path, target: Path, source: Path) -> None:
    edit_weights(target, lambda w: [w.update({f"language_model.{name}": w.pop(name)}) for name in list(w)])
    assert [row["state"] for row in convert.verify_origin(source, target)] == ["ok", "ok"]
    edit_weights(target, lambda w: w.pop("language_model.lm_head.weight"))
    with pytest.raises(KitError, match="no lm_head.weight"):
        convert.verify_origin(source, target)
    edit(target / "config.json", lambda c: c.update(tie_word_embeddings=True))
    assert [row["state"] for row in convert.verify_origin(source, target)] == ["ok", "fail"]
