"""Model folders small enough for two cores: targets like DeepSeek-V3 and Llama, and drafters.

They hold a configuration only. SGLang loads them with ``load_format=dummy``, and the harness fills
in weights (`tests.support.engine.weights`); tokens are ids, so there is no tokenizer either.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

VOCABULARY = 512
TARGET_LAYERS = 4
# The drafter proposes BLOCK - 1 tokens after the bonus token, so a step commits 1 .. BLOCK tokens.
BLOCK = 8
_MASK_TOKEN = 258
# FlashMLA fixes the latent and rope widths; everything else is as small as the code paths allow.
_LATENT, _ROPE = 512, 64


@dataclass(frozen=True, kw_only=True)
class Models:
    """Folders with a ``config.json`` each."""

    target: Path
    moe_target: Path
    grouped_target: Path
    drafter: Path
    nextn_drafter: Path


def write_models(folder: Path) -> Models:
    """Write the model folders below ``folder`` (idempotent) and say where they are."""
    made = Models(
        target=folder / "target",
        moe_target=folder / "target-moe",
        grouped_target=folder / "target-grouped",
        drafter=folder / "drafter",
        nextn_drafter=folder / "drafter-nextn",
    )
    _write(made.target, _target(experts_from=TARGET_LAYERS))
    _write(made.moe_target, _target(experts_from=1))
    _write(made.grouped_target, _grouped_target())
    _write(made.drafter, _drafter())
    # SGLang makes the one-layer EAGLE drafter of DeepSeek-V3 from a target's own description.
    _write(made.nextn_drafter, _target(experts_from=1) | {"num_nextn_predict_layers": 1})
    return made


def _target(*, experts_from: int) -> dict[str, object]:
    """Describe an MLA target whose layers from ``experts_from`` on are mixtures of experts."""
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "torch_dtype": "float32",
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": TARGET_LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "kv_lora_rank": _LATENT,
        "qk_rope_head_dim": _ROPE,
        "q_lora_rank": 64,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": experts_from,
        "moe_layer_freq": 1,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 4096,
        "rope_theta": 10000.0,
        # Without yarn the engine's CPU rope kernel is not reachable for this model.
        "rope_scaling": {
            "type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 1024,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
        "use_cache": True,
        "num_nextn_predict_layers": 0,
        "bos_token_id": 256,
        "eos_token_id": 257,
    }


def _grouped_target() -> dict[str, object]:
    """Describe a target without MLA: two query heads share a KV head."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "float32",
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": TARGET_LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 4096,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "mlp_bias": False,
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
        "use_cache": True,
        "bos_token_id": 256,
        "eos_token_id": 257,
    }


def _drafter() -> dict[str, object]:
    """Describe a one-layer DFlash drafter that reads the target's layers 0 and 2."""
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "torch_dtype": "float32",
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 4096,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "num_target_layers": TARGET_LAYERS,
        "block_size": BLOCK,
        "dflash_config": {"mask_token_id": _MASK_TOKEN, "target_layer_ids": [0, 2]},
    }


def _write(folder: Path, config: dict[str, object]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(config, indent=1)
    path = folder / "config.json"
    if not path.exists() or path.read_text() != text:
        path.write_text(text)
