"""Root file systems that sandboxes start from, and the runtime of the agent inside them."""
