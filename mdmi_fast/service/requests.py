"""What a request says, refused where it says something else."""

from __future__ import annotations

import asyncio
import functools
import json
import math
import re
import secrets
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mdmi_fast.decoding import parse_policy
from mdmi_fast.service.dispatch import Refused

if TYPE_CHECKING:
    from aiohttp import web

MAX_BYTES, _BODY_SECONDS = 2**20, 5.0


async def read_body(request: web.BaseRequest) -> Any:
    """What the body of a request says."""
    from aiohttp import web

    kind = request.content_type if "Content-Type" in request.headers else "application/json"
    if kind != "application/json":
        raise Refused(415, f"Content-Type must be application/json, got {kind[:100]}")
    coding = request.headers.get("Content-Encoding", "identity")
    if coding != "identity":
        raise Refused(415, f"Content-Encoding must be identity, got {coding[:100]}")
    if (request.content_length or 0) > MAX_BYTES:
        raise Refused(413, f"a request may be {MAX_BYTES} bytes long, got {request.content_length}")
    if request.headers.get("Expect", "").lower() == "100-continue":
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # of the answer, nothing has been sent
    try:
        return json.loads(await asyncio.wait_for(request.read(), _BODY_SECONDS))
    except asyncio.TimeoutError:
        raise Refused(408, f"the request did not arrive within {_BODY_SECONDS:g} s") from None
    except web.HTTPRequestEntityTooLarge:
        raise Refused(413, f"a request may be {MAX_BYTES} bytes long") from None
    except (web.RequestPayloadError, ConnectionError) as error:
        raise Refused(400, f"the body did not arrive whole: {error}") from None
    except (ValueError, RecursionError) as error:
        raise Refused(400, f"the body must be JSON: {error}") from None


def id_of(request: web.BaseRequest) -> str:
    """What the client calls its request, if it may stand in a log, or a name of our own."""
    given = request.headers.get("X-Request-Id", "")
    return given if re.fullmatch(r"[A-Za-z0-9._:-]{1,64}", given) else secrets.token_hex(8)


@functools.lru_cache(maxsize=1000)
def _checked(policy: str) -> str | None:
    """What is wrong with a policy, if anything."""
    try:
        parse_policy(policy, mi=lambda hidden, mask: hidden)
    except ValueError as error:
        return str(error)
    return None


def check_policy(policy: Any) -> None:
    if not isinstance(policy, str):
        raise Refused(400, f"policy must be a string, got {shown(policy)}")
    wrong = _checked(policy)
    if wrong is not None:
        raise Refused(400, wrong)


def number_of(body: Mapping[str, Any], name: str, default: float, *, high: float) -> float:
    value = body.get(name, default)
    if type(value) not in (int, float) or not 0 <= value <= high or math.isnan(value):
        raise Refused(400, f"{name} must be a number from 0 to {high:g}, got {shown(value)}")
    return float(value)


def shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
