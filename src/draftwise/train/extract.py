"""Extract the hidden states of a target over a body of text into files: what ``draftwise extract`` does.

The files are those of method ``extract_hidden_states``, one per text, or shards of several texts; training reads both
(`draftwise.train.heads.shards`). Work is done in groups of texts; after each the folder's manifest says how far it
got, so that a run that was interrupted goes on where it stopped.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftwise.errors import ConfigError, DraftwiseError
from draftwise.propose.extract_hidden_states import write_states
from draftwise.train.folders import whole_file
from draftwise.train.heads.text import read_documents, tokenize

if TYPE_CHECKING:
    from draftwise import LLM

MANIFEST = "manifest.json"
_GROUP_TOKENS = 16_384
"""Tokens of the texts that are in the engine together; an interruption costs as much work at most."""


@dataclass(slots=True)
class Progress:
    """How far a folder has got: the manifest, without what identifies the work."""

    texts: int = 0  # of the data, done or left out
    skipped: int = 0  # texts of fewer than two tokens
    tokens: int = 0  # written
    files: list[str] = field(default_factory=list)
    done: bool = False


@dataclass(frozen=True, slots=True)
class Job:
    """The data to extract, and its destination. ``shard_tokens``: texts share files of about as many tokens; None:
    one each."""

    data: tuple[Path, ...]
    output: Path
    target: str
    layers: tuple[int, ...]
    max_length: int  # longer texts are cut into several
    shard_tokens: int | None = None
    limit: int | None = None  # texts
    weights: str = "auto"  # what the target is computed in: dtype and quantization

    @property
    def parts(self) -> Path:
        """Where the engine writes to: files of single texts, moved or joined when their group is done."""
        return self.output / "parts"

    def identity(self) -> dict[str, Any]:
        """The settings that must be the same for a run to go on in a folder."""
        return {
            "target": self.target,
            "layers": list(self.layers),
            "weights": self.weights,
            "data": [{"file": str(file), "sha256": _digest(file)} for file in self.data],
            "max_length": self.max_length,
            "shard_tokens": self.shard_tokens,
        }


def extract(llm: LLM, job: Job, advance: Callable[[str], None] = lambda _: None) -> Progress:
    """Extract what the folder does not hold yet. ``llm`` has method ``extract_hidden_states`` with the job's layers.

    ``advance`` is called with a label for every text.

    Raises:
        ConfigError: the folder holds other work, or the data cannot be read; the file is named.
        DraftwiseError: a file could not be written.
    """
    progress = open_folder(job)
    if progress.done and (job.limit is None or progress.texts >= job.limit):
        return progress
    tokenizer = llm.get_tokenizer()
    group: list[list[int]] = []
    taken = progress.texts
    skipped = 0
    finished = True
    try:
        for number, ids in enumerate(_texts(job, tokenizer)):
            if number < progress.texts:
                continue
            if job.limit is not None and number >= job.limit:
                finished = False
                break
            taken = number + 1
            advance(f"{progress.tokens} tokens")
            if len(ids) < 2:
                skipped += 1
                continue
            group.append(ids)
            if sum(map(len, group)) >= (job.shard_tokens or _GROUP_TOKENS):
                _write_group(llm, job, group, progress)
                progress.texts, progress.skipped = taken, progress.skipped + skipped
                _save(job, progress)
                group, skipped = [], 0
        if group:
            _write_group(llm, job, group, progress)
        progress.texts, progress.skipped, progress.done = taken, progress.skipped + skipped, finished
        _save(job, progress)
    finally:
        _clear(job.parts)  # of an interruption: they are made again
    return progress


def open_folder(job: Job) -> Progress:
    """The finished files, after half-written ones were removed.

    Raises:
        ConfigError: the folder belongs to other work, or its manifest cannot be read.
    """
    manifest = job.output / MANIFEST
    if not manifest.is_file():
        if any(job.output.glob("*.safetensors")):
            raise ConfigError(
                f"--output {job.output}: there are .safetensors files without a {MANIFEST}; choose another folder"
            )
        return Progress()
    try:
        found = json.loads(manifest.read_text(encoding="utf-8"))
        progress = Progress(**found.pop("progress"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{manifest}: cannot be read: {error}") from error
    for name, value in job.identity().items():
        if found.get(name) != value:
            raise ConfigError(
                f"--output {job.output}: holds an extraction with {name} {found.get(name)!r}, not {value!r}; choose "
                "another folder, or remove this one"
            )
    known = set(progress.files)
    for path in [*job.output.glob("*.safetensors"), *job.output.glob("*.part")]:
        if path.name not in known:
            path.unlink()
    _clear(job.parts)
    missing = [name for name in progress.files if not (job.output / name).is_file()]
    if missing:
        raise ConfigError(f"{job.output / missing[0]}: is missing, but {MANIFEST} names it")
    return progress


def _texts(job: Job, tokenizer: Any) -> Iterator[list[int]]:
    """Token ids of every text, long ones in pieces."""
    for document in read_documents(job.data):
        ids = tokenize(document, tokenizer).ids
        for start in range(0, max(len(ids), 1), job.max_length):
            yield ids[start : start + job.max_length]


def _write_group(llm: LLM, job: Job, group: Sequence[list[int]], progress: Progress) -> None:
    """Run the texts together and write their files, or their shard."""
    from draftwise import SamplingParams

    params = SamplingParams(max_tokens=1, temperature=0, detokenize=False)
    waiting: list[Path] = []
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in group], params, use_tqdm=False)
    for output in outputs:
        done = output.outputs[0]
        if done.error is not None or output.kv_transfer_params is None:
            raise DraftwiseError(f"text {progress.texts + 1} and following: {done.error}")
        waiting.append(Path(output.kv_transfer_params["hidden_states_path"]))
    number = len(progress.files)
    if job.shard_tokens is None:
        for i, path in enumerate(waiting):
            name = f"text-{number + i:07d}.safetensors"
            os.replace(path, job.output / name)
            progress.files.append(name)
    else:
        name = f"shard-{number:05d}.safetensors"
        _join(waiting, job.output / name, job.layers)
        progress.files.append(name)
        for path in waiting:
            path.unlink()
    progress.tokens += sum(map(len, group))


def _join(paths: Sequence[Path], shard: Path, layers: Sequence[int]) -> None:
    """The files of single texts as one, with ``starts`` [texts + 1]."""
    import torch
    from safetensors.torch import load_file

    parts = [load_file(str(path)) for path in paths]
    ids = torch.cat([part["token_ids"] for part in parts])
    starts = [0]
    for part in parts:
        starts.append(starts[-1] + len(part["token_ids"]))
    states = torch.cat([part["hidden_states"] for part in parts])
    write_states(shard, ids.numpy().astype("int32"), states, layers, starts)


def _save(job: Job, progress: Progress) -> None:
    """Write the manifest; whole or not at all. Raises DraftwiseError."""
    state = {name: getattr(progress, name) for name in Progress.__slots__}
    job.output.mkdir(parents=True, exist_ok=True)
    with whole_file(job.output / MANIFEST) as part:
        part.write_text(json.dumps({**job.identity(), "progress": state}, indent=1) + "\n", encoding="utf-8")


def _digest(file: Path) -> str:
    """Of its content: another text of the same length is other data."""
    try:
        found = file.stat()
        return _digest_of(file, found.st_size, found.st_mtime_ns)
    except OSError as error:
        raise ConfigError(f"--data {file}: {error.strerror or error}") from error


@functools.lru_cache(maxsize=256)
def _digest_of(file: Path, size: int, changed: int) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()[:32]


def _clear(parts: Path) -> None:
    if parts.is_dir():
        for path in [*parts.glob("*.safetensors"), *parts.glob("*.part")]:
            path.unlink()
        if not any(parts.iterdir()):
            parts.rmdir()
