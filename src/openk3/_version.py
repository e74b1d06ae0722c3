"""The version, alone in a file so that anything may read it."""

__version__ = "0.1.0"
