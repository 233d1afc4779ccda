"""The same drafter in several programs: its logits of two draft steps, to be held against each other."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file


def logits_of_speculators(folder: Path, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    from speculators.models.eagle3 import Eagle3SpeculatorConfig
    from speculators.models.eagle3.core import Eagle3DraftModel

    config = Eagle3SpeculatorConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "sdpa"
    return logits_of(Eagle3DraftModel.from_pretrained(folder, config=config), hidden, tokens)


def logits_of(model: Any, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Of two TTT steps, `[2, tokens, draft_vocab]`; the second shows which states the first one hands on."""
    seen: list[torch.Tensor] = []
    handle = model.lm_head.register_forward_hook(lambda *args: seen.append(args[-1][0]))
    with torch.no_grad():
        model.eval()(hidden, tokens, torch.zeros_like(tokens), ttt_steps=2)
    handle.remove()
    return torch.stack(seen)


def logits_of_specforge(folder: Path, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    from specforge.modeling.auto import AutoDraftModelConfig
    from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3, prepare_decoder_attention_mask

    # Not from_pretrained: in transformers 5.19 it leaves the tables of the rotation, which are not stored, empty.
    model = LlamaForCausalLMEagle3(AutoDraftModelConfig.from_file(str(folder / "config.json"))).eval()
    model.load_state_dict(load_file(folder / "model.safetensors"))
    length, logits = tokens.shape[1], []
    cache: list[list[torch.Tensor]] = [[], []]
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):  # compiling its norm and rotation takes half a minute
        states = model.project_hidden_states(hidden)
        mask = prepare_decoder_attention_mask(torch.ones(1, length, dtype=torch.bool), (1, length), states, 0)
        for step in range(2):
            ids = torch.cat([tokens[:, step:], tokens.new_zeros(1, step)], dim=1)
            states = model.backbone(model.embed_input_ids(ids), states, cache, mask, torch.arange(length)[None])
            logits.append(model.compute_logits(states)[0])
    return torch.stack(logits)


def differences(found: torch.Tensor, wanted: torch.Tensor) -> list[float]:
    """Of each draft step: the largest difference between two logits, relative to the largest of the wanted ones."""
    return [float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, wanted, strict=True)]
