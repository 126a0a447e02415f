"""The console in a real browser: what it shows of a mesh, while requests run and when a worker dies."""

from __future__ import annotations

import re
import shutil
import signal
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
import pytest_asyncio
from playwright.async_api import Browser, Page, async_playwright, expect

from engine_core.types.digest import tokenizer_digest
from tests.support.asking import Asker, random_prompt
from tests.support.fake_decode import FakeDecode, register, running_router, says
from tests.support.mesh import Mesh
from tests.support.models import tiny_model

pytestmark = pytest.mark.asyncio(loop_scope="module")

WORKERS = {"prefill-0": "PREFILL", "decode-0": "DECODE", "decode-1": "DECODE"}
POOL = 4096 // 16
WAIT = 30_000
"""Milliseconds for what must come true on a slow machine."""
expect.set_options(timeout=WAIT)
QUESTION = "tell me of the sea and the wind"


@dataclass
class Watched:
    """A page, and all that went wrong on it."""

    page: Page
    errors: list[str] = field(default_factory=list)
    elsewhere: list[str] = field(default_factory=list)

    def card(self, name: str) -> Any:
        """A worker's card."""
        return self.page.locator(f'.worker[data-instance="{name}"]')


@dataclass
class Setting:
    """A mesh of the module's own, and a browser."""

    mesh: Mesh
    asker: Asker
    browser: Browser

    @asynccontextmanager
    async def console(self, width: int = 1280, height: int = 900, **options: Any) -> AsyncIterator[Watched]:
        """The page, once it has drawn the workers. Fails on errors, and on any request to another place."""
        context = await self.browser.new_context(viewport={"width": width, "height": height}, **options)
        page = await context.new_page()
        page.set_default_timeout(WAIT)
        watched = Watched(page)
        page.on("console", lambda m: watched.errors.append(m.text) if m.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: watched.errors.append(str(error)))
        page.on("request", lambda r: None if r.url.startswith(self.mesh.url) else watched.elsewhere.append(r.url))
        try:
            await page.goto(f"{self.mesh.url}/console")
            await expect(watched.card("prefill-0")).to_be_visible(timeout=WAIT)
            yield watched
            assert (watched.errors, watched.elsewhere) == ([], [])
        finally:
            await context.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def setting() -> AsyncIterator[Setting]:
    chromium = shutil.which("chromium")
    assert chromium, "these tests need Debian's package chromium: `make test` installs it"
    options = {"kv_tokens": 4096, "lease_ttl": 2.0, "lease_renewal": 0.5}
    async with (
        Mesh(tiny_model("llama"), prefill=1, decode=2, options=options) as mesh,
        Asker(mesh) as asker,
        async_playwright() as play,
    ):
        browser = await play.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        yield Setting(mesh, asker, browser)
        await browser.close()


async def test_the_page_shows_the_mesh_and_asks_nobody_else(setting: Setting) -> None:
    await setting.asker.generate(random_prompt(80, 1), max_tokens=4)
    await setting.mesh.quiet()
    async with setting.console() as console:
        page = console.page
        await expect(page.locator(".worker")).to_have_count(3)
        for name, role in WORKERS.items():
            card = console.card(name)
            await expect(card).to_have_attribute("data-role", role)
            await expect(card.locator(".pill")).to_have_text("READY")
            kv = (await setting.mesh.rank(name))["kv"]
            words = [f"{kv[state]} {state}" for state in ("used", "cached", "free") if state != "cached" or kv[state]]
            await expect(card.locator(".blocks")).to_have_text(f"{' · '.join(words)} of {POOL}")
        await expect(page.locator("#links li")).to_have_count(2)
        await expect(page.locator(".wire[data-link]")).to_have_count(2)
        await expect(page.locator("#facts")).to_contain_text("3/3 workers ready")
        await expect(page.locator("#facts")).to_contain_text("1/1 bootstrap")
        await expect(page.locator("#chat-model option")).to_have_text([tiny_model("llama").name])
        for canvas in await page.locator("canvas").all():  # something is drawn on each
            assert await canvas.evaluate(
                "c => c.getContext('2d').getImageData(0, 0, c.width, c.height).data.some(v => v)"
            )


async def test_a_request_is_in_the_list_and_in_the_picture_while_it_lives(setting: Setting) -> None:
    await setting.mesh.kill_engine("prefill-0", signal.SIGSTOP)
    try:
        asking = setting.asker.start(random_prompt(60, 2), max_tokens=4)
        async with setting.console() as console:
            row = console.page.locator("#requests tbody tr", has_text=asking.request_id)
            await expect(row).to_be_visible()
            await expect(row.locator(".stage")).to_contain_text("prefill")
            dot = console.card("prefill-0").locator(".dot")
            await expect(dot).to_have_count(1)
            assert asking.request_id in str(await dot.get_attribute("title"))
            await expect(row).to_have_class("slow")  # after five seconds without token 1
            await expect(console.page.locator("#slow-hint")).to_contain_text("1 slow")

            await setting.mesh.kill_engine("prefill-0", signal.SIGCONT)
            answer = await asking.whole()
            assert answer.ok
            await expect(row).to_have_count(0)
            await expect(dot).to_have_count(0)
            await console.page.click('[data-which="recent"]')
            await expect(row.locator("td").nth(4)).to_have_text("4")
            await row.locator("button").click()
            detail = console.page.locator("#detail")
            await expect(detail.locator(".waterfall .name")).to_contain_text(
                ["prefill compute", "KV transfer", "decode"]
            )
            await expect(detail.locator(".moves tbody tr").last).to_contain_text("FINISHED")
            await console.page.keyboard.press("Escape")
            await expect(detail).to_be_hidden()
    finally:
        await setting.mesh.kill_engine("prefill-0", signal.SIGCONT)


async def test_a_chat_streams_what_the_api_gives_and_says_where_its_time_went(setting: Setting) -> None:
    body = {"model": "default", "messages": [{"role": "user", "content": QUESTION}], "temperature": 0, "max_tokens": 24}
    async with httpx.AsyncClient(timeout=60.0, trust_env=False) as client:
        answer = (await client.post(f"{setting.mesh.base_url}/chat/completions", json=body)).json()
    async with setting.console() as console:
        page = console.page
        await page.fill("#chat-temperature", "0")
        await page.fill("#chat-max", "24")
        await page.fill("#chat-text", QUESTION)
        await page.keyboard.press("Enter")
        bubble = page.locator(".bubble.assistant")
        await expect(bubble).to_have_attribute("data-end", answer["choices"][0]["finish_reason"])
        assert await bubble.locator(".text").text_content() == answer["choices"][0]["message"]["content"]
        await expect(bubble.locator(".waterfall .name")).to_contain_text(["prefill compute", "decode"])
        await expect(bubble.locator(".axis")).to_contain_text("token 1 after")
        await expect(bubble.locator(".figures")).to_contain_text(f"{answer['usage']['completion_tokens']} out")
        await page.fill("#chat-max", "0")  # what is wrong is said in the router's words
        await page.fill("#chat-text", QUESTION)
        await page.locator("#chat-max").evaluate("input => input.removeAttribute('min')")
        await page.click("#chat-send")
        await expect(page.locator(".bubble.assistant .bad")).to_contain_text("max_tokens")
        console.errors = [e for e in console.errors if "400" not in e]  # the browser notes the refusal


async def test_stop_ends_a_chat_at_the_workers_too(setting: Setting) -> None:
    async with setting.console() as console:
        page = console.page
        await setting.mesh.kill_engine("prefill-0", signal.SIGSTOP)
        try:
            await page.fill("#chat-text", f"{QUESTION} {uuid.uuid4()}")
            await page.click("#chat-send")
            await page.click("#chat-stop")
            await expect(page.locator(".bubble.assistant")).to_have_attribute("data-end", "stopped")
            await expect(page.locator("#chat-send")).to_be_visible()
        finally:
            await setting.mesh.kill_engine("prefill-0", signal.SIGCONT)
        await expect(page.locator("#requests tbody .none")).to_be_visible()
    await setting.mesh.quiet()


@pytest.mark.parametrize(("width", "height"), [(390, 844), (1280, 800), (1920, 1080)])
async def test_nothing_is_wider_than_the_screen(setting: Setting, width: int, height: int) -> None:
    async with setting.console(width, height, has_touch=width < 500) as console:
        page = console.page
        await expect(page.locator("#requests thead th").first).to_be_visible()
        assert await page.evaluate("document.documentElement.scrollWidth") <= width
        wide = await page.evaluate(
            "w => [...document.querySelectorAll('.panel, .tile, .card, header')]"
            ".filter(e => e.getBoundingClientRect().right > w + 0.5).map(e => e.className)",
            width,
        )
        assert wide == []
        await expect(page.locator("#wires")).to_be_visible(visible=width > 640)


async def test_both_themes_can_be_had(setting: Setting) -> None:
    async with setting.console(color_scheme="dark") as console:
        page = console.page
        background = "getComputedStyle(document.body).backgroundColor"
        dark = await page.evaluate(background)
        await page.click("#theme")
        await page.click("#theme")
        await expect(page.locator("html")).to_have_attribute("data-theme", "light")
        assert await page.evaluate(background) != dark
        await page.reload()
        await expect(page.locator("html")).to_have_attribute("data-theme", "light")


async def test_a_chat_needs_the_key_and_shows_thoughts_apart(setting: Setting) -> None:
    """Without a key, with what can be none, with a wrong one and with the right one; it is in no address."""
    fake = FakeDecode(says([]))
    async with running_router(tiny_model("llama"), fake, api_key=("sk-1",), reasoning_parser="deepseek_r1") as router:
        fake.script = says(router.ids("<think>so it is</think>well then"))
        page = await setting.browser.new_page()
        page.set_default_timeout(WAIT)
        sent: list[tuple[str, str | None]] = []
        errors: list[str] = []
        page.on("request", lambda r: sent.append((r.url, r.headers.get("authorization"))))
        page.on("console", lambda m: errors.append(m.text) if m.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: errors.append(str(error)))
        answers, banner = page.locator(".bubble.assistant"), page.locator("#banner")

        async def ask() -> None:
            await page.fill("#chat-text", QUESTION)
            await page.click("#chat-send")
            await expect(answers.last).to_have_attribute("data-end", re.compile("."))

        await page.goto(f"{router.url}/console")
        await expect(page.locator("#key-dialog")).to_be_visible()
        await expect(banner).to_have_text("The router wants an API key: give one under Key.")
        await page.fill("#key", "ключ")
        await page.click("#key-form button")
        assert await page.locator("#key").evaluate("input => input.validity.patternMismatch")
        await page.fill("#key", "sk-2")
        await page.click("#key-form button")
        await expect(page.locator("#key-dialog")).to_be_hidden()
        wrong = "The router does not take this API key: give another one under Key."
        await expect(banner).to_have_text(wrong)
        await ask()
        await expect(answers.last).to_have_attribute("data-end", "failed")
        await expect(answers.last.locator(".bad")).to_have_text(wrong)
        assert not fake.requests

        await page.click("#key-open")
        await page.fill("#key", " sk-1 ")
        await page.keyboard.press("Enter")
        await expect(banner).to_be_hidden()
        await expect(page.locator(".worker")).to_have_count(2)
        await ask()
        await expect(answers.last).to_have_attribute("data-end", "stop")
        await expect(answers.last.locator(".text")).to_have_text("well then")
        await expect(answers.last.locator(".thoughts")).to_have_text("so it is")
        await page.reload()
        await expect(page.locator(".worker")).to_have_count(2)  # the tab has it
        assert await page.evaluate("[Object.keys(localStorage).length, document.cookie, location.href]") == [
            0, "", f"{router.url}/console/",
        ]  # fmt: skip
        assert [e for e in errors if "401" not in e] == []
        assert {key for _, key in sent} == {None, "Bearer sk-2", "Bearer sk-1"}
        assert not [url for url, _ in sent if "sk-" in url]
        await page.close()


async def test_the_key_is_sent_and_kept_in_the_tab(setting: Setting) -> None:
    async with setting.console() as console:
        page = console.page
        await page.click("#key-open")
        await page.fill("#key", "secret-1")
        await page.click("#key-form button")
        async with page.expect_request(lambda r: r.headers.get("authorization") == "Bearer secret-1") as found:
            pass
        assert "/console/api/mesh" in (await found.value).url
        assert await page.evaluate("JSON.stringify(localStorage)") == "{}"


async def test_names_from_the_wire_are_text(setting: Setting) -> None:
    name = '<img src=x onerror="window.owned=1"><script>window.owned=1</script>\'&amp;'
    evil = FakeDecode(says([]), name=name, parts={"dtype": "other"})
    await register(setting.mesh.bootstrap, evil, tokenizer_digest(tiny_model("llama")))
    async with setting.console() as console:
        page = console.page
        await expect(page.locator(".worker")).to_have_count(4)
        await expect(page.locator(".worker header b").get_by_text(name, exact=True)).to_be_visible()
        assert await page.locator("main img, main script").count() == 0
        assert await page.evaluate("window.owned") is None


@pytest.mark.slow
async def test_the_page_outlives_its_router(setting: Setting) -> None:
    async with setting.console() as console:
        page = console.page
        setting.mesh.kill("router")
        await setting.mesh.gone("router")
        await expect(page.locator("#banner")).to_contain_text("The router does not answer")
        await setting.mesh.start("router")
        await setting.mesh.until_ready()
        await expect(page.locator("#banner")).to_be_hidden()
        await expect(page.locator("body")).to_have_attribute("data-connected", "true")
        console.errors.clear()  # of the connections that were refused


async def test_a_killed_worker_is_shown_lost(setting: Setting) -> None:
    async with setting.console() as console:
        card = console.card("decode-1")
        await expect(card.locator(".pill")).to_have_text("READY")
        setting.mesh.kill("decode-1")
        await setting.mesh.gone("decode-1")
        await expect(card).to_contain_text("no answer for")
        await expect(card.locator(".pill")).to_have_text("LOST")
        await expect(console.page.locator("#facts .warn")).to_contain_text("workers ready")
