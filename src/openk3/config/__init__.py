"""Frozen dataclasses for models and runs, presets, and strict TOML recipes. Imports no torch."""
