"""The Kimi K3 architecture on one device, with ports for everything distributed."""

from openk3.model.cache import DenseCache
from openk3.model.init import cast, keeps_float32
from openk3.model.k3 import K3

__all__ = ["K3", "DenseCache", "cast", "keeps_float32"]
