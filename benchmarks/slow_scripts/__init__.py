"""Training scripts as people write them, each with one thing that makes it slow.

They measure a profiler: does it say what is wrong, and where? `expected` has the answers, `check`
asks ``python -m torchfast profile`` and compares. The scripts know nothing of torchfast.
"""
