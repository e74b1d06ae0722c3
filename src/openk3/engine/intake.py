"""What a request must satisfy before it waits."""

from openk3.engine.plan import Prompt, Runner
from openk3.engine.types import Request
from openk3.errors import InputError


def prompt_of(request: Request, runner: Runner, max_context: int) -> Prompt:
    """A request's prompt as the memory sees it. Raises InputError if it can never run."""
    prompt = runner.expand(request) if request.media else Prompt(request.prompt_ids)
    ids = prompt.ids
    if not ids:
        raise InputError("prompt_ids is empty; a prompt has at least one token")
    if not 0 <= min(ids) <= max(ids) < runner.vocab_size:
        raise InputError(
            f"prompt_ids has an id outside [0, {runner.vocab_size}): "
            f"{min(ids) if min(ids) < 0 else max(ids)}"
        )
    strange = [i for i in request.params.logit_bias if not 0 <= i < runner.vocab_size]
    if strange:
        raise InputError(f"logit_bias has an id outside [0, {runner.vocab_size}): {strange[0]}")
    if request.media and request.params.prompt_logprobs is not None:
        raise InputError("prompt_logprobs is for prompts without pictures")
    if len(ids) >= max_context:
        raise InputError(
            f"the prompt has {len(ids)} tokens, and prompt and answer together may have "
            f"{max_context}"
        )
    return prompt
