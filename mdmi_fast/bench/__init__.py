"""Benchmarks: workloads by stem, each with the ways it is commonly done, checked before they are timed.

A stem is a module of this package with `workloads(quick)`, what is timed way against way, and, where there is more to
say, `others(quick)`, what needs another process or counts something else than time. `mdmi-fast bench` runs them;
benchmarks/test_speed.py gives the same workloads to pytest-benchmark.
"""

STEMS = ("pairwise_mlp", "stats", "kl", "select", "score_and_select", "training", "decoding_step", "labels")
"""In the order in which they run."""
