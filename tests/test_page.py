"""The page at ``/``: as a document, and in headless Chromium against a server in this process.

The customers are scripted: one engine answers steered requests, another the unsteered ones.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient
from pages import Document
from playwright.sync_api import Browser, Locator, Page, Request, Route, expect, sync_playwright
from samples import random_basis
from scripted import Script, ScriptedEngine
from serving import serving
from tiny import tiny_model
from traitbasis.server import Settings, create_app

from traitbasis.basis import Basis
from traitbasis.engines.base import EngineStats, Listener, Ticket
from traitbasis.engines.base import Request as EngineRequest
from traitbasis.errors import EngineBusyError
from traitbasis.guards import GUARDS, Guard
from traitbasis.model import LanguageModel
from traitbasis.simulator import UserSimulator

HOSTILE = "<img src=x onerror=\"window.hacked = 1\"><script>window.hacked = 1</script><b>bold</b> & 'quoted'"
expect.set_options(timeout=20_000)  # two cores, and other tests on them


class TwoEngines:
    """Steered requests go to one engine, the others to another, whichever comes first."""

    def __init__(self, steered: ScriptedEngine, unsteered: ScriptedEngine) -> None:
        self.steered, self.unsteered = steered, unsteered

    def submit(self, request: EngineRequest, listener: Listener, *, again: bool = False) -> Ticket:
        return (self.steered if request.additions else self.unsteered).submit(request, listener)

    def stats(self) -> EngineStats:
        return EngineStats(max_batch=2, max_queue=2, max_context=None)

    def close(self) -> None:
        self.steered.close()
        self.unsteered.close()


@pytest.fixture(scope="module")
def lm() -> LanguageModel:
    return tiny_model()


@pytest.fixture(scope="module")
def basis(lm: LanguageModel) -> Basis:
    return random_basis(lm, "impatience", "skeptical")


Scripts = Script | str | Exception | list[Script | str | Exception]
Serve = Callable[..., Any]


@dataclass
class Customers:
    """A server whose customers say what is written for them."""

    url: str
    steered: ScriptedEngine
    unsteered: ScriptedEngine


@pytest.fixture
def customers(lm: LanguageModel, basis: Basis) -> Serve:
    """Serve two scripted customers, without guards unless asked."""

    @contextmanager
    def serve(
        steered: Scripts = "Where is it?", unsteered: Scripts = "No hurry.", guards: tuple[Guard, ...] = ()
    ) -> Iterator[Customers]:
        engines = TwoEngines(*(ScriptedEngine(*(s if isinstance(s, list) else [s])) for s in (steered, unsteered)))
        with (
            UserSimulator(lm, basis, engine=engines, guards=guards) as simulator,
            serving(create_app(simulator)) as url,
        ):
            yield Customers(url, engines.steered, engines.unsteered)

    return serve


# ---- Without a browser


@pytest.fixture(scope="module")
def response(lm: LanguageModel, basis: Basis) -> httpx.Response:
    with UserSimulator(lm, basis, engine=ScriptedEngine("Hello.")) as simulator:
        return TestClient(create_app(simulator)).get("/")


def test_the_page_is_one_document_with_nothing_from_elsewhere(response: httpx.Response) -> None:
    assert response.status_code == 200 and response.headers["content-type"] == "text/html; charset=utf-8"
    assert not re.search(r"https?://", response.text)
    document = Document(response.text)
    assert not re.search(r"@import|url\(", document.inline["style"][0])
    for tag, name, value in document.attributes:
        assert name != "src", tag
        assert name != "href" or value.startswith(("#", "data:image/")), value
        assert name != "style" and not name.startswith("on"), f"{name} of {tag}: the policy would refuse it"


def test_the_policy_allows_the_pages_own_script_and_style_and_nothing_else(response: httpx.Response) -> None:
    policy = dict(part.strip().split(" ", 1) for part in response.headers["content-security-policy"].split(";"))
    for tag, texts in Document(response.text).inline.items():
        (text,) = texts
        assert policy[f"{tag}-src"] == f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
    assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'"
    assert policy["connect-src"] == "'self'"
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["referrer-policy"] == "no-referrer"


def test_the_page_is_no_part_of_the_api(lm: LanguageModel, basis: Basis) -> None:
    with UserSimulator(lm, basis, engine=ScriptedEngine("Hello.")) as simulator:
        client = TestClient(create_app(simulator))
        assert "/" not in client.get("/openapi.json").json()["paths"]
        head = client.head("/")
    assert head.status_code == 200 and not head.content  # what load balancers ask


def test_the_page_needs_no_key_and_what_it_asks_for_does(lm: LanguageModel, basis: Basis) -> None:
    with UserSimulator(lm, basis, engine=ScriptedEngine("Hello.")) as simulator:
        client = TestClient(create_app(simulator, settings=Settings(api_keys=("open-sesame",))))
        assert client.get("/").status_code == client.get("/health").status_code == 200
        assert client.get("/v1/models").status_code == 401


# ---- In a browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Debian's Chromium. CI must have it; elsewhere its absence skips these tests."""
    names = ("chromium", "chromium-browser", "google-chrome")
    path = next(filter(None, map(shutil.which, names)), None)
    if path is None and os.environ.get("CI"):
        pytest.fail(f"the tests of the page need one of {', '.join(names)}")
    if path is None:
        pytest.skip(f"none of {', '.join(names)} is installed; Debian's package chromium is what CI uses")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path)
        yield browser
        browser.close()


@dataclass
class Visit:
    """An open page, with what it sent and what it complained of."""

    page: Page
    problems: list[str] = field(default_factory=list)
    urls: list[str] = field(default_factory=list)
    asked: list[dict[str, Any]] = field(default_factory=list)

    def send(self, text: str, writes: bool = False) -> None:
        """Send a message as the agent, and wait for both replies unless they stay open."""
        self.page.get_by_label("Your message, as the agent").fill(text)
        self.page.get_by_role("button", name="Send").click()
        if not writes:
            expect(self.page.get_by_role("button", name="Send")).to_be_enabled()

    def reply(self, side: str, turn: int = 1) -> Locator:
        return self.page.get_by_role("article", name=f"{side} customer, turn {turn}", exact=True)

    def request(self, side: str) -> dict[str, Any]:
        """What was asked last for a side; the unsteered is the one without traits."""
        return [body for body in self.asked if bool(body["traits"]) is (side == "steered")][-1]

    def facts(self, side: str, turn: int = 1) -> dict[str, str]:
        return dict(line.split("\n") for line in self.reply(side, turn).locator("dl > div").all_inner_texts())


@pytest.fixture
def visit(browser: Browser) -> Iterator[Callable[..., Visit]]:
    """Open the page; afterwards nothing may have gone to another server."""
    opened: list[tuple[str, Visit]] = []

    def open_page(url: str, width: int = 1280, routes: dict[str, Callable[[Route], None]] | None = None) -> Visit:
        context = browser.new_context(viewport={"width": width, "height": 800})
        context.grant_permissions(["clipboard-read", "clipboard-write"])
        page = context.new_page()
        found = Visit(page)

        def note(request: Request) -> None:
            found.urls.append(request.url)
            if request.method == "POST":
                found.asked.append(json.loads(request.post_data or ""))

        page.on("request", note)
        page.on("console", lambda m: found.problems.append(m.text) if m.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: found.problems.append(str(error)))
        for pattern, answer in (routes or {}).items():
            page.route(pattern, answer)
        opened.append((url, found))
        page.goto(url)
        return found

    yield open_page
    for url, found in opened:
        found.page.context.close()
        assert not [u for u in found.urls if not u.startswith((url, "data:", "blob:"))]


def answer(status: int, body: Any, **headers: str) -> Callable[[Route], None]:
    """A route that answers in the server's place."""
    text = body if isinstance(body, str) else json.dumps(body)
    return lambda route: route.fulfill(status=status, body=text, headers=headers)


def refused(status: int, message: str, **headers: str) -> Callable[[Route], None]:
    return answer(status, {"error": {"message": message, "type": "x", "param": None, "code": None}}, **headers)


def test_the_page_loads_without_a_complaint_and_asks_only_its_server(
    customers: Serve, visit: Callable[..., Visit]
) -> None:
    with customers() as server:
        seen = visit(server.url)
        expect(seen.page.get_by_role("slider")).to_have_count(2)
        expect(seen.page.get_by_role("slider", name="impatience")).to_have_value("1")
        assert seen.page.get_by_label("Served user").locator("option").all_inner_texts() == ["steered-user"]
        seen.send("Hi!")
        expect(seen.reply("steered")).to_contain_text("Where is it?")
        assert seen.problems == []


def test_two_customers_stand_side_by_side_and_each_goes_on_from_its_own_replies(
    customers: Serve, visit: Callable[..., Visit]
) -> None:
    with customers(["Now!", "Still waiting."], ["Thanks.", "Fine."]) as server:
        seen = visit(server.url)
        seen.send("Hi! How can I help?")
        seen.send("Which order?")
        for side, said in {"steered": ["Now!", "Still waiting."], "unsteered": ["Thanks.", "Fine."]}.items():
            for turn, text in enumerate(said, 1):
                expect(seen.reply(side, turn).locator(".said")).to_have_text(text)
            system, *spoken = seen.request(side)["messages"]
            assert system["role"] == "system" and "#W4417" in system["content"]
            assert [(m["role"], m["content"]) for m in spoken] == [
                ("user", "Hi! How can I help?"),
                ("assistant", said[0]),
                ("user", "Which order?"),
            ]
        left, right = (seen.reply(side).bounding_box() for side in ("steered", "unsteered"))
        assert left and right and left["y"] == right["y"] and left["x"] + left["width"] < right["x"]


def test_sliders_and_fields_decide_what_is_sent(customers: Serve, visit: Callable[..., Visit]) -> None:
    with customers() as server:
        seen = visit(server.url)
        slider, other = (seen.page.get_by_role("slider", name=name) for name in ("impatience", "skeptical"))
        slider.fill("1.5")
        other.fill("-0.7")
        seen.page.get_by_label("What both customers are told").fill("Your name is Ada.")
        seen.page.get_by_label("Seed").fill("11")
        seen.page.get_by_label("Temperature").fill("0.25")
        seen.send("Hi!")
        assert seen.request("steered") == {
            "model": "steered-user",
            "messages": [{"role": "system", "content": "Your name is Ada."}, {"role": "user", "content": "Hi!"}],
            "traits": {"impatience": "high", "skeptical": -0.7},
            "temperature": 0.25,
            "seed": 11,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        assert seen.request("unsteered") == seen.request("steered") | {"traits": {}}
        assert server.steered.requests[0].sampling.temperature == 0.25

        other.press("Home")  # the keyboard reaches the opposite pole
        expect(other).to_have_attribute("aria-valuetext", "opposite, minus 2")
        seen.page.locator(".trait", has_text="impatience").get_by_text("low").click()
        seen.send("And now?")
        assert seen.request("steered")["traits"] == {"impatience": "low", "skeptical": -2}

        seen.page.get_by_role("button", name="All off").click()
        before = len(seen.asked)
        seen.send("And off?")
        assert [body["traits"] for body in seen.asked[before:]] == [{}, {}]


def test_a_calibrated_trait_has_its_own_levels_and_can_be_forced(customers: Serve, visit: Callable[..., Visit]) -> None:
    def detail(low: float, high: float, **more: Any) -> dict[str, Any]:
        levels = {"low": {"intensity": low}, "medium": {"intensity": 1.0}, "high": {"intensity": high}}
        return {"levels": levels, "limit": 0.4, "steerable": True, **more}

    details = {"impatience": detail(0.32, 1.37), "skeptical": detail(0.01, 3.6, steerable=False)}
    answered = answer(200, {"traits": list(details), "details": details})
    with customers() as server:
        seen = visit(server.url, routes={"**/traits": answered})
        page = seen.page
        slider, other = (page.get_by_role("slider", name=name) for name in details)
        expect(page.locator(".trait", has_text="skeptical")).to_contain_text("not steerable")
        expect(page.locator(".trait", has_text="impatience")).not_to_contain_text("not steerable")
        expect(slider).to_have_value("1")
        expect(other).to_have_attribute("aria-valuetext", "off")
        page.locator(".trait", has_text="impatience").get_by_text("high").click()
        expect(slider).to_have_attribute("aria-valuetext", "high, 1.37")
        other.press("End")  # beyond the usual reach, since "high" is
        expect(other).to_have_attribute("aria-valuetext", "4")
        seen.send("Hi!")
        assert seen.request("steered")["traits"] == {"impatience": "high", "skeptical": 4}
        assert "force" not in seen.request("steered")

        slider.fill("0.3")
        expect(slider).to_have_attribute("aria-valuetext", "low, 0.32")
        page.get_by_label("beyond its limit").check()
        seen.send("And now?")
        assert seen.request("steered")["traits"] == {"impatience": "low", "skeptical": 4}
        assert seen.request("steered")["force"] is True and "force" not in seen.request("unsteered")
        page.get_by_role("button", name="Copy as Python").click()
        expect(page.locator("#told")).to_contain_text("Copied")
        assert '"force": True' in page.evaluate("navigator.clipboard.readText()")
        assert seen.problems == []


def test_choosing_a_served_user_moves_the_sliders_to_its_traits(customers: Serve, visit: Callable[..., Visit]) -> None:
    about = {"traits": {"skeptical": 1.5}, "persona": {"age": 34, "work": "nurse"}, "sampling": {"temperature": 0.8}}
    models = [{"id": "steered-user"}, {"id": "steered-user@impatience-medium"}, {"id": "anna", "traitbasis": about}]
    with customers() as server:
        seen = visit(server.url, routes={"**/v1/models": answer(200, {"data": models})})
        page = seen.page
        expect(page.get_by_role("slider", name="impatience")).to_have_value("1")
        choice = page.get_by_label("Served user")
        assert choice.locator("option").all_inner_texts() == ["steered-user", "anna"]
        choice.select_option("anna")
        expect(page.get_by_role("slider", name="skeptical")).to_have_value("1.5")
        expect(page.get_by_role("slider", name="impatience")).to_have_value("0")
        expect(choice).to_have_accessible_description("age 34; work nurse")
        expect(page.get_by_label("Temperature")).to_have_attribute("placeholder", "0.8")
        seen.send("Hi!")
        assert (seen.request("steered")["model"], seen.request("steered")["traits"]) == ("anna", {"skeptical": "high"})
        assert (seen.request("unsteered")["model"], seen.request("unsteered")["traits"]) == ("anna", {})


def test_what_was_left_out_of_a_conversation_is_shown(customers: Serve, visit: Callable[..., Visit]) -> None:
    made = {"dose": 0.1, "tries": 1, "seed": 7, "rejected": {}, "dropped": {"agent": 3}, "plain": "judge prompt of x"}
    end = {"choices": [{"delta": {}, "finish_reason": "stop"}], "traitbasis": made}
    with customers() as server:
        seen = visit(server.url, routes={"**/v1/chat/*": answer(200, f"data: {json.dumps(end)}\n\ndata: [DONE]\n\n")})
        seen.send("Hi!")
        facts = seen.facts("steered")
        assert facts["left out for want of room"] == "agent ×3"
        assert facts["not as a customer"] == "judge prompt of x"


def test_dose_tries_rejects_seed_and_tokens_stand_under_each_turn(
    customers: Serve, visit: Callable[..., Visit], basis: Basis
) -> None:
    seed = 2**63 - 1  # more than a JavaScript number holds exactly
    with customers(["  ", Script(["Where ", "is it?"])], guards=GUARDS) as server:
        seen = visit(server.url)
        seen.page.get_by_label("Seed").fill(str(seed))
        seen.send("Hi!")
        steered, unsteered = seen.facts("steered"), seen.facts("unsteered")
        prompt = len(server.steered.requests[0].prompt_ids)
        assert steered == {
            "dose": f"{basis.dose({'impatience': 1.0}):.2f}",
            "tries": "2",
            "rejected": "empty ×1",
            "seed": str(seed),
            "tokens": f"2 (prompt {prompt})",
        }
        assert unsteered == steered | {
            "dose": "0.00",
            "tries": "1",
            "rejected": "none",
            "tokens": f"1 (prompt {prompt})",
        }
        assert seen.asked[0]["seed"] == seed
        expect(seen.reply("steered").locator(".mark")).to_be_hidden()


def test_a_turn_that_no_try_got_past_the_guards_is_marked_and_so_is_one_cut_off(
    customers: Serve, visit: Callable[..., Visit]
) -> None:
    with customers("no no " * 50, Script(["It came"], finish="length"), guards=GUARDS) as server:
        seen = visit(server.url)
        seen.send("Hi!")
        made = json.loads(seen.reply("steered").locator("pre").text_content() or "")
        assert made["failed_guard"]
        expect(seen.reply("steered").locator(".mark")).to_contain_text(f"“{made['failed_guard']}”")
        expect(seen.reply("steered").locator(".mark")).to_contain_text(f"{made['tries']} tries")
        assert "cut off" in seen.facts("unsteered")
        expect(seen.reply("unsteered").locator(".mark")).to_be_hidden()


def test_stop_ends_both_and_the_conversation_goes_on(customers: Serve, visit: Callable[..., Visit]) -> None:
    waiting = Script(["I ", "am "], waits=True)
    with customers([waiting, "Well?", waiting], [waiting, "Yes.", waiting]) as server:
        seen = visit(server.url)
        page = seen.page
        seen.send("Hi!", writes=True)
        for side in ("steered", "unsteered"):
            expect(seen.reply(side).locator(".said")).to_have_text("I am")
        expect(page.get_by_role("button", name="Send")).to_be_disabled()
        expect(page.get_by_role("button", name="Stop")).to_be_focused()
        page.get_by_role("button", name="Stop").press("Enter")
        for side, engine in {"steered": server.steered, "unsteered": server.unsteered}.items():
            expect(seen.reply(side).locator(".state")).to_have_text("stopped")
            assert engine.tickets[0].cancelled.wait(10), f"the {side} turn is still being generated"
        expect(page.get_by_role("button", name="Send")).to_be_focused()
        seen.send("Go on.")
        expect(seen.reply("steered", 2).locator(".said")).to_have_text("Well?")
        assert seen.request("steered")["messages"][2] == {"role": "assistant", "content": "I am"}

        seen.send("Again.", writes=True)
        expect(seen.reply("unsteered", 3).locator(".said")).to_have_text("I am")
        page.keyboard.press("Escape")
        expect(seen.reply("unsteered", 3).locator(".state")).to_have_text("stopped")


def test_restart_ends_what_is_written_and_begins_afresh(customers: Serve, visit: Callable[..., Visit]) -> None:
    with customers([Script(["I "], waits=True), "Well?"]) as server:
        seen = visit(server.url)
        seen.send("Hi!", writes=True)
        expect(seen.reply("steered").locator(".said")).to_have_text("I")
        seen.page.get_by_role("button", name="Restart").click()
        expect(seen.page.get_by_role("article")).to_have_count(0)
        assert server.steered.tickets[0].cancelled.wait(10)
        seen.send("Hello!")
        expect(seen.reply("steered").locator(".said")).to_have_text("Well?")
        assert [m["content"] for m in seen.request("steered")["messages"][1:]] == ["Hello!"]
        assert seen.problems == []


def test_a_busy_server_is_shown_in_words_and_can_be_asked_again(customers: Serve, visit: Callable[..., Visit]) -> None:
    with customers([EngineBusyError("the queue is full"), "Finally."]) as server:
        seen = visit(server.url)
        seen.send("Hi!")
        alert = seen.reply("steered").get_by_role("alert")
        for words in ("busy", "429", "the queue is full", "wait 1 s"):
            expect(alert).to_contain_text(words)
        expect(seen.reply("unsteered").locator(".said")).to_have_text("No hurry.")
        seen.reply("steered").get_by_role("button", name="Ask again").click()
        expect(seen.reply("steered").locator(".said")).to_have_text("Finally.")
        expect(alert).to_be_hidden()
        assert len(server.unsteered.requests) == 1
        assert len(server.steered.requests[-1].prompt_ids) == len(server.steered.requests[0].prompt_ids)


@pytest.mark.parametrize(
    ("routes", "words"),
    [
        ({"**/v1/models": answer(200, {"data": [{"id": "nobody"}]})}, ["404", "nobody", "steered-user"]),
        ({"**/health": answer(200, {"traits": ["rage"]})}, ["400", "rage", "impatience"]),
        ({"**/v1/chat/*": refused(401, "no such key")}, ["401", "no such key", "Settings"]),
        ({"**/v1/chat/*": answer(502, "<h1>Oh</h1>", **{"X-Request-ID": "r-17"})}, ["failed (502)", "r-17"]),
        ({"**/v1/chat/*": answer(200, 'data: {"choices": [{"delta": {"content": "Hm"}}]}\n\n')}, ["broke off"]),
        ({"**/v1/chat/*": lambda route: route.abort()}, ["cannot be reached"]),
    ],
)
def test_an_error_is_shown_in_words(
    customers: Serve, visit: Callable[..., Visit], routes: dict[str, Callable[[Route], None]], words: list[str]
) -> None:
    with customers() as server:
        seen = visit(server.url, routes=routes)
        expect(seen.page.get_by_role("slider").first).to_be_visible()
        seen.send("Hi!")
        for word in words:
            expect(seen.reply("steered").get_by_role("alert")).to_contain_text(word)
        expect(seen.reply("steered").get_by_role("button", name="Ask again")).to_be_visible()


def test_an_engine_that_fails_within_the_stream_is_shown(customers: Serve, visit: Callable[..., Visit]) -> None:
    with customers(Script(["I am"], fails=EngineBusyError("the engine stopped"))) as server:
        seen = visit(server.url)
        seen.send("Hi!")
        expect(seen.reply("steered").get_by_role("alert")).to_contain_text("the engine stopped")
        expect(seen.reply("steered").locator(".said")).to_have_text("I am")


def test_a_server_that_wants_a_key_gets_it_and_the_key_stays_in_this_tab(
    customers: Serve, visit: Callable[..., Visit]
) -> None:
    keys: list[str | None] = []

    def models(route: Route) -> None:
        keys.append(route.request.headers.get("authorization"))
        if keys[-1] == "Bearer open-sesame":
            route.continue_()
        else:
            refused(401, "a key is needed")(route)

    with customers() as server:
        seen = visit(server.url, routes={"**/v1/models": models})
        page = seen.page
        expect(page.get_by_role("alert")).to_contain_text("a key is needed")
        page.get_by_label("API key").fill("open-sesame")
        page.get_by_label("API key").blur()
        expect(page.locator("#banner")).to_be_hidden()
        expect(page.get_by_label("Served user")).to_have_value("steered-user")
        with page.expect_request("**/v1/chat/completions") as sent:
            seen.send("Hi!")
        assert sent.value.headers["authorization"] == "Bearer open-sesame"
        page.get_by_role("button", name="Copy as curl").click()
        expect(page.locator("#told")).to_contain_text("Copied")
        assert "open-sesame" not in page.evaluate("navigator.clipboard.readText()")
        page.reload()
        expect(page.get_by_label("API key")).to_have_value("open-sesame")
        assert page.evaluate("[localStorage.length, document.cookie]") == [0, ""]
        assert page.context.new_page().goto(server.url)  # another tab knows nothing of it
        assert page.context.pages[1].get_by_label("API key").input_value() == ""
    assert keys[0] is None


def test_text_from_a_model_or_a_server_is_never_markup(customers: Serve, visit: Callable[..., Visit]) -> None:
    with customers(HOSTILE, [EngineBusyError(HOSTILE)]) as server:
        routes = {
            "**/v1/models": answer(200, {"data": [{"id": "steered-user"}, {"id": HOSTILE.replace("@", "")}]}),
            "**/health": answer(200, {"model": HOSTILE, "traits": ["impatience", HOSTILE]}),
        }
        seen = visit(server.url, routes=routes)
        page = seen.page
        expect(page.get_by_role("slider")).to_have_count(2)
        seen.send(HOSTILE)
        expect(seen.reply("steered").locator(".said")).to_have_text(HOSTILE)
        expect(seen.reply("unsteered").get_by_role("alert")).to_contain_text(HOSTILE)
        expect(page.locator(".agent")).to_contain_text(HOSTILE)
        expect(page.locator("#served")).to_contain_text(HOSTILE)
        assert page.locator("img, .frame script, .reply .said *, .agent b").count() == 0
        assert page.evaluate("window.hacked") is None


def test_the_browser_refuses_markup_and_scripts_that_are_not_the_pages(
    customers: Serve, visit: Callable[..., Visit]
) -> None:
    with customers() as server:
        page = visit(server.url).page
        with pytest.raises(Exception, match="TrustedHTML"):
            page.evaluate(f"document.body.innerHTML = {json.dumps(HOSTILE)}")
        page.evaluate("""() => {
            const script = document.createElement("script");
            script.append("window.hacked = 1");
            document.body.append(script);
        }""")
        assert page.evaluate("window.hacked") is None


@pytest.mark.parametrize("width", [380, 700])
def test_nothing_is_wider_than_a_narrow_window(customers: Serve, visit: Callable[..., Visit], width: int) -> None:
    with customers("Where" * 60, HOSTILE) as server:
        seen = visit(server.url, width=width)
        page = seen.page
        expect(page.get_by_role("slider")).to_have_count(2)
        for name in ("Instruction", "Settings"):
            page.get_by_text(name, exact=True).click()
        seen.send("x" * 300)
        for summary in page.get_by_text("What made it").all():
            summary.click()
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        first, second = (seen.reply(side).bounding_box() for side in ("steered", "unsteered"))
        assert first and second
        if width == 380:  # the columns stack
            assert first["y"] + first["height"] < second["y"] and first["x"] == second["x"]
        else:
            assert first["y"] == second["y"]


def test_the_keyboard_is_enough(customers: Serve, visit: Callable[..., Visit]) -> None:
    with customers() as server:
        seen = visit(server.url)
        page = seen.page
        expect(page.get_by_role("slider")).to_have_count(2)
        message = page.get_by_label("Your message, as the agent")
        expect(message).to_be_focused()
        message.fill("one")
        message.press("Shift+Enter")
        page.keyboard.type("two")
        assert seen.asked == []
        message.press("Enter")
        expect(seen.reply("unsteered").locator(".said")).to_have_text("No hurry.")
        assert seen.request("steered")["messages"][-1]["content"] == "one\ntwo"
        expect(message).to_be_focused()

        stops = []
        page.locator(".skip").focus()
        for _ in range(40):
            page.keyboard.press("Tab")
            stops.append(page.evaluate("document.activeElement.id"))
            if stops[-1] == "send":
                break
        named = [stop for stop in stops if stop]
        assert named[:4] == ["trait-impatience", "trait-skeptical", "off", "scenario"], stops
        rest = ["instruction", "model", "seed", "temperature", "key", "restart", "curl", "python", "download", "log"]
        assert named[4:] == [*rest, "message", "send"], stops


def test_every_control_has_a_name_and_streamed_turns_are_announced(
    customers: Serve, visit: Callable[..., Visit]
) -> None:
    with customers() as server:
        seen = visit(server.url)
        page = seen.page
        expect(page.get_by_role("slider")).to_have_count(2)
        seen.send("Hi!")
        for control in page.locator("input, select, textarea, button").all():
            name = control.evaluate(
                "n => n.labels?.[0]?.textContent || n.ariaLabel || n.ariaLabelledByElements?.[0]"
                ".textContent || n.textContent"
            )
            assert name.strip(), control.evaluate("n => n.outerHTML")
        said = seen.reply("steered").locator(".said")
        expect(said).to_have_attribute("aria-live", "polite")
        expect(said).to_have_attribute("aria-busy", "false")


def test_the_copied_request_is_the_one_that_was_made(
    customers: Serve, visit: Callable[..., Visit], tmp_path: Path
) -> None:
    with customers() as server:
        seen = visit(server.url)
        page = seen.page
        page.get_by_role("slider", name="skeptical").fill("-0.5")
        page.get_by_label("What both customers are told").fill('It\'s "#W1", \\ $HOME `id` !\nLine two: ümläut 🙂 %s')
        page.get_by_label("Temperature").fill("0.3")
        page.get_by_label("Seed").fill("007")
        seen.send('Don\'t you know? "Hm" \\n')

        def copied(what: str) -> str:
            page.get_by_role("button", name=f"Copy as {what}").click()
            expect(page.locator("#told")).to_contain_text(f"as {what}")
            return str(page.evaluate("navigator.clipboard.readText()"))

        # A shell says what it would hand to curl.
        shell = subprocess.run(
            ["sh", "-c", 'curl() { printf "%s\\0" "$@"; }\n' + copied("curl")], capture_output=True, check=True
        )
        url, *options, _ = shell.stdout.decode().split("\0")
        assert options[:2] == ["-H", "Content-Type: application/json"] and options[2] == "-d"
        assert httpx.post(url, content=options[3].encode(), headers={"Content-Type": "application/json"}).is_success

        script = tmp_path / "copied.py"
        script.write_text(copied("Python"), "utf-8")
        environment = {**os.environ, "PYTHONIOENCODING": "utf-8"}
        ran = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment, timeout=120)
        assert ran.returncode == 0, ran.stderr
        assert ran.stdout.startswith("Where is it?\n") and "'dose'" in ran.stdout

        made, by_curl, by_python = server.steered.requests
        for request in (by_curl, by_python):
            assert request.prompt_ids == made.prompt_ids
            assert (request.seed, request.sampling) == (made.seed, made.sampling)
            assert all((request.additions[z] == addition).all() for z, addition in made.additions.items())


def test_what_stands_in_the_message_field_is_what_is_copied(customers: Serve, visit: Callable[..., Visit]) -> None:
    with customers() as server:
        seen = visit(server.url)
        seen.send("Hi!")
        seen.page.get_by_label("Your message, as the agent").fill("Which order?")
        seen.page.get_by_role("button", name="Copy as curl").click()
        expect(seen.page.locator("#told")).to_contain_text("Copied")
        text = str(seen.page.evaluate("navigator.clipboard.readText()"))
        body = json.loads(text[text.index("-d '") + 4 : text.rindex("'")])
        assert [m["content"] for m in body["messages"][1:]] == ["Hi!", "Where is it?", "Which order?"]


def test_without_a_clipboard_the_text_is_shown_to_copy_by_hand(customers: Serve, visit: Callable[..., Visit]) -> None:
    with customers() as server:
        page = visit(server.url).page
        page.evaluate("Object.defineProperty(navigator, 'clipboard', { value: undefined })")
        page.get_by_role("button", name="Copy as curl").click()
        expect(page.get_by_role("dialog").get_by_role("textbox")).to_have_value(re.compile(r"^curl 'http"))
        page.get_by_role("dialog").get_by_role("button", name="Close").click()
        expect(page.get_by_role("dialog")).to_be_hidden()


def test_the_transcript_says_what_was_said_and_what_made_it(customers: Serve, visit: Callable[..., Visit]) -> None:
    with customers(["Now!", EngineBusyError("full")]) as server:
        seen = visit(server.url)
        page = seen.page
        page.get_by_role("button", name="Download transcript").click()
        expect(page.locator("#told")).to_contain_text("no turn")
        page.get_by_label("API key").fill("open-sesame")
        seen.send("Hi!")
        seen.send("Which order?")
        with page.expect_download() as download:
            page.get_by_role("button", name="Download transcript").click()
        assert download.value.suggested_filename.endswith(".json")
        text = Path(download.value.path()).read_text("utf-8")
        first, second = json.loads(text)["turns"]
        assert (first["agent"], first["steered"]["text"], first["unsteered"]["text"]) == ("Hi!", "Now!", "No hurry.")
        assert first["steered"]["traitbasis"]["traits"] == {"impatience": 1.0}
        assert first["unsteered"]["traitbasis"]["traits"] == {}
        assert first["steered"]["usage"]["completion_tokens"] == 1
        assert second["steered"]["state"] == "failed" and "full" in second["steered"]["error"]
        assert second["steered"]["request"]["messages"][-1]["content"] == "Which order?"
        assert "open-sesame" not in text


@pytest.mark.parametrize(("label", "value"), [("Seed", "seven"), ("API key", "schlüssel"), ("Temperature", "-1")])
def test_a_field_that_cannot_be_sent_is_pointed_out(
    customers: Serve, visit: Callable[..., Visit], label: str, value: str
) -> None:
    with customers() as server:
        seen = visit(server.url, width=380)  # where the settings are folded away
        page = seen.page
        page.get_by_text("Settings", exact=True).click()
        page.get_by_label(label).fill(value)
        page.get_by_text("Settings", exact=True).click()
        page.get_by_label("Your message, as the agent").fill("Hi!")
        page.get_by_role("button", name="Send").click()
        expect(page.get_by_label(label)).to_be_focused()
        assert seen.asked == []
        expect(page.get_by_label("Your message, as the agent")).to_have_value("Hi!")
