"""What the names of weight formats mean, by device."""

from __future__ import annotations

import pytest

from draftwise.errors import ConfigError
from draftwise.quantization.scheme import Scheme, checked_name, parse_scheme


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(
    "name",
    ["fp8", "int8_dynamic", "int4_dynamic", "int8_weight_only", "int4_weight_only_g32", "int4_dynamic_g128"],
)
def test_a_forms_own_name_means_it_everywhere(name: str, device: str) -> None:
    assert parse_scheme(name, device=device).name == name


def test_the_short_names_mean_what_is_fast_on_a_device() -> None:
    assert parse_scheme("int8") == parse_scheme("int8", device="cuda") == Scheme(8, True, None)
    assert parse_scheme("int4") == Scheme(4, True, 64)
    assert parse_scheme("INT4_g32 ") == parse_scheme("int4_dynamic_g32") == Scheme(4, True, 32)
    assert parse_scheme("int4", device="cuda") == parse_scheme("int4_weight_only") == Scheme(4, False, 64)


def test_a_checked_name_is_left_for_the_device_to_read() -> None:
    assert checked_name(" Int4_G32") == "int4_g32"
    for wrong in ("int4_g48", "int8_g64", "int4_weight", "int2"):
        with pytest.raises(ConfigError, match="format: "):
            checked_name(wrong, "format")
