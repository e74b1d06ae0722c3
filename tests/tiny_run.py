"""A training run small enough to be killed and resumed many times in a test."""

import dataclasses
from pathlib import Path

import numpy as np
import torch

from openk3.config import preset
from openk3.config.recipe import DataRecipe, OptimRecipe, Recipe, RunRecipe, TrainRecipe
from openk3.data.writer import write_dataset
from openk3.train.step import next_token_loss

VOCAB = 300
EOT = 256


def tiny_config():
    nano = preset("nano")
    return nano.replace(
        vocab_size=VOCAB,
        bos_token_id=257,
        eos_token_id=EOT,
        pad_token_id=258,
        media_placeholder_token_id=259,
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=48,
        linear_attn=dataclasses.replace(
            nano.linear_attn, full_attn_layers=(3,), num_heads=2, head_dim=16
        ),
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
        num_experts=8,
        num_experts_per_token=2,
        moe_intermediate_size=16,
        routed_expert_hidden_size=16,
    )


def write_tiny_data(path: Path, num_documents: int = 40) -> Path:
    """Documents of a repeated phrase each, one byte a token."""
    rng = np.random.default_rng(0)
    token_bytes = np.array([1] * 256 + [0] * (VOCAB - 256))
    with write_dataset(path, token_bytes=token_bytes, eot_id=EOT) as writer:
        for i in range(num_documents):
            phrase = rng.integers(97, 123, size=int(rng.integers(3, 9)))
            split = "heldout" if i % 10 == 0 else "train"
            writer.add(split, np.tile(phrase, 12)[: int(rng.integers(30, 70))])
    return path


def tiny_recipe(data: Path, **changes) -> Recipe:
    """changes: `steps`, or any field as section__name."""
    recipe = Recipe(
        model=tiny_config(),
        data=DataRecipe(train=(str(data),), sequence_tokens=32),
        optim=OptimRecipe(lr=5e-3),
        train=TrainRecipe(steps=8, batch_sequences=4, micro_sequences=2),
        run=RunRecipe(
            device="cpu",
            checkpoint_every=2,
            keep_checkpoints=2,
            eval_every=4,
            eval_tokens=256,
            observe_every=3,
            sample_prompts=(),
        ),
    )
    for key, value in changes.items():
        section, name = key.split("__")
        new = dataclasses.replace(getattr(recipe, section), **{name: value})
        recipe = dataclasses.replace(recipe, **{section: new})
    return recipe


def noisy_loss(model, batch, probe=None):
    """Draws from torch's global generator, so that resuming must restore it."""
    return next_token_loss(model, batch, probe) * (1 + 0.1 * torch.rand(()))
