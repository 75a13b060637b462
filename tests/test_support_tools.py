"""The tools of support seekers: all of them through a client of the official SDK, and the scenario's clock.

The clients run in memory and over stdio; expectations come from the data files, read here on their own.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import json
import math
import re
import sys
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

import pytest
import yaml

from traitbasis.errors import ReactionError
from traitbasis.reactive.support import scenario, scenarios
from traitbasis.reactive.support_tools import CATEGORIES, TOOLS, SupportWorld, mcp_server, openai_tools

mcp = pytest.importorskip("mcp")

GRAZ = {"latitude": 47.0771, "longitude": 15.4490}
# One call of every tool in "exam-library", and words that its answer has to hold.
CALLS: dict[str, tuple[dict[str, Any], str]] = {
    "utils_local_time": ({}, "2025-02-11T21:35:00+01:00"),
    "utils_coordinates": ({}, "47.0771"),
    "utils_current_place": ({}, "University Library West"),
    "utils_days_until": ({"date": "2025-02-13"}, '"days": 2'),
    "utils_convert": ({"value": 10, "unit": "km"}, "6.21"),
    "map_geocode": ({"query": "Graz"}, "15.449"),
    "map_reverse_geocode": (GRAZ, "Lindengasse 4"),
    "map_nearby": ({**GRAZ, "kind": "cafe"}, "Nachtcafé Lichtblick"),
    "map_search": ({"query": "counselling"}, "Student Counselling Centre Graz"),
    "map_place": ({"place_id": "g2"}, "Zinzendorfgasse 9"),
    "map_route": ({"place_id": "g1"}, "Augarten Riverside"),
    "weather_now": (GRAZ, "temperature_c"),
    "weather_hours": ({**GRAZ, "hours": 3}, "2025-02-12T00:00+01:00"),
    "weather_days": ({**GRAZ, "days": 2}, "Thursday"),
    "weather_past": ({**GRAZ, "days": 2}, "2025-02-09"),
    "weather_air": (GRAZ, "category"),
    "weather_sun": (GRAZ, "sunset"),
    "news_headlines": ({}, "Library West stays open until midnight"),
    "news_search": ({"query": "tram works"}, "Tram line 7"),
    "news_topic": ({"topic": "local"}, "Murtal Morgen"),
    "news_article": ({"article_id": "n01"}, "soup until 21:00"),
    "reddit_search": ({"query": "failed anatomy"}, "last 48 hours"),
    "reddit_subreddit": ({"subreddit": "studentlife"}, "I lied to my parents"),
    "reddit_post": ({"post_id": "p01"}, "mild_panic"),
    "reddit_subreddits": ({"query": "exam"}, "r/studentlife"),
    "wiki_search": ({"query": "fear before a test"}, "Test anxiety"),
    "wiki_summary": ({"title": "test anxiety"}, "Causes"),
    "wiki_section": ({"title": "Test anxiety", "section": "help"}, "slow breathing"),
    "music_search": ({"query": "ambient"}, "Slow Harbour"),
    "music_mood": ({"mood": "focus"}, "Focus Room"),
    "music_artist": ({"name": "ilse brandt"}, "Seven Evenings"),
}


@pytest.fixture(scope="module")
def world() -> SupportWorld:
    return SupportWorld(scenario("exam-library"))


@pytest.mark.parametrize("mode", ["auto", "legacy"])  # legacy: the initialize handshake, JSON-RPC over memory streams
def test_every_tool_answers_a_session_of_the_official_sdk_as_it_does_in_process(world: SupportWorld, mode: str) -> None:
    async def ask() -> dict[str, Any]:
        async with mcp.Client(mcp_server(scenario("exam-library")), mode=mode) as client:
            assert isinstance(client.session, mcp.ClientSession)
            return {name: await client.call_tool(name, arguments) for name, (arguments, _) in CALLS.items()}

    assert CALLS.keys() == TOOLS.keys()
    for name, result in asyncio.run(ask()).items():
        assert not result.is_error, result
        told = json.loads(result.content[0].text)
        assert told == result.structured_content == world.call(name, CALLS[name][0]), name
        assert CALLS[name][1] in json.dumps(told, ensure_ascii=False), name


def test_a_client_is_told_31_tools_in_seven_categories_each_with_what_it_takes() -> None:
    async def listed() -> list[Any]:
        async with mcp.Client(mcp_server(scenario("exam-library"))) as client:
            return list((await client.list_tools()).tools)

    tools = asyncio.run(listed())
    assert len(tools) == 31
    assert {tool.meta["category"] for tool in tools} == set(CATEGORIES)
    by_name = {tool["function"]["name"]: tool["function"] for tool in openai_tools()}
    for tool in tools:
        assert tool.description and tool.annotations.read_only_hint
        ours = by_name[tool.name]["parameters"]
        assert tool.input_schema["properties"].keys() == ours["properties"].keys()
        assert set(tool.input_schema.get("required", ())) == set(ours.get("required", ()))


def test_wrong_arguments_are_an_error_result_that_says_what_is_known() -> None:
    async def ask() -> list[Any]:
        async with mcp.Client(mcp_server(scenario("exam-library"))) as client:
            calls: list[tuple[str, dict[str, Any]]] = [
                ("map_place", {"place_id": "nowhere"}),
                ("weather_now", {"latitude": 0.0, "longitude": -140.0}),
                ("weather_now", {"latitude": 91, "longitude": 0}),
                ("wiki_section", {"title": "Grief", "section": "History"}),
            ]
            return [await client.call_tool(name, arguments) for name, arguments in calls]

    place, ocean, pole, section = asyncio.run(ask())
    assert all(result.is_error for result in (place, ocean, pole, section))
    assert "map_nearby" in place.content[0].text
    assert "no weather station" in ocean.content[0].text
    assert "latitude" in pole.content[0].text
    assert "Course, At work" in section.content[0].text


def test_the_server_speaks_over_stdio() -> None:
    from mcp import Client, StdioServerParameters

    command = [sys.executable, "-m", "traitbasis.cli", "support", "tools", "--scenario", "stage-fright"]

    async def ask() -> str:
        async with Client(StdioServerParameters(command=command[0], args=command[1:])) as client:
            assert len((await client.list_tools()).tools) == 31
            return str((await client.call_tool("utils_current_place", {})).content[0].text)

    assert "Koganei Recital Hall" in asyncio.run(ask())


# --- the clock --------------------------------------------------------------------------------------------------------

_STAMP = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d(?::\d\d)?(?:Z|[+-]\d\d:\d\d)")
_ALL: dict[str, list[dict[str, Any]]] = yaml.safe_load(
    files("traitbasis.reactive").joinpath("data/support_reading.yaml").read_text(encoding="utf-8")
)


def _answers(world: SupportWorld) -> Iterator[tuple[str, str]]:
    """What every tool says when it is asked for as much as it gives, also by the ids that there will ever be."""
    place = world.scenario.place
    here = {"latitude": place.latitude, "longitude": place.longitude}
    for name, (arguments, _) in CALLS.items():
        asked = {**arguments, **(here if "latitude" in arguments else {})}
        asked |= {"limit": 20} if "limit" in TOOLS[name].arguments.model_fields else {}
        if "id" not in "".join(arguments):
            yield name, json.dumps(world.call(name, asked))
    for word in ("library", "exam", "halvorsen", "flights", "power", "brother", "nurses", "a"):
        yield "news_search", json.dumps(world.call("news_search", {"query": word, "limit": 20}))
        yield "reddit_search", json.dumps(world.call("reddit_search", {"query": word, "limit": 20}))
    for topic in ("local", "business", "travel", "culture", "health", "education", "housing", "society"):
        yield "news_topic", json.dumps(world.call("news_topic", {"topic": topic, "limit": 20}))
    for kind, argument, tool in (("news", "article_id", "news_article"), ("posts", "post_id", "reddit_post")):
        for one in _ALL[kind]:
            try:
                yield tool, json.dumps(world.call(tool, {argument: one["id"]}))
            except ReactionError:
                continue


@pytest.mark.parametrize("name", list(scenarios()))
def test_nothing_is_told_that_is_later_than_the_scenario(name: str) -> None:
    world, stamps = SupportWorld(scenario(name)), 0
    for tool, answer in _answers(world):
        if tool == "weather_hours":  # its hours are to come; that they were forecast is not
            answer = json.dumps(json.loads(answer)["issued"])
        for stamp in _STAMP.findall(answer):
            stamps += 1
            assert dt.datetime.fromisoformat(stamp) <= world.now, (tool, stamp)
    assert stamps > 10


def test_news_posts_comments_and_votes_come_with_the_time() -> None:
    early = SupportWorld(scenario("exam-library"))
    late = SupportWorld(scenario("exam-library"), early.now + dt.timedelta(days=10))
    ids = [{one["id"] for one in w.call("news_headlines", {"limit": 20})["articles"]} for w in (early, late)]
    assert ids == [{"n01", "n02"}, {"n01", "n02", "n03"}]
    posts = [
        {one["id"] for one in w.call("reddit_subreddit", {"subreddit": "r/studentlife"})["posts"]}
        for w in (early, late)
    ]
    assert posts == [{"p01", "p02"}, {"p01", "p02", "p03"}]
    before, after = (w.call("reddit_post", {"post_id": "p01"}) for w in (early, late))
    assert [len(before["comments"]), len(after["comments"])] == [before["comment_count"], 2] == [1, 2]
    hours = 24 * 8 + 1 + 25 / 60  # from 3 February 19:10 UTC to the 11th 20:35
    assert before["score"] == round(412 * (1 - math.exp(-hours / 48))) < after["score"]
    with pytest.raises(ReactionError, match="n03"):
        early.call("news_article", {"article_id": "n03"})


def test_the_weather_is_the_hours_own_and_the_same_for_everybody() -> None:
    graz = scenario("exam-library")
    moments = [graz.time + dt.timedelta(hours=hours) for hours in (0, 12, 24 * 160)]
    found = [SupportWorld(graz, moment).call("weather_now", GRAZ) for moment in moments]
    assert len({json.dumps({**one, "time": ""}) for one in found}) == 3
    assert found[2]["temperature_c"] > found[0]["temperature_c"] + 8  # July and February
    again = SupportWorld(scenario("stage-fright"), moments[0]).call("weather_now", GRAZ)  # asked from Tokyo
    assert {**again, "time": ""} == {**found[0], "time": ""}
    past = SupportWorld(graz, moments[0] + dt.timedelta(days=1)).call("weather_past", {**GRAZ, "days": 1})["days"][0]
    assert past["date"] == "2025-02-11" and past["low_c"] <= found[0]["temperature_c"] <= past["high_c"]


def test_a_forecast_errs_more_the_further_ahead_it_looks() -> None:
    errors: dict[int, list[float]] = {1: [], 40: []}
    for one in scenarios().values():
        here = {"latitude": one.place.latitude, "longitude": one.place.longitude}
        for ahead, found in errors.items():
            forecast = SupportWorld(one).call("weather_hours", {**here, "hours": ahead})["hours"][-1]
            true = SupportWorld(one, dt.datetime.fromisoformat(forecast["time"])).call("weather_now", here)
            found.append(abs(forecast["temperature_c"] - true["temperature_c"]))
    assert sum(errors[1]) < sum(errors[40]) / 2
    assert max(errors[40]) < 2.0


def test_the_sun_rises_within_minutes_of_the_almanac() -> None:
    # Greenwich, 2025-06-21: 04:43 and 21:21 BST; 2025-12-21: 08:04 and 15:53 GMT (almanac of the Royal Observatory).
    london = scenario("new-city-sunday")
    for day, zone, rise, sets in (("2025-06-21", 1, "04:43", "21:21"), ("2025-12-21", 0, "08:04", "15:53")):
        noon = dt.datetime.fromisoformat(f"{day}T12:00").replace(tzinfo=dt.timezone(dt.timedelta(hours=zone)))
        moved = london.model_copy(update={"time": noon})
        found = SupportWorld(moved).call("weather_sun", {"latitude": 51.4769, "longitude": 0.0})
        for said, true in ((found["sunrise"], rise), (found["sunset"], sets)):
            minutes = [int(text[:2]) * 60 + int(text[3:]) for text in (said, true)]
            assert abs(minutes[0] - minutes[1]) <= 6, (day, said, true)


# --- maps -------------------------------------------------------------------------------------------------------------


def test_distances_are_those_of_the_map(world: SupportWorld) -> None:
    cafe = next(p for p in world.call("map_nearby", GRAZ)["results"] if p["id"] == "g2")  # 210 m west, 120 m north
    assert abs(cafe["distance_m"] - math.hypot(210, 120)) <= 2
    assert cafe["walk_minutes"] == 3  # 242 m at 80 m a minute
    nearest = world.call("map_nearby", {**GRAZ, "radius_m": 250})["results"]
    assert [place["id"] for place in nearest] == ["g2"]


def test_open_is_what_is_open_at_the_scenarios_hour_and_on_its_weekday() -> None:
    graz = scenario("exam-library")

    def is_open(place: str, time: str) -> bool:
        world = SupportWorld(graz, dt.datetime.fromisoformat(f"{time}+01:00"))
        return bool(world.call("map_place", {"place_id": place})["open_now"])

    assert is_open("g2", "2025-02-11T21:35") and is_open("g2", "2025-02-12T00:59")  # 09:00-01:00
    assert not is_open("g2", "2025-02-12T01:00") and not is_open("g2", "2025-02-12T08:59")
    assert is_open("g3", "2025-02-11T09:00") and not is_open("g3", "2025-02-15T12:00")  # not on Saturdays
    assert is_open("g1", "2025-02-12T03:00")
    open_now = SupportWorld(graz).call("map_nearby", {**GRAZ, "open_now": True, "limit": 20})["results"]
    assert "g3" not in {place["id"] for place in open_now} and all(place["open_now"] for place in open_now)


# --- bad calls --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "arguments", "named"),
    [
        ("weather_tomorrow", {}, "weather_tomorrow"),
        ("weather_now", {}, "latitude"),
        ("weather_now", {"latitude": float("nan"), "longitude": 0}, "latitude"),
        ("map_nearby", {**GRAZ, "radius_m": -5}, "radius_m"),
        ("map_nearby", {**GRAZ, "wish": "x"}, "wish"),
        ("utils_days_until", {"date": "soon"}, "date"),
        ("utils_convert", {"value": 1, "unit": "parsec"}, "unit"),
        ("news_search", {"query": ""}, "query"),
        ("music_mood", {"mood": "purple"}, "mood"),
        ("music_artist", {"name": "Nobody"}, "Nobody"),
        ("reddit_post", {"post_id": "p99"}, "p99"),
    ],
)
def test_a_call_that_cannot_be_answered_names_what_is_wrong(
    world: SupportWorld, name: str, arguments: dict[str, Any], named: str
) -> None:
    with pytest.raises(ReactionError, match=named):
        world.call(name, arguments)


def test_a_clock_without_a_zone_is_refused() -> None:
    with pytest.raises(ReactionError, match="offset"):
        SupportWorld(scenario("exam-library"), dt.datetime(2025, 1, 1))


def test_without_the_sdk_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mcp.server", None)
    with pytest.raises(ReactionError, match=r"traitbasis\[mcp\]"):
        mcp_server(scenario("exam-library"))
