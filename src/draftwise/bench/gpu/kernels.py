"""Parts: are the kernels right, and how does attention compare with torch's."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from draftwise.bench.gpu.models import llama_config, random_target
from draftwise.bench.gpu.report import PartReport
from draftwise.bench.gpu.setting import BLOCK, Setting, tree_parents
from draftwise.graphs.buffers import PassBuffers, Shape, Tables
from draftwise.graphs.capture import Captures
from draftwise.graphs.decoder import GraphedDecoder, on_device
from draftwise.kernels.base import HeadShape
from draftwise.kv.storage import KVLayerSpec, KVStorage
from draftwise.models import checking
from draftwise.models.checking import KernelCheck
from draftwise.models.inputs import RowInput, build_step_input
from draftwise.models.llama import LlamaModel
from draftwise.runner.step_checks import check_steps


def check_kernels(setting: Setting, report: PartReport) -> None:
    """What `draftwise env --check-kernels` compares, at the benchmark's shapes; a small model's bits in batches, trees
    and graphs."""
    size, device = setting.size, setting.device
    config = LlamaModel.parse(llama_config(size), "LlamaForCausalLM", size.max_len)
    checks: dict[str, list[KernelCheck]] = {}
    for dtype in (torch.bfloat16, torch.float32) if setting.cuda else (torch.float32,):
        for invariant in (True, False):
            kind = f"{str(dtype).removeprefix('torch.')}, {'fixed tiles' if invariant else 'default'}"
            checks[kind] = checking.check_kernels(
                setting.ops(dtype=dtype, batch_invariant=invariant), config, adapters=True, stored=True
            )
    if setting.cuda:
        checks["whole numbers"] = check_steps(device, size.vocab, BLOCK)
    for kind, found in checks.items():
        for check in found:
            report.check(f"{check.name}: {kind}", check.right, str(check))
    _check_bits(setting, report)


@torch.inference_mode()
def _check_bits(setting: Setting, report: PartReport) -> None:
    """A token's logits decoded alone, in a chunk, and in a tree; replayed and not."""
    for invariant in (True, False) if setting.cuda else (True,):
        ops = setting.ops(batch_invariant=invariant)
        model = random_target(setting, ops, layers=2)
        context = setting.size.context // 2
        captures = Captures((Shape(1, 8, setting.size.max_len + 64),))
        graphed = GraphedDecoder(model, captures, BLOCK, setting.graphs())
        inputs = setting.rows(1, 8, context)
        blocks = len(inputs[0].block_table_np)

        def storage(model: GraphedDecoder = graphed, blocks: int = blocks) -> KVStorage:
            kv = KVStorage(model.kv_layout(), blocks, BLOCK, model.dtype, setting.device, spare=True)
            generator = torch.Generator(setting.device).manual_seed(0)
            for layer in range(len(model.kv_layout())):
                for part in kv.layer(layer):
                    part.normal_(0.0, 0.5, generator=generator)
            return kv

        kv = storage()
        graphed.prepare(kv)
        batch = build_step_input(inputs, BLOCK, graphed.inputs_on)
        replayed = graphed.forward_logits(batch, kv)[1].clone()
        eager = model.forward_logits(on_device(batch, setting.device), storage())[1]
        kind = "fixed tiles" if invariant else "default"
        worst = float((replayed - eager).abs().max())
        if invariant and setting.cuda:
            report.check(
                f"a replayed pass has the bits of the pass ({kind})", worst == 0.0, f"{worst:.2g} apart"
            )
        else:
            report.at_most(f"a replayed pass against the pass ({kind}): largest difference", worst, 0.05)
        alone = []
        kv = storage()
        for i in range(8):
            one = [RowInput(inputs[0].tokens[i : i + 1], context + i, inputs[0].block_table_np)]
            alone.append(model.forward_logits(build_step_input(one, BLOCK, setting.device), kv)[1])
        apart = float((torch.cat(alone) - eager).abs().max())
        if invariant and setting.cuda:
            report.check(f"a chunk of 8 has the bits of 8 steps ({kind})", apart == 0.0, f"{apart:.2g} apart")
        else:
            report.add(f"a chunk of 8 against 8 steps ({kind}): largest difference", apart)


@torch.inference_mode()
def compare_attention(setting: Setting, report: PartReport) -> None:
    """Ours over paged K/V against torch's SDPA and flex attention over K/V that lie in one piece."""
    size = setting.size
    heads, kv_heads, dim = size.heads, size.kv_heads, size.head_dim
    long = size.context
    cases: list[tuple[str, int, int, int, bool]] = [
        ("decode, batch 1", 1, 1, long, False),
        ("8 rows, batch 1", 1, 8, long, False),
        (f"tree of {size.tree}, batch 1", 1, 1 + size.tree, long, True),
        ("decode, batch 16", 16, 1, long, False),
        ("6 rows, batch 16", 16, 6, long, False),
        ("decode, batch 64", 64, 1, long // 2, False),
        ("prompt", 1, size.prefill, 0, False),
    ]
    compiled: list[tuple[str, float, Tensor, Tensor, Tensor, int]] = []
    for name, requests, rows, context, tree in cases:
        parents = tree_parents(rows - 1) if tree else None
        inputs = setting.rows(requests, rows, context, parents)
        blocks = sum(len(row.block_table_np) for row in inputs)
        kv = KVStorage(
            (KVLayerSpec.dense(kv_heads, dim),), blocks, BLOCK, setting.dtype, setting.device, spare=True
        )
        kv.layer(0)[0].normal_()
        q = torch.randn(requests * rows, heads, dim, device=setting.device).to(setting.dtype)
        ours = _ours(setting, inputs, kv, q, requests, rows, context)
        keys = context + rows
        k, v = torch.randn(2, requests, kv_heads, keys, dim, device=setting.device).to(setting.dtype)
        dense = q.view(requests, rows, heads, dim).transpose(1, 2).contiguous()
        mask = _mask(setting, rows, context, parents)
        whole = rows == keys

        def sdpa(
            dense: Tensor = dense,
            k: Tensor = k,
            v: Tensor = v,
            mask: Tensor | None = mask,
            whole: bool = whole,
        ) -> Tensor:
            return F.scaled_dot_product_attention(
                dense, k, v, attn_mask=None if whole else mask, is_causal=whole, enable_gqa=True
            )

        theirs = setting.time_captured(sdpa)
        read = 2 * requests * keys * kv_heads * dim * setting.dtype.itemsize
        report.add(
            f"{name}, context {context}: ours", ours * 1e6, "us", note=f"{read / ours / 1e12:.2f} TB/s of K/V"
        )
        report.at_most(f"{name}: ours / SDPA", ours / theirs, 1.0, "x", f"SDPA {theirs * 1e6:.0f} us")
        if rows <= 8 and requests == 1:
            compiled.append((name, ours, dense, k, v, context))
    if not setting.cuda:
        return
    _compare_prompts(setting, report)
    for name, ours, dense, k, v, context in compiled:  # last: compiling takes long
        try:
            other = _flex(setting, dense, k, v, context)
        except Exception as error:  # a compiler that refuses a shape is no failure of ours
            report.add(f"{name}: flex attention", f"refused: {type(error).__name__}")
        else:
            report.add(f"{name}: ours / flex", ours / other, "x", note=f"flex {other * 1e6:.0f} us")


def _ours(
    setting: Setting, inputs: list[RowInput], kv: KVStorage, q: Tensor, requests: int, rows: int, context: int
) -> float:
    size = setting.size
    if rows > 64:  # prompts are not captured
        batch = build_step_input(inputs, BLOCK, setting.device).attention
        shape, ops = HeadShape(size.heads, size.kv_heads, size.head_dim), setting.ops()
        return setting.time(lambda: ops.attention(q, kv.layer(0), batch, shape, size.head_dim**-0.5))
    backend = setting.graphs()
    assert kv.spare_slot is not None
    tables = Tables(requests, context + rows, BLOCK, kv.spare_slot, backend)
    buffers = PassBuffers(Shape(requests, rows, context + rows), tables)
    buffers.fill(build_step_input(inputs, BLOCK, torch.device("cpu")))
    heads = HeadShape(size.heads, size.kv_heads, size.head_dim)
    ops = setting.ops()

    def run() -> Tensor:
        buffers.batch.attention.cache.clear()
        return ops.attention(q, kv.layer(0), buffers.batch.attention, heads, size.head_dim**-0.5)

    return setting.time_captured(run)


def _compare_prompts(setting: Setting, report: PartReport) -> None:
    """From how many rows on it pays to gather a chunk's keys for flash attention (`triton.prompts.PROMPT_ROWS`)."""
    from draftwise.kernels.triton.attention import TritonAttention

    size, context = setting.size, setting.size.context
    for rows in (32, 64, 128, 256, 512):
        batch = build_step_input(setting.rows(1, rows, context), BLOCK, setting.device).attention
        kv = torch.randn(-(-(context + rows) // BLOCK) * BLOCK, 2 * size.kv_heads, size.head_dim)
        q = torch.randn(rows, size.heads, size.head_dim).to(setting.device, setting.dtype)
        layer = (kv.to(setting.device, setting.dtype),)
        times: list[float] = []
        for least in (None, 1):
            run = TritonAttention(prompt_rows=least).run
            times.append(setting.time(partial(run, q, layer, batch, num_kv_heads=size.kv_heads, scale=0.1)))
        name = f"chunk of {rows}, context {context}"
        report.add(f"{name}: gathered for flash attention", times[1] * 1e6, "us")
        report.add(f"{name}: the kernel of decoding rows / flash attention", times[0] / times[1], "x")


def _mask(setting: Setting, rows: int, context: int, parents: tuple[int, ...] | None) -> Tensor | None:
    """[1, 1, rows, context + rows] bool; None: every row sees all."""
    if rows == 1:
        return None
    own = torch.ones(rows, rows, dtype=torch.bool).tril()
    if parents is not None:
        own = torch.eye(rows, dtype=torch.bool)
        own[:, 0] = True
        for i, parent in enumerate(parents):
            if parent >= 0:
                own[i + 1] |= own[parent + 1]
    whole = torch.cat((torch.ones(rows, context, dtype=torch.bool), own), dim=1)
    return whole[None, None].to(setting.device)


def _flex(setting: Setting, q: Tensor, k: Tensor, v: Tensor, context: int) -> float:
    """Seconds of flex attention, compiled. Raises whatever the compiler does."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def causal(b: Any, h: Any, row: Any, key: Any) -> Any:
        return key <= row + context

    mask = create_block_mask(causal, None, None, q.shape[2], k.shape[2], device=str(setting.device))
    compiled: Any = torch.compile(flex_attention, dynamic=False)
    return setting.time(lambda: compiled(q, k, v, block_mask=mask, enable_gqa=True))
