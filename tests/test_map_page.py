"""The page of a map, used in a real browser: slider, hover, table, and nothing asked of the network."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from playwright.sync_api import Page, sync_playwright

from mdmi_fast.maps import MIMap, write_page

CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed (Debian: apt-get install chromium)")

QUIET = ["--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-sync"]


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Page]:
    mi = torch.tensor([[0.0, 0.64, 0.0, 0.16], [0.64, 0.0, 0.0, 0.04], [0.0, 0.0, 0.0, 0.0], [0.16, 0.04, 0.0, 0.0]])
    mask = torch.tensor([True, True, False, True])
    labels = ("one", "two</script><b>", "three", "four")
    found = MIMap(mi, torch.tensor([0.7, 0.8, 0.0, 0.9]), torch.tensor([9, 9, 1, 9]), mask, labels, "by hand")
    expected = torch.zeros(4, 4, dtype=torch.bool)
    expected[1, 0] = True
    path = tmp_path / "map.html"
    write_page(found, path, expected=expected, expected_name="neighbours", title="A <title>")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, chromium_sandbox=False, args=QUIET)
        page = browser.new_page()
        wrong: list[str] = []
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
        page.on("request", lambda request: wrong.append(request.url) if "map.html" not in request.url else None)
        page.goto(path.as_uri())
        yield page
        assert [entry for entry in wrong if not entry.startswith("data:")] == []
        browser.close()


def test_slider_hover_and_table(page: Page) -> None:
    assert page.title() == page.inner_text("#title") == "A <title>"
    assert "3 of 4 positions masked; by hand" in page.inner_text("#about")
    assert page.inner_text("#kind") == "neighbours"
    slider, count = page.locator("#tau"), page.locator("#count")
    for position, pairs, nats in [("0", 3, "0.0000"), ("0.4", 2, "0.1024"), ("0.6", 1, "0.2304"), ("1", 1, "0.6400")]:
        slider.evaluate("(node, at) => { node.value = at; node.dispatchEvent(new Event('input')) }", position)
        assert count.inner_text() == f"{pairs} of 3 pairs"
        assert page.inner_text("#nats") == nats
        assert page.locator("#top tr").count() == pairs
        assert page.locator("#arcs path").count() == pairs
    slider.evaluate("(node) => { node.value = 0; node.dispatchEvent(new Event('input')) }")
    rows = page.locator("#top tr").all_inner_texts()
    assert re.split(r"\s*\t", rows[0]) == ["one \u2013 two</script><b>", "0.6400", "yes"]
    assert [row.split("\t")[-1] for row in rows] == ["yes", "no", "no"]
    assert page.locator("#top tr.unexpected").count() == 2
    box = page.locator("#heat").bounding_box()
    assert box is not None
    for row, column, text in [
        (0, 1, "one \u2013 two</script><b>: 0.6400 nats"),
        (3, 0, "four \u2013 one: 0.1600 nats, unexpected"),
        (1, 1, "two</script><b>: entropy 0.8000 nats"),
        (0, 2, "one \u2013 three: not masked"),
    ]:
        page.mouse.move(box["x"] + box["width"] * (column + 0.5) / 4, box["y"] + box["height"] * (row + 0.5) / 4)
        assert page.inner_text("#tip") == text
    page.mouse.move(1, 1)
    assert not page.is_visible("#tip")


def test_strong_pairs_are_dark_unexpected_ones_orange_and_unmasked_ones_grey(page: Page) -> None:
    def colour(row: int, column: int) -> list[int]:
        code = f"document.getElementById('heat').getContext('2d').getImageData({160 * column + 80}, {160 * row + 80}, 1, 1)"
        return list(page.evaluate(f"Array.from({code}.data.slice(0, 3))"))

    strong, unexpected, grey = colour(0, 1), colour(0, 3), colour(0, 2)
    assert strong == colour(1, 0)
    assert strong[2] > strong[1] < 100
    assert unexpected[0] > unexpected[2]
    assert grey == [0xDC] * 3
