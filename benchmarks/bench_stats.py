from mdmi_fast.bench.stats import workloads

__all__ = ["test_speed", "workloads"]


def test_speed(benchmark, way):
    benchmark(way)
