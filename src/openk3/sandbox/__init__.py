"""Resumable sandboxes: pause, resume, fork and snapshot isolated machines. Imports no torch."""
