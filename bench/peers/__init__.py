"""Training steps of other trainers beside ours: `make bench-peers` (__main__.py)."""
