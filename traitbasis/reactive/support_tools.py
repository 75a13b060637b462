"""The world of a support scenario, as tools: maps, weather, news and more for its place, as they stood at its time.

31 tools in the seven categories of TEA-Bench (arXiv 2601.18700, 3.3). The data are ours and made up
(``data/support_*``),
so every agent finds the same world, and no network is asked. The clock is the scenario's: news, posts and comments that
are younger are not there yet, forecasts are what was forecast by then, shops are open or closed as they were.

In process, without a further package: ``SupportWorld(scenario).call(name, arguments)`` and ``openai_tools``. Over the
Model Context Protocol, by the official SDK (extra ``mcp``): ``mcp_server(scenario)``.
"""

from __future__ import annotations

import datetime as dt
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, wraps
from importlib.resources import files
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, TypeVar, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from traitbasis.errors import ReactionError
from traitbasis.reactive.factual_units import folded, words_of
from traitbasis.reactive.support import SupportScenario, scenarios
from traitbasis.reactive.support_weather import (
    CLIMATES,
    REACH,
    SURROUNDINGS,
    chance,
    day_of,
    forecast_for,
    hour_of,
    last_issued,
    metres_between,
    station_near,
    sun_times,
    weather_at,
)

if TYPE_CHECKING:
    from mcp.server import MCPServer

Category = Literal["Reddit", "Map", "Utils", "Weather", "News", "Wikipedia", "Music"]
CATEGORIES: tuple[Category, ...] = get_args(Category)
Result = dict[str, Any]
Function = TypeVar("Function", bound=Callable[..., Result])


class Tool(NamedTuple):
    """A tool: a method of ``SupportWorld``. arguments: pydantic model of what it takes."""

    name: str
    category: Category
    description: str
    arguments: type[BaseModel]


TOOLS: dict[str, Tool] = {}


def _tool(category: Category) -> Callable[[Function], Function]:
    """Register a method of ``SupportWorld``; its signature and docstring are what an agent is told."""

    def register(method: Function) -> Function:
        fields: dict[str, Any] = {
            name: (parameter.annotation, ... if parameter.default is inspect.Parameter.empty else parameter.default)
            for name, parameter in inspect.signature(method, eval_str=True).parameters.items()
            if name != "self"
        }
        model = create_model(method.__name__, __config__=ConfigDict(extra="forbid"), **fields)
        TOOLS[method.__name__] = Tool(method.__name__, category, inspect.cleandoc(method.__doc__ or ""), model)
        return method

    return register


Latitude = Annotated[float, Field(ge=-90, le=90, allow_inf_nan=False, description="degrees north")]
Longitude = Annotated[float, Field(ge=-180, le=180, allow_inf_nan=False, description="degrees east")]
Query = Annotated[str, Field(min_length=1, max_length=200, description="a few words")]
Limit = Annotated[int, Field(ge=1, le=20, description="at most so many results")]


class SupportWorld:
    """What can be looked up in a scenario. now: another moment than the scenario's own, with its offset from UTC."""

    def __init__(self, scenario: SupportScenario, now: dt.datetime | None = None) -> None:
        if now is not None and now.tzinfo is None:
            raise ReactionError(f"now is {now}, without an offset from UTC")
        self.scenario, self.now = scenario, (now or scenario.time).astimezone(scenario.time.tzinfo)
        self._places = _places(scenario)

    def call(self, name: str, arguments: Mapping[str, Any] | None = None) -> Result:
        """A tool's result, which JSON can hold. Raises ReactionError naming the tool or the argument that is wrong."""
        if name not in TOOLS:
            raise ReactionError(f"unknown tool {name!r}; known: {', '.join(TOOLS)}")
        try:
            checked = TOOLS[name].arguments.model_validate(dict(arguments or {}))
        except ValidationError as error:
            first = error.errors()[0]
            raise ReactionError(f"{name}: {'.'.join(map(str, first['loc'])) or 'arguments'}: {first['msg']}") from error
        found: Result = getattr(self, name)(**{field: getattr(checked, field) for field in type(checked).model_fields})
        return found

    # --- Utils: what a phone knows ------------------------------------------------------------------------------------

    @_tool("Utils")
    def utils_local_time(self) -> Result:
        """The person's local date, weekday and time."""
        return {
            "local_time": self.now.isoformat(),
            "weekday": f"{self.now:%A}",
            "timezone": self.scenario.timezone,
        }

    @_tool("Utils")
    def utils_coordinates(self) -> Result:
        """The person's coordinates, for the map and weather tools."""
        return {"latitude": self.scenario.place.latitude, "longitude": self.scenario.place.longitude}

    @_tool("Utils")
    def utils_current_place(self) -> Result:
        """The place where the person is: its name, kind and address."""
        place = self.scenario.place
        return {name: getattr(place, name) for name in ("name", "kind", "street", "city", "country")}

    @_tool("Utils")
    def utils_days_until(self, date: Annotated[dt.date, Field(description="such as 2025-03-14")]) -> Result:
        """How many days from today until a date, and its weekday; negative for the past."""
        return {"date": date.isoformat(), "weekday": f"{date:%A}", "days": (date - self.now.date()).days}

    @_tool("Utils")
    def utils_convert(
        self,
        value: Annotated[float, Field(allow_inf_nan=False)],
        unit: Annotated[Literal["km", "mi", "m", "ft", "c", "f", "kg", "lb"], Field(description="of the value")],
    ) -> Result:
        """Convert a length, weight or temperature between metric and imperial units."""
        factors = {"km": ("mi", 0.621371), "mi": ("km", 1.609344), "m": ("ft", 3.28084), "ft": ("m", 0.3048)}
        factors |= {"kg": ("lb", 2.204623), "lb": ("kg", 0.45359237)}
        if unit in ("c", "f"):
            other, found = ("f", value * 9 / 5 + 32) if unit == "c" else ("c", (value - 32) * 5 / 9)
        else:
            other, factor = factors[unit]
            found = value * factor
        return {"value": value, "unit": unit, "converted": round(found, 2), "converted_unit": other}

    # --- Map ----------------------------------------------------------------------------------------------------------

    @_tool("Map")
    def map_geocode(self, query: Query) -> Result:
        """Coordinates of a place or city by its name."""
        cities = {one.place.city: one.place for one in scenarios().values()}
        found = [
            {"name": city, "kind": "city", "latitude": place.latitude, "longitude": place.longitude}
            for city, place in cities.items()
            if folded(query) == folded(city)
        ]
        places = [self._shown(place) for place in _best(query, self._places, ("name", "street"), 3)]
        return {"results": [*found, *places]}

    @_tool("Map")
    def map_reverse_geocode(self, latitude: Latitude, longitude: Longitude) -> Result:
        """The nearest known address to a point."""
        here = self.scenario.place
        known: list[Result] = [
            {"name": here.name, "street": here.street, "latitude": here.latitude, "longitude": here.longitude},
            *self._places,
        ]
        near = min(known, key=lambda one: metres_between(latitude, longitude, one["latitude"], one["longitude"]))
        metres = metres_between(latitude, longitude, near["latitude"], near["longitude"])
        if metres > REACH:
            raise ReactionError(f"there is no address near {latitude}, {longitude}")
        return {"name": near["name"], "street": near["street"], "city": here.city, "distance_m": round(metres)}

    @_tool("Map")
    def map_nearby(
        self,
        latitude: Latitude,
        longitude: Longitude,
        kind: Annotated[str, Field(max_length=60, description="such as park, cafe or counselling; empty for all")] = "",
        radius_m: Annotated[int, Field(ge=50, le=20_000)] = 2000,
        open_now: Annotated[bool, Field(description="only what is open at this moment")] = False,
        limit: Limit = 5,
    ) -> Result:
        """Places around a point, nearest first, with distance and opening hours."""
        found = []
        for place in self._places:
            metres = metres_between(latitude, longitude, place["latitude"], place["longitude"])
            if metres <= radius_m and (not kind or _matches(kind, (place["kind"], place["name"]))):
                shown = {**self._shown(place), "distance_m": round(metres), "walk_minutes": max(1, round(metres / 80))}
                if shown["open_now"] or not open_now:
                    found.append(shown)
        found.sort(key=lambda place: int(place["distance_m"]))
        return {"results": found[:limit], "kinds": sorted({str(place["kind"]) for place in self._places})}

    @_tool("Map")
    def map_search(self, query: Query, limit: Limit = 5) -> Result:
        """Places in the person's surroundings by name, kind or street."""
        found = _best(query, self._places, ("name", "kind", "street", "note"), limit)
        return {"results": [self._shown(place) for place in found]}

    @_tool("Map")
    def map_place(self, place_id: Annotated[str, Field(description="id from another map tool")]) -> Result:
        """All that is known of a place: address, hours, whether it is open now."""
        return self._shown(self._place(place_id))

    @_tool("Map")
    def map_route(
        self,
        place_id: Annotated[str, Field(description="id of the place to go to")],
        mode: Literal["walk", "bike", "transit"] = "walk",
    ) -> Result:
        """The way from where the person is to a place: metres and minutes."""
        place, here = self._place(place_id), self.scenario.place
        metres = 1.25 * metres_between(
            here.latitude, here.longitude, place["latitude"], place["longitude"]
        )  # streets turn
        speed, wait = {"walk": (80, 0), "bike": (250, 2), "transit": (330, 7)}[mode]
        minutes = max(1, round(metres / speed + wait))
        arrival = self.now + dt.timedelta(minutes=minutes)
        return {"to": place["name"], "mode": mode, "distance_m": round(metres, -1), "minutes": minutes} | {
            "arrival": f"{arrival:%H:%M}"
        }

    def _place(self, place_id: str) -> Result:
        known = {place["id"]: place for place in self._places}
        if place_id not in known:
            raise ReactionError(f"unknown place {place_id!r}; map_nearby and map_search give ids")
        return known[place_id]

    def _shown(self, place: Result) -> Result:
        is_open, until = _open(place, self.now)
        shown = {name: value for name, value in place.items() if name != "days"}
        return {**shown, "open_days": _days(place), "open_now": is_open, **({"open_until": until} if until else {})}

    # --- Weather ------------------------------------------------------------------------------------------------------

    @_tool("Weather")
    def weather_now(self, latitude: Latitude, longitude: Longitude) -> Result:
        """The weather at a point at this moment."""
        return {"time": self._minute(self.now), **weather_at(station_near(latitude, longitude), self.now)}

    @_tool("Weather")
    def weather_hours(
        self, latitude: Latitude, longitude: Longitude, hours: Annotated[int, Field(ge=1, le=48)] = 12
    ) -> Result:
        """Forecast for the next hours, as it was last issued."""
        station, issued = station_near(latitude, longitude), last_issued(self.now)
        first = self.now.replace(minute=0, second=0, microsecond=0)
        coming = [first + dt.timedelta(hours=h) for h in range(1, hours + 1)]
        return {
            "issued": self._minute(issued),
            "hours": [{"time": self._minute(hour), **forecast_for(station, hour, issued)} for hour in coming],
        }

    @_tool("Weather")
    def weather_days(
        self, latitude: Latitude, longitude: Longitude, days: Annotated[int, Field(ge=1, le=7)] = 3
    ) -> Result:
        """Forecast for the next days, from tomorrow on, as it was last issued."""
        station, issued = station_near(latitude, longitude), last_issued(self.now)
        midnight = self.now.replace(hour=0, minute=0, second=0, microsecond=0)
        found = []
        for day in range(1, days + 1):
            date = midnight + dt.timedelta(days=day)
            found.append(day_of([forecast_for(station, date + dt.timedelta(hours=h), issued) for h in range(24)], date))
        return {"issued": self._minute(issued), "days": found}

    @_tool("Weather")
    def weather_past(
        self, latitude: Latitude, longitude: Longitude, days: Annotated[int, Field(ge=1, le=14)] = 3
    ) -> Result:
        """The weather of the last days, yesterday first."""
        station = station_near(latitude, longitude)
        midnight = self.now.replace(hour=0, minute=0, second=0, microsecond=0)
        dates = [midnight - dt.timedelta(days=day) for day in range(1, days + 1)]
        return {"days": [day_of([weather_at(station, d + dt.timedelta(hours=h)) for h in range(24)], d) for d in dates]}

    @_tool("Weather")
    def weather_air(self, latitude: Latitude, longitude: Longitude) -> Result:
        """Air quality at a point at this moment, as an index where up to 50 is good."""
        station = station_near(latitude, longitude)
        index = round(CLIMATES[station.id]["air"] * (0.7 + 0.6 * chance(station.id, "air", hour_of(self.now) // 3)))
        words = ((50, "good"), (100, "moderate"), (150, "unhealthy for sensitive people"))
        return {
            "measured": self._minute(self.now.replace(minute=0)),
            "index": index,
            "category": next((word for top, word in words if index <= top), "unhealthy"),
        }

    @_tool("Weather")
    def weather_sun(self, latitude: Latitude, longitude: Longitude) -> Result:
        """Today's sunrise and sunset at a point, to some minutes."""
        return {"date": self.now.date().isoformat(), **sun_times(latitude, longitude, self.now)}

    def _minute(self, time: dt.datetime) -> str:
        return time.isoformat(timespec="minutes")

    # --- News ---------------------------------------------------------------------------------------------------------

    @_tool("News")
    def news_headlines(self, city: Annotated[str, Field(max_length=60)] = "", limit: Limit = 5) -> Result:
        """The latest headlines, newest first; by default of the person's city."""
        return {
            "articles": self._news(lambda one: folded(one["city"]) == folded(city or self.scenario.place.city), limit)
        }

    @_tool("News")
    def news_search(self, query: Query, limit: Limit = 5) -> Result:
        """Articles of all papers by words, best first."""
        published = [one for one in _reading()["news"] if self._was(one["published"])]
        found = _best(query, published, ("headline", "text", "city", "topic"), limit)
        return {"articles": [_headline(one) for one in found]}

    @_tool("News")
    def news_topic(
        self,
        topic: Literal["local", "business", "travel", "culture", "health", "education", "housing", "society"],
        limit: Limit = 5,
    ) -> Result:
        """The latest articles on a topic from all cities, newest first."""
        return {"articles": self._news(lambda one: one["topic"] == topic, limit)}

    @_tool("News")
    def news_article(self, article_id: Annotated[str, Field(description="id from another news tool")]) -> Result:
        """One article in full."""
        return dict(self._one("news", article_id, "published"))

    def _news(self, wanted: Callable[[Mapping[str, Any]], bool], limit: int) -> list[Result]:
        found = [one for one in _reading()["news"] if self._was(one["published"]) and wanted(one)]
        found.sort(key=lambda one: str(one["published"]), reverse=True)
        return [_headline(one) for one in found[:limit]]

    # --- Reddit -------------------------------------------------------------------------------------------------------

    @_tool("Reddit")
    def reddit_search(self, query: Query, limit: Limit = 5) -> Result:
        """Posts by words, best first."""
        found = _best(query, self._posts(), ("title", "text", "subreddit"), limit)
        return {"posts": [self._listed(post) for post in found]}

    @_tool("Reddit")
    def reddit_subreddit(self, subreddit: Annotated[str, Field(max_length=60)], limit: Limit = 5) -> Result:
        """The newest posts of a subreddit."""
        name = f"r/{subreddit.removeprefix('r/')}".casefold()
        found = [post for post in self._posts() if post["subreddit"].casefold() == name]
        found.sort(key=lambda post: str(post["created"]), reverse=True)
        return {"posts": [self._listed(post) for post in found[:limit]]}

    @_tool("Reddit")
    def reddit_post(self, post_id: Annotated[str, Field(description="id from another Reddit tool")]) -> Result:
        """One post with its comments so far."""
        post = self._one("posts", post_id, "created")
        comments = [comment for comment in post["comments"] if self._was(comment["created"])]
        return {**self._listed(post), "text": post["text"], "comments": comments}

    @_tool("Reddit")
    def reddit_subreddits(self, query: Annotated[str, Field(max_length=100)] = "") -> Result:
        """Subreddits and how many posts they hold; with words, those that speak of them."""
        posts = self._posts()
        wanted = _best(query, posts, ("subreddit", "title", "text"), len(posts)) if query else posts
        names = sorted({post["subreddit"] for post in wanted})
        return {"subreddits": [{"name": n, "posts": sum(post["subreddit"] == n for post in posts)} for n in names]}

    def _posts(self) -> list[Mapping[str, Any]]:
        return [post for post in _reading()["posts"] if self._was(post["created"])]

    def _listed(self, post: Mapping[str, Any]) -> Result:
        age = (self.now - _time(post["created"])).total_seconds() / 86_400
        return {
            **{name: post[name] for name in ("id", "subreddit", "title", "author", "created")},
            "score": max(1, round(post["score"] * (1 - math.exp(-age / 2)))),  # the votes of its first days, by now
            "comment_count": sum(self._was(comment["created"]) for comment in post["comments"]),
        }

    # --- Wikipedia ----------------------------------------------------------------------------------------------------

    @_tool("Wikipedia")
    def wiki_search(self, query: Query, limit: Limit = 5) -> Result:
        """Titles of articles by words, best first."""
        found = _best(query, _reading()["articles"], ("title", "summary", "sections"), limit)
        return {"titles": [article["title"] for article in found]}

    @_tool("Wikipedia")
    def wiki_summary(self, title: Query) -> Result:
        """The beginning of an article, and its sections' names."""
        article = _article(title)
        return {"title": article["title"], "summary": article["summary"], "sections": list(article["sections"])}

    @_tool("Wikipedia")
    def wiki_section(self, title: Query, section: Query) -> Result:
        """One section of an article."""
        article = _article(title)
        known = {name.casefold(): (name, text) for name, text in article["sections"].items()}
        if section.casefold() not in known:
            raise ReactionError(
                f"{article['title']!r} has no section {section!r}; it has: {', '.join(article['sections'])}"
            )
        name, text = known[section.casefold()]
        return {"title": article["title"], "section": name, "text": text}

    # --- Music --------------------------------------------------------------------------------------------------------

    @_tool("Music")
    def music_search(self, query: Query, limit: Limit = 5) -> Result:
        """Tracks by title, artist, album or genre."""
        return {"tracks": [dict(t) for t in _best(query, self._tracks(), ("title", "artist", "album", "genre"), limit)]}

    @_tool("Music")
    def music_mood(
        self,
        mood: Literal["calm", "sleep", "sad", "cheerful", "energetic", "hopeful", "angry", "focus"],
        limit: Limit = 5,
    ) -> Result:
        """Tracks for a mood."""
        return {"tracks": [dict(track) for track in self._tracks() if track["mood"] == mood][:limit]}

    @_tool("Music")
    def music_artist(self, name: Query) -> Result:
        """An artist's albums and tracks."""
        tracks = [track for track in self._tracks() if folded(track["artist"]) == folded(name)]
        if not tracks:
            raise ReactionError(f"unknown artist {name!r}; music_search finds names")
        return {"artist": tracks[0]["artist"], "albums": sorted({t["album"] for t in tracks}), "tracks": tracks}

    def _tracks(self) -> list[Mapping[str, Any]]:
        return [track for track in _reading()["tracks"] if track["year"] <= self.now.year]

    # --- time ---------------------------------------------------------------------------------------------------------

    def _was(self, time: str) -> bool:
        return _time(time) <= self.now

    def _one(self, kind: str, id_: str, when: str) -> Mapping[str, Any]:
        found = next((one for one in _reading()[kind] if one["id"] == id_ and self._was(one[when])), None)
        if found is None:  # what is yet to come is as unknown as what never was
            raise ReactionError(f"nothing with the id {id_!r} among the {kind}")
        return found


def openai_tools() -> list[dict[str, Any]]:
    """The tools as chat completions take them."""
    return [
        {"type": "function", "function": {"name": t.name, "description": t.description, "parameters": _schema(t)}}
        for t in TOOLS.values()
    ]


def mcp_server(scenario: SupportScenario, now: dt.datetime | None = None) -> MCPServer[Any]:
    """An MCP server with all tools; ``.run("stdio")`` serves it, a client of the SDK takes it in process.

    A call with wrong arguments gets a result marked as an error, which says what is known. Raises ReactionError when
    the ``mcp`` package is missing.
    """
    try:
        from mcp.server import MCPServer
        from mcp.server.mcpserver.exceptions import ToolError
        from mcp.types import ToolAnnotations
    except ImportError as error:
        raise ReactionError("the tools are served with the mcp package: pip install 'traitbasis[mcp]'") from error
    from traitbasis import __version__

    world = SupportWorld(scenario, now)
    server: MCPServer[Any] = MCPServer("traitbasis-support", version=__version__, log_level="WARNING")

    def serve(tool: Tool) -> None:
        method = getattr(world, tool.name)

        @wraps(method)
        def answer(**arguments: Any) -> Result:
            try:
                return world.call(tool.name, arguments)
            except ReactionError as error:
                raise ToolError(str(error)) from error

        server.add_tool(
            answer,
            name=tool.name,
            description=tool.description,
            annotations=ToolAnnotations(read_only_hint=True, open_world_hint=False),
            meta={"category": tool.category},
        )

    for tool in TOOLS.values():
        serve(tool)
    return server


def _schema(tool: Tool) -> dict[str, Any]:
    return {name: value for name, value in tool.arguments.model_json_schema().items() if name != "title"}


# --- the data ---------------------------------------------------------------------------------------------------------


@cache
def _reading() -> Mapping[str, list[Mapping[str, Any]]]:
    text = files("traitbasis.reactive").joinpath("data/support_reading.yaml").read_text(encoding="utf-8")
    found: Mapping[str, list[Mapping[str, Any]]] = yaml.safe_load(text)
    return found


_DEGREE = 111_320  # metres of a degree of latitude


def _places(scenario: SupportScenario) -> list[Result]:
    """What stands around a scenario; nothing does around one that is not ours."""
    here, found = scenario.place, []
    for place in SURROUNDINGS.get(scenario.id, {}).get("places", ()):
        east, north = place["at"]
        point = {
            "latitude": round(here.latitude + north / _DEGREE, 5),
            "longitude": round(here.longitude + east / _DEGREE / math.cos(math.radians(here.latitude)), 5),
        }
        found.append({**{name: value for name, value in place.items() if name != "at"}, **point})
    return found


def _article(title: str) -> Mapping[str, Any]:
    found = next((one for one in _reading()["articles"] if folded(one["title"]) == folded(title)), None)
    if found is None:
        raise ReactionError(f"no article {title!r}; wiki_search finds titles")
    return found


def _headline(one: Mapping[str, Any]) -> Result:
    return {name: one[name] for name in ("id", "headline", "city", "topic", "source", "published")}


def _time(text: str) -> dt.datetime:
    return dt.datetime.fromisoformat(text)


def _matches(query: str, texts: Iterable[str]) -> bool:
    said = set(_stems(" ".join(texts)))
    return all(word in said for word in _stems(query))


def _stems(text: str) -> list[str]:
    return [word[:-1] if len(word) > 3 and word.endswith("s") else word for word in words_of(text)]


_Record = TypeVar("_Record", bound=Mapping[str, Any])


def _best(query: str, records: Sequence[_Record], fields: Sequence[str], limit: int) -> list[_Record]:
    """Records that hold words of the query, those with most of them first; words of the first field count double."""
    asked = {word for word in _stems(query) if len(word) > 2 or word.isdigit()}
    scored = []
    for record in records:
        words = [set(_stems(str(record.get(field, "")))) for field in fields]
        score = 2 * len(asked & words[0]) + len(asked & set().union(*words[1:]))
        if score:
            scored.append((score, record))
    return [record for _, record in sorted(scored, key=lambda one: -one[0])[:limit]]


_WEEK = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")


def _days(place: Mapping[str, Any]) -> str:
    return ", ".join(_WEEK[day - 1] for day in place["days"]) if "days" in place else "daily"


def _open(place: Mapping[str, Any], now: dt.datetime) -> tuple[bool, str]:
    """Whether it is open, and until when; hours may end after midnight."""
    if place["open"] == "always":
        return True, ""
    opens, closes = (int(text[:2]) * 60 + int(text[3:]) for text in place["open"].split("-"))
    minute, days = now.hour * 60 + now.minute, place.get("days", range(1, 8))
    if closes > opens:
        is_open = opens <= minute < closes and now.isoweekday() in days
    else:
        yesterday = (now - dt.timedelta(days=1)).isoweekday()
        is_open = (minute >= opens and now.isoweekday() in days) or (minute < closes and yesterday in days)
    return is_open, place["open"].split("-")[1] if is_open else ""
