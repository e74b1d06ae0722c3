"""Files in and out: training checkpoints and the published Hugging Face layout."""
