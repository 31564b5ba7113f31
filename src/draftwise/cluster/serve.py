"""``draftwise.cluster.serve:app``: what files for ``serve deploy`` name as the application.

This is a name for Ray and nothing else. What it stands for is built on the server, floors above this one, and is found
by its path, as methods of third parties are.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

_BUILDER = "draftwise.deploy.application"


def app(args: Mapping[str, Any]) -> Any:
    """The application of ``args``, see `deploy.plan.Plan`. Raises ConfigError."""
    return importlib.import_module(_BUILDER).build(args)
