"""Tests that need CUDA devices; skipped, never passed, on a machine without them."""
