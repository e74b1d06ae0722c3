"""The model that CPU benchmarks share, and transformers' `kimi_linear` of the same sizes.

Hidden 256, 8 layers of which 6 KDA and 2 MLA, 4 heads of 64, 8 experts of 256, top-2, vocabulary
8192. Ours computes more per layer: AttnRes mixes, a full-rank output gate on MLA, a latent
projection around the experts, Quantile Balancing. The peer runs in a virtual environment of its
own, made on first use; nothing here imports openk3 or transformers before it is asked to.

    PEER_PYTHON benchmarks/cpu_peer.py THREADS     generates: a number of tokens in, seconds out
"""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

VOCAB = 8192
PEER_NEEDS = ["torch==2.13.0", "transformers==5.24.0"]
PROMPT_TOKENS = 16


def our_config() -> Any:
    """The shape, as an openk3 ModelConfig."""
    from openk3.config import LinearAttnConfig, ModelConfig

    return ModelConfig(
        vocab_size=VOCAB,
        hidden_size=256,
        num_hidden_layers=8,
        num_attention_heads=4,
        intermediate_size=1024,
        linear_attn=LinearAttnConfig(full_attn_layers=(4, 8), num_heads=4, head_dim=64),
        q_lora_rank=128,
        kv_lora_rank=128,
        qk_nope_head_dim=64,
        qk_rope_head_dim=32,
        v_head_dim=64,
        num_experts=8,
        num_experts_per_token=2,
        num_shared_experts=1,
        moe_intermediate_size=256,
        routed_expert_hidden_size=256,
        attn_res_block_size=4,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
        media_placeholder_token_id=3,
    )


def peer_model(*, use_cache: bool) -> Any:
    """The shape, as transformers' model in float32 (only in the peer's environment)."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.models.kimi_linear.configuration_kimi_linear import KimiLinearConfig

    layers = ["linear_attention"] * 8
    layers[3] = layers[7] = "full_attention"
    config = KimiLinearConfig(
        vocab_size=VOCAB,
        hidden_size=256,
        intermediate_size=1024,
        moe_intermediate_size=256,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_shared_experts=1,
        kv_lora_rank=128,
        q_lora_rank=128,
        qk_rope_head_dim=32,
        qk_nope_head_dim=64,
        v_head_dim=64,
        num_experts_per_tok=2,
        num_local_experts=8,
        linear_head_dim=64,
        linear_num_heads=4,
        layer_types=layers,
        mlp_layer_types=["dense"] + ["sparse"] * 7,
        max_position_embeddings=4096,
        pad_token_id=2,
        bos_token_id=0,
        eos_token_id=1,
        use_cache=use_cache,
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def peer_python(folder: Path) -> Path:
    """The interpreter of the peer's environment."""
    python = folder / "bin" / "python"
    if not (folder / ".ready").exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "-q", *PEER_NEEDS], check=True)
        (folder / ".ready").touch()
    return python


class PeerGenerator:
    """The peer in a process of its own, generating on request."""

    def __init__(self, venv: Path, threads: int) -> None:
        command = [str(peer_python(venv)), __file__, str(threads)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.millions = float(self._line())

    def _line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit("the peer ended; its message is above")
        return line

    def seconds(self, tokens: int) -> float:
        """Seconds for a prompt of PROMPT_TOKENS and that many new tokens."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{tokens}\n")
        self.process.stdin.flush()
        return json.loads(self._line())

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait()


def generate_on_request(threads: int) -> None:
    """The worker: parameters in millions first, then seconds for each number of tokens read."""
    import torch

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    model = peer_model(use_cache=True).eval()
    ids = torch.randint(10, VOCAB, (1, PROMPT_TOKENS))

    def generate(tokens: int) -> float:
        begin = time.perf_counter()
        out = model.generate(
            ids, min_new_tokens=tokens, max_new_tokens=tokens, do_sample=False, pad_token_id=2
        )
        assert out.shape[1] == PROMPT_TOKENS + tokens
        return time.perf_counter() - begin

    generate(4)
    print(sum(p.numel() for p in model.parameters()) / 1e6, flush=True)
    for line in sys.stdin:
        print(json.dumps(generate(int(line))), flush=True)


if __name__ == "__main__":
    generate_on_request(int(sys.argv[1]))
