"""A checkpoint larger than the process may address still generates, and the same tokens."""

import json
import subprocess
import sys

import pytest
import torch

from model_folders import CONFIG, random_tensor
from openk3.checkpoint.hf.configs import published_config
from openk3.checkpoint.hf.folder import INDEX
from openk3.checkpoint.hf.layout import from_file, published
from openk3.checkpoint.hf.write import Produced, ShardWriter, plan_shards

BIG = CONFIG.replace(
    num_hidden_layers=4,
    num_experts=256,
    num_experts_per_token=4,
    moe_intermediate_size=1024,
    routed_expert_hidden_size=1024,
)
GENERATE = """
import json, resource, sys
import torch, openk3
from openk3.checkpoint.experts import stream_stats

folder, limit, experts = sys.argv[1], int(sys.argv[2]), sys.argv[3]
torch.set_num_threads(1)
if limit:
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
model = openk3.load(folder, experts=experts, dtype=torch.float32, expert_cache_gb=0.05)
ids = model.generate(torch.arange(4)[None], max_new_tokens=5, temperature=0, stop_ids=[])
stats = stream_stats(model)
print(json.dumps({"ids": ids.tolist(), "evictions": stats.evictions if stats else None}))
"""


@pytest.fixture(scope="module")
def big_folder(tmp_path_factory):
    """1.3 GB of experts; every expert's bytes are a different window of one random buffer."""
    path = tmp_path_factory.mktemp("big")
    rng = torch.Generator().manual_seed(0)
    noise = torch.randint(0, 256, (8 << 20,), generator=rng, dtype=torch.uint8)
    tensors = list(published(BIG))
    shards = list(plan_shards([tensors], 400_000_000))
    with ShardWriter(path, shards) as writer:  # not write_folder: nothing here must reach the disk
        for number, tensor in enumerate(tensors):
            size = tensor.num_bytes
            if from_file(tensor.name).part == "weight_packed":
                start = number * 4099 % (noise.numel() - size)
                value = noise[start : start + size].view(tensor.shape)
            else:
                value = random_tensor(tensor.name, tensor.shape, tensor.dtype, rng)
            writer.store([Produced(tensor.name, value)])
        index = {"metadata": {}, "weight_map": writer.weight_map}
    (path / INDEX).write_text(json.dumps(index))
    (path / "config.json").write_text(json.dumps(published_config(BIG, None, True, "bfloat16")))
    return path


def run(folder, limit, experts):
    return subprocess.run(
        [sys.executable, "-c", GENERATE, str(folder), str(limit), experts],
        capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.mark.slow
def test_tokens_under_an_address_space_limit_equal_the_unlimited_run(big_folder):
    size = sum(file.stat().st_size for file in big_folder.glob("*.safetensors"))
    limit = 1_150_000_000
    assert size > limit
    limited = run(big_folder, limit, "stream")
    assert limited.returncode == 0, limited.stderr
    free = run(big_folder, 0, "packed")
    assert json.loads(limited.stdout)["ids"] == json.loads(free.stdout)["ids"]
    assert json.loads(limited.stdout)["evictions"] > 0
    # the limit binds: holding the same experts in memory is impossible under it
    assert run(big_folder, limit, "packed").returncode != 0
