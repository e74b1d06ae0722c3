"""A tiny model in the published layout that knows two conversations by heart: one with a tool, one
with a picture."""

from pathlib import Path

import torch
from torch.nn import functional as F

import openk3
from conftest import GOLDEN_SHARED
from model_folders import CONFIG
from openk3.config import VisionConfig
from openk3.model import K3
from openk3.model.init import cast
from openk3.ops import mx
from openk3.text import train_tokenizer, xtml
from openk3.text.image import ImageProcessor

GOLDEN = GOLDEN_SHARED / "golden" / "tiny_checkpoint"
VISION = VisionConfig(
    patch_size=4, init_pos_emb_height=8, init_pos_emb_width=8, vt_num_attention_heads=2,
    vt_num_hidden_layers=1, vt_hidden_size=32, vt_intermediate_size=48, qkv_hidden_size=32,
    mm_hidden_size=32, text_hidden_size=CONFIG.hidden_size,
)  # fmt: skip
TIDE = [
    {"role": "user", "content": "How high is the tide in Brest?"},
    {
        "role": "assistant",
        "reasoning_content": "The tool knows.",
        "tool_calls": [
            {"function": {"name": "get_tide", "arguments": {"port": "Brest", "hours": 3}}}
        ],
    },
    {"role": "tool", "content": "2.1"},
    {"role": "assistant", "reasoning_content": "It is in metres.", "content": "2.1 metres."},
]
RING = [
    {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is this?"}]},
    {"role": "assistant", "reasoning_content": "It is round.", "content": "A red ring."},
]


def teach(path: Path, tools: list, picture: Path) -> Path:
    """Write the model folder `path`.

    It is the tiny checkpoint of shared/, where that is to be had, with rows for a vocabulary that
    holds all bytes, trained until it says its lines.
    """
    seen = ImageProcessor(patch_size=4)([picture])
    ways = [(TIDE, {"tools": tools}), (RING, {"image_prompts": seen.prompts})]
    whole = [xtml.render(talk, **way, add_generation_prompt=False) for talk, way in ways]
    asked = [xtml.render(talk[:1], **way) for talk, way in ways]
    texts = ["".join(text for text, _ in segments) for segments in whole]
    tokenizer = train_tokenizer.train(texts * 2, 640)
    model = _blank(tokenizer)
    images = {"pixel_values": torch.from_numpy(seen.pixel_values),
              "grid_thws": torch.from_numpy(seen.grid_thws)}  # fmt: skip
    _train(
        model,
        [
            (tokenizer.encode_segments(all_of_it), len(tokenizer.encode_segments(prompt)), pictures)
            for all_of_it, prompt, pictures in zip(whole, asked, ({}, images), strict=True)
        ],
    )
    openk3.save(cast(model, torch.bfloat16), path, mxfp4_experts=True)
    tokenizer.save(path)
    return path


def _blank(tokenizer) -> K3:
    golden = openk3.load(GOLDEN, dtype=torch.float32) if GOLDEN.exists() else None
    base = golden.config if golden else CONFIG.replace(vision=VISION)
    model = K3(
        base.replace(
            vocab_size=tokenizer.vocab_size,
            eos_token_id=tokenizer.end_of_msg_id,
            pad_token_id=tokenizer.pad_id,
            bos_token_id=tokenizer.bos_id,
            media_placeholder_token_id=tokenizer.special_id("<|media_pad|>"),
            quantization=None,
        ),
        seed=0,
    )
    if golden:
        state = golden.state_dict()
        del state["embed_tokens.weight"], state["lm_head.weight"]
        model.load_state_dict(state, strict=False)
    return model


def _train(model: K3, lessons: list) -> None:
    """Until every token is sure. Experts stay as they are, so that MXFP4 holds them exactly."""
    for name, parameter in model.named_parameters():
        frozen = name.startswith(("vision", "mm_")) or ".experts." in name
        parameter.requires_grad_(not frozen)
        if ".experts." in name:
            parameter.data = mx.fake_quantize(parameter.data)
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=3e-3, betas=(0.9, 0.98), weight_decay=0)
    for _ in range(400):
        losses = []
        for ids, num_asked, images in lessons:
            row = torch.tensor([ids])
            spoken = row[0, num_asked:]
            logits = model(row, **images)[0, -len(spoken) - 1 : -1]  # a picture takes more rows
            losses.append(F.cross_entropy(logits, spoken, reduction="none"))
        loss = torch.cat(losses)
        if float(loss.detach().max()) < 0.03:
            return
        optimizer.zero_grad()
        loss.mean().backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
    raise AssertionError(f"the lessons were not learned: {loss.max()} nats for the worst token")
