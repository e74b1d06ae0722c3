"""The numerical operations of Kimi K3: a plain torch reference for each, and its fast backends."""
