"""Settings every test shares."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Property tests look at the same examples every time, however slow the machine is.
settings.register_profile(
    "steady", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("steady")

# Before transformers or tokenizers are imported: no test reaches for the network or forks a tokenizer pool.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Without a GPU, Triton kernels run in Triton's interpreter; it must know before triton is imported.
if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"
# Processes that tests start see this source tree, installed or not.
_PATH = [str(Path(__file__).parents[1] / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
os.environ["PYTHONPATH"] = os.pathsep.join(_PATH)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests marked ``gpu`` are skipped, with a reason that is shown, where torch sees no CUDA device."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(params=["best", "emulated", "amx"])
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    """The level that this processor gets; tiles that are computed, anywhere; those of the unit, where there is one."""
    from tests.native import on_level

    with on_level(request.param):
        yield request.param


@pytest.fixture(autouse=True, scope="module")
def _registered_proposers() -> Iterator[None]:
    """What a module registers is gone after it: the order of modules must not matter."""
    from draftwise.config import registry

    before = dict(registry._registered)
    yield
    registry._registered.clear()
    registry._registered.update(before)
