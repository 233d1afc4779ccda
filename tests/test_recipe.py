"""The new drafter's config derived, field by field."""

import importlib.util
from pathlib import Path

import pytest
from shapes import B300, FLAT, K25, LOCAL, REFERENCE, SMOL, TINY, write_config

from eagle3kit import drafter, recipe, target
from eagle3kit.errors import KitError
from eagle3kit.params import Params
from eagle3kit.target import Target


class TestFields:
    def test_every_field_is_explained_and_in_one_group(self) -> None:
        grouped = [name for names in drafter.FIELD_GROUPS.values() for name in names]
        assert sorted(grouped) == sorted(drafter.FIELDS)

    @pytest.mark.parametrize(("params", "shape"), [(B300, K25), (LOCAL, SMOL), (LOCAL, TINY)], ids=["k2.5", "smollm2", "tiny"])
    def test_every_field_is_derived(self, params: Params, shape: Target) -> None:
        values = recipe.derive(params, REFERENCE, shape).values
        assert set(values) == set(drafter.FIELDS) - {"verifier"}

    def test_text_keeps_ids_readable(self) -> None:
        assert drafter.text(163839) == "163839"
        assert drafter.text([2, 30, 58]) == "2, 30, 58"
        assert drafter.text(1e-05) == "1e-05"
        assert drafter.text(None) == "unknown"
        assert drafter.text({"rope_type": "default", "rope_theta": 1e5}) == "theta 100000"


def fields(params: Params, shape: Target, parent: drafter.Parent = REFERENCE) -> dict[str, recipe.Derived]:
    return {field.name: field for field in recipe.derive(params, parent, shape).fields}


class TestDerive:
    def test_k25(self) -> None:
        found = fields(B300, K25)
        values = {name: field.value for name, field in found.items()}
        assert (values["num_attention_heads"], values["num_key_value_heads"], values["head_dim"]) == (64, 64, 128)
        assert (values["hidden_size"], values["vocab_size"], values["draft_vocab_size"]) == (7168, 163840, 32000)
        assert (values["rms_norm_eps"], values["max_position_embeddings"], values["pad_token_id"]) == (1e-05, 262144, 163839)
        assert values[drafter.ROPE] == {**(K25.rope.scaling or {}), "rope_theta": 50000.0}
        assert (values[drafter.ROPE]["rope_type"], values[drafter.ROPE]["factor"]) == ("yarn", 64.0)
        assert values["layer_types"] == ["full_attention"]
        assert (found[drafter.AUX].value, found[drafter.AUX].source) == ([2, 30, 58], "parent")
        assert "beta_fast" in found[drafter.ROPE].reason
        assert all(field.reason for field in found.values())
        dropped = [name for name, field in found.items() if field.source == "dropped"]
        assert len(dropped) == 4
        assert any("kv_lora_rank" in name for name in dropped)

    def test_smollm2(self) -> None:
        found = fields(LOCAL, SMOL)
        shape = [found[name].value for name in ("num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size")]
        assert shape == [9, 3, 64, 1536]
        assert (found["head_dim"].source, found[drafter.AUX].value) == ("target", [2, 15, 27])
        assert found[drafter.ROPE].value == {"rope_type": "default", "rope_theta": 100000.0}
        assert "2, 30, 58 are not copied" in found[drafter.AUX].reason

    def test_mla_target_never_gives_its_own_head_width(self) -> None:
        found = fields(LOCAL, TINY)
        assert [found[name].value for name in ("num_attention_heads", "num_key_value_heads", "head_dim")] == [4, 4, 128]

    def test_what_the_target_prescribes_is_not_inherited(self, tmp_path: Path) -> None:
        parent = drafter.read_parent(Params(drafter_parent=str(write_config(tmp_path, FLAT))))
        derivation = recipe.derive(B300, parent, K25)
        found = {field.name: field for field in derivation.fields}
        assert (found["rms_norm_eps"].value, found["rms_norm_eps"].source) == (1e-05, "target")
        assert "1e-06 belongs to another target" in found["rms_norm_eps"].reason
        assert found["num_attention_heads"].source == "parent"
        assert derivation.before(found["rms_norm_eps"]) == "1e-06"
        assert derivation.before(found["num_attention_heads"]) == "same"
        assert (found["eagle_config"].source, found["use_cache"].source) == ("dropped", "dropped")

    def test_parameters_decide(self) -> None:
        found = fields(
            LOCAL.replace(draft_vocab_size=0, drafter_norm_output=False, drafter_heads=12, aux_layers=[3, 9, 20]), SMOL
        )
        assert found["draft_vocab_size"].value == 49152
        assert found["norm_output"].value is False
        assert found["num_attention_heads"] == recipe.Derived("num_attention_heads", 12, "chosen", "drafter_heads: 12")
        assert found[drafter.AUX].value == [3, 9, 20]

    @pytest.mark.parametrize(
        ("params", "shape", "message"),
        [
            (B300.replace(aux_layers=[1, 29, 57]), K25, "sglang.*set aux_layers: \\[2, 30, 58\\]"),
            (LOCAL.replace(aux_layers=[2, 30, 58]), SMOL, "layers that the target does not have"),
            (LOCAL.replace(draft_vocab_size=50000), SMOL, "larger than the target's vocabulary.*49152"),
            (LOCAL.replace(drafter_heads=8), SMOL, "8 heads, 3 key and value heads"),
            (LOCAL.replace(drafter_head_dim=65), SMOL, "odd width.*65"),
            (B300.replace(drafter_heads=0, drafter_kv_heads=0), SMOL, "cannot be spread over the GPUs.*serve_tensor_parallel 8"),
        ],
    )
    def test_what_does_not_fit(self, params: Params, shape: Target, message: str) -> None:
        with pytest.raises(KitError, match=message):
            recipe.derive(params, REFERENCE, shape)

    def test_activation_that_the_engine_lacks(self) -> None:
        config = {**target.reference_config("smollm2-135m"), "hidden_act": "gelu"}
        found = fields(LOCAL, Target.from_config(config, name="x"))["hidden_act"]
        assert (found.value, found.source) == ("silu", "chosen")
        assert "gelu" in found.reason

    def test_tables_name_every_field_once(self) -> None:
        derivation = recipe.derive(B300, REFERENCE, K25)
        assert len({row["field"] for row in derivation.rows()}) == len(derivation.fields) == sum(derivation.counts().values())
        assert {row["from"] for row in derivation.rows()} == {"parent", "target", "chosen", "dropped"}

    def test_one_norm_for_each_auxiliary_state(self) -> None:
        params = B300.replace(drafter_norm_before_fc=False, drafter_fc_norm=True)
        values = recipe.derive(params, REFERENCE, K25).values
        assert (values["fc_norm"], values["norm_before_fc"]) == (True, False)
        assert [name for name in drafter.tensors(values) if "norm" in name][:3] == [f"fc_norm.{i}.weight" for i in range(3)]
        assert drafter.size(values) == drafter.size(recipe.derive(B300, REFERENCE, K25).values)

    def test_choices_of_size(self) -> None:
        rows = recipe.size_choices(recipe.derive(B300, REFERENCE, K25).values)
        assert [(row["MLP width"], row["draft vocabulary"]) for row in rows] == [
            (12288, "32,000"),
            (12288, "163,840 (full)"),
            (18432, "32,000"),
            (18432, "163,840 (full)"),
        ]
        assert [row[""] for row in rows] == ["this config", "", "", ""]
        assert rows[0]["without embed_tokens and lm_head"] == pytest.approx(0.83e9, rel=0.01)
        assert rows[1]["bytes in bfloat16"] == pytest.approx(6.36e9, rel=0.005)
        assert len(recipe.size_choices(recipe.derive(LOCAL, REFERENCE, SMOL).values)) == 2

    def test_choices_of_norms(self) -> None:
        values = recipe.derive(B300, REFERENCE, K25).values
        stays = [row["norm"] for row in recipe.norm_choices(values) if row["this drafter"] == "stays with vLLM"]
        assert stays == ["norm_before_residual", "norm_before_fc", "norm_output"]
        plain = {**values, **dict.fromkeys(stays, False), "fc_norm": True}
        assert {row["this drafter"] for row in recipe.norm_choices(plain)} == {"can be exported"}

    def test_the_installed_programs_read_the_norms_as_the_table_says(self) -> None:
        def source(module: str) -> str:
            package, _, path = module.partition(".")
            spec = importlib.util.find_spec(package)  # located, not imported
            assert spec
            assert spec.origin
            return (Path(spec.origin).parent / f"{path.replace('.', '/')}.py").read_text()

        vllm, specforge = source("vllm.model_executor.models.llama_eagle3"), source("specforge.modeling.draft.llama3_eagle")
        for row in recipe.norm_choices(recipe.derive(B300, REFERENCE, K25).values):
            assert f'"{row["norm"]}"' in vllm
            assert (f'"{row["norm"]}"' in specforge) == (not row["true in SpecForge 0.2.0"].startswith("no such field"))
        assert 'getattr(config, "norm_output", True)' in specforge
        assert 'getattr(self.config, "norm_output", False)' in vllm
