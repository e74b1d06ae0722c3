"""The serving engine: continuous batching over a hybrid KDA + MLA cache."""
