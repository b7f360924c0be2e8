"""The page at / in headless Chromium, in a phone-sized and a desktop-sized window: type, stream, read what it shows.

`PAGE_SCREENSHOTS=folder` keeps pictures.
"""

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

from pipeline.service.auth import digest
from tests.support.batch_helpers import KEY, OTHER_KEY, client_of, jsonl, line
from tests.support.service_helpers import DEMO, Offline, local, make_endpoint, scripted

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
pytestmark = [
    pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="no Chromium and chromedriver on PATH"),
]

SIZES = {"phone": (390, 844), "desktop": (1280, 900)}
PROMPT = "name[The Copper Kettle], eatType[coffee shop], priceRange[less than £20], area[city centre]"


@pytest.fixture(scope="module")
def offline() -> Offline:
    return Offline()


@pytest.fixture(scope="module")
def url(offline: Offline) -> Iterator[str]:
    endpoint = make_endpoint(offline.generator)
    with local(endpoint) as running:
        yield running
    endpoint.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Chrome]:
    options = ChromeOptions()
    options.binary_location = CHROMIUM or ""
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = Chrome(options=options, service=Service(DRIVER))
    yield driver
    driver.quit()


def resize(browser: Chrome, size: str) -> None:
    width, height = SIZES[size]
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": size == "phone"}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


def keep(browser: Chrome, name: str) -> None:
    if folder := os.environ.get("PAGE_SCREENSHOTS"):
        browser.save_screenshot(str(Path(folder) / f"{name}.png"))


def wait_for_answer(browser: Chrome) -> str:
    WebDriverWait(browser, 30).until(lambda b: b.execute_script("return document.body.dataset.state") == "done")
    return str(browser.execute_script("return document.getElementById('answer').textContent"))


def fill(browser: Chrome, name: str, text: str) -> None:
    field = browser.find_element(By.ID, name)
    field.clear()
    field.send_keys(text)


def shown(browser: Chrome, name: str) -> str:
    return browser.find_element(By.ID, name).text


@pytest.mark.parametrize("size", SIZES)
def test_type_and_stream(browser: Chrome, url: str, offline: Offline, size: str) -> None:
    resize(browser, size)
    browser.get(url + "/")
    WebDriverWait(browser, 10).until(lambda b: "context 2048" in shown(b, "model"))
    fill(browser, "prompt", PROMPT)
    fill(browser, "max_tokens", "50")
    browser.find_element(By.ID, "go").click()
    wanted = offline(PROMPT, 50)
    assert wait_for_answer(browser) == offline.text(wanted)
    keep(browser, size)
    assert shown(browser, "error") == ""
    steps = len(wanted.tokens) - 1
    assert shown(browser, "tokens") == str(steps + 1)
    assert shown(browser, "layers") == f"{wanted.layers_run / steps:.1f} of 24"
    assert shown(browser, "speedup") == f"{24 * steps / wanted.layers_run:.2f}×"
    assert int(shown(browser, "rate")) > 0
    shades = browser.execute_script(
        "return [...document.querySelectorAll('#answer span')].map(s => [s.title, getComputedStyle(s).backgroundColor])"
    )
    assert shades[0][0] == "24 of 24 layers"
    assert len({title for title, _ in shades}) == len({colour for _, colour in shades}) >= 3
    inside = browser.execute_script("return document.documentElement.scrollWidth <= window.innerWidth")
    assert inside, "the page is wider than the window"
    assert not [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]


def test_errors(browser: Chrome, url: str) -> None:
    resize(browser, "phone")
    browser.get(url + "/")
    fill(browser, "max_tokens", "9000")
    browser.find_element(By.ID, "go").click()
    assert wait_for_answer(browser) == ""
    assert "does not fit" in shown(browser, "error")
    browser.get_log("browser")  # a 400 counts as one


def test_stop_ends_the_answer_and_frees_its_row(
    browser: Chrome, tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that never ends by itself, 100 tokens at 20 a second."""
    generator = scripted(tiny_checkpoint, tmp_path, list(range(65, 75)) * 12)
    endpoint = make_endpoint(generator)
    step = endpoint.engine.step
    monkeypatch.setattr(endpoint.engine, "step", lambda: (time.sleep(0.05), step())[1])
    with local(endpoint) as url:
        browser.get(url + "/")
        fill(browser, "prompt", "")
        fill(browser, "max_tokens", "100")
        browser.find_element(By.ID, "go").click()
        WebDriverWait(browser, 10).until(lambda b: shown(b, "tokens") not in ("", "–"))
        browser.find_element(By.ID, "halt").click()
        wait_for_answer(browser)
        assert int(shown(browser, "tokens")) < 100
        assert shown(browser, "error") == ""
        WebDriverWait(endpoint, 30).until(lambda e: e.thread.num_running == e.num_responses == 0)
        assert endpoint.engine.counts.cancelled == 1
    endpoint.close()


def test_it_asks_for_a_key(browser: Chrome, offline: Offline) -> None:
    endpoint = make_endpoint(offline.generator, [digest("a-secret-key")])
    with local(endpoint) as locked:
        browser.get(locked + "/")
        WebDriverWait(browser, 10).until(lambda b: b.find_element(By.ID, "key").is_displayed())
        fill(browser, "key", "a-secret-key\t")
        WebDriverWait(browser, 10).until(lambda b: "context 2048" in shown(b, "model"))
        browser.get("about:blank")
        browser.get(locked + "/#key=a-secret-key")  # as `skipdecode serve` prints it
        WebDriverWait(browser, 10).until(lambda b: "context 2048" in shown(b, "model"))
        browser.find_element(By.ID, "go").click()
        assert len(wait_for_answer(browser)) > 20
    endpoint.close()


def test_it_lists_the_batches_of_the_key(browser: Chrome, offline: Offline, tmp_path: Path) -> None:
    storage = {"path": str(tmp_path / "storage")}
    settings = {"storage": storage, "batches": {"actors": {"price_per_hour": 2.0}}}
    endpoint = make_endpoint(offline.generator, [digest(KEY), digest(OTHER_KEY)], **settings)
    with local(endpoint) as served:
        client = client_of(served)
        file = client.files.create(file=("in.jsonl", jsonl([line("a"), line("<b>b")])), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
        browser.get(f"{served}/#key={KEY}")
        WebDriverWait(browser, 10).until(lambda b: "validating" in shown(b, "batch_rows"))
        assert shown(browser, "batch_rows").split() == [batch.id, "validating", "0", "of", "0", "0", "0.00"]
        keep(browser, "batches")
        assert browser.execute_script("return document.documentElement.scrollWidth <= window.innerWidth")
        client.batches.cancel(batch.id)
        WebDriverWait(browser, 10).until(lambda b: "cancelling" in shown(b, "batch_rows"))
        browser.get("about:blank")
        browser.get(f"{served}/#key={OTHER_KEY}")
        WebDriverWait(browser, 10).until(lambda b: "context 2048" in shown(b, "model"))
        assert not browser.find_element(By.ID, "batches").is_displayed()
    endpoint.close()


TEMPLATE = """\
</s>{% for m in messages %}{{ m.role[0] }}:{{ m.content }}
{% endfor %}{% if add_generation_prompt %}a:{% endif %}"""


@pytest.mark.parametrize("size", SIZES)
def test_a_conversation(browser: Chrome, tmp_path: Path, size: str) -> None:
    """The demo model with a template: two turns, an error in between, a new conversation, and completions as before."""
    shutil.copytree(DEMO, tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text(TEMPLATE)
    offline = Offline(str(tmp_path / "model"))
    encode = offline.generator.tokenizer.encode_rendered
    endpoint = make_endpoint(offline.generator)
    with local(endpoint) as url:
        resize(browser, size)
        browser.get(url + "/")
        WebDriverWait(browser, 10).until(lambda b: b.find_element(By.ID, "mode_chat").is_displayed())
        assert shown(browser, "go") == "Send"
        assert not browser.find_element(By.ID, "answer").is_displayed()
        fill(browser, "max_tokens", "40")
        fill(browser, "system", "s")
        history, transcript = "</s>s:s\n", []
        for question in ("name[The Mill]", "food[Italian]"):
            fill(browser, "prompt", question + "\n")  # Enter sends
            wait_for_answer(browser)
            history += f"u:{question}\na:"
            answer = offline.text(offline(encode([history])[0], 40))
            history += answer + "\n"
            transcript += [question, answer]
            assert shown(browser, "error") == ""
            assert turns(browser) == transcript
            assert shown(browser, "tokens") != "–"
            fill(browser, "max_tokens", "9000")
            fill(browser, "prompt", "and then?")
            browser.execute_script("document.body.dataset.state = ''")
            browser.find_element(By.ID, "go").click()
            wait_for_answer(browser)
            assert "does not fit" in shown(browser, "error")
            assert turns(browser) == transcript
            assert browser.find_element(By.ID, "prompt").get_property("value") == "and then?"
            fill(browser, "max_tokens", "40")
            browser.execute_script("document.body.dataset.state = ''")
        keep(browser, f"conversation-{size}")
        assert browser.execute_script("return document.documentElement.scrollWidth <= window.innerWidth")
        browser.find_element(By.ID, "anew").click()
        assert turns(browser) == []
        browser.find_element(By.ID, "mode_text").click()
        fill(browser, "prompt", PROMPT)
        browser.find_element(By.ID, "go").click()
        assert wait_for_answer(browser) == offline.text(offline(PROMPT, 64))
        browser.get_log("browser")  # a 400 counts as an error
    endpoint.close()


def turns(browser: Chrome) -> list[str]:
    found = browser.execute_script("return [...document.querySelectorAll('.turn')].map(t => t.textContent)")
    return [str(text) for text in found]


def test_without_a_template_there_is_no_conversation(browser: Chrome, url: str) -> None:
    browser.get(url + "/")
    WebDriverWait(browser, 10).until(lambda b: "context 2048" in shown(b, "model"))
    assert not browser.find_element(By.ID, "modes").is_displayed()
    assert shown(browser, "go") == "Complete"
