"""The stages of ``gpu_minutes``: what each measures, and what was predicted of it."""

import itertools
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import torch
import torch.nn.functional as F

from benchmarks import formula, graphs, on_device
from benchmarks import synthetic_pair as synthetic
from benchmarks.common import machine, median_seconds, print_facts, print_table
from benchmarks.engine_runs import run_engine
from truedraft.engine.core.engine import EngineCore
from truedraft.engine.cuda.blocks import COLUMNS, KINDS, PackedBlocks, random_blocks
from truedraft.engine.cuda.blocks import pack as pack_blocks
from truedraft.engine.cuda.quantised import is_right
from truedraft.engine.cuda.scaled import ScaledLinear, multiplies_fp8
from truedraft.engine.cuda.triton_run import find_kernels
from truedraft.engine.layers.quantised_blocks import TYPES
from truedraft.engine.layers.run import AttentionShape
from truedraft.engine.layers.weight import ScaledRows
from truedraft.engine.memory.batch import ForwardBatch, Span
from truedraft.engine.memory.block_table import BlockTable
from truedraft.engine.memory.kv_cache import AttentionCache, KVCache
from truedraft.engine.messages import Generate, SamplingParams, TokenOutput

ROOT = Path(__file__).parent.parent
# Lines that begin so are shown together in the end.
VERDICT = "VERDICT "
ROWS, DRAFTS = (1, 16, 64), (0, 2)
PRODUCT_ROWS = (1, 16, 64, 320)
# Types of the quantised products, which Q4_K_M files have.
PRODUCT_TYPES = ("Q4_K", "Q6_K")
# Tokens a second of the pair 8b in 16 bits, when its drafts are accepted with 0.7, computed from rounds that
# were measured: by device, of rows and drafts. A run should reach this share of them.
PREDICTED = {
    "H200": {(1, 0): 197, (16, 0): 2793, (64, 0): 8565, (1, 2): 296, (16, 2): 3898, (64, 2): 10_630},
    "H100": {(1, 0): 145, (16, 0): 2125, (64, 0): 6903, (1, 2): 223, (16, 2): 3055, (64, 2): 8877},
}
ACCEPTANCE, REACHED = 0.7, 0.85
# Bytes of the weights that a product cycles through: more than any cache holds.
PRODUCT_BYTES = 1 << 30
NODES = 1000
# These are the tests of kernels, graphs and waits; the others are whole engines.
FIRST_TESTS = "kernel or in_place or graphs or host or rows_do_not_depend"
TESTS = ("tests/engine/test_cuda.py", "tests/engine/test_cuda_blocks.py")
# Pairs of stages and programs a multiprocessor, for the kernel of attention; the first is what is shipped.
ATTENTION = ((5, 4), (5, 8), (3, 4))
RULES = {
    "greedy": SamplingParams(max_tokens=48, temperature=0, ignore_eos=True),
    "rejection": SamplingParams(max_tokens=48, seed=1, verification="rejection", ignore_eos=True),
    "block": SamplingParams(max_tokens=48, seed=1, verification="block", ignore_eos=True),
    "coupled": SamplingParams(max_tokens=48, seed=1, ignore_eos=True),
    "cut": SamplingParams(
        max_tokens=48, seed=1, verification="rejection", top_k=40, top_p=0.9, ignore_eos=True
    ),
}


class Bench:
    """What the stages share. ``is_dry``: at sizes that say nothing about speed."""

    def __init__(self, device: str, dtype: torch.dtype, is_dry: bool) -> None:
        self.device = device
        self.dtype = dtype
        self.is_dry = is_dry
        self.repeats = 2 if is_dry else 20

    # What measurements are made of.

    def judge(
        self, what: str, measured: float, *, at_least: float | None = None, at_most: float | None = None
    ) -> None:
        """Prints a prediction, a measurement and the verdict."""
        bound = f"at most {at_most:g}" if at_least is None else f"at least {at_least:g}"
        holds = measured <= (at_most or 0) if at_least is None else measured >= at_least
        verdict = "a dry run" if self.is_dry else "AS PREDICTED" if holds else "NOT AS PREDICTED"
        print(f"{VERDICT}{what}: {measured:.3g}, predicted {bound}: {verdict}", flush=True)

    def seconds(self, work: Callable[[], object]) -> float:
        """Median, the device's work included."""

        def finished() -> None:
            work()
            on_device.synchronise(self.device)

        return median_seconds({"": finished}, self.repeats)[""]

    def copy_bandwidth(self) -> float:
        return on_device.copy_bandwidth(self.device, 1 << (20 if self.is_dry else 30))

    def replayed(self, function: Callable[[], None]) -> Callable[[], None]:
        """``function`` as one CUDA graph, on a GPU."""
        if self.device == "cpu":
            return function
        from truedraft.engine.rounds.capture.capture import CudaCapture

        return CudaCapture(torch.device(self.device)).record(function)

    def engine_of(self, pair: str, dtype: torch.dtype, **config: Any) -> EngineCore:
        settings: dict[str, Any] = {
            "num_speculative_tokens": max(DRAFTS),
            "max_num_sequences": max(self.rows),
            "cache_memory": "16MiB" if self.is_dry else "6GiB",
            "cuda_graph_seconds": 120,
        }
        return on_device.engine_on_device(
            synthetic.PAIRS[pair], ACCEPTANCE, self.device, dtype, **(settings | config)
        )

    @property
    def rows(self) -> tuple[int, ...]:
        return (1, 2) if self.is_dry else ROWS

    # Stages.

    def facts(self, _: str) -> None:
        is_gpu = self.device != "cpu"
        x = torch.zeros(8, device=self.device)

        def operations() -> None:
            for _ in range(NODES):
                x.add_(1)

        operations()
        started = time.perf_counter()
        operations()
        eager = (time.perf_counter() - started) / NODES
        on_device.synchronise(self.device)
        replay = self.replayed(operations)
        print_facts(
            {
                **machine(),
                "torch": str(torch.__version__),
                "CUDA": str(torch.version.cuda),
                "triton": str(import_module("triton").__version__) if find_spec("triton") else "none",
                "device": torch.cuda.get_device_name() if is_gpu else "cpu",
                "capability": str(torch.cuda.get_device_capability()) if is_gpu else "none",
                "copy, GB/s read and written": f"{self.copy_bandwidth() / 1e9:.0f}",
            }
        )
        self.judge("a dependent node of a graph, us", 1e6 * self.seconds(replay) / NODES, at_most=3)
        self.judge("an eager operation on the host, us", 1e6 * eager, at_most=8)
        self.judge("a read of eight numbers, us", 1e6 * self.seconds(x.tolist), at_most=30)

    def kernels(self, _: str) -> None:
        """Correctness: what differs here makes every other number worthless."""
        used = wrong = varying = 0
        device = torch.device(self.device)
        if self.device != "cpu":
            for name in ("8b", "1b"):
                shape = synthetic.SHAPES[name]
                size = shape.hidden // shape.heads
                layer = AttentionShape(0, shape.heads, shape.kv_heads, size, size**-0.5, None, None)
                used += find_kernels([layer], self.dtype, device) is not None
            self.judge("models whose attention agrees, of 2", used, at_least=2)
        if has_kernels(self.device):
            kernels = import_module("truedraft.engine.cuda.quantised_kernels")
            inputs = 256 if self.is_dry else 4096
            for type_ in list(KINDS)[-1:] if self.is_dry else KINDS:
                started = time.perf_counter()
                is_served = is_right(kernels, type_, self.dtype, device)
                packed = self.packed_of(type_, 2 * COLUMNS, inputs)
                x = torch.randn(PRODUCT_ROWS[-1], inputs, device=device, dtype=self.dtype)
                whole = kernels.multiply(x, [packed], None, 1.0, None)
                numbers = [
                    n
                    for n in PRODUCT_ROWS
                    if not torch.equal(kernels.multiply(x[:n], [packed], None, 1.0, None), whole[:n])
                ]
                wrong, varying = wrong + (not is_served), varying + bool(numbers)
                took = f"{time.perf_counter() - started:.1f} s"
                print(f"type {type_}: {'right' if is_served else 'WRONG'}, other bits in {numbers}, {took}")
            self.judge("types of quantised weights that are wrong", wrong, at_most=0)
            self.judge("types whose rows depend on their number", varying, at_most=0)
        if wrong or (self.device != "cpu" and used < 2):
            raise AssertionError("kernels are wrong or cannot be used; the warnings above say why")

    def identity(self, _: str) -> None:
        """Asks whether captured rounds say what phases say, by every rule."""
        core = self.engine_of("tiny", torch.float32)
        captured = graphs.graphs_of(core)
        prompts = synthetic.prompts(core.target.vocab_size, 5, 20)
        rows = []
        for name, params in RULES.items():
            params = msgspec.structs.replace(params, max_tokens=8 if self.is_dry else 48)
            run = partial(run_engine, core, prompts, params, len(prompts))
            variants = {"": run} | graphs.without(core, {"": run})
            ours, theirs = (variant().token_ids for variant in variants.values())
            rows.append({"rule": name, "same text": sum(map(lists_equal, ours, theirs)), "of": len(prompts)})
        print_table(rows, "Captured rounds against phases, float32")
        print(f"Graphs: {graphs.facts(core) or 'none'}")
        same = sum(row["same text"] == row["of"] for row in rows)
        self.judge(f"rules with the same text in captured rounds, of {len(RULES)}", same, at_least=len(RULES))
        if same < len(RULES):
            raise AssertionError("texts differ: start with tests/engine/test_cuda.py -k graphs")
        if self.device != "cpu" and (captured is None or captured.num_misses):
            raise AssertionError("rounds were not captured; the warnings above say why")

    def mix(self, pair: str) -> None:
        """What rows that ask for more cost, alone among others and all together."""
        num_rows = 4 if self.is_dry else 16
        core = self.engine_of(pair, self.dtype, max_num_sequences=num_rows)
        prompts = synthetic.prompts(core.target.vocab_size, num_rows, 64)
        base = SamplingParams(max_tokens=16 if self.is_dry else 96, temperature=0, ignore_eos=True)
        put = partial(msgspec.structs.replace, base)
        others = [base] * (num_rows - 1)
        qwen = put(temperature=0.7, top_p=0.8, top_k=20, repetition_penalty=1.05)
        # With the share of a greedy round that each may take: so much more at most.
        kinds = {
            "greedy": ([base] * num_rows, 1.0),
            "one with log-probabilities": ([*others, put(logprobs=2)], 1.08),
            "one with a penalty": ([*others, put(frequency_penalty=0.5)], 1.08),
            "one with a bias": ([*others, put(logit_bias={5: 1.0})], 1.08),
            "one with a seed": ([*others, put(temperature=0.8, seed=1)], 1.05),
            "all with top-p 0.9": ([put(temperature=0.6, top_p=0.9)] * num_rows, 1.05),
            "all as Qwen 2.5's defaults": ([qwen] * num_rows, 1.1),
        }
        table = []
        for name, (params, _) in kinds.items():
            row: dict[str, Any] = {f"{num_rows} rows": name}
            for drafts in DRAFTS:
                wanted = [msgspec.structs.replace(one, num_speculative_tokens=drafts) for one in params]
                for _ in range(2):
                    milliseconds, speed = self._full_rounds(core, prompts, wanted)
                row[f"k {drafts}: ms"], row[f"k {drafts}: tokens/s"] = round(milliseconds, 2), round(speed)
            table.append(row)
            print(row, flush=True)
        print_table(table, "Rounds in the engine")
        print(f"Graphs: {graphs.facts(core) or 'none'}")
        for (name, (_, most)), row in list(zip(kinds.items(), table, strict=True))[1:]:
            for drafts in DRAFTS:
                column = f"k {drafts}: ms"
                share = row[column] / max(table[0][column], 1e-9)
                self.judge(f"{name}, {drafts} drafts: a round, to greedy's", share, at_most=most)
        self._prompts_among_rows(core, prompts, base)

    def _prompts_among_rows(self, core: EngineCore, prompts: list[list[int]], base: SamplingParams) -> None:
        """Compares a step in which a prompt arrives with the longer one of a step of the rows alone and one
        of the prompt alone: the target's weights are read once."""
        table = []
        lengths = (24,) if self.is_dry else (64, 768)
        for drafts, length in itertools.product(DRAFTS, lengths):
            decode = msgspec.structs.replace(base, num_speculative_tokens=drafts, max_tokens=256)
            (prompt,) = synthetic.prompts(core.target.vocab_size, 1, length)
            alone = self._step(core, decode, prompt)
            names = [f"row {number}" for number in range(len(prompts))]
            for name, each in zip(names, prompts, strict=True):
                core.add(Generate(name, each, decode))
            rows, both = self._step(core, decode), self._step(core, decode, prompt)
            core.abort_all(set(names))
            row = {
                "drafts": drafts,
                "prompt": length,
                "rows, ms": rows,
                "prompt, ms": alone,
                "both, ms": both,
            }
            table.append({name: round(value, 2) for name, value in row.items()})
            print(table[-1], flush=True)
            what = f"a prompt of {length} among rows, {drafts} drafts: a step, to the longer of both"
            self.judge(what, both / max(rows, alone, 1e-9), at_most=1.35 if drafts else 1.2)
        print_table(table, "Steps of rows, of a prompt, and of both")

    def _step(self, core: EngineCore, params: SamplingParams, prompt: list[int] | None = None) -> float:
        """Returns the milliseconds of a step in which the prompt arrives, if there is one: the median."""
        seconds, vocab_size = [], core.target.vocab_size
        for number in range(5 if self.is_dry else 11):
            if prompt is not None:
                # No beginning of it is in the cache.
                other = [(token_id + number) % vocab_size for token_id in prompt]
                core.add(Generate("prompt", other, msgspec.structs.replace(params, max_tokens=1)))
            started = time.perf_counter()
            core.step()
            seconds.append(time.perf_counter() - started)
        return 1000 * statistics.median(seconds[3:])

    def _full_rounds(
        self, core: EngineCore, prompts: list[list[int]], params: list[SamplingParams]
    ) -> tuple[float, float]:
        """Returns the milliseconds of a round in which all rows decode, and tokens a second in these."""
        for number, (prompt, one) in enumerate(zip(prompts, params, strict=True)):
            core.add(Generate(str(number), prompt, one))
        tokens = rounds = 0
        started = ended = None
        while core.has_work:
            outputs = core.step()
            if len(outputs) != len(prompts):
                continue
            ended = time.perf_counter()
            if started is None:
                started = ended
                continue
            rounds += 1
            tokens += sum(len(output.token_ids) for output in outputs if isinstance(output, TokenOutput))
        seconds = (ended or 0.0) - (started or 0.0)
        return 1000 * seconds / max(rounds, 1), tokens / max(seconds, 1e-9)

    def products(self, _: str) -> None:
        copy = self.copy_bandwidth()
        table = []
        for name in ("tiny-target" if self.is_dry else "8b",):
            shape = synthetic.SHAPES[name]
            kv = shape.hidden // shape.heads * shape.kv_heads
            vocab_size = synthetic.PAIRS["tiny" if self.is_dry else "8b"].vocab_size
            products = {
                "qkv": (shape.hidden + 2 * kv, shape.hidden),
                "output": (shape.hidden, shape.hidden),
                "gate, up": (2 * shape.mlp, shape.hidden),
                "down": (shape.hidden, shape.mlp),
                "head": (vocab_size, shape.hidden),
            }
            libraries = ["cublas"] if self.device == "cpu" else ["cublas", "cublaslt"]
            libraries += PRODUCT_TYPES[: 1 if self.is_dry else None] if has_kernels(self.device) else ()
            libraries += ["fp8"] if multiplies_fp8(self.dtype, torch.device(self.device)) else []
            for library in libraries:
                whole = dict.fromkeys(PRODUCT_ROWS, 0.0)
                num_bytes = 0.0
                for product, (outputs, inputs) in products.items():
                    times = shape.layers if product != "head" else 1
                    size, seconds = self._product(outputs, inputs, library)
                    num_bytes += times * size
                    for rows, took in seconds.items():
                        whole[rows] += times * took
                    shares = {str(rows): f"{size / took / copy:.2f}" for rows, took in seconds.items()}
                    table.append({"model": name, "product": product, "by": library, **shares})
                    print(table[-1], flush=True)
                passes = {str(rows): f"{1000 * took:.2f}" for rows, took in whole.items() if took}
                table.append({"model": name, "product": "a pass, ms", "by": library, **passes})
                print(table[-1], flush=True)
                if library in (*PRODUCT_TYPES, "fp8"):
                    self._judge_pass(name, library, num_bytes / copy, whole)
        print_table(table, "Products: weights read a second, as a share of the copy, by rows")

    def _judge_pass(self, model: str, library: str, floor: float, seconds: dict[int, float]) -> None:
        """``floor``: the seconds that reading the weights once takes."""
        self.judge(f"{library} of {model}, one row: share of the copy", floor / seconds[1], at_least=0.6)
        growth = seconds[4] / seconds[1] if self.is_dry else seconds[16] / seconds[1]
        self.judge(f"{library} of {model}, 16 rows: times one row", growth, at_most=1.3)
        if (model, library) == ("1b", "Q4_0"):
            # Without attention, norms and draws, which take about 0.35 ms.
            self.judge("products of a 4-bit draft's pass, one row, ms", 1000 * seconds[1], at_most=0.5)

    def _product(self, outputs: int, inputs: int, library: str) -> tuple[float, dict[int, float]]:
        """Returns the bytes of the weights, and the seconds of a product by its rows."""
        multiply: Callable[[torch.Tensor, Any], torch.Tensor]
        weights: list[Any]
        most = 1 if self.is_dry else PRODUCT_BYTES
        if library in PRODUCT_TYPES:
            kernels = import_module("truedraft.engine.cuda.quantised_kernels")
            first = self.packed_of(TYPES[library], outputs, inputs)
            num_bytes = float(first.num_bytes)
            number = max(2, int(most // num_bytes))
            weights = [first, *(self.packed_of(TYPES[library], outputs, inputs) for _ in range(number - 1))]

            def multiply(x: torch.Tensor, weight: Any) -> torch.Tensor:
                product: torch.Tensor = kernels.multiply(x, [weight], None, 1.0, None)
                return product

        elif library == "fp8":
            kernels = import_module("truedraft.engine.cuda.quantised_kernels")
            num_bytes = float(outputs * inputs)
            number = max(2, int(most // num_bytes))
            drawn = ScaledRows.of(torch.randn(outputs, inputs, device=self.device))
            copies = (ScaledRows(drawn.values.clone(), drawn.scales) for _ in range(number))
            weights = [ScaledLinear(kernels.round_rows, [rows], None) for rows in copies]

            def multiply(x: torch.Tensor, weight: Any) -> torch.Tensor:
                product: torch.Tensor = weight(x)
                return product

        else:
            if self.device != "cpu":
                torch.backends.cuda.preferred_blas_library(library)
            num_bytes = outputs * inputs * self.dtype.itemsize
            number = max(2, int(most // num_bytes))
            weights = [
                torch.randn(outputs, inputs, device=self.device, dtype=self.dtype) for _ in range(number)
            ]
            multiply = F.linear
        seconds = {}
        for rows in PRODUCT_ROWS[:2] if self.is_dry else PRODUCT_ROWS:
            x = torch.randn(rows, inputs, device=self.device, dtype=self.dtype)

            def each(x: torch.Tensor = x) -> None:
                for weight in weights:
                    multiply(x, weight)

            seconds[rows] = self.seconds(self.replayed(each)) / number
        return num_bytes, seconds

    def packed_of(self, type_: int, outputs: int, inputs: int) -> PackedBlocks:
        """Returns random weights, of which ``COLUMNS`` rows are drawn, and the others repeat them."""
        drawn = pack_blocks(random_blocks(type_, COLUMNS, inputs), torch.device(self.device))
        tiles = -(-outputs // COLUMNS)

        def repeated(part: torch.Tensor) -> torch.Tensor:
            return part.repeat(tiles, *[1] * (part.dim() - 1)) if part.numel() else part

        parts = map(repeated, (drawn.low, drawn.high, drawn.scales, drawn.supers))
        return PackedBlocks(type_, outputs, inputs, *parts)

    def attention(self, _: str) -> None:
        """Times one layer of 8B, with one new token a row."""
        cases = {
            "32 rows of 300": [300] * 32,
            "32 rows of 4,096": [4096] * 32,
            "31 rows of 300, one of 16,384": [300] * 31 + [16384],
            "16 rows, one of 65,536": [300] * 15 + [65536],
        }
        if self.is_dry:
            cases = {name: [context // 64 for context in contexts[-2:]] for name, contexts in cases.items()}
        kernels = import_module("truedraft.engine.cuda.kernels")
        table, seconds = [], {}
        for name, contexts in cases.items():
            row: dict[str, Any] = {"batch": name}
            for stages, programs in ATTENTION:
                with settings_of(kernels, NUM_STAGES=stages, PROGRAMS_OF_PIECES=programs):
                    took = self._attention(kernels, contexts)
                seconds[name, stages, programs] = took
                # Keys and values of 8 heads of 128, in 16 bits.
                row[f"{stages} stages, {programs} a SM: us"] = f"{1e6 * took:.1f}"
                row[f"GB/s {stages}, {programs}"] = round(4096 * sum(contexts) / took / 1e9)
            table.append(row)
            print(row, flush=True)
        print_table(table, "Attention of one layer of 8B, one new token a row")
        ragged, even = "31 rows of 300, one of 16,384", "32 rows of 300"
        shipped = ATTENTION[0]
        self.judge(
            "a ragged batch, times an even one",
            seconds[ragged, *shipped] / seconds[even, *shipped],
            at_most=3,
        )
        gain = seconds["32 rows of 4,096", 3, 4] / seconds["32 rows of 4,096", *shipped]
        self.judge("long rows: gain of five stages over three", gain, at_least=1.1)

    def _attention(self, kernels: Any, contexts: list[int]) -> float:
        """Returns the seconds of a layer; layers have caches of their own, so that none is read from L2."""
        device, size, layers = torch.device(self.device), 16, 4
        needed = [-(-(context + 1) // size) for context in contexts]
        spans, start = [], 0
        for context, blocks in zip(contexts, needed, strict=True):
            table = BlockTable()
            table.block_ids = list(range(start, start + blocks))
            table.num_computed_tokens = context
            spans.append(Span(table, [0], 1))
            start += blocks
        batch = ForwardBatch.build(spans, size, device)
        heads = 8, 128
        cache = KVCache([AttentionCache(heads, heads, self.dtype, device)] * layers, start, size)
        for part in (*cache.keys, *cache.values):
            part.normal_()
        query = torch.randn(len(contexts), 32, 128, device=device, dtype=self.dtype)
        output = torch.empty_like(query)

        def run() -> None:
            for layer in range(layers):
                kernels.attend_rows(
                    *(output, query, cache.keys[layer], cache.values[layer]),
                    *(batch.short_rows, batch.positions[0], size, 128**-0.5, None),
                )

        return self.seconds(self.replayed(run)) / layers

    def engine(self, pair: str) -> None:
        core = self.engine_of(pair, self.dtype)
        copy = self.copy_bandwidth()
        shape = synthetic.PAIRS[pair]
        weights = on_device.weight_bytes(shape.target, shape.vocab_size, self.dtype)
        table = []
        cut = {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
        for name, sampling in (("greedy", {"temperature": 0.0}), ("top-k 20, top-p 0.95", cut)):
            for rows in self.rows:
                prompts = synthetic.prompts(core.target.vocab_size, rows, 64)
                plain = None
                for drafts in DRAFTS:
                    params = SamplingParams(
                        max_tokens=16 if self.is_dry else 96,
                        ignore_eos=True,
                        num_speculative_tokens=drafts,
                        **sampling,
                    )
                    run = partial(run_engine, core, prompts, params, rows)
                    run()
                    done = max((run() for _ in range(2)), key=lambda run: run.tokens_per_second)
                    plain = plain or done
                    phases = formula.phases([done])
                    row = {"requests": name, "rows": rows, "drafts": drafts}
                    row["tokens/s"] = f"{done.tokens_per_second:.1f}"
                    row["to plain"] = f"{done.tokens_per_second / plain.tokens_per_second:.2f}"
                    row |= {key: f"{phases[key]:.2f}" for key in phases if key != "host_share"}
                    share = weights / (phases["round_ms"] / 1000) / copy
                    row["weights to copy"] = f"{share:.2f}" if drafts == 0 else ""
                    table.append(row)
                    print(row, flush=True)
                    what = f"{name}, {rows} rows, {drafts} drafts"
                    self._judge_speed(what, rows, drafts, done.tokens_per_second)
                    if drafts == 0 and rows == 1:
                        self.judge(f"{what}: weights to copy", share, at_least=0.6)
                    elif drafts:
                        gain = done.tokens_per_second / plain.tokens_per_second
                        self.judge(f"{what}: speed-up", gain, at_least=1.25)
        print_table(table, f"Pair {pair}, {self.dtype}; drafts are accepted with {ACCEPTANCE} when greedy")
        print(f"Graphs: {graphs.facts(core) or 'none'}")

    def _judge_speed(self, what: str, rows: int, drafts: int, speed: float) -> None:
        """Compares tokens a second with what was computed for this device, or for the first one in a dry
        run."""
        name = torch.cuda.get_device_name() if self.device != "cpu" else "H200"
        for device, predicted in PREDICTED.items():
            if device in name and (rows, drafts) in predicted:
                self.judge(f"{what}: tokens/s", speed, at_least=REACHED * predicted[rows, drafts])

    def profile(self, pair: str) -> None:
        core = self.engine_of(pair, self.dtype, cuda_graphs=False)
        (prompt,) = synthetic.prompts(core.target.vocab_size, 1, 64)
        params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, num_speculative_tokens=0)
        run_engine(core, [prompt], params)
        activity = torch.profiler.ProfilerActivity
        kind = activity.CPU if self.device == "cpu" else activity.CUDA
        with torch.profiler.profile(activities=[kind]) as profiler:
            run_engine(core, [prompt], params)
        sort = "self_cpu_time_total" if self.device == "cpu" else "self_device_time_total"
        print(profiler.key_averages().table(sort_by=sort, row_limit=30, max_name_column_width=90))

    def tests(self, _: str) -> None:
        codes = []
        for chosen in (FIRST_TESTS, f"not ({FIRST_TESTS})"):
            options = ("-q", "-p", "no:cacheprovider", "--maxfail=4", "--durations=12", "-k", chosen)
            command = [sys.executable, "-m", "pytest", *options, *TESTS]
            codes.append(subprocess.run(command, cwd=ROOT, check=False).returncode)
        if any(codes):
            raise AssertionError(f"pytest ended with {codes}")


def has_kernels(device: str) -> bool:
    """Tells whether kernels in Triton run: on a GPU, or in its interpreter."""
    return device != "cpu" or os.environ.get("TRITON_INTERPRET") == "1"


@contextmanager
def settings_of(module: Any, **settings: int) -> Iterator[None]:
    """Gives constants of a module other values for a while."""
    with mock.patch.multiple(module, **settings):
        yield


def lists_equal(ours: Any, theirs: Any) -> bool:
    return list(ours) == list(theirs)
