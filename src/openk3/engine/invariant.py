"""Steps in batch-invariant mode: one token of one sequence at a time.

Every product then has one row, every recurrence one step, and attention runs over as many pages as
the position alone says: the order of every sum is fixed, so the same request gets the same floats
to the last bit, whatever shares its steps, was cached, was cut into chunks or was preempted.
"""

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from openk3.engine import batch
from openk3.engine.logprobs import Scores
from openk3.engine.plan import Chunk, ChunkResult, Copy, Results
from openk3.engine.runner import ModelRunner
from openk3.engine.sampling import Choice, choose
from openk3.engine.types import TokenLogprobs
from openk3.engine.verify import result_of, sampling_rows
from openk3.model.ports import Context


class InvariantRunner(ModelRunner):
    """A runner whose floats depend on a request alone."""

    def warm_up(self) -> bool:
        """Nothing: its steps are not recorded, and prompts of any length are single tokens."""
        return False

    def _advance(self, chunks: Sequence[Chunk]) -> Results:
        results = [self._alone(chunk) for chunk in chunks]
        return lambda: results

    def _alone(self, chunk: Chunk) -> ChunkResult:
        """A chunk token by token; drafts only as long as they are what was chosen."""
        kept: list[Choice] = []
        rows = sampling_rows(chunk)
        known = chunk.num_known
        scores: tuple[TokenLogprobs, ...] = ()
        asked, top = chunk.scored(), chunk.request.params.prompt_logprobs
        self._keep(chunk, chunk.start)
        for i, token in enumerate(chunk.token_ids):
            if i >= known and (chunk.request.constraint or token != kept[-1].token_id):
                break
            logits = self._token(chunk, i)
            if i < len(asked) and top is not None:
                scores += Scores(logits, lambda x: x, asked[i : i + 1], top).wait()
            self._keep(chunk, chunk.start + i + 1)
            if rows and i >= known - 1:
                kept += choose(logits, [rows[i - known + 1]], self.config.seed)
                if kept[-1].error:
                    break
        return result_of(chunk, kept, scores)

    def _token(self, chunk: Chunk, index: int) -> Tensor:
        """Logits [1, V] behind one token."""
        position = chunk.start + index
        pages = position // self.geometry.page_tokens + 1
        one = replace(
            chunk,
            token_ids=chunk.token_ids[index : index + 1],
            start=position,
            latent_pages=chunk.latent_pages[:pages],
            checkpoints=(),
            num_drafts=0,
        )
        native = None if chunk.request.media else self._native
        if native is not None and native.takes([one]):
            return native.run([], [replace(one, samples=True)], {})[0]
        rows = batch.decode_rows([one], self.memory, {})
        step = batch.build(rows, [one], [], self.memory, {})
        x = self.model.embed_tokens(step.input_ids)
        x = self._pictures.splice(x[0], one)[None]
        hidden = self._trunk(x, Context(step.sequence))
        return self.model.lm_head(hidden[0])

    def _keep(self, chunk: Chunk, position: int) -> None:
        """Checkpoints that are due at `position`, as copies of the live state."""
        for point in chunk.checkpoints:
            if point.position == position:
                pairs = zip(chunk.state_pages, point.pages, strict=True)
                self.memory.copy([Copy(*pair) for pair in pairs])
