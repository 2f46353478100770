"""/debug/routing in a real browser, before a router that answers requests meanwhile."""

import asyncio
import json
import re
import shutil
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any
from urllib.parse import parse_qs, urlsplit

import aiohttp
import pytest
from playwright.async_api import Locator, Page, Route, async_playwright, expect
from tests.router.split_engines import Split

pytestmark = pytest.mark.anyio
PROMPT = "the secret prompt " * 50
KEY = "sk-the-secret-key"


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """One for all tests, where tools find it: it takes longer to start than a test does."""
    program = shutil.which("chromium")
    assert program is not None, "there is no chromium on PATH: run tests/browser/install"
    profile = tmp_path_factory.mktemp("chromium")
    # Its sandbox refuses to work for root, whom tests in containers mostly run as.
    command = [program, "--headless", "--no-sandbox", "--remote-debugging-port=0", f"--user-data-dir={profile}"]
    address = profile / "DevToolsActivePort"
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + 60
        while not address.exists() or not address.read_text().count("\n"):
            assert process.poll() is None, "chromium ended before it could be asked"
            assert time.monotonic() < deadline, "chromium cannot be asked within a minute"
            time.sleep(0.02)
        yield f"http://127.0.0.1:{address.read_text().split()[0]}"
        process.terminate()


@pytest.fixture
async def page(chromium: str, exit_stack: Any) -> AsyncIterator[Page]:
    """An empty tab, closed before the routers on the stack; whatever its console complains about fails the test."""
    complaints: list[str] = []
    async with async_playwright() as playwright:
        browser = await playwright.chromium.connect_over_cdp(chromium)
        context = await browser.new_context()
        page = await context.new_page()
        page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        yield page
        await context.close()
    assert complaints == []


async def opened(page: Page, router: Any) -> None:
    await page.goto(router.admin_url + "/debug/routing")
    await expect(page.get_by_role("status")).to_have_text("Live")


async def ask(client: aiohttp.ClientSession, router: Any, request_id: str) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": PROMPT}]}
    headers = {"x-request-id": request_id, "authorization": f"Bearer {KEY}"}
    async with client.post(router.url + "/v1/chat/completions", json=body, headers=headers) as response:
        assert response.status == 200
        await response.read()


def decision_about(page: Page, request_id: str) -> Locator:
    return page.locator(".decisions > tbody", has_text=request_id)


async def test_a_decision_shows_up_live_with_what_each_replica_would_have_cost(
    page: Page, start_router: Any, engines: Any, client: Any
) -> None:
    router = await start_router(*engines)
    await opened(page, router)
    await ask(client, router, "asked-meanwhile")
    decision = decision_about(page, "asked-meanwhile")
    await decision.get_by_role("button").click()
    costs = decision.locator(".costs tbody tr")
    await expect(costs).to_have_count(2)
    await expect(costs.first.locator("td").last).to_have_text(await decision.get_by_role("button").inner_text())
    await expect(decision.locator(".chosen")).to_have_count(1)


async def test_an_opened_decision_stays_open_and_focused_when_others_follow(
    page: Page, start_router: Any, engines: Any, client: Any
) -> None:
    router = await start_router(*engines)
    await opened(page, router)
    await ask(client, router, "the-first")
    button = decision_about(page, "the-first").get_by_role("button")
    await button.click()
    await ask(client, router, "the-second")
    await expect(page.locator(".decisions > tbody").first).to_contain_text("the-second")
    await expect(button).to_be_focused()
    await expect(decision_about(page, "the-first").locator(".costs")).to_be_visible()


async def test_a_replicas_state_is_shown_as_it_changes(page: Page, start_router: Any, engines: Any) -> None:
    router = await start_router(*engines)
    await opened(page, router)
    state = page.locator(".replicas tbody tr", has_text=engines[0].url).locator("td").first
    await expect(state).to_have_text("ready")
    engines[0].is_ready = False
    await expect(state).to_have_text("not ready")


async def test_a_replicas_load_and_cache_share_are_shown_in_their_columns(
    page: Page, start_router: Any, engines: Any
) -> None:
    shown = {
        "In flight": "3 of 16", "Prefill tokens ahead": "1,234", "Resident tokens": "5,678",
        "Prefill tokens/s": "900", "KV in use": "25 %", "Cache share": "75 %",
    }  # fmt: skip
    replica = {
        "url": "http://one", "state": "ready", "role": "both", "revision": "", "num_in_flight": 3, "max_in_flight": 16,
        "prefill_tokens": 1234, "resident_tokens": 5678, "prefill_tokens_per_second": 900.4, "kv_usage": 0.25,
        "cache_share": 0.75,
    }  # fmt: skip

    async def answer(route: Route) -> None:
        service = {"name": "a", "policy": "RoundRobin", "num_waiting": 0, "replicas": [replica], "decisions": []}
        await route.fulfill(json={"time": 0, "names": ["a"], "services": [service]})

    await page.route("**/routing.json*", answer)
    await opened(page, await start_router(*engines))
    titles = await page.locator(".replicas thead th").all_inner_texts()
    cells = page.locator(".replicas tbody tr").locator("th, td")
    for title, text in shown.items():
        await expect(cells.nth(titles.index(title))).to_have_text(text)
    for title, share in {"KV in use": 0.25, "Cache share": 0.75}.items():
        meter = page.get_by_role("meter", name=f"{title} of http://one")
        await expect(meter).to_have_js_property("value", share)


async def test_a_request_counts_in_flight_and_in_the_cache_where_it_was_sent(
    page: Page, start_router: Any, engine: Any, client: Any
) -> None:
    engine.gate.clear()
    router = await start_router(engine)
    await opened(page, router)
    asked = asyncio.create_task(ask(client, router, "held"))
    titles = await page.locator(".replicas thead th").all_inner_texts()
    cells = page.locator(".replicas tbody tr").locator("th, td")
    in_flight = cells.nth(titles.index("In flight"))
    await expect(in_flight).to_have_text(re.compile("^1 of "))
    await expect(cells.nth(titles.index("Cache share"))).to_have_text("100 %")
    engine.gate.set()
    await asked
    await expect(in_flight).to_have_text(re.compile("^0 of "))


async def test_a_paused_page_stands_still(page: Page, start_router: Any, engines: Any, client: Any) -> None:
    router = await start_router(*engines)
    await opened(page, router)
    await page.get_by_role("button", name="Pause").click()
    await expect(page.get_by_role("status")).to_have_text("Paused")
    await ask(client, router, "asked-meanwhile")
    await page.wait_for_timeout(1500)  # longer than it waits between two looks
    await expect(decision_about(page, "asked-meanwhile")).to_have_count(0)
    await page.get_by_role("button", name="Pause").click()
    await expect(decision_about(page, "asked-meanwhile")).to_have_count(1)


async def test_names_are_shown_as_text(page: Page, start_router: Any, engines: Any, client: Any) -> None:
    router = await start_router(*engines)
    await opened(page, router)
    await ask(client, router, "<img src=x>")
    await expect(decision_about(page, "<img src=x>")).to_have_count(1)
    await expect(page.locator("img")).to_have_count(0)


async def test_a_gateways_services_are_shown_one_at_a_time(page: Page, start_router: Any, engines: Any) -> None:
    async def answer(route: Route) -> None:
        [name] = parse_qs(urlsplit(route.request.url).query).get("service", ["team/a"])
        service = {"name": name, "policy": "RoundRobin", "num_waiting": 0, "replicas": [], "decisions": []}
        await route.fulfill(json={"time": 0, "names": ["team/a", "team/b"], "services": [service]})

    await page.route("**/routing.json*", answer)
    await opened(page, await start_router(*engines))
    heading = page.get_by_role("heading", level=2)
    await expect(heading).to_have_text("team/a")
    await page.get_by_label("Service").select_option("team/b")
    await expect(heading).to_have_text("team/b")


async def test_json_holds_costs_and_no_secrets(start_router: Any, engines: Any, client: Any) -> None:
    router = await start_router(*engines)
    await ask(client, router, "one")
    async with client.get(router.admin_url + "/debug/routing.json") as response:
        text = await response.text()
    assert "secret" not in text
    [service] = json.loads(text)["services"]
    [decision] = service["decisions"]
    assert {cost["url"] for cost in decision["costs"]} == {engine.url for engine in engines}
    assert min(cost["cost_seconds"] for cost in decision["costs"]) == pytest.approx(decision["cost_seconds"])
    assert sum(replica["cache_share"] for replica in service["replicas"]) == pytest.approx(1.0)


async def test_nothing_is_loaded_from_elsewhere_nor_allowed_to_be(
    page: Page, start_router: Any, engines: Any, client: Any
) -> None:
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    router = await start_router(*engines)
    await opened(page, router)
    assert all(url.startswith((router.admin_url, "data:")) for url in asked)
    async with client.get(router.admin_url + "/debug/routing") as response:
        assert response.headers["content-security-policy"].startswith("default-src 'none'; ")


async def test_a_decision_shows_who_prefills_and_what_other_pairs_would_have_cost(
    page: Page, start_router: Any, exit_stack: Any, client: Any
) -> None:
    split = Split(start_router, exit_stack)
    router = await split.start(num_prefills=2)
    await opened(page, router)
    await ask(client, router, "split")
    decision = decision_about(page, "split")
    await expect(decision).to_contain_text(min(engine.url for engine in split.prefills))
    await decision.get_by_role("button").click()
    costs = decision.locator(".costs tbody tr")
    await expect(costs).to_have_count(2)
    await expect(decision.locator(".chosen")).to_have_count(1)
    await expect(decision.locator(".costs thead")).to_contain_text("kv transfer")
