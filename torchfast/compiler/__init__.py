"""torch.compile made dependable: regions, failures, caches, and what really happened."""
