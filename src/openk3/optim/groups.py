"""Which optimizer moves which parameter, and where a matrix is cut into head blocks.

K3 report §2.5 orthogonalises the momentum of Q, K and V per head. We cut every projection whose
rows belong to heads: KDA q, k, v, the decay's up-projection and the output gate; MLA q_b, and kv_b
into the keys and values of each head. Matrices that mix heads stay whole; an expert is a matrix.
The vision tower, trained from scratch beside the text (§2.4), is cut likewise: q, k, v by head.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from openk3.config.model import ModelConfig
from openk3.errors import InputError

Kind = Literal["muon", "matrix", "embed", "plain"]
"""muon: Per-Head Muon. The rest is AdamW: matrix and embed decay, plain does not."""


@dataclass(frozen=True)
class Assignment:
    """How one parameter is optimised."""

    name: str
    """Its name in the model."""
    kind: Kind
    """Its group."""
    rows: tuple[int, ...] = ()
    """Muon: heights of the blocks its rows are cut into, repeated down the matrix."""


Rows = Callable[[ModelConfig, int], tuple[int, ...]]


def _kda_heads(config: ModelConfig, layer: int) -> tuple[int, ...]:
    return (config.linear_attn.head_dim,)


def _gate_heads(config: ModelConfig, layer: int) -> tuple[int, ...]:
    return (config.linear_attn.head_dim if config.is_kda(layer) else config.v_head_dim,)


def _mla_queries(config: ModelConfig, layer: int) -> tuple[int, ...]:
    return (config.qk_head_dim,)


def _mla_keys_values(config: ModelConfig, layer: int) -> tuple[int, ...]:
    return (config.qk_nope_head_dim, config.v_head_dim)


def _tower_heads(config: ModelConfig, layer: int) -> tuple[int, ...]:
    vision = config.vision
    return () if vision is None else (vision.qkv_hidden_size // vision.vt_num_attention_heads,)


def _whole(config: ModelConfig, layer: int) -> tuple[int, ...]:
    return ()


RULES: tuple[tuple[str, Kind, Rows], ...] = (
    (r"(vision_tower|mm_projector)\.(.*norm\d?\.weight|.*pos_emb\.weight)", "plain", _whole),
    (r"vision_tower\.patch_embed\.proj\.weight", "matrix", _whole),  # reads pixels, as an embedding
    (r"vision_tower\..*\.wqkv\.weight", "muon", _tower_heads),
    (
        r"vision_tower\..*\.(wo|mlp\.fc[01])\.weight|mm_projector\.proj\.[02]\.weight",
        "muon",
        _whole,
    ),
    (r"(embed_tokens|lm_head)\.weight", "embed", _whole),
    (r".*_res_proj\.weight", "plain", _whole),  # AttnRes queries: one row each
    (r".*(norm|conv1d)\.weight|.*\.(A_log|dt_bias)", "plain", _whole),
    (r".*self_attn\.b_proj\.weight", "matrix", _whole),  # one row per head: nothing to rotate
    (r".*self_attn\.([qkv]|f_b)_proj\.weight", "muon", _kda_heads),
    (r".*self_attn\.g_proj\.weight", "muon", _gate_heads),
    (r".*self_attn\.q_b_proj\.weight", "muon", _mla_queries),
    (r".*self_attn\.kv_b_proj\.weight", "muon", _mla_keys_values),
    (r".*self_attn\.(o|f_a|q_a)_proj\.weight", "muon", _whole),
    (r".*self_attn\.kv_a_proj_with_mqa\.weight", "muon", _whole),
    (r".*block_sparse_moe\.gate\.weight", "muon", _whole),
    (r".*block_sparse_moe\.experts\.w[123](\.weight)?", "muon", _whole),
    (r".*(gate|up|down|eh)_proj\.weight", "muon", _whole),
)
"""First full match wins; prefixes `language_model.` and `model.` are dropped before."""


def assign(name: str, parameter: Tensor, config: ModelConfig) -> Assignment:
    """The one group of `parameter`. Raises InputError for a name no rule knows, or a shape that
    the rule's blocks do not divide."""
    bare = name.removeprefix("language_model.").removeprefix("model.")
    layer = re.search(r"layers\.(\d+)\.", bare)
    index = int(layer.group(1)) if layer else config.num_hidden_layers - 1
    for pattern, kind, rows in RULES:
        if re.fullmatch(pattern, bare):
            if kind != "muon":
                return Assignment(name, kind)
            return Assignment(name, kind, _checked(name, parameter, rows(config, index)))
    raise InputError(
        f"no optimizer group knows the parameter {name!r} of shape {tuple(parameter.shape)}; "
        "add a rule to openk3.optim.groups.RULES"
    )


def assign_all(
    parameters: Iterable[tuple[str, Tensor]], config: ModelConfig
) -> tuple[Assignment, ...]:
    """Every trainable parameter's group, in the order given."""
    return tuple(assign(name, p, config) for name, p in parameters if p.requires_grad)


def _checked(name: str, parameter: Tensor, rows: tuple[int, ...]) -> tuple[int, ...]:
    if parameter.ndim not in (2, 3):
        raise InputError(
            f"{name} has shape {tuple(parameter.shape)}; Muon takes matrices [rows, columns] or "
            "stacks of them [experts, rows, columns]"
        )
    rows = rows or (parameter.shape[-2],)
    if parameter.shape[-2] % sum(rows):
        raise InputError(
            f"{name} has {parameter.shape[-2]} rows, which blocks of {rows} do not divide; its "
            "shape contradicts the model config"
        )
    return rows
