"""Decoding over HTTP: `mdmi-fast serve`. Dynamic batches, deadlines, backpressure, workers that may die.

POST /decode  {"tokens": [...], "policy": "mi-budget:0.05", "temperature": 0, "seed": 7, "deadline_ms": 2000}; all but
              tokens may be left out. 200 {"tokens": [...], "passes": n}
GET /health   200 while requests are accepted, else 503
GET /metrics  for Prometheus: `mdmi_fast/watch` holds alert rules and a dashboard

Whatever is not answered with 200 is answered with {"error": "...", "status": n, "id": "..."}:
400 the request makes no sense, 404 there is no such path, 405 not with this method, 408 the body did not arrive in
time, 413 it is too large, 415 it is no JSON by its Content-Type, 422 this sequence cannot be decoded, 500 a fault of
the service, 503 too busy or stopping: try again later, 504 the deadline has passed. The id is that of the request's
line in the log; it is the request's X-Request-Id, if it has one, and comes back under that name.

Importing this imports no server; that is an extra, `service`.
"""
