"""Whether a record that Python and native code both write is laid out alike on both sides (``csrc/layout.cpp``)."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

from draftwise.errors import ConfigError
from draftwise.kernels.cpu.library import NativeLibrary


def check_record(
    library: NativeLibrary,
    name: str,
    mirror: type[ctypes.Structure],
    renamed: Mapping[str, str] | None = None,
) -> None:
    """Compare each field of ``mirror`` with that of ``dw::NAME``: order, name, offset and size, in bytes.

    ``renamed``: fields of the mirror that have another name in C.
    Example: a new int64 in the middle of the C record alone moves all fields behind it by 8 bytes.

    Raises:
        ConfigError: Something differs; says which field.
    """
    renamed = renamed or {}
    found: list[tuple[str, int, int]] = []
    for entry in mirror._fields_:
        field = getattr(mirror, entry[0])
        found.append((renamed.get(entry[0], entry[0]), field.offset, field.size))
    native = _native_fields(library).get(name, [])
    for ours, theirs in zip(found, native, strict=False):
        if ours != theirs:
            raise ConfigError(
                f"the native library lays {name}.{theirs[0]} out at byte {theirs[1]} ({theirs[2]} bytes), but Python "
                f"expects {ours[0]} at byte {ours[1]} ({ours[2]} bytes): {mirror.__name__} and csrc differ"
            )
    if len(found) != len(native):
        raise ConfigError(
            f"the native library has {len(native)} fields of {name}, but Python has {len(found)}"
        )


def _native_fields(library: NativeLibrary) -> dict[str, list[tuple[str, int, int]]]:
    """Name, offset and size of each field, by record."""
    pointer = ctypes.POINTER(ctypes.c_int64)
    name_of = library.function("dw_layout_field", ctypes.c_char_p, [ctypes.c_int, pointer, pointer])
    found: dict[str, list[tuple[str, int, int]]] = {}
    offset, size = ctypes.c_int64(), ctypes.c_int64()
    count = 0
    while (full := name_of(count, offset, size)) is not None:
        record, _, field = full.decode().partition(".")
        found.setdefault(record, []).append((field, offset.value, size.value))
        count += 1
    return found
