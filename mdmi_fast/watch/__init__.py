"""What runs can be seen from outside: metrics for Prometheus, spans for OpenTelemetry, a dashboard and alerts.

`grafana.json` and `alerts.yml` lie beside this file. Nothing here is imported by what decodes.
"""

from mdmi_fast.watch.metrics import Collector, serve
from mdmi_fast.watch.tracing import Traced

__all__ = ["Collector", "Traced", "serve"]
