"""Routing of sessions over many engines. Imports no torch."""
