"""Per-Head Muon, AdamW groups, learning-rate schedules and weight clipping."""
