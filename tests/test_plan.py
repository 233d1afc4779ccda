"""Checks on the plan: counted numbers against known ones, guessed ones against published measurements."""

import dataclasses
import json
from pathlib import Path
from typing import Any, get_args

import pytest

from eagle3kit import drafter, plan, recipe, target
from eagle3kit.data import Row
from eagle3kit.errors import KitError
from eagle3kit.params import FP8_LIMITS, Params, load_file
from eagle3kit.plan import Disk, Estimate, Workload
from eagle3kit.speedup import hardware_presets

K25 = target.reference("kimi-k2.5")
SMALL = target.reference("smollm2-135m")
EMPTY = Disk(used=0, free=10**16)


def kimi(**changes: Any) -> Params:
    values: dict[str, Any] = {
        "target_model": "kimi-k2.5",
        "target_dtype": "auto",
        "data_source": "owner/prompts",
        "data_train_prompts": 1000,
        "data_heldout_prompts": 100,
        "data_seq_length": 2048,
        "data_max_response_tokens": 1024,
        "drafter_heads": 64,
        "drafter_kv_heads": 64,
        "drafter_head_dim": 128,
        "drafter_intermediate_size": 12288,
        "draft_vocab_size": 32000,
        "train_pack_tokens": 4096,
        "train_epochs": 2,
        "train_processes": 8,
        "serve_max_model_len": 4096,
        "serve_tensor_parallel": 8,
        "device": "cuda",
        "hardware": "b300",
        "gpu_count": 8,
    }
    return Params(**{**values, **changes})


def counted(train: int = 1000, each: int = 2048, heldout: int = 0) -> Workload:
    total = train + heldout
    return Workload(train, heldout, train * each, heldout * each, total * 1000, total * each, "counted")


# ---- counted


def test_bytes_a_token() -> None:
    assert plan.bytes_per_token(K25, 3, "auto") == 57_344
    assert plan.bytes_per_token(K25, 3, "bfloat16") == 57_344
    assert plan.bytes_per_token(SMALL, 3, "float32") == 576 * 4 * 4
    assert plan.bytes_per_token(K25, 3, "auto", "fp8") == 7168 * 4 + 4
    assert plan.bytes_per_token(SMALL, 3, "float32", "fp8") == 576 * 4 + 4


def test_hidden_states_of_a_thousand_samples() -> None:
    made = plan.plan(kimi(), K25, counted(), EMPTY)
    assert made.value("hidden_states.bytes") == 1000 * 2048 * 57_344
    assert made["hidden_states.bytes"].text == "117 GB"
    assert plan.plan(kimi(), K25, counted(1, 6_000_000_000), EMPTY)["hidden_states.bytes"].text == "344 TB"


def test_drafter_parameters_of_a_published_size() -> None:
    counts = plan.drafter_parameters(K25, plan.drafter_shape(kimi(), K25))
    assert counts["fc"] == 7168 * 3 * 7168
    assert counts["attention"] == 3 * 14336 * 8192 + 8192 * 7168
    assert counts["mlp"] == 3 * 7168 * 12288
    assert counts["norms"] == (4 + 3) * 7168
    own = sum(count for group, count in counts.items() if group not in ("lm_head", "embed_tokens"))
    assert own == pytest.approx(0.829e9, rel=0.001)
    assert plan.plan(kimi(), K25, counted(), EMPTY).value("drafter.trained_parameters") == own


@pytest.mark.parametrize("name", ["kimi-k2.5", "smollm2-135m"])
@pytest.mark.parametrize("changes", [{}, {"drafter_layers": 2}, {"drafter_norm_before_fc": False}, {"draft_vocab_size": 0}])
def test_the_drafter_that_is_built_has_the_planned_size(name: str, changes: dict[str, Any]) -> None:
    params, t = Params(target_model=name, **changes), target.reference(name)
    made = plan.plan(params, t, counted(), EMPTY)
    derived = recipe.derive(params, drafter.reference("a test"), t)
    size = drafter.size({field.name: field.value for field in derived.fields})
    assert made.value("drafter.parameters") == size.parameters
    assert made.value("drafter.trained_parameters") == size.trained


def test_published_drafter_has_the_published_bytes() -> None:
    """lightseekorg/kimi-k2.5-eagle3: full vocabulary, 12,288 wide, about 6.0 GB; how many key and value heads is not known."""
    few, many = (
        plan.plan(kimi(draft_vocab_size=0, drafter_kv_heads=n), K25, counted(), EMPTY).value("drafter.bytes") for n in (8, 64)
    )
    assert few == pytest.approx(5.95e9, rel=0.005)
    assert many == pytest.approx(6.36e9, rel=0.005)


def test_steps_and_passes() -> None:
    made = plan.plan(kimi(), K25, counted(), EMPTY)
    assert made.value("train.token_passes") == 2 * 1000 * 2048
    assert made.value("train.steps") == 2 * 63  # 2,048,000 / (4096 x 8) = 62.5


def test_training_flops() -> None:
    counts = {"fc": 10, "attention": 100, "mlp": 200, "norms": 5, "lm_head": 50, "embed_tokens": 1000}
    assert plan.training_flops(counts, 3) == 6 * 10 + 2 * 50 + 3 * (6 * 300 + 4 * 50)


# ---- expected


def test_builtin_prompts_are_counted() -> None:
    work = plan.workload(Params())
    folder = Path(plan.__file__).parent / "prompts"
    assert work.train_prompts == len((folder / "train.jsonl").read_text().splitlines())
    assert work.heldout_prompts == len((folder / "heldout.jsonl").read_text().splitlines())
    assert work.prompts * 100 < work.tokens <= work.prompts * 256
    assert work.tokens <= work.most_tokens
    assert plan.workload(Params(data_train_prompts=10, data_heldout_prompts=5)).prompts == 15


def test_local_file_is_read(tmp_path: Path) -> None:
    lines = [{"messages": [{"role": "user", "content": f"{number:02d}" + "x" * 398}]} for number in range(20)]
    file = tmp_path / "p.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    work = plan.workload(Params(data_source=str(file), data_seq_length=4096, train_pack_tokens=4096, serve_max_model_len=4096))
    assert (work.train_prompts, work.heldout_prompts) == (18, 2)
    assert work.tokens == 20 * (400 // 4 + plan.TEMPLATE_TOKENS + 96)


def test_each_answer_of_a_conversation_is_a_row_with_all_before_it(tmp_path: Path) -> None:
    roles, file = ("system", "user", "user", "user"), tmp_path / "p.jsonl"
    turns = [[str(i) * length for length in (40, 80, 20, 1)] for i in range(10)]
    messages = [[{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)] for texts in turns]
    file.write_text("".join(json.dumps({"messages": each}) + "\n" for each in messages))
    wide = {"data_seq_length": 4096, "train_pack_tokens": 4096, "serve_max_model_len": 4096}
    work = plan.workload(Params(data_source=str(file), **wide), tokens_in=len)
    rows = [40 + 80 + 96, 40 + 80 + 20 + 2 * 96, 40 + 80 + 20 + 1 + 3 * 96]
    assert work.tokens == 10 * sum(row + plan.TEMPLATE_TOKENS for row in rows)
    assert work.answer_tokens == 10 * 3 * 96
    assert work.how.startswith("expected: tokens of the prompts counted")


def test_answers_that_get_longer_than_assumed_are_stopped_in_time(tmp_path: Path) -> None:
    """Ten thousand conversations, reckoned with 10 tokens each; the first 32 have 10 too, the first 64 a hundred."""
    params = Params(runs_dir=str(tmp_path), run_name="long")
    captured = tmp_path / "captured"
    captured.mkdir()
    total, disk = 10_000, Disk.of(tmp_path)
    each = int(disk.free / total / 30)  # bytes of ten tokens: all of them take a thirtieth of the free space, or a third
    target_ = dataclasses.replace(SMALL, hidden_size=max(64, each // (10 * 4 * 4) // 64 * 64))
    per_token = plan.bytes_per_token(target_, 3, params.target_dtype)
    shown: list[int] = []
    work = plan.counted([*rows(total - 100, 10), *rows(100, 10, "heldout")])
    reckoned = plan.plan(params, target_, work, captured=captured)
    look = plan.guarded(reckoned, lambda done, _: shown.append(done))

    def write(tokens: int) -> None:
        with (captured / "1.safetensors").open("wb") as file:
            file.truncate(tokens * per_token)  # a sparse file: its length is what counts

    write(320)
    for done in (0, 31, 32, 33):
        look(done, total)
    write(64 * 100 * 100)
    look(63, total)  # not looked at before there are twice as many
    with pytest.raises(KitError, match="the disk of runs_dir would be .* full"):
        look(64, total)
    assert shown == [0, 31, 32, 33, 63, 64]
    quiet = plan.guarded(dataclasses.replace(reckoned, captured=tmp_path / "none"), lambda *_: None)
    quiet(5000, total)  # an engine that writes no states with the answers


def test_states_of_other_layers_make_no_room(tmp_path: Path) -> None:
    params, run = Params(runs_dir=str(tmp_path), run_name="two"), tmp_path / "two" / "captured"
    for name, size in (("these", 400), ("others", 70_000)):
        (run / name).mkdir(parents=True)
        (run / name / "1.safetensors").write_bytes(b"x" * size)
    need = [
        plan.plan(params, SMALL, counted(10, 100), EMPTY, captured).value("disk.needed") for captured in (None, run / "these")
    ]
    assert need[1] - need[0] == 70_000


def test_hub_data_needs_a_number() -> None:
    assert plan.workload(kimi()).prompts == 1100
    assert plan.workload(kimi(data_heldout_prompts=0)).heldout_prompts == 111  # a tenth of all
    with pytest.raises(KitError, match=r"not known before it is downloaded.*set data_train_prompts"):
        plan.workload(kimi(data_train_prompts=0))
    assert plan.workload(kimi(data_train_prompts=0), 500).train_prompts == 500


def test_long_answers_are_expected_shorter_than_they_may_get() -> None:
    work = plan.workload(
        kimi(data_max_response_tokens=4096, data_seq_length=8192, train_pack_tokens=8192, serve_max_model_len=8192)
    )
    assert work.tokens == 1100 * (plan.PROMPT_TOKENS + plan.ANSWER_TOKENS)
    assert work.most_tokens == 1100 * 8192


# ---- guessed, against what was measured


@pytest.mark.parametrize(("streams", "measured"), [(1, 88.5), (4, 233.8), (16, 475.2), (64, 1330)])
def test_decode_rates_against_published_ones(streams: int, measured: float) -> None:
    """Kimi-K2.6 (the same shape and formats) on 8x RTX PRO 6000, tensor parallel 8, no speculation."""
    rate, how = plan.generation_rate(K25, hardware_presets()["rtx-pro-6000"], kimi(), streams)
    assert rate == pytest.approx(measured, rel=0.3)
    assert "rough" in how


def test_cpu_training_time_against_a_measured_run() -> None:
    """`params/local.yaml`: 93,809 tokens, 3 epochs, 2 TTT steps, draft vocabulary 4096: 9.0 min on two cores."""
    work = Workload(907, 64, 93_809, 0, 0, 93_809, "counted")
    params = load_file(Path(__file__).parents[1] / "params" / "local.yaml")
    assert plan.plan(params, SMALL, work, EMPTY).value("minutes.training") == pytest.approx(9.0, rel=0.35)


def test_cpu_rates_fall_with_size_and_rise_with_streams() -> None:
    cpu = hardware_presets()["cpu"]
    one, many = (plan.generation_rate(SMALL, cpu, Params(), n)[0] for n in (1, 128))
    assert (one, many) == (13, 180)
    assert one < plan.generation_rate(SMALL, cpu, Params(), 2)[0] < plan.generation_rate(SMALL, cpu, Params(), 4)[0] < many
    assert plan.generation_rate(SMALL, cpu, Params(), 1000)[0] == many
    assert plan.generation_rate(K25, cpu, Params(), 1)[0] < 0.1


def test_money() -> None:
    assert plan.plan(kimi(), K25, counted(), EMPTY)["money"].text == "unknown"
    made = plan.plan(kimi(gpu_price_per_hour=5.0), K25, counted(), EMPTY)
    assert made.value("money") == pytest.approx(made.value("minutes.total") / 60 * 8 * 5, abs=0.01)


def test_machines_are_the_choices_of_the_parameter() -> None:
    presets = hardware_presets()
    assert set(presets) == set(get_args(Params.model_fields["hardware"].annotation))
    assert [h.name for h in presets.values() if not h.is_gpu] == ["cpu"]
    assert presets["b300"].memory_gb == 288
    for hardware in presets.values():
        assert hardware.source
        numbers = (hardware.memory_gb, hardware.bandwidth_gb_s, hardware.link_gb_s, hardware.bf16_tflops, hardware.compute)
        assert all(number is not None for number in numbers) == hardware.is_gpu


# ---- checks


def test_memory_that_fits() -> None:
    plan.plan(kimi(), K25, counted(), EMPTY).check()
    plan.plan(kimi(hardware="rtx-pro-6000"), K25, counted(), EMPTY).check()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hardware": "rtx-pro-6000", "serve_tensor_parallel": 4}, "595.0 GB of weights; wanted at most 345.6 GB.*parallel: 8"),
        ({"hardware": "b300", "serve_tensor_parallel": 2}, "fix: set serve_tensor_parallel: 4"),
        (
            {"hardware": "rtx-pro-6000", "serve_tensor_parallel": 4, "gpu_count": 4, "train_processes": 4},
            "take a machine with 8 of these GPUs.*or 4 of hardware b200, b300",
        ),
    ],
)
def test_memory_that_does_not_fit(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(KitError, match=message):
        plan.plan(kimi(**changes), K25, counted(), EMPTY).check()


def test_kimi_does_not_fit_a_small_machine() -> None:
    made = plan.plan(Params(target_model="kimi-k2.5"), K25, counted(), EMPTY)
    with pytest.raises(KitError, match=r"do not fit in this machine's memory.*target_model: smollm2-135m"):
        made.check()


def test_disk_that_is_too_small_names_what_fits() -> None:
    disk = Disk(used=200 * 10**9, free=1000 * 10**9)
    params = kimi(target_model="/models/k25", data_train_prompts=20_000)
    local = dataclasses.replace(K25, source="/models/k25")
    with pytest.raises(KitError, match=r"the disk of runs_dir would be .*data_train_prompts: \d+") as caught:
        plan.plan(params, local, disk=disk).check()
    fits = int(str(caught.value.fix).partition("data_train_prompts: ")[2].partition(",")[0])
    assert 10_000 < fits < 20_000
    plan.plan(params.replace(data_train_prompts=fits), local, disk=disk).check()
    with pytest.raises(KitError):
        plan.plan(params.replace(data_train_prompts=fits + 200), local, disk=disk).check()


def rows(count: int, tokens: int, split: Any = "train") -> list[Row]:
    return [Row(f"{split}-{i}", "any", split, tokens, tokens // 2) for i in range(count)]


def test_counted_rows_are_reckoned_to_the_byte() -> None:
    work = plan.counted([*rows(10, 100), *rows(2, 50, "heldout")])
    assert (work.train_prompts, work.heldout_prompts, work.tokens, work.answer_tokens) == (10, 2, 1100, 550)
    made = plan.plan(Params(), SMALL, work, EMPTY)
    assert made.value("hidden_states.bytes") == 1100 * 4 * 576 * 4
    assert made["hidden_states.bytes"].how == "counted: tokens x bytes per token"


def test_counted_tokens_that_do_not_fit_are_refused_with_what_would() -> None:
    params, disk = kimi(target_model="/models/k25"), Disk(used=200 * 10**9, free=1000 * 10**9)
    local = dataclasses.replace(K25, source="/models/k25")
    many = plan.counted([*rows(20_000, 1000), *rows(100, 1000, "heldout")])
    made = plan.plan(params, local, many, disk)
    assert made.value("disk.share") > plan.DISK_LIMIT
    with pytest.raises(KitError, match=r"wanted at most 90 % full.*data_train_prompts: \d+") as caught:
        made.check_disk()
    fits = int(str(caught.value.fix).partition("data_train_prompts: ")[2].partition(",")[0])
    plan.plan(params, local, plan.counted([*rows(fits, 1000), *rows(100, 1000, "heldout")]), disk).check_disk()
    with pytest.raises(KitError):
        plan.plan(params, local, plan.counted([*rows(fits + 200, 1000), *rows(100, 1000, "heldout")]), disk).check_disk()


FP8: dict[str, Any] = {"extraction_storage": "fp8", **FP8_LIMITS}


@pytest.mark.parametrize(("free", "fits"), [(1000, True), (658, True), (657, False), (300, False)])
def test_one_byte_a_number_is_named_where_it_fits(free: int, fits: bool, tmp_path: Path) -> None:
    """20.1 M tokens of 57,344 B do not; of 28,676 B they are 576.4 GB, with two checkpoints 592.0 GB: 90 % of 657.7 GB."""
    params, disk = kimi(target_model="/models/k25", runs_dir=str(tmp_path)), Disk(used=0, free=free * 10**9)
    local = dataclasses.replace(K25, source="/models/k25")
    work = plan.counted([*rows(20_000, 1000), *rows(100, 1000, "heldout")])
    refused = plan.plan(params, local, work, disk).problems()[0]
    whole = f"extraction_storage: fp8 (with {', '.join(f'{name}: {value:g}' for name, value in FP8_LIMITS.items())})"
    assert (whole in str(refused.fix)) is fits
    rounded = plan.plan(params.replace(**FP8), local, work, disk)
    assert rounded.value("hidden_states.bytes") == 20_100_000 * 28_676
    assert (rounded.problems() == []) is fits
    assert not any("fp8" in str(problem.fix) for problem in rounded.problems())


ONLINE: dict[str, Any] = {"extraction_mode": "online", "train_processes": 4, "serve_tensor_parallel": 4}


def test_online_is_named_with_what_it_needs(tmp_path: Path) -> None:
    """100,000 held-out tokens, eight rows of 1,000 for the golden check and eight on their way: 116,000 of 57,344 B."""
    params, disk = kimi(target_model="/models/k25", runs_dir=str(tmp_path)), Disk(used=0, free=300 * 10**9)
    local = dataclasses.replace(K25, source="/models/k25")
    work = plan.counted([*rows(20_000, 1000), *rows(100, 1000, "heldout")])
    refused = str(plan.plan(params, local, work, disk).problems()[0].fix)
    assert "extraction_mode: online (6.65 GB of states, with train_processes and serve_tensor_parallel together" in refused
    fits = params.replace(train_processes=4, serve_tensor_parallel=4)
    assert "online (6.42 GB of states)" in str(plan.plan(fits, local, work, disk).problems()[0].fix)
    assert "online" not in str(plan.plan(params.replace(extraction_engine="transformers"), local, work, disk).problems()[0].fix)
    online = plan.plan(params.replace(**ONLINE), local, work, disk)
    assert online.problems() == []
    assert online.value("hidden_states.bytes") == (100_000 + 12_000) * 57_344


def test_online_more_or_shorter_training_prompts_are_no_remedy(tmp_path: Path) -> None:
    params = kimi(target_model="/models/k25", runs_dir=str(tmp_path)).replace(**ONLINE)
    work = plan.counted([*rows(20_000, 1000), *rows(1000, 1000, "heldout")])
    refused = str(plan.plan(params, dataclasses.replace(K25, source="/models/k25"), work, Disk(0, 50 * 10**9)).problems()[0].fix)
    assert "online" not in refused
    assert "data_train_prompts" not in refused


def test_online_every_epoch_extracts_again() -> None:
    params = Params(train_epochs=3)
    work = plan.counted([*rows(100, 200), *rows(10, 200, "heldout")])
    offline, online = (plan.plan(params.replace(extraction_mode=mode), SMALL, work, EMPTY) for mode in ("offline", "online"))
    once = offline.value("minutes.hidden_states") * 100 / 110
    assert online.value("minutes.training") == pytest.approx(offline.value("minutes.training") + 3 * once)
    assert (offline.value("server.starts"), online.value("server.starts")) == (4, 6)
    assert "every epoch extracts anew" in online["minutes.training"].how


def test_states_that_the_server_has_captured_need_no_room_either(tmp_path: Path) -> None:
    params = Params(runs_dir=str(tmp_path), run_name="again")
    before = plan.plan(params, SMALL, counted(10, 100), EMPTY).value("disk.needed")
    folder = tmp_path / "again" / "captured" / "abc"
    folder.mkdir(parents=True)
    (folder / "1.safetensors").write_bytes(bytes(4000))
    assert before - plan.plan(params, SMALL, counted(10, 100), EMPTY).value("disk.needed") == 4000


def test_full_disk_is_no_reason_to_refuse_a_small_run() -> None:
    nearly_full = Disk(used=9500 * 10**9, free=500 * 10**9)
    plan.plan(Params(), SMALL, counted(100, 200), nearly_full).check()


def test_no_prompt_fits() -> None:
    with pytest.raises(KitError, match=r"fix: set runs_dir to a disk with [\d.]+ [kMGT]?B free$"):
        plan.plan(Params(), SMALL, counted(100, 200), Disk(used=10**9, free=10**6)).check()


def test_states_that_are_there_already_need_no_room(tmp_path: Path) -> None:
    params = Params(runs_dir=str(tmp_path), run_name="again")
    before = plan.plan(params, SMALL, counted(10, 100), EMPTY).value("disk.needed")
    folder = tmp_path / "again" / "hidden_states"
    folder.mkdir(parents=True)
    (folder / "hs_0.safetensors").write_bytes(bytes(5000))
    assert before - plan.plan(params, SMALL, counted(10, 100), EMPTY).value("disk.needed") == 5000


def test_download_counts_until_it_is_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    params = kimi(runs_dir=str(tmp_path / "runs"))
    made = plan.plan(params, K25, counted(), EMPTY)
    assert made.value("download.bytes") == 595e9
    assert "the same disk" in made["download.bytes"].how
    blobs = tmp_path / "models--moonshotai--Kimi-K2.5" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / "a").write_bytes(bytes(1000))
    assert plan.plan(params, K25, counted(), EMPTY).value("download.bytes") == 595e9 - 1000
    assert plan.plan(Params(), SMALL, counted(), EMPTY).value("download.bytes") == 0


def test_wrong_layers_stop_the_plan() -> None:
    with pytest.raises(KitError, match="convention sglang"):
        plan.plan(kimi(aux_layers=[1, 29, 57]), K25, counted(), EMPTY)


# ---- for display


def test_rows_have_everything() -> None:
    rows = plan.plan(Params(), SMALL, disk=EMPTY).rows()
    assert all(set(row) == {"what", "value", "how"} and row["value"] and row["how"] for row in rows)
    names = [row["what"] for row in rows]
    for name in ("tokens", "hidden_states.bytes", "disk.share", "train.steps", "minutes.total", "memory.fits", "money"):
        assert name in names


@pytest.mark.parametrize(
    ("estimate", "text"),
    [
        (Estimate(None, "min", ""), "unknown"),
        (Estimate(57344, "bytes", ""), "57.3 kB"),
        (Estimate(0.314, "share", ""), "31.4 %"),
        (Estimate(9.04, "min", ""), "9.04 min"),
        (Estimate(600.0, "min", ""), "10.0 h"),
        (Estimate(50500, "prompts", ""), "50,500 prompts"),
        (Estimate(138_000, "tokens", ""), "138 k tokens"),
        (Estimate(8.2e13, "FLOP", ""), "8.2e+13 FLOP"),
        (Estimate("yes", "", ""), "yes"),
    ],
)
def test_numbers_are_readable(estimate: Estimate, text: str) -> None:
    assert estimate.text == text


@pytest.mark.parametrize("name", ["money", "memory.fits"])
def test_what_is_no_number_says_so(name: str) -> None:
    with pytest.raises(TypeError, match=f"{name} is not a number"):
        plan.plan(Params(), SMALL, counted(), EMPTY).value(name)
