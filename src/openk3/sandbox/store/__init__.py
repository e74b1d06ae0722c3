"""What of a sandbox is on disk: records, images, layers, snapshots, and how they are swept."""
