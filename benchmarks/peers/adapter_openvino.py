"""OpenVINO: single passes on the exported model itself, generation through OpenVINO GenAI."""

from __future__ import annotations

import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai
from channel import Engine, Generated, Load, Unsupported, serve


class OpenVINO(Engine):
    """Models are folders that optimum-cli exported; their weights already have the format asked for."""

    def load(self, load: Load) -> dict[str, Any]:
        self.given = load
        self.properties = {
            "INFERENCE_NUM_THREADS": load.threads,
            "PERFORMANCE_HINT": "LATENCY",
            "ENABLE_CPU_PINNING": False,
        }
        self.random = np.random.default_rng(0)
        self.pipelines: dict[str, Any] = {}
        if load.max_len > 1024:
            self._compile()
        else:
            for method in load.methods:
                self._pipeline(method)
        return {name: version(name) for name in ("openvino", "openvino-genai", "optimum-intel")}

    # -------------------------------------------------------------------------------------------- passes

    def _compile(self) -> None:
        core = ov.Core()
        model = core.read_model(Path(self.given.model) / "openvino_model.xml")
        # Which rows' logits are wanted is one more input: of a prompt, only the last row's, as GenAI has it.
        product = model.output("logits").get_node().input_value(0).get_node()
        while product.get_type_name() == "Convert":
            product = product.input_value(0).get_node()
        wanted = ov.opset13.parameter([-1], np.int64, name="rows")
        wanted.output(0).set_names({"rows"})
        picked = ov.opset13.gather(product.input_value(0), wanted, ov.opset13.constant(1))
        product.input(0).replace_source_output(picked.output(0))
        model.add_parameters([wanted])
        model.validate_nodes_and_infer_types()
        self.request = core.compile_model(model, "CPU", self.properties).create_infer_request()
        self.contexts: dict[int, list[np.ndarray]] = {}
        self.names = {name for port in self.request.model_inputs for name in port.names}

    def _infer(self, rows: int, context: int, *, last: bool = False) -> float:
        inputs = {
            "input_ids": self.random.integers(10, 1000, (1, rows)),
            "attention_mask": np.ones((1, context + rows), np.int64),
            "position_ids": np.arange(context, context + rows)[None],
            "beam_idx": np.zeros(1, np.int32),
            "rows": np.array([rows - 1]) if last else np.arange(rows),
        }
        inputs = {name: value for name, value in inputs.items() if name in self.names}
        start = time.perf_counter()
        self.request.infer(inputs)
        logits = self.request.get_output_tensor(0).data
        seconds = time.perf_counter() - start
        assert logits.shape[1] == len(inputs["rows"])
        return seconds

    def step(self, context: int, rows: int, repeat: int) -> list[float]:
        # The cache grows with each pass. Going back to the context costs a copy that is not part of a pass; the pass
        # of one row that follows takes it in, and lets the plugin arrange its cache.
        if context not in self.contexts:
            self.request.reset_state()
            self._infer(context - 1, 0)
            self.contexts[context] = [state.state.data.copy() for state in self.request.query_state()]
        for state, kept in zip(self.request.query_state(), self.contexts[context], strict=True):
            state.state = ov.Tensor(kept)
        self._infer(1, context - 1)
        return [self._infer(rows, context + i * rows) for i in range(repeat)]

    def prefill(self, tokens: int) -> float:
        self.request.reset_state()
        return self._infer(tokens, 0, last=True)

    # ---------------------------------------------------------------------------------------- generation

    def _pipeline(self, method: str) -> Any:
        found = self.pipelines.get(method)
        if found is None:
            options: dict[str, Any] = dict(self.properties)
            if method == "ngram":
                options["prompt_lookup"] = True
            elif method == "draft_model":
                assert self.given.draft is not None
                options["draft_model"] = genai.draft_model(self.given.draft, "CPU", **self.properties)
            elif method != "plain":
                raise Unsupported(f"{method} is not part of OpenVINO GenAI")
            if self.given.batch > 1:
                raise Unsupported("batches are not measured")
            found = self.pipelines[method] = genai.LLMPipeline(self.given.model, "CPU", **options)
        return found

    def generate(
        self, prompts: Sequence[Sequence[int]], tokens: int, method: str, temperature: float
    ) -> Generated:
        pipeline = self._pipeline(method)
        config = genai.GenerationConfig()
        config.max_new_tokens = tokens
        config.ignore_eos = True
        config.do_sample = temperature > 0
        if temperature > 0:
            config.temperature, config.top_p, config.rng_seed = (
                temperature,
                1.0,
                int(self.random.integers(1 << 30)),
            )
        if method != "plain":
            config.num_assistant_tokens = self.given.num_draft
        if method == "ngram":
            config.max_ngram_size = 3
        out: list[list[int]] = []
        start = time.perf_counter()
        for prompt in prompts:
            try:
                made = pipeline.generate(ov.Tensor(np.array([prompt], np.int64)), config)
            except RuntimeError:
                del self.pipelines[method]  # it keeps the request that failed, and fails from then on
                raise
            out.append([int(token) for token in made.tokens[0]])
        return Generated(time.perf_counter() - start, out)


if __name__ == "__main__":
    serve(OpenVINO())
