"""``draftwise env``: versions, processor, and which promises hold here. For bug reports."""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
from typing import TYPE_CHECKING, Any

from draftwise.cli.options import ENGINE_BOOLEANS, add_engine_options, engine_kwargs
from draftwise.cli.report import print_json
from draftwise.cpus import default_threads, model, processors

if TYPE_CHECKING:
    from draftwise.cli.options import Subparsers
    from draftwise.config.engine import EngineConfig
    from draftwise.models.checking import KernelCheck

BOOLEANS = ENGINE_BOOLEANS
PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "huggingface_hub")
_ISA = (
    "avx2",
    "fma",
    "avx512f",
    "avx512_vnni",
    "avx512_bf16",
    "amx_bf16",
    "amx_int8",
    "asimd",
    "asimddp",
    "i8mm",
    "bf16",
    "sve",
)


def add_parser(subparsers: Subparsers) -> None:
    """Register ``env``."""
    parser = subparsers.add_parser(
        "env",
        help="what this machine and this installation are",
        usage="draftwise env [options]",
        description="Versions, processor, threads, and the guarantees of the engine as configured.",
    )
    parser.add_argument("--json", action="store_true", help="as a JSON object")
    parser.add_argument(
        "--check-kernels",
        action="store_true",
        help="compare every kernel with plain torch at the model's shapes and dtype; exit status 1 if one is wrong",
    )
    add_engine_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Carry out ``draftwise env``."""
    facts = environment()
    from draftwise import LLM

    with LLM(**engine_kwargs(args)) as llm:
        config, held = llm.config, llm.guarantees
        facts["engine"] = {
            "model": "embedded demo model" if config.embedded else config.model,
            "device": config.device,
            "drafters": [spec.method for spec in config.drafters],
            "default_method": config.default_method,
        }
        facts["guarantees"] = {
            "lossless": held.lossless,
            "same_bits": held.same_bits,
            "same_seed_same_text": held.same_seed_same_text,
            "reasons": list(held.reasons),
        }
    checks = _check(config) if args.check_kernels else []
    if args.check_kernels:
        facts["checks"] = [
            {"kernel": check.name, "right": check.right, "result": str(check)} for check in checks
        ]
    if args.json:
        print_json(facts)
    else:
        _print_facts(facts)
        width = max((len(check.name) for check in checks), default=0) + 2
        for check in checks:
            print(f"{check.name:<{width}}{check}")
    return 0 if all(check.right for check in checks) else 1


def _check(config: EngineConfig) -> list[KernelCheck]:
    """The kernels of the engine's target, and those between its passes; also those that the engine does without."""
    import torch

    from draftwise.kernels.select import default_ops, on_triton
    from draftwise.models.checking import check_kernels
    from draftwise.models.loader import load_config
    from draftwise.quantization.scheme import parse_scheme
    from draftwise.runner.step_checks import check_steps

    assert config.model is not None, "resolve_engine_config names the embedded model"
    model = load_config(config.model, config.revision, max_model_len=config.max_model_len)
    name = (model.dtype or "float32") if config.dtype == "auto" else config.dtype
    device = torch.device(config.device)
    scheme = parse_scheme(config.quantization, device=device.type) if config.quantization else None
    ops = default_ops(
        getattr(torch, name), device, scheme, batch_invariant=config.batch_invariant, untested=True,
        latent=model.latent is not None,
    )  # fmt: skip
    triton = on_triton(device, untested=True)
    checks = check_kernels(ops, model, scheme, adapters=triton, stored=triton)
    if triton:
        checks += check_steps(device, model.vocab_size, config.block_size)
    return checks


def environment() -> dict[str, Any]:
    """Versions and machine, without building an engine."""
    import torch

    from draftwise import __version__

    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    versions["torch"] = torch.__version__  # says of which build it is; some wheels are recorded without that
    cpu = model()
    found = processors()
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "draftwise": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": versions,
        "cpu": {
            "model": cpu.name,
            "cores": found.allowed,
            "quota": found.quota,  # of control groups, in processors; null: none
            "threads": default_threads(torch.get_num_threads()),  # the default of an engine
            "isa": [flag for flag in _ISA if flag in cpu.features],
            "torch_capability": torch.backends.cpu.get_cpu_capability(),
            "torch_threads": torch.get_num_threads(),
        },
        "kernels": _kernels(),
        "gpus": gpus,
    }


def machine(device: str) -> tuple[str, str]:
    """The processor, or the GPUs, that models run on, and whose kernels they use there."""
    import torch

    from draftwise.kernels.select import on_triton

    facts = environment()
    cpu = facts["cpu"]
    if device == "cpu":
        return f"{cpu['model']}, {cpu['cores']} cores, {cpu['torch_threads']} threads", facts["kernels"]
    return ", ".join(facts["gpus"]) or device, "triton" if on_triton(torch.device(device)) else "torch"


def _kernels() -> str:
    """The kernels for models on the CPU: the native instruction set and the reason for it, or the reason why there
    are no native kernels."""
    import torch

    from draftwise.kernels.cpu.library import native_library
    from draftwise.kernels.select import native_reason

    reason = native_reason(torch.bfloat16, torch.device("cpu"))
    library = native_library()
    if reason is None and library is not None:
        from draftwise.kernels.cpu.levels import settle_level

        level = settle_level(library)
        return f"native, {level.isa.name.lower()} ({level.reason})"
    return f"torch ({reason})"


def _print_facts(facts: dict[str, Any]) -> None:
    cpu, engine, held = facts["cpu"], facts["engine"], facts["guarantees"]
    rows = [
        ("draftwise", facts["draftwise"]),
        ("python", facts["python"]),
        ("platform", facts["platform"]),
        *facts["packages"].items(),
        (
            "cpu",
            f"{cpu['model']}, {cpu['cores']} cores" + (f", quota {cpu['quota']:g}" if cpu["quota"] else ""),
        ),
        ("threads", f"{cpu['threads']} (torch: {cpu['torch_threads']})"),
        ("instruction sets", f"{' '.join(cpu['isa']) or 'unknown'} (torch: {cpu['torch_capability']})"),
        ("kernels", facts["kernels"]),
        ("gpus", ", ".join(facts["gpus"]) or "none"),
        ("model", engine["model"]),
        ("device", engine["device"]),
        ("drafters", ", ".join(engine["drafters"]) + f" (default: {engine['default_method']})"),
        ("lossless", "yes" if held["lossless"] else "no"),
        ("same bits", "yes" if held["same_bits"] else "no"),
        ("same seed, same text", "yes" if held["same_seed_same_text"] else "no"),
        *(("", reason) for reason in held["reasons"]),
    ]
    for name, value in rows:
        print(f"{name:<22}{value}")
