"""A tiny dataset of drawings with captions, one of text, and a vision tower for the tiny model."""

import numpy as np

from openk3.config import VisionConfig
from openk3.data.build import token_lengths
from openk3.data.build_pictures import build_pictures, read_records
from openk3.data.dataset import Dataset
from openk3.data.drawings import write_drawings
from openk3.data.writer import write_dataset
from openk3.text.image import ImageProcessor
from openk3.text.tokenizer import load

VISION = VisionConfig(
    patch_size=8,
    init_pos_emb_height=4,
    init_pos_emb_width=4,
    vt_num_attention_heads=2,
    vt_num_hidden_layers=1,
    vt_hidden_size=16,
    vt_intermediate_size=32,
    qkv_hidden_size=16,
    mm_hidden_size=16,
    text_hidden_size=32,
)


def write_pictures_and_text(base):
    """Two dataset folders of one tokenizer."""
    records = read_records(write_drawings(base / "drawings", 24))
    processor = ImageProcessor(patch_size=8)
    build_pictures(records, base / "data", processor=processor, vocab_size=300, held_out=0.3)
    pictures = Dataset(base / "data")
    tokenizer = load(pictures.tokenizer_path)
    lengths = token_lengths(tokenizer)
    with write_dataset(
        base / "text", token_bytes=lengths, eot_id=pictures.eot_id, tokenizer=tokenizer
    ) as writer:
        for i in range(20):
            writer.add("train", np.full(30 + i, 97 + i))
    return base / "data", base / "text"
