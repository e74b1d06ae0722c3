"""Meshes, expert parallelism, sharded state and pipelines on torch.distributed."""
