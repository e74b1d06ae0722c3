"""HTTP servers over the engine and over sandboxes."""
