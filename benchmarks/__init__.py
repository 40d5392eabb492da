"""Benchmarks: each a `python -m benchmarks.NAME`; what was measured stands in RESULTS.md."""
