"""serve's page in a browser: where Chromium and selenium are, and `build --ui` has made it."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from server import answered, serving

from pyorch.native import page

pytestmark = pytest.mark.slow
selenium = pytest.importorskip("selenium.webdriver")
support = pytest.importorskip("selenium.webdriver.support.ui")
REQUEST = "Network.requestWillBeSent"


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Any]:
    if not (page.find() and shutil.which("chromium") and shutil.which("chromedriver")):
        pytest.skip("no Chromium with its driver, or no page: sparq-cpp build --ui")
    options = selenium.ChromeOptions()
    for name in ("headless=new", "no-sandbox", "disable-gpu", "disable-background-networking"):
        options.add_argument(f"--{name}")
    options.add_argument(f"--user-data-dir={tmp_path}")
    options.binary_location = shutil.which("chromium")
    options.set_capability("goog:loggingPrefs", {"performance": "ALL"})
    driver = selenium.ChromeService(shutil.which("chromedriver"))
    with selenium.Chrome(service=driver, options=options) as browser:
        yield browser


def test_a_message_is_answered_with_sparse_attention(
    server_dir: Path, tiny_chat: Path, tmp_path: Path, browser: Any
) -> None:
    """And nothing is loaded from elsewhere."""
    line = ("-m", tiny_chat, "-t", 1, "-np", 1, "-c", 4096, "-n", 32, "--metrics")
    line += ("--path", page.find(), "--sparse-attn", "sparq,rank=8,topk=40,min_ctx=0")
    with serving(server_dir, tmp_path / "log", *line) as url:
        browser.implicitly_wait(60)
        browser.get(url)
        wait = support.WebDriverWait(browser, 60)
        box = browser.find_element("tag name", "textarea")
        wait.until(lambda _: box.is_displayed())
        box.send_keys("It was a dark night. " * 5 + "\n")
        wait.until(lambda _: "t/s" in browser.find_element("tag name", "body").text)
        assert re.search(r'_calls_total{by="sparse".*} [1-9]', answered(f"{url}/metrics")[1])
        browser.get("about:blank")
    events = (json.loads(x["message"])["message"] for x in browser.get_log("performance"))
    asked = [e["params"]["request"]["url"] for e in events if e["method"] == REQUEST]
    assert asked and not [x for x in asked if x.startswith("http") and not x.startswith(url)]
