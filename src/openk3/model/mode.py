"""Evaluation mode for the length of a block."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put `model` into evaluation mode; afterwards, also after an error, back into the old one."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)
