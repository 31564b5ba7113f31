"""Text for the embedded demo models: CPython's standard library, split by file.

The corpus is the set of `.py` files of the running interpreter's standard library. Every file belongs to
exactly one side of the split, decided by a hash of its path relative to the library's root: the same file is
held out under every Python version and on every machine. Nothing here needs torch, so that the benchmarks can
take prompts from the held-out files without loading it.
"""

from __future__ import annotations

import hashlib
import os
import re
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from draftwise.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from tokenizers import Tokenizer

EOS_TOKEN = "<|endoftext|>"
EOS_ID = 0
"""The only special token: it separates files, so that it ends a text and can start an empty one."""

HELDOUT_PERMILLE = 35
"""Files held out of training, per thousand."""

_SKIP_DIRS = ("site-packages", "dist-packages", "__pycache__", "lib-dynload")
# Generated tables, data and deliberately broken sources: a small model would waste its capacity on them.
_SKIP_PREFIXES = (
    "config-",
    "_sysconfigdata",
    "encodings/",
    "html/entities.py",
    "lib2to3/tests/data/",
    "pydoc_data/",
    "test/bad",
    "test/encoded_modules/",
    "test/test_lib2to3/data/",
    "test/test_tokenize_data",
    "test/tokenizedata/",
)
_TEST_DIR = re.compile(r"(^|/)(test|tests|idle_test)/")
_MAX_DIGITS = 0.15
_MIN_BYTES = 200

# Llama-3-like pieces, made for code: a word takes one leading sign or space with it (" name", "_name"), and
# a line's closing signs take the newline and the next line's indentation but for its last space, which belongs
# to the word that follows.
_PIECES = (
    r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+(?:\n+ *(?= ))?[\r\n]*"
    r"|\s*\n+ *(?= )|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file of the corpus."""

    path: Path
    relative: str
    """Path relative to the library's root, with forward slashes: the file's identity in the split."""
    kind: Literal["library", "test"]
    heldout: bool


@dataclass(frozen=True, slots=True)
class HeldoutPrompt:
    """A benchmark prompt: exactly the first `len(token_ids)` tokens of a definition in a held-out file."""

    token_ids: list[int]
    source: str
    """Relative path and line, as in `heapq.py:120`."""


def is_heldout(relative: str) -> bool:
    """Say whether the file at this relative path (forward slashes) is held out; depends on nothing else."""
    digest = hashlib.sha256(relative.encode("utf-8")).digest()
    return int.from_bytes(digest[:8], "big") % 1000 < HELDOUT_PERMILLE


def stdlib_root() -> Path:
    """Return the folder of the running interpreter's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def stdlib_files(root: Path | None = None) -> list[SourceFile]:
    """List the corpus in a stable order (by relative path), generated tables left out.

    Args:
        root: the library's folder; the running interpreter's by default.

    Raises:
        ConfigError: there is no Python file in it.
    """
    base = root or stdlib_root()
    found = []
    for folder, folders, names in os.walk(base):
        # Installed packages may be a hundred times the library: nobody looks into their folders.
        folders[:] = [name for name in folders if name not in _SKIP_DIRS]
        for path in (Path(folder, name) for name in names if name.endswith(".py")):
            relative = path.relative_to(base).as_posix()
            if relative.startswith(_SKIP_PREFIXES) or any(part in _SKIP_DIRS for part in path.parts):
                continue
            kind: Literal["library", "test"] = "test" if _TEST_DIR.search(relative) else "library"
            found.append(SourceFile(path, relative, kind, is_heldout(relative)))
    if not found:
        raise ConfigError(f"--root {base}: there is no .py file in it to learn from")
    return sorted(found, key=lambda file: file.relative)


def read_source(file: SourceFile) -> str | None:
    """Return the file's text with `\\n` line ends; None if it is tiny, not UTF-8, or a table of numbers."""
    data = file.path.read_bytes()
    try:
        text = data.decode("utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError:
        return None
    if len(data) < _MIN_BYTES or sum(map(str.isdigit, text)) > _MAX_DIGITS * len(text):
        return None
    return text


def train_tokenizer(texts: Iterable[str], vocab_size: int = 4096) -> Tokenizer:
    """Train the byte-level BPE tokenizer; id 0 is `<|endoftext|>`, the last ids are the rarest merges."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOS_TOKEN],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


@dataclass(frozen=True, slots=True)
class Corpus:
    """The tokenised corpus: one array of ids per file, in the order of `stdlib_files`."""

    library: list[npt.NDArray[np.uint16]]
    test: list[npt.NDArray[np.uint16]]
    heldout: list[npt.NDArray[np.uint16]]
    """Held-out library files (held-out test files are used for nothing)."""
    heldout_bytes: int

    def window_epochs(self, window: int, seed: int, test_parts: int) -> Iterator[npt.NDArray[np.uint16]]:
        """Yield epochs of shuffled windows, each epoch of shape (windows, window + 1), without end.

        An epoch holds all library files and every `test_parts`-th test file, so that tests, more than half of
        the text but of little variety, do not dominate. Windows overlap by one token, the last label.
        """
        import numpy as np

        epoch = 0
        while True:
            rng = np.random.Generator(np.random.PCG64([seed, epoch]))
            files = self.library + self.test[epoch % test_parts :: test_parts]
            order = rng.permutation(len(files))
            stream = join_files([files[i] for i in order])
            start = int(rng.integers(0, max(1, min(window, len(stream) - window - 1))))
            count = (len(stream) - start - 1) // window
            rows = np.arange(count)[:, None] * window + np.arange(window + 1)[None, :] + start
            yield stream[rows[rng.permutation(count)]]
            epoch += 1


def join_files(files: Sequence[npt.NDArray[np.uint16]]) -> npt.NDArray[np.uint16]:
    """Concatenate files with one end-of-text before each and one after the last."""
    import numpy as np

    eos = np.array([EOS_ID], dtype=np.uint16)
    parts = [piece for file in files for piece in (eos, file)]
    return np.concatenate([*parts, eos])


def build_corpus(tokenizer: Tokenizer, files: Sequence[SourceFile]) -> Corpus:
    """Tokenise every file. Takes seconds for the whole library."""
    import numpy as np

    groups: dict[str, list[npt.NDArray[np.uint16]]] = {"library": [], "test": [], "heldout": []}
    heldout_bytes = 0
    for file in files:
        text = read_source(file)
        if text is None or (file.heldout and file.kind == "test"):
            continue
        if file.heldout:
            heldout_bytes += len(text.encode("utf-8"))
        ids = np.array(tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.uint16)
        groups["heldout" if file.heldout else file.kind].append(ids)
    return Corpus(groups["library"], groups["test"], groups["heldout"], heldout_bytes)


_DEFINITION = re.compile(r"^(?:class|def|    def|async def|    async def) ", re.MULTILINE)


def heldout_prompts(
    tokenizer: Any, n: int, prompt_tokens: int, seed: int = 0, *, root: Path | None = None
) -> list[HeldoutPrompt]:
    """Draw prompts from files no embedded model was trained on; the same arguments give the same prompts.

    Each prompt starts at the line of a `def` or `class`. Files take turns, so that a long file does not
    dominate.

    Args:
        tokenizer: a `tokenizers.Tokenizer` or a Transformers tokenizer.
        n: how many prompts; fewer come back if the held-out files do not hold as many.
        prompt_tokens: length of every prompt in tokens.
        seed: another seed, other places.
        root: the library's folder; the running interpreter's by default.
    """

    def key(*parts: object) -> bytes:
        return hashlib.sha256(":".join(map(str, (seed, *parts))).encode()).digest()

    places: list[tuple[int, bytes, str, str, int]] = []
    for file in stdlib_files(root):
        text = read_source(file) if file.heldout and file.kind == "library" else None
        if text is None:
            continue
        starts = [match.start() for match in _DEFINITION.finditer(text)]
        starts.sort(key=lambda start: key(file.relative, start))
        for turn, start in enumerate(starts):
            places.append((turn, key(file.relative), file.relative, text, start))
    places.sort(key=lambda place: place[:2])

    prompts: list[HeldoutPrompt] = []
    for _, _, relative, text, start in places:
        if len(prompts) == n:
            break
        # No token of this vocabulary is longer than some dozens of bytes: a slice is enough, and quick.
        ids = _encode(tokenizer, text[start : start + 16 * prompt_tokens + 256])[:prompt_tokens]
        if len(ids) == prompt_tokens:
            line = text.count("\n", 0, start) + 1
            prompts.append(HeldoutPrompt(ids, f"{relative}:{line}"))
    return prompts


def _encode(tokenizer: Any, text: str) -> list[int]:
    encoding = tokenizer.encode(text, add_special_tokens=False)
    return list(getattr(encoding, "ids", encoding))
