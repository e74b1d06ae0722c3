"""A small model folder in the published layout, written without a model, and ways to spoil it."""

import json
import struct
from pathlib import Path

import torch

from openk3.checkpoint.hf.configs import published_config
from openk3.checkpoint.hf.layout import from_file, published
from openk3.checkpoint.hf.read import DTYPES
from openk3.checkpoint.hf.write import Produced, write_folder
from openk3.config import LinearAttnConfig, ModelConfig

# No two widths are equal, so that no transposed or swapped tensor can pass.
CONFIG = ModelConfig(
    vocab_size=120,
    hidden_size=96,
    num_hidden_layers=4,
    num_attention_heads=2,
    intermediate_size=80,
    linear_attn=LinearAttnConfig(full_attn_layers=(3, 4), num_heads=3, head_dim=16),
    q_lora_rank=40,
    kv_lora_rank=24,
    qk_nope_head_dim=20,
    qk_rope_head_dim=12,
    v_head_dim=28,
    num_experts=6,
    num_experts_per_token=2,
    num_shared_experts=1,
    moe_intermediate_size=64,
    routed_expert_hidden_size=32,
    attn_res_block_size=2,
    max_position_embeddings=512,
    bos_token_id=0,
    eos_token_id=1,
    pad_token_id=2,
    media_placeholder_token_id=3,
)


def random_tensor(name, shape, dtype, rng):
    """Weights of ordinary size; A_log padding is zero, norms are one."""
    parameter = from_file(name).parameter
    if dtype == "U8":
        low, high = (116, 121) if name.endswith("_scale") else (0, 256)
        return torch.randint(low, high, shape, generator=rng, dtype=torch.uint8)
    value = torch.randn(shape, generator=rng) * 0.1
    if parameter.endswith("norm.weight"):
        value += 1
    if parameter.endswith("A_log"):
        value[CONFIG.linear_attn.num_heads :] = 0
    return value.to(DTYPES[dtype])


def write_random(path, *, mxfp4_experts=True, config=CONFIG, max_shard_bytes=60e3, seed=0):
    """A folder of random weights in the published layout; returns its path."""
    rng = torch.Generator().manual_seed(seed)
    tensors = list(published(config, mxfp4_experts=mxfp4_experts))
    values = {t.name: random_tensor(t.name, t.shape, t.dtype, rng) for t in tensors}
    write_folder(
        path,
        [tensors],
        [lambda name=name, value=value: [Produced(name, value)] for name, value in values.items()],
        config=published_config(config, None, mxfp4_experts, "bfloat16"),
        companions=None,
        max_shard_bytes=max_shard_bytes,
        extra=lambda weight_map: {},
    )
    return Path(path)


class Spoiler:
    """Edits a folder's files behind the reader's back."""

    def __init__(self, path):
        self.path = path

    def shard_of(self, name):
        return self.path / self.index()["weight_map"][name]

    def index(self):
        return json.loads((self.path / "model.safetensors.index.json").read_text())

    def edit_json(self, file, change):
        value = json.loads((self.path / file).read_text())
        change(value)
        (self.path / file).write_text(json.dumps(value))

    def edit_index(self, change):
        self.edit_json("model.safetensors.index.json", change)

    def edit_config(self, change):
        self.edit_json("config.json", change)

    def edit_header(self, name, change):
        """change(header dict) on the shard that holds `name`; the data stays."""
        path = self.shard_of(name)
        raw = path.read_bytes()
        length = struct.unpack("<Q", raw[:8])[0]
        header = json.loads(raw[8 : 8 + length])
        change(header)
        self.write(path, json.dumps(header).encode(), raw[8 + length :])

    @staticmethod
    def write(path, text, data):
        path.write_bytes(struct.pack("<Q", len(text)) + text + data)

    def rename(self, old, new):
        """Give a tensor another name, in its header and in the index."""
        self.edit_header(old, lambda header: header.update({new: header.pop(old)}))
        self.edit_index(lambda i: i["weight_map"].update({new: i["weight_map"].pop(old)}))
