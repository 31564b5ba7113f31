"""``draftwise serve --ray``: the server on Ray Serve, or the file by which ``serve deploy`` starts it."""

from __future__ import annotations

import argparse
import contextlib
import functools
import signal
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftwise.cli.errors import UsageError
from draftwise.errors import ConfigError, install

if TYPE_CHECKING:
    from draftwise.deploy.plan import Plan
    from draftwise.server.config import ServerConfig

_NAME = "draftwise"
"""The application's name in the cluster."""


def add_ray(parser: argparse.ArgumentParser) -> None:
    """Add its flags."""
    group = parser.add_argument_group("Ray Serve")
    group.add_argument(
        "--ray", dest="on_ray", action="store_true", help="serve on the nodes of a Ray cluster"
    )
    group.add_argument("--num-replicas", type=int, metavar="N", help="with --ray: engines (1)")
    group.add_argument(
        "--num-fronts", type=int, metavar="N", help="with --ray: processes that take requests (1)"
    )
    group.add_argument(
        "--write-deployment",
        metavar="FILE",
        help="write the YAML file for serve deploy (-: to stdout), and end",
    )


def wants_ray(args: argparse.Namespace) -> bool:
    """Whether to serve on Ray. Raises UsageError for flags that need it."""
    if args.on_ray or args.write_deployment is not None:
        return True
    for flag in ("num_replicas", "num_fronts"):
        if getattr(args, flag) is not None:
            raise UsageError(f"--{flag.replace('_', '-')}: needs --ray")
    return False


def serve_on_ray(args: argparse.Namespace, engine: Mapping[str, Any], server: ServerConfig) -> int:
    """Deploy and stay until a signal comes; the exit code. Raises UsageError, ConfigError."""
    from dataclasses import fields

    from draftwise.deploy.plan import Plan

    plan = Plan.of(
        {
            "engine": dict(engine),
            "server": {f.name: getattr(server, f.name) for f in fields(server)},
            "num_replicas": args.num_replicas or 1,
            "num_fronts": args.num_fronts or 1,
        }
        if args.num_replicas != 0 and args.num_fronts != 0
        else {"num_replicas": 0}
    )
    plan.first_replicas()  # says what is wrong
    if args.write_deployment is not None:
        return _write(plan, args.write_deployment)
    if server.port == 0:
        raise UsageError("--port 0: Ray Serve's proxies need a port that all nodes have")
    return _deploy(plan, server)


def _write(plan: Plan, path: str) -> int:
    import yaml

    plan.engine_config  # noqa: B018  (says what is wrong)
    text = yaml.safe_dump(plan.written(), sort_keys=False)
    if path == "-":
        print(text, end="")
        return 0
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--write-deployment {path}: {error.strerror}") from None
    print(f"wrote {path}: serve deploy {path}")
    return 0


def _deploy(plan: Plan, server: ServerConfig) -> int:
    from draftwise.cluster.rays import join_cluster

    join_cluster("--ray")
    try:
        from ray import serve
    except ImportError as error:
        raise ConfigError(f"--ray: {error.name} is not installed: {install('ray')}") from None
    from draftwise.deploy.application import build

    got = threading.Event()
    numbers: list[int] = []

    def stop(number: int, frame: object) -> None:
        numbers.append(number)
        got.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    try:
        serve.start(proxy_location="EveryNode", http_options={"host": server.host, "port": server.port})
        serve.run(
            build(plan), name=_NAME, route_prefix="/", blocking=False,
            external_scaler_enabled=plan.is_scaled,
        )  # fmt: skip
        host = f"[{server.host}]" if ":" in server.host else server.host
        print(f"Draftwise serves {server.model_names[0]} at http://{host}:{server.port}", flush=True)
        while not got.wait(1.0):
            pass
    except RuntimeError as error:
        raise ConfigError(f"--ray: {_why(serve, error)}") from None
    finally:
        for end in (functools.partial(serve.delete, _NAME), serve.shutdown):
            with contextlib.suppress(Exception):  # another user has ended it, with its controller
                end()
    return 130 if numbers[:1] == [signal.SIGINT] else 0


def _why(serve: Any, error: Exception) -> str:
    """The reason of a failed deployment, which Ray puts only into its status."""
    found = [str(error)]
    for application in serve.status().applications.values():
        for deployment in application.deployments.values():
            # the end of a traceback: what a replica raised
            lines = [line.strip() for line in deployment.message.splitlines() if line.strip()]
            found += lines[-1:] if deployment.status != "HEALTHY" else []
    return "; ".join(found)
