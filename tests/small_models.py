"""Small models and parts of them that several tests need."""

import torch

from openk3.config import VisionConfig, preset
from openk3.model import K3

# sizes that all differ; 5 x 3 table, so that rows and columns cannot be confused
VISION = VisionConfig(
    patch_size=4,
    init_pos_emb_height=5,
    init_pos_emb_width=3,
    vt_num_attention_heads=3,
    vt_num_hidden_layers=2,
    vt_hidden_size=20,
    vt_intermediate_size=44,
    qkv_hidden_size=24,
    mm_hidden_size=20,
    text_hidden_size=64,
)


def seeing_model():
    """A nano that looks at pictures with VISION."""
    sizes = {"hidden_size": 64, "routed_expert_hidden_size": 32, "initializer_range": 0.1}
    return K3(preset("nano", vision=VISION, **sizes), seed=1).eval()


def lively_model(seed, mtp=False):
    """A nano whose every part matters: AttnRes queries, zero at the start, are drawn too."""
    config = preset("nano", initializer_range=0.1, num_nextn_predict_layers=int(mtp))
    model = K3(config, seed=seed)
    rng = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("_res_proj.weight"):
                weight.normal_(std=0.1, generator=rng)
    return model.eval()
