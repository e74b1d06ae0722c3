"""Pictures of prompts: where their rows stand, and the rows themselves while they are needed."""

from dataclasses import dataclass

import torch
from torch import Tensor

from openk3.engine.plan import Chunk, Prompt
from openk3.engine.types import Request
from openk3.model.k3 import K3
from openk3.model.media import expand_media, rows_per_item


def expand(request: Request, model: K3) -> Prompt:
    """Each picture's media id once for each of its rows. Raises InputError."""
    if request.media is None:
        return Prompt(request.prompt_ids)
    grids = torch.as_tensor(request.media.grid_thws)
    ids = torch.tensor(request.prompt_ids)
    expanded = expand_media(ids, grids, model.config)
    counts = iter(rows_per_item(grids, model.config))
    spans, position = [], 0
    for token in request.prompt_ids:
        count = 1
        if token == model.config.media_placeholder_token_id:
            count = next(counts)
            spans.append((position, count))
        position += count
    return Prompt(tuple(expanded.tolist()), tuple(spans))


@dataclass(frozen=True)
class _Seen:
    prompt: Prompt
    rows: Tensor
    """[R, d], all pictures' rows in order"""


class Pictures:
    """The rows of the running requests' pictures, by slot, computed when first needed."""

    def __init__(self, model: K3) -> None:
        self.model = model
        self._seen: dict[int, _Seen] = {}

    def forget(self, slot: int) -> None:
        self._seen.pop(slot, None)

    def splice(self, x_TD: Tensor, chunk: Chunk) -> Tensor:
        """The embeddings of a chunk's tokens with pictures in their places."""
        media = chunk.request.media
        if media is None:
            return x_TD
        seen = self._seen.get(chunk.slot)
        if seen is None:
            device = x_TD.device
            pixels = torch.as_tensor(media.pixel_values).to(device)
            rows = self.model.images(pixels, torch.as_tensor(media.grid_thws).to(device))
            seen = self._seen[chunk.slot] = _Seen(expand(chunk.request, self.model), rows)
        ids = torch.tensor(chunk.token_ids, device=x_TD.device)
        positions = chunk.start + torch.arange(len(ids), device=x_TD.device)
        in_prompt = positions < len(seen.prompt.ids)
        blank = in_prompt & (ids == self.model.config.pad_token_id)
        x_TD = x_TD.masked_fill(blank[:, None], 0)
        first = 0
        for begin, count in seen.prompt.media:
            here = (positions >= begin) & (positions < begin + count)
            index = (first + positions - begin)[here]
            x_TD[here] = seen.rows[index].to(x_TD.dtype)
            first += count
        if chunk.end >= len(seen.prompt.ids):
            self.forget(chunk.slot)
        return x_TD
