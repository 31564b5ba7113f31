"""What mkdocs.yml needs besides docs/: the pages beside it, under about/, and a reference made from docstrings."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BESIDE = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")
REFERENCE = """# Reference

This page lists the public interface, from the docstrings. `from draftwise import NAME` takes each name.

"""
CLASSES = (
    "engine.llm.LLM",
    "engine.async_llm.AsyncLLM",
    "engine.stepped.LLMEngine",
    "sampling.params.SamplingParams",
    "sampling.structured.StructuredOutputs",
    "config.speculative.SpeculativeConfig",
    "config.engine.EngineConfig",
    "config.limits.RequestLimits",
    "config.lora.LoRARequest",
    "engine.outputs.RequestOutput",
    "engine.outputs.CompletionOutput",
    "engine.outputs.RequestMetrics",
    "engine.outputs.SpeculationMetrics",
    "engine.outputs.EngineStats",
    "engine.outputs.Guarantees",
    "errors",
    "models.registry.register_model",
    "propose.registry.register_proposer",
    "verify.registry.register_verifier",
)


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are not in docs/."""
    from mkdocs.structure.files import File

    text = REFERENCE + "\n\n".join(f"::: draftwise.{name}" for name in CLASSES) + "\n"
    files.append(File.generated(config, "reference.md", content=text))
    for name in BESIDE:
        text = (ROOT / name).read_text(encoding="utf-8")
        # From about/ a page of docs/ is one folder up: "](docs/models.md)" is "](../models.md)".
        text = re.sub(r"\]\(docs/", "](../", text)
        files.append(File.generated(config, f"about/{name}", content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Links from docs/ to the pages beside it lead to about/: "](../../README.md)" is "](../about/README.md)"."""
    if page.file.src_uri.startswith("about/"):
        return markdown
    names = "|".join(re.escape(name) for name in BESIDE)
    return re.sub(rf"\]\(((?:\.\./)*)\.\./({names})", r"](\1about/\2", markdown)
