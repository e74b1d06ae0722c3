"""The pre-training loop."""
