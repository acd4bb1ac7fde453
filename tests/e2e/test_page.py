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
from test_served_documents import read

from pyorch.cli.served_documents import passed_on
from pyorch.models.gguf_file import read_gguf
from pyorch.native import page

pytestmark = pytest.mark.slow
selenium = pytest.importorskip("selenium.webdriver")
support = pytest.importorskip("selenium.webdriver.support.ui")
ASKS = [f"Network.{n}" for n in ("requestWillBeSent", "webSocketCreated", "webTransportCreated")]
INSIDE = ("about:", "blob:", "chrome", "data:")  # of the browser itself


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


def test_a_message_about_a_document_is_answered_with_sparse_attention(
    server_dir: Path, tiny_chat: Path, tmp_path: Path, browser: Any
) -> None:
    """The text is pasted, and not read again; nothing is loaded from elsewhere."""
    text = "It was a dark night. " * 160
    document = read(tiny_chat, tmp_path / "book.kv", text)
    options, env = passed_on(read_gguf(tiny_chat), [document], (), tmp_path)
    line = ("-m", tiny_chat, "-t", 1, "-np", 1, "-c", 4096, "-n", 32, "--metrics", *options)
    line += ("--path", page.find(), "--sparse-attn", "sparq,rank=8,topk=40,min_ctx=0")
    with serving(server_dir, tmp_path / "log", *line, **env) as url:
        browser.implicitly_wait(60)
        browser.get(url)
        wait = support.WebDriverWait(browser, 60)
        box = browser.find_element("tag name", "textarea")
        wait.until(lambda _: box.is_displayed())
        box.send_keys(text[:210])
        for key in ("a", "c", "v" * 16, "a", "x", "v"):  # as a whole it could become a file
            box.send_keys(selenium.Keys.CONTROL, key)
        box.send_keys(selenium.Keys.SHIFT, "\n\n")
        box.send_keys("Why?\n")
        wait.until(lambda _: "t/s" in browser.find_element("tag name", "body").text)
        said = answered(f"{url}/metrics")[1]
        assert re.search(r'_calls_total{by="sparse".*} [1-9]', said)
        n_read = re.search(r"^llamacpp:prompt_tokens_total (\d+)", said, re.MULTILINE)
        assert n_read and int(n_read[1]) < 40 < document.n_tokens
        browser.get("about:blank")
    events = (json.loads(x["message"])["message"] for x in browser.get_log("performance"))
    sent = [e["params"].get("request", e["params"])["url"] for e in events if e["method"] in ASKS]
    assert sent and not [x for x in sent if not x.startswith((f"{url}/", *INSIDE))]
