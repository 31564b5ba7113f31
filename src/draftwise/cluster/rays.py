"""Ranks on the nodes of a Ray cluster: a placement group with a bundle for each, and an actor that supervises it.

Ray places and watches; the ranks' processes are those of `ranking`, and steps go to them over connections of their own.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from draftwise.cluster.group import Holding
from draftwise.cluster.remote import Gone, Hand
from draftwise.cluster.supervisor import Supervisor
from draftwise.errors import ConfigError, install

logger = logging.getLogger("draftwise")

_SAYING = 10.0
"""Seconds of waiting for resources after which the log says so."""


_BACKEND = "distributed_executor_backend: 'ray'"


def load_ray(what: str = _BACKEND) -> Any:
    """The module. Raises ConfigError if it is not installed; ``what`` needs it."""
    try:
        import ray
    except ImportError:
        raise ConfigError(f"{what} needs the package ray: {install('ray')}") from None
    return ray


def join_cluster(what: str = _BACKEND) -> Any:
    """Ray, connected to a cluster: the one that this program has joined, that ``RAY_ADDRESS`` names, or that runs on
    this machine; else one of its own. Raises ConfigError if Ray is not installed, or through Ray Client."""
    ray = load_ray(what)
    if not ray.is_initialized():
        try:
            ray.init(logging_level=logging.WARNING)
        except Exception as error:  # Ray has no exceptions of its own for this
            raise ConfigError(f"{what}: Ray cannot be joined or started: {error}") from None
    if ray.util.client.ray.is_connected():
        raise ConfigError(
            f"{what} over Ray Client (ray://) is not supported, as ranks connect to the "
            "engine: run it on a node of the cluster, for example with ray job submit"
        )
    return ray


class _NodeSupervisor(Supervisor):
    """That of an actor."""

    def where(self) -> tuple[str, str]:
        """(id, address) of the node."""
        ray = load_ray()
        return ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()


class ActorHand(Hand):
    """Calls the supervisor in an actor."""

    def __init__(self, ray: Any, actor: Any, machine: str, address: str) -> None:
        self._ray = ray
        self.actor = actor
        self.machine = machine
        self.address = address

    def begin(self, method: str, *arguments: Any) -> Callable[[float], Any]:
        ray, errors = self._ray, self._ray.exceptions
        if not ray.is_initialized():  # a call would join a cluster anew
            return _gone("was ended with its Ray cluster")
        try:
            reference = getattr(self.actor, method).remote(*arguments)
        except errors.RayError as error:
            return _gone(self._lost(error))

        def answer(seconds: float) -> Any:
            try:
                return ray.get(reference, timeout=seconds)
            except errors.RayActorError as error:
                raise Gone(self._lost(error)) from None
            except errors.GetTimeoutError:
                raise Gone(f"is supervised on node {self.address} by an actor that does not answer") from None
            except errors.RayTaskError as error:
                raise error.cause from None  # what the method raised

        return answer

    def _lost(self, error: Exception) -> str:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        detail = next(
            (line for line in lines if "exit detail" in line or "killed" in line), lines[0] if lines else ""
        )
        return f"was ended with its Ray actor on node {self.address}: {detail}"


def _gone(why: str) -> Callable[[float], Any]:
    def answer(seconds: float) -> Any:
        raise Gone(why)

    return answer


class Reserved(Holding):
    """Actors and, if it was made for them, the placement group that they are in."""

    def __init__(self, ray: Any, group: Any | None) -> None:
        self._ray = ray
        self._group = group
        self.actors: list[Any] = []

    def put_away(self) -> None:
        if not self._ray.is_initialized():
            return
        for actor in self.actors:
            with contextlib.suppress(Exception):
                self._ray.kill(actor)
        self.actors.clear()
        if self._group is not None:
            with contextlib.suppress(Exception):
                self._ray.util.remove_placement_group(self._group)
        self._group = None

    def disown(self) -> None:
        self.actors.clear()
        self._group = None


def reserve(ray: Any, size: int, *, cpus: int, gpus: int, seconds: float) -> tuple[list[Hand], Reserved]:
    """An actor with a supervisor for each rank, with so many processors and devices.

    They go into the placement group that this program runs in, if there is one (a Ray Serve replica with
    ``placement_group_bundles``); else into one that is made for them, on as few nodes as can be. Ranks of a node stand
    together.

    Raises:
        ConfigError: the cluster has no room for them within ``seconds``, or its nodes lack Draftwise.
    """
    bundle = {"CPU": float(cpus)} | ({"GPU": float(gpus)} if gpus else {})
    current = ray.util.get_current_placement_group()
    if current is not None:
        group, holding = current, Reserved(ray, None)
    else:
        group = ray.util.placement_group([bundle] * size, strategy="PACK")
        holding = Reserved(ray, group)
    try:
        _wait(ray, group, bundle, size, seconds)
        indices = _bundles(group, bundle, size)
        strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
        actor = ray.remote(_NodeSupervisor)
        for index in indices:
            holding.actors.append(
                actor.options(
                    num_cpus=cpus,
                    num_gpus=gpus,
                    max_restarts=0,
                    scheduling_strategy=strategy(
                        placement_group=group, placement_group_bundle_index=index,
                        placement_group_capture_child_tasks=False,
                    ),
                ).remote()
            )  # fmt: skip
        places = _nodes(ray, holding.actors, seconds)
    except BaseException:
        holding.put_away()
        raise
    hands: list[Hand] = [
        ActorHand(ray, one, node, address)
        for one, (node, address) in zip(holding.actors, places, strict=True)
    ]
    here = ray.get_runtime_context().get_node_id()
    hands.sort(key=lambda hand: (hand.machine != here, hand.machine))
    return hands, holding


def _wait(ray: Any, group: Any, bundle: dict[str, float], size: int, seconds: float) -> None:
    """Until the cluster has room; a cluster that grows by itself may need minutes."""
    begun, said = time.monotonic(), False
    while not group.wait(min(_SAYING, max(0.1, seconds - (time.monotonic() - begun)))):
        wanted = f"{size} bundles of {_shown(bundle)}"
        free = f"free in the cluster: {_shown(ray.available_resources())}"
        if time.monotonic() - begun >= seconds:
            raise ConfigError(
                f"tensor_parallel_size: Ray found no room for {wanted} within {seconds:g} s (worker_timeout); {free}"
            )
        if not said:
            logger.warning("waiting for Ray to find room for %s; %s", wanted, free)
        said = True


def _shown(resources: dict[str, float]) -> str:
    return ", ".join(f"{name} {resources.get(name, 0.0):g}" for name in ("CPU", "GPU") if name in resources)


def _bundles(group: Any, bundle: dict[str, float], size: int) -> list[int]:
    """The last ones that are large enough: in a Ray Serve replica the first is the replica's own."""
    fitting = [
        i
        for i, one in enumerate(group.bundle_specs)
        if all(one.get(name, 0.0) >= wanted for name, wanted in bundle.items())
    ]
    if len(fitting) < size:
        raise ConfigError(
            f"tensor_parallel_size: the placement group that this runs in has {len(fitting)} bundles with "
            f"{_shown(bundle)}, {size} ranks need one each"
        )
    return fitting[len(fitting) - size :]


def _nodes(ray: Any, actors: Sequence[Any], seconds: float) -> list[tuple[str, str]]:
    """(node id, address) of each."""
    try:
        return list(ray.get([one.where.remote() for one in actors], timeout=max(seconds, 60.0)))
    except (ray.exceptions.RayActorError, ray.exceptions.RayTaskError) as error:
        raise ConfigError(
            f"a node of the Ray cluster cannot start a rank; is Draftwise installed there? {error}"
        ) from None
    except ray.exceptions.GetTimeoutError:
        raise ConfigError("a node of the Ray cluster did not start a worker in time") from None
