"""Drafts of a model's MTP layer, and the memory that they need.

The layer has a latent at every position p, of the pair (last hidden state at p - 1, token at p):
of nothing behind p, so that it belongs to a prefix as the trunk's latents do, lies in their pages
and is shared with them. Position 0 has no pair, as in training, and is hidden from all. A chunk
that starts at p needs the hidden state at p - 1: it is kept beside the KDA state, in the pages of
the first group, and travels with that into checkpoints and back.

A window is drafted at the start of the step that verifies it: token by token, each from the hidden
state that the layer made of the one before, with the noise that will choose at that position. What
the layer writes then is written again, from true hidden states, by the pass that verifies.

Legend: N tokens of a packed row, B rows, T tokens of a decoding row, d model width.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

import torch
from torch import Tensor

from openk3.engine import batch
from openk3.engine.page_memory import PageMemory
from openk3.engine.paged import DecodeRows, PagedSequence
from openk3.engine.plan import UNKNOWN, Chunk
from openk3.engine.sampling import Row, choose
from openk3.engine.transfer import on_device
from openk3.errors import ConfigError
from openk3.model.k3 import K3
from openk3.model.ports import Context

FIRST = 1
"""The first position that has a pair."""


class LayerDrafts:
    """Raises ConfigError for a model that has no such layer."""

    def __init__(self, model: K3, memory: PageMemory, seed: int) -> None:
        if model.mtp is None or not memory.kda_layers:
            raise ConfigError(
                'draft = "mtp" needs a model with an MTP layer (num_nextn_predict_layers 1) and '
                'KDA layers; use "ngram"'
            )
        self.model, self.layer, self.memory, self.seed = model, model.mtp, memory, seed

    def draft(self, chunk_list: Sequence[Chunk]) -> list[Chunk]:
        """Chunks whose unknown guesses have been made."""
        at = [i for i, c in enumerate(chunk_list) if c.num_drafts and c.token_ids[-1] == UNKNOWN]
        chunks = list(chunk_list)
        if not at:
            return chunks
        hidden = self.memory.hiddens()[self._index([chunks[i].state_pages[0] for i in at])]
        made = {i: list(chunks[i].token_ids[: chunks[i].num_known]) for i in at}
        for step in range(max((chunks[i].num_drafts for i in at), default=0)):
            left = [n for n, i in enumerate(at) if chunks[i].num_drafts > step]
            at, hidden = [at[n] for n in left], hidden[self._index(left)]
            hidden = self._advance([chunks[i] for i in at], [made[i][-1] for i in at], step, hidden)
            rows = [
                Row(c.request, c.start + step + 1, (*c.output_ids, *made[i][1:]))
                for i, c in ((i, chunks[i]) for i in at)
            ]
            choices = choose(self.model.lm_head(hidden), rows, self.seed)
            for i, choice in zip(at, choices, strict=True):
                made[i].append(choice.token_id)
        return [
            replace(c, token_ids=tuple(made[i])) if i in made else c for i, c in enumerate(chunks)
        ]

    def _advance(
        self, chunks: Sequence[Chunk], ids: Sequence[int], step: int, hidden_BD: Tensor
    ) -> Tensor:
        """[B, d] of the layer behind `ids`, `step` tokens into each chunk."""
        size, device = self.memory.geometry.page_tokens, self.memory.device
        at = [c.start + step for c in chunks]
        pages = [c.latent_pages[p // size] for c, p in zip(chunks, at, strict=True)]
        rows = DecodeRows(
            1,
            batch.page_table([c.latent_pages for c in chunks], device),
            self._index(at),
            self._index([p + 1 for p in at]),
            torch.empty(0),
        )
        sequence = PagedSequence(
            self.memory, self._index(pages), self._index([p % size for p in at]), rows, first=FIRST
        )
        embedded = self.model.embed_tokens(self._index(ids))
        return self.layer(hidden_BD[None], embedded[None], Context(sequence))[0]

    def extend(self, ids: Tensor, hidden: Tensor, sequence: PagedSequence) -> None:
        """Write the latents of a packed row: ids [1, N], hidden [N, d] of the trunk's pass."""
        rows, prefill, begins = sequence.decode, sequence.prefill, []
        if rows is not None:
            begins += [(slice(0, rows.num_tokens, rows.tokens), rows.states[0].long())]
        if prefill is not None:
            begins += [(prefill.first + prefill.cu_seqlens[:-1], prefill.states[0])]
        self._write(ids, hidden, sequence.page, sequence.offset, begins)

    def extend_chunks(self, chunks: Sequence[Chunk], hidden: Tensor) -> None:
        """`extend` for chunks whose tokens' hidden states [N, d] follow each other unfilled."""
        ids = self._index([token for c in chunks for token in c.token_ids])
        places = [batch.places(c, self.memory.geometry.page_tokens) for c in chunks]
        page, offset = (self._index([*chain(*some)]) for some in zip(*places, strict=True))
        first = self._index(batch.firsts((), chunks))
        states = self._index([c.state_pages[0] for c in chunks])
        self._write(ids[None], hidden, page, offset, [(first, states)])

    def keep(
        self, chunks: Sequence[Chunk], ends: Sequence[int], hidden: Tensor, first: Sequence[int]
    ) -> None:
        """Remember the hidden states [N, d] behind which chunks, and their checkpoints, go on.

        ends: how many tokens of each chunk stand; first: where its tokens begin in the row."""
        pages: list[int] = []
        places: list[int] = []
        for chunk, end, begin in zip(chunks, ends, first, strict=True):
            points = [(chunk.start + end, chunk.state_pages)]
            points += [(p.position, p.pages) for p in chunk.checkpoints if p.position > chunk.start]
            pages += [own[0] for _, own in points]
            places += [begin + position - chunk.start - 1 for position, _ in points]
        self.memory.hiddens()[self._index(pages)] = hidden[self._index(places)]

    def _write(
        self, ids: Tensor, hidden: Tensor, page: Tensor, offset: Tensor,
        begins: Sequence[tuple[slice | Tensor, Tensor]],
    ) -> None:  # fmt: skip
        """The latents of ids [1, N] where they belong, each of a pair with the hidden state before
        it. begins: where in the row sequences go on, and the pages that kept theirs."""
        before = torch.empty_like(hidden)
        before[1:] = hidden[:-1]
        for first, states in begins:
            before[first] = self.memory.hiddens()[states]
        latent, k_rope = self.layer.latents(before[None], self.model.embed_tokens(ids))
        pages = self.memory.latents(self.layer.self_attn.layer)
        pages[page, offset] = torch.cat([latent, k_rope], -1)[0]

    def _index(self, values: Sequence[int]) -> Tensor:
        return on_device(values, self.memory.device)
