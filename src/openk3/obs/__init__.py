"""Logs, metrics and console lines. Imports no torch."""
