"""The part of Prometheus' query language that the rules use, evaluated over scrapes that a test took.

A scrape is what ``/metrics`` answered at a time. ``increase`` and ``rate`` count from sample to sample, over restarts,
and extrapolate nothing: an alert that fires here has samples to fire on.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from prometheus_client.parser import text_string_to_metric_families

Labels = frozenset[tuple[str, str]]
Vector = dict[Labels, float]
Value = float | Vector

_TOKEN = re.compile(
    r'\s*(?:(?P<text>"[^"]*")|(?P<span>\[\d+[smhd]\])|(?P<duration>\d+[smhd]\b)|(?P<number>\d+(?:\.\d+)?)|(?P<name>[a-zA-Z_][\w:]*)|'
    r"(?P<sign>=~|!~|!=|==|<=|>=|[-+*/<>=(){},]))"
)
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_COMPARE: dict[str, Callable[[float, float], bool]] = {
    ">": operator.gt,
    "<": operator.lt,
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
}
_COUNT: dict[str, Callable[[float, float], float]] = {
    "*": operator.mul,
    "/": lambda a, b: a / b if b else float("nan"),
    "+": operator.add,
    "-": operator.sub,
}


class Scrape(NamedTuple):
    """Samples by name and labels, at a time in seconds."""

    time_s: float
    samples: Mapping[str, Vector]


def scrape(time_s: float, text: str, instance: str = "node", job: str = "tallystick", *, up: int = 1) -> Scrape:
    """What Prometheus keeps of an answer of ``/metrics``."""
    target = {("instance", instance), ("job", job)}
    samples: dict[str, Vector] = {"up": {frozenset(target): float(up)}}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = frozenset(target | {*sample.labels.items()})
            samples.setdefault(sample.name, {})[labels] = sample.value
    return Scrape(time_s, samples)


def evaluate(expression: str, scrapes: Sequence[Scrape], recorded: Mapping[str, str] | None = None) -> Value:
    """The value at the time of the last scrape; ``recorded`` are recording rules by name."""
    parser = _Parser(expression, scrapes, recorded or {})
    value = parser.either()
    assert parser.is_at_end, f"{expression}: not understood from {parser.token!r} on"
    return value


def seconds_of(duration: str) -> int:
    """Of a duration as rules write it, such as ``5m``."""
    return int(duration[:-1]) * _SECONDS[duration[-1]]


class _Parser:
    def __init__(self, expression: str, scrapes: Sequence[Scrape], recorded: Mapping[str, str]) -> None:
        self._scrapes, self._recorded = scrapes, recorded
        self._tokens: list[str] = []
        at = 0
        text = expression.strip()
        while at < len(text):
            found = _TOKEN.match(text, at)
            assert found is not None, f"{expression}: {text[at:]!r} is no token"
            self._tokens.append(found[0].strip())
            at = found.end()

    @property
    def is_at_end(self) -> bool:
        return not self._tokens

    @property
    def token(self) -> str:
        return self._tokens[0] if self._tokens else ""

    def _take(self, *expected: str) -> str:
        assert not expected or self.token in expected, f"{self.token!r} where {expected} should be"
        return self._tokens.pop(0)

    def either(self) -> Value:
        left = self.both()
        while self.token == "or":
            self._take()
            right = self.both()
            assert isinstance(left, dict)
            assert isinstance(right, dict)
            left = {**right, **left}
        return left

    def both(self) -> Value:
        left = self._compared()
        while self.token == "and":
            self._take()
            on = self._matching()
            right = self._compared()
            assert isinstance(left, dict)
            assert isinstance(right, dict)
            found = {_only(labels, on) for labels in right}
            left = {labels: value for labels, value in left.items() if _only(labels, on) in found}
        return left

    def _compared(self) -> Value:
        left = self._sum()
        if self.token not in _COMPARE:
            return left
        compare = _COMPARE[self._take()]
        on = self._matching()
        right = self._sum()
        assert isinstance(left, dict)
        return {labels: a for labels, a, b in _pairs(left, right, on) if compare(a, b)}

    def _sum(self) -> Value:
        return self._chain(self._product, "+", "-")

    def _product(self) -> Value:
        return self._chain(self._atom, "*", "/")

    def _chain(self, part: Callable[[], Value], *signs: str) -> Value:
        left = part()
        while self.token in signs:
            count = _COUNT[self._take()]
            on = self._matching()
            right = part()
            if isinstance(left, dict):
                left = {labels: count(a, b) for labels, a, b in _pairs(left, right, on)}
            elif isinstance(right, dict):
                left = {labels: count(left, b) for labels, b in right.items()}
            else:
                left = count(left, right)
        return left

    def _matching(self) -> frozenset[str] | None:
        """The labels of ``on``; what ``group_left`` adds is not of interest."""
        if self.token != "on":
            return None
        self._take()
        names = frozenset(self._names())
        if self.token == "group_left":
            self._take()
            self._names()
        return names

    def _names(self) -> list[str]:
        names = []
        self._take("(")
        while self.token != ")":
            names.append(self._take())
            if self.token == ",":
                self._take()
        self._take(")")
        return names

    def _atom(self) -> Value:
        token = self._take()
        if token[0].isdigit():
            return float(token)
        if token == "(":
            value = self.either()
            self._take(")")
            return value
        if token in _AGGREGATES:
            self._take("by")
            by = self._names()
            self._take("(")
            value = self.both()
            self._take(")")
            assert isinstance(value, dict)
            return _grouped(value, by, _AGGREGATES[token])
        if token == "time":
            self._names()
            return self._scrapes[-1].time_s
        if token == "histogram_quantile":
            self._take("(")
            quantile = float(self._take())
            self._take(",")
            value = self.both()
            self._take(")")
            assert isinstance(value, dict)
            return _quantile(quantile, value)
        if token in _OVER_TIME:
            self._take("(")
            series = self._range(self._take())
            self._take(")")
            return {labels: found for labels, each in series.items() if (found := _OVER_TIME[token](each)) is not None}
        if token in self._recorded:
            return evaluate(self._recorded[token], self._scrapes, self._recorded)
        wanted = self._wanted()
        return {labels: value for labels, value in self._scrapes[-1].samples.get(token, {}).items() if wanted(labels)}

    def _range(self, name: str) -> dict[Labels, list[tuple[float, float]]]:
        wanted = self._wanted()
        span = self._take()
        until_s = self._scrapes[-1].time_s
        if self.token == "offset":
            self._take()
            until_s -= seconds_of(self._take())
        since_s = until_s - seconds_of(span[1:-1])
        series: dict[Labels, list[tuple[float, float]]] = {}
        for each in self._scrapes:
            for labels, value in each.samples.get(name, {}).items():
                if since_s <= each.time_s <= until_s and wanted(labels):
                    series.setdefault(labels, []).append((each.time_s, value))
        return series

    def _wanted(self) -> Callable[[Labels], bool]:
        matchers: list[tuple[str, str, str]] = []
        if self.token == "{":
            self._take()
            while self.token != "}":
                matchers.append((self._take(), self._take("=", "!=", "=~", "!~"), self._take()[1:-1]))
                if self.token == ",":
                    self._take()
            self._take("}")

        def is_wanted(labels: Labels) -> bool:
            values = dict(labels)
            for name, sign, text in matchers:
                found = values.get(name, "")
                is_equal = bool(re.fullmatch(text, found)) if "~" in sign else found == text
                if is_equal == sign.startswith("!"):
                    return False
            return True

        return is_wanted


def _pairs(left: Vector, right: Value, on: frozenset[str] | None) -> list[tuple[Labels, float, float]]:
    if not isinstance(right, dict):
        return [(labels, value, right) for labels, value in left.items()]
    others = {_only(labels, on): value for labels, value in right.items()}
    assert len(others) == len(right), "several on the right match one on the left"
    return [(labels, value, others[key]) for labels, value in left.items() if (key := _only(labels, on)) in others]


def _only(labels: Labels, names: frozenset[str] | None) -> Labels:
    return labels if names is None else frozenset(pair for pair in labels if pair[0] in names)


def _grouped(value: Vector, by: Sequence[str], of: Callable[[list[float]], float]) -> Vector:
    groups: dict[Labels, list[float]] = {}
    for labels, each in value.items():
        groups.setdefault(_only(labels, frozenset(by)), []).append(each)
    return {labels: float(of(each)) for labels, each in groups.items()}


def _quantile(quantile: float, buckets: Vector) -> Vector:
    """The upper end of the bucket in which it lies."""
    found: dict[Labels, list[tuple[float, float]]] = {}
    for labels, count in buckets.items():
        rest = frozenset(pair for pair in labels if pair[0] != "le")
        found.setdefault(rest, []).append((float(dict(labels)["le"]), count))
    result = {}
    for labels, each in found.items():
        total = max(count for _, count in each)
        if total:
            result[labels] = min(le for le, count in each if count >= quantile * total)
    return result


def _increase(series: list[tuple[float, float]]) -> float | None:
    if len(series) < 2:
        return None
    return sum(b - a if b >= a else b for (_, a), (_, b) in pairwise(series))


def _rate(series: list[tuple[float, float]]) -> float | None:
    increase = _increase(series)
    return None if increase is None else increase / (series[-1][0] - series[0][0])


_AGGREGATES: dict[str, Callable[[list[float]], float]] = {"sum": sum, "count": len, "max": max}
_OVER_TIME: dict[str, Callable[[list[tuple[float, float]]], float | None]] = {
    "increase": _increase,
    "rate": _rate,
    "changes": lambda series: float(sum(a != b for (_, a), (_, b) in pairwise(series))),
    "last_over_time": lambda series: series[-1][1],
    "min_over_time": lambda series: min(value for _, value in series),
}
