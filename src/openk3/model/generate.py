"""Token-by-token generation with the dense cache: simple, exact, one batch."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from openk3.errors import DivergedError, InputError
from openk3.model.cache import DenseCache
from openk3.model.mode import evaluation_mode

if TYPE_CHECKING:
    from openk3.model.k3 import K3


@torch.inference_mode()
def generate(
    model: "K3",
    input_ids: Tensor,
    *,
    pixel_values: Tensor | None = None,
    grid_thws: Tensor | None = None,
    max_new_tokens: int = 128,
    temperature: float = 1.0,
    top_p: float = 1.0,
    seed: int = 0,
    stop_ids: Sequence[int] | None = None,
    on_token: Callable[[Tensor], None] | None = None,
) -> Tensor:
    """The prompt and its continuation [B, T + n], n <= max_new_tokens.

    input_ids [B, T >= 1]; pixel_values and grid_thws are the prompt's pictures, as `K3.forward`
    takes them (compact ids are returned compact). temperature 0 is greedy; top_p keeps the smallest
    set of tokens with that probability. stop_ids None is the config's end-of-message id; a row that
    stopped is filled with the padding id until all have. on_token receives each step's ids [B].
    Raises InputError, and DivergedError when the model computes no finite logits.
    """
    if input_ids.ndim != 2 or input_ids.shape[1] == 0:
        raise InputError(f"generate needs a prompt [B, T >= 1], not {list(input_ids.shape)}")
    if not 0 <= temperature < float("inf") or not 0 < top_p <= 1:
        raise InputError(
            f"temperature ({temperature}) must be finite and at least 0, and top_p ({top_p}) "
            "within (0, 1]"
        )
    if max_new_tokens < 0 or not -(2**63) <= seed < 2**63:
        raise InputError(
            f"max_new_tokens ({max_new_tokens}) must not be negative, and seed ({seed}) must fit "
            "into 64 bits"
        )
    stops = torch.tensor(
        [model.config.eos_token_id] if stop_ids is None else list(stop_ids),
        dtype=torch.int64,
        device=input_ids.device,
    )
    rng = torch.Generator(device=input_ids.device).manual_seed(seed)
    cache, pieces = DenseCache(), [input_ids]
    done = torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)
    ids, images = input_ids, {"pixel_values": pixel_values, "grid_thws": grid_thws}
    with evaluation_mode(model):
        for _ in range(max_new_tokens):
            logits = model(ids, **images, state=cache, logits_for="last")[:, -1].float()
            images = {}  # the cache has seen them
            chosen = sample(logits, temperature, top_p, rng)
            chosen = torch.where(done, model.config.pad_token_id, chosen)
            done |= torch.isin(chosen, stops)
            ids = chosen[:, None]
            pieces.append(ids)
            if on_token is not None:
                on_token(chosen)
            if bool(done.all()):
                break
    return torch.cat(pieces, 1)


def sample(logits: Tensor, temperature: float, top_p: float, rng: torch.Generator) -> Tensor:
    """One token per row of logits [B, vocab] float32. Raises DivergedError on logits of NaN."""
    largest = logits.amax(-1, keepdim=True)
    if not bool(largest.isfinite().all()):
        raise DivergedError(
            "the model's logits are not finite, so no token can be chosen: its weights have "
            "diverged; use an earlier checkpoint or train with a smaller learning rate"
        )
    if temperature == 0:
        return logits.argmax(-1)
    # the largest is moved to 0 first: no temperature, however small, then makes an infinity
    probs = ((logits - largest) / temperature).softmax(-1)
    if top_p < 1:
        ordered, index = probs.sort(-1, descending=True)
        outside = ordered.cumsum(-1) - ordered >= top_p
        probs = torch.zeros_like(probs).scatter_(-1, index, ordered.masked_fill(outside, 0.0))
    return torch.multinomial(probs, 1, generator=rng)[:, 0]
