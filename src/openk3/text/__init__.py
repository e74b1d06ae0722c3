"""Tokenizers and the XTML chat format. Imports no torch."""
