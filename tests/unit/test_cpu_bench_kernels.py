"""The kernel benchmark on a tiny shape: everything measured, in units that fit together."""

from __future__ import annotations

import pytest
from tests.native import native_or_skip

from draftwise.bench.kernels import Shape, bench_kernels
from draftwise.errors import ConfigError

TINY = Shape(hidden=64, inner=96, layers=5, heads=4, kv_heads=2, vocab=100)


def test_every_format_and_row_count_is_measured() -> None:
    native_or_skip()
    seen: list[str] = []
    report = bench_kernels(
        formats=["bfloat16", "int4_g32", "nvfp4", "nvfp4_dynamic"],
        rows=[3],
        threads=1,
        rounds=2,
        layers=1,
        shape=TINY,
        advance=seen.append,
    )
    assert [(row.format, row.rows) for row in report.rows] == [
        ("bfloat16", 1),
        ("bfloat16", 3),
        ("int4_g32", 1),
        ("int4_g32", 3),
        ("nvfp4", 1),
        ("nvfp4", 3),
        ("nvfp4_dynamic", 1),
        ("nvfp4_dynamic", 3),
    ]
    read = {row.format: row.read_rate * row.seconds for row in report.rows}
    assert read["int4_g32"] < read["nvfp4"] < 0.5 * read["bfloat16"]
    assert len(seen) == 3 * 8  # one round to warm up
    assert report.peaks.keys() == {"bfloat16", "int8"} and report.bandwidth > 0 and report.threads == 1
    for row in report.rows:
        assert row.share == pytest.approx(row.roofline / row.seconds)
        # a whole pass: all layers and the head, from a run of one layer
        operations = 2 * row.rows * TINY.linear_weights()
        assert row.operation_rate == pytest.approx(operations / row.seconds)


def test_unknown_format() -> None:
    native_or_skip()
    with pytest.raises(ConfigError, match="int5"):
        bench_kernels(formats=["int5"], shape=TINY)


def test_shape_is_tinyllamas() -> None:
    assert 1.0e9 < Shape().linear_weights() < 1.1e9
