from mdmi_fast.bench.pairwise_mlp import workloads

__all__ = ["test_speed", "workloads"]


def test_speed(benchmark, way):
    benchmark(way)
