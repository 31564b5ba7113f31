"""Make the models that `compare.py` measures, once for each engine's format.

    python benchmarks/peers/prepare.py --work DIR --peers ENVS

What is there already is left alone; what a missing peer would need is skipped with a message. About 10 GB.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

from jobs import model_path
from processes import Unavailable, check_imports, interpreter

HERE = Path(__file__).parent
FORMATS = ("bf16", "int8", "int4")
OPENVINO_WEIGHTS = {
    "bf16": ["--weight-format", "fp16"],  # the CPU plugin computes in bfloat16 where the processor can
    "int8": ["--weight-format", "int8"],
    "int4": ["--weight-format", "int4", "--group-size", "128", "--ratio", "1.0"],
}


def make(out: Path, command: list[str]) -> None:
    """Run a command that makes ``out``; a half-made one does not stay."""
    if out.exists():
        print(f"{out}: is there")
        return
    print(f"{out}: being made", flush=True)
    out.parent.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(command, env={**os.environ, "HF_HUB_OFFLINE": "1"}, check=False)
    if done.returncode:
        if out.is_dir():
            shutil.rmtree(out)
        out.unlink(missing_ok=True)
        raise SystemExit(f"{' '.join(command)} failed with exit code {done.returncode}")


def main() -> None:
    from draftwise.config.embedded import embedded_path

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--peers")
    parser.add_argument("--python", action="append", default=[], metavar="NAME=PATH")
    given = parser.parse_args()
    named = dict(pair.split("=", 1) for pair in given.python)
    work: Path = given.work
    sources = {
        "llama-1b": work / "llama-1b",
        "target": embedded_path("target"),
        "draft": embedded_path("draft"),
    }
    make(sources["llama-1b"], [sys.executable, str(HERE.parent / "make_model.py"), str(sources["llama-1b"])])
    for name, source in sources.items():
        for format in FORMATS if name == "llama-1b" else FORMATS[:1]:
            for peer, modules in (("openvino", ["optimum.intel", "nncf"]), ("llamacpp", ["gguf"])):
                try:
                    python = interpreter(peer, named, given.peers)
                    check_imports(python, modules)
                except Unavailable as reason:
                    print(f"{peer}, {name} {format}: skipped: {reason}")
                    continue
                out = model_path(work, peer, name, format)
                if peer == "openvino":
                    export = str(Path(python).with_name("optimum-cli"))
                    options = ["--task", "text-generation-with-past", *OPENVINO_WEIGHTS[format]]
                    make(out, [export, "export", "openvino", "-m", str(source), *options, str(out)])
                else:
                    kind = out.stem.rpartition("-")[2]
                    script = str(HERE / "export_gguf.py")
                    make(out, [python, script, str(source), str(out), "--type", kind])


if __name__ == "__main__":
    main()
