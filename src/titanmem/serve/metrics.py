"""Numbers for Prometheus, in its text format."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from threading import Lock

BUCKETS = (0.005, 0.02, 0.1, 0.5, 2.0, 10.0, 60.0)
Labels = tuple[tuple[str, str], ...]


class Metrics:
    """Counters and one histogram, from any thread."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._counts: dict[str, dict[Labels, float]] = defaultdict(lambda: defaultdict(float))
        self._help: dict[str, tuple[str, str]] = {}
        self._times: dict[str, list[float]] = defaultdict(lambda: [0.0] * (len(BUCKETS) + 2))

    def describe(self, name: str, kind: str, text: str) -> None:
        self._help[name] = (kind, text)
        if kind == "counter":
            self._counts[name]  # known from the start; those with labels appear when they are counted

    def count(self, name: str, value: float = 1, **labels: str) -> None:
        with self._lock:
            self._counts[name][tuple(sorted(labels.items()))] += value

    def observe(self, path: str, seconds: float) -> None:
        with self._lock:
            held = self._times[path]
            held[bisect_left(BUCKETS, seconds)] += 1
            held[-1] += seconds

    def text(self, gauges: dict[str, float]) -> str:
        """All of it; `gauges` are values of now."""
        lines = []
        with self._lock:
            for name, (kind, text) in self._help.items():
                lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]
                if name in gauges:
                    lines.append(f"{name} {gauges[name]:g}")
                lines += [f"{name}{_labels(labels)} {value:g}" for labels, value in self._counts.get(name, {}).items()]
            name = "titanmem_request_seconds"
            lines += [f"# HELP {name} how long requests took", f"# TYPE {name} histogram"]
            for path, held in self._times.items():
                total = 0.0
                for limit, value in zip([*map(str, BUCKETS), "+Inf"], held[:-1], strict=True):
                    total += value
                    lines.append(f"{name}_bucket{_labels((('le', limit), ('path', path)))} {total:g}")
                lines.append(f"{name}_sum{_labels((('path', path),))} {held[-1]:.6f}")
                lines.append(f"{name}_count{_labels((('path', path),))} {total:g}")
        return "\n".join(lines) + "\n"


def _labels(labels: Labels) -> str:
    return "{" + ",".join(f'{name}="{value}"' for name, value in labels) + "}" if labels else ""
