from mdmi_fast.bench.score_and_select import workloads

__all__ = ["test_speed", "workloads"]


def test_speed(benchmark, way):
    benchmark(way)
