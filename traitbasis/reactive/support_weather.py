"""The weather of support scenarios: a function of city and hour, the same for everybody, made up.

A city's climate (``data/support_places.yaml``) gives the season and the day's course, chance that depends on nothing
but city and hour the rest. A forecast is what will be, with an error that grows with how far ahead it looks.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import math
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

import yaml

from traitbasis.errors import ReactionError
from traitbasis.reactive.support import SupportScenario, scenarios

Result = dict[str, Any]

REACH = 100_000  # metres to a place that is still "there"
SURROUNDINGS: Mapping[str, Mapping[str, Any]] = yaml.safe_load(
    files("traitbasis.reactive").joinpath("data/support_places.yaml").read_text(encoding="utf-8")
)
CLIMATES: Mapping[str, Mapping[str, Any]] = {name: one["climate"] for name, one in SURROUNDINGS.items()}


def chance(*what: object) -> float:
    """A number from 0 to 1 that depends on nothing but `what`."""
    digest = hashlib.blake2b(repr(what).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


def hour_of(time: dt.datetime) -> int:
    """Hours since 1970, of any zone."""
    return int(time.timestamp() // 3600)


def station_near(latitude: float, longitude: float) -> SupportScenario:
    """The scenario whose city's weather is that of a point. Raises ReactionError where there is none near."""
    near = [one for one in scenarios().values() if one.id in CLIMATES]
    best = min(near, key=lambda one: metres_between(latitude, longitude, one.place.latitude, one.place.longitude))
    if metres_between(latitude, longitude, best.place.latitude, best.place.longitude) > REACH:
        raise ReactionError(
            f"no weather station near {latitude}, {longitude}; utils_coordinates says where the person is"
        )
    return best


def weather_at(station: SupportScenario, time: dt.datetime) -> Result:
    """The weather that there is; time is in the station's own zone."""
    climate, hour, day = CLIMATES[station.id], hour_of(time), hour_of(time) // 24
    local = time.astimezone(station.time.tzinfo)
    season = math.cos(2 * math.pi * (local.month - 1 + local.day / 31 - climate["warmest"] + 0.5) / 12)
    into = hour % 24 / 24
    spell = (1 - into) * chance(station.id, day) + into * chance(station.id, day + 1)  # from one day's air to the next
    temperature = climate["mean"] + climate["summer"] * season + 8 * (spell - 0.5)
    temperature += climate["noon"] * math.cos(2 * math.pi * (local.hour - 15) / 24)
    found = {
        "temperature_c": round(temperature, 1),
        "condition": _condition(climate["wet"], temperature, station.id, hour // 3),
        "wind_kmh": round(climate["wind"] * (0.5 + chance(station.id, "wind", hour // 3))),
        "humidity_percent": round(45 + 45 * chance(station.id, "air", hour // 6)),
    }
    if abs((time - station.time).total_seconds()) <= 6 * 3600:
        found |= climate.get("around", {})
    return found


def _condition(wet: float, temperature: float, *what: object) -> str:
    sky, weight = chance("sky", *what), chance("weight", *what)
    if sky < wet:
        return ("light " if weight < 0.6 else "heavy " if weight > 0.92 else "") + (
            "snow" if temperature < 0.5 else "rain"
        )
    return "clear sky" if weight < 0.35 else "partly cloudy" if weight < 0.7 else "overcast"


def last_issued(now: dt.datetime) -> dt.datetime:
    """Forecasts come out every six hours."""
    return now.replace(hour=now.hour // 6 * 6, minute=0, second=0, microsecond=0)


def forecast_for(station: SupportScenario, time: dt.datetime, issued: dt.datetime) -> Result:
    """What was said of an hour when the forecast was made: the further ahead, the more it errs."""
    true, ahead = weather_at(station, time), max(0.0, (time - issued).total_seconds() / 3600)
    what = (station.id, hour_of(time) // 3, hour_of(issued))
    temperature = true["temperature_c"] + 0.5 * math.sqrt(ahead) * (chance("error", *what) - 0.5)
    missed = chance("missed", *what) < min(0.4, ahead / 150)
    sky = _condition(CLIMATES[station.id]["wet"], temperature, "other", *what) if missed else true["condition"]
    return {"temperature_c": round(temperature, 1), "condition": sky, "wind_kmh": true["wind_kmh"]}


def day_of(hours: Sequence[Result], date: dt.datetime) -> Result:
    """Lowest, highest and most of a day's 24 hours."""
    conditions = [hour["condition"] for hour in hours[7:22]]
    return {
        "date": date.date().isoformat(),
        "weekday": f"{date:%A}",
        "low_c": min(hour["temperature_c"] for hour in hours),
        "high_c": max(hour["temperature_c"] for hour in hours),
        "condition": max(conditions, key=conditions.count),
        "wet_hours": sum("rain" in c or "snow" in c for c in conditions),
    }


def sun_times(latitude: float, longitude: float, now: dt.datetime) -> Result:
    """Sunrise and sunset from the sun's declination and the equation of time (the usual short forms)."""
    turn = 2 * math.pi * (now.timetuple().tm_yday - 81) / 365
    declination = math.radians(23.45) * math.sin(turn)
    equation = 9.87 * math.sin(2 * turn) - 7.53 * math.cos(turn) - 1.5 * math.sin(turn)
    horizon = math.sin(math.radians(-0.83)) - math.sin(math.radians(latitude)) * math.sin(declination)
    cosine = horizon / (math.cos(math.radians(latitude)) * math.cos(declination) or 1e-9)
    if abs(cosine) > 1:
        return {"sun": "never sets today" if cosine < 0 else "does not rise today"}
    offset = (now.utcoffset() or dt.timedelta()).total_seconds() / 60
    noon, half = 720 - 4 * longitude - equation + offset, 4 * math.degrees(math.acos(cosine))
    return {
        name: f"{int(m // 60) % 24:02d}:{int(m % 60):02d}"
        for name, m in (("sunrise", noon - half), ("sunset", noon + half))
    }


def metres_between(latitude: float, longitude: float, other_latitude: float, other_longitude: float) -> float:
    """Along the great circle (haversine)."""
    a, b = math.radians(latitude), math.radians(other_latitude)
    half = math.sin((b - a) / 2) ** 2
    half += math.cos(a) * math.cos(b) * math.sin(math.radians(other_longitude - longitude) / 2) ** 2
    return 2 * 6_371_000 * math.asin(math.sqrt(min(1.0, half)))
