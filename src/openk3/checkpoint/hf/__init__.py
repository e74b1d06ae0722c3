"""The published layout: names, headers, folders, loading, saving."""
