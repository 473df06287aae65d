"""Benchmarks, run by hand: ratios in one process on the same work, medians of alternated runs."""
