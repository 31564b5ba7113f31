"""Calls to all replicas, with their answers joined: numbers with a label, sums, and whether all have done it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Whole = tuple[int, str, bytes]
"""Status, content type and body of an answer."""
Answers = Sequence[tuple[str, Whole]]
"""By replica."""


def metrics(answers: Answers) -> Whole:
    """Prometheus' text, every sample with the label ``replica``; a family's samples stand together.

    Example: ``a{b="c"} 1.0`` of replica x becomes ``a{replica="x",b="c"} 1.0``.
    """
    heads: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for replica, (_, _, body) in answers:
        family, known = "", list[str]()
        for line in body.decode().splitlines():
            if line.startswith("#"):
                kind, name = line.split(" ", 3)[1:3]
                if kind == "HELP":
                    family = name
                    samples.setdefault(family, [])
                    known = heads.setdefault(family, [])
                if line not in known:
                    known.append(line)
            elif line:
                samples[family].append(_labelled(line, replica))
    lines = [line for family in heads for line in (*heads[family], *samples[family])]
    text = "".join(line + "\n" for line in lines)
    return 200, "text/plain; version=0.0.4; charset=utf-8", text.encode()


def _labelled(sample: str, replica: str) -> str:
    end = sample.index(" ")
    brace = sample.find("{", 0, end)
    if brace < 0:
        return f'{sample[:end]}{{replica="{replica}"}}{sample[end:]}'
    return f'{sample[:brace]}{{replica="{replica}",{sample[brace + 1 :]}'


def load(answers: Answers) -> Whole:
    """Requests of all, and the mean use of their caches."""
    found = [json.loads(body) for _, (_, _, body) in answers]
    summed: dict[str, Any] = {
        name: sum(one[name] for one in found)
        for name in ("server_load", "num_requests_running", "num_requests_waiting")
    }
    summed["kv_cache_usage"] = sum(one["kv_cache_usage"] for one in found) / len(found)
    return _json(summed)


def reset(answers: Answers) -> Whole:
    """Whether all have forgotten their cached blocks."""
    return _json({"success": all(json.loads(body)["success"] for _, (_, _, body) in answers)})


def _json(value: Mapping[str, Any]) -> Whole:
    return 200, "application/json", json.dumps(value).encode()


TOGETHER: Mapping[str, Callable[[Answers], Whole]] = {
    "/metrics": metrics,
    "/load": load,
    "/reset_prefix_cache": reset,
}
"""Paths that all replicas answer, and how their answers become one."""
