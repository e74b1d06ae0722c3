"""Frozen dataclasses for models and runs, presets, and strict TOML recipes. Imports no torch."""

from openk3.config.model import LinearAttnConfig, ModelConfig, VisionConfig
from openk3.config.presets import LADDER, preset

__all__ = ["LADDER", "LinearAttnConfig", "ModelConfig", "VisionConfig", "preset"]
