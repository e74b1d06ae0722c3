"""Post-training: the only place that knows both the trainer and the engine."""
