"""The Kimi K3 architecture on one device, with ports for everything distributed."""
