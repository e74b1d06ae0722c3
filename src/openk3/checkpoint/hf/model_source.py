"""A model in memory as a source of weights, whatever form its experts have."""

from pathlib import Path
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from openk3.checkpoint.experts.packed import PackedExperts
from openk3.checkpoint.experts.streamed import StreamedExperts
from openk3.checkpoint.hf.layout import Parameter
from openk3.checkpoint.hf.read import NAMES
from openk3.errors import InputError
from openk3.model import K3
from openk3.ops import mx


class ModelSource:
    """The parameters and saved buffers of a K3; a `Source`."""

    def __init__(self, model: K3) -> None:
        self._model, self._state = model, model.state_dict()

    def stored(self, parameter: Parameter) -> str:
        experts = self._experts(parameter)
        if isinstance(experts, PackedExperts):
            return "MXFP4"
        if isinstance(experts, StreamedExperts):
            return experts.source.stored(parameter)
        value = self._tensor(parameter)
        if value.dtype not in NAMES or value.dtype == torch.uint8:
            raise InputError(f"{parameter.name} is {value.dtype}; only floats can be saved")
        return NAMES[value.dtype]

    def values(self, parameter: Parameter, expert: int | None = None) -> Tensor:
        experts = self._experts(parameter)
        if isinstance(experts, PackedExperts):
            return mx.dequantize(*self.packed(parameter, expert or 0), dtype=torch.bfloat16)
        if isinstance(experts, StreamedExperts):
            return experts.source.values(parameter, expert)
        value = self._tensor(parameter)
        return value if expert is None else value[expert]

    def packed(self, parameter: Parameter, expert: int) -> mx.Quantized:
        experts = self._experts(parameter)
        if isinstance(experts, PackedExperts):
            return experts.packed(parameter.name.rsplit(".", 1)[1], expert)
        assert isinstance(experts, StreamedExperts), f"{parameter.name} is not packed"
        return experts.source.packed(parameter, expert)

    def where(self, parameter: Parameter, expert: int | None = None) -> str:
        return parameter.name if expert is None else f"{parameter.name}[{expert}]"

    def _tensor(self, parameter: Parameter) -> Tensor:
        value = self._state.get(parameter.name)
        if value is None or tuple(value.shape) != parameter.shape:
            raise InputError(
                f"the model's {parameter.name} is {None if value is None else list(value.shape)}; "
                f"its config asks for {list(parameter.shape)}"
            )
        return value

    def _experts(self, parameter: Parameter) -> nn.Module | None:
        if not parameter.is_expert:
            return None
        return self._model.get_submodule(parameter.name.rsplit(".", 1)[0])


_LOADED_FROM: WeakKeyDictionary[nn.Module, Path] = WeakKeyDictionary()


def loaded_from(model: nn.Module) -> Path | None:
    """The folder `load` read a model from, if it is still there."""
    path = _LOADED_FROM.get(model)
    return path if path is not None and path.is_dir() else None


def remember_folder(model: nn.Module, path: Path) -> None:
    """Note where a model came from."""
    _LOADED_FROM[model] = path
