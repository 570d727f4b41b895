"""The stages of ``gpu_minutes`` for kinds of models: hybrids, experts, latents, heads, files; and HTTP."""

import asyncio
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch

from benchmarks import gpu_stages, graphs, on_device
from benchmarks import synthetic_pair as synthetic
from benchmarks.common import print_table
from benchmarks.engine_runs import decode_params, run_engine
from benchmarks.gpu_layers import ExpertLayer, delta_layer
from benchmarks.gpu_models import TINY, engine_of, hybrid_with_head, tiny_engine
from benchmarks.gpu_stages import ACCEPTANCE, RULES, lists_equal
from truedraft.engine.core.engine import EngineCore

# Clients of the stage through HTTP, and seconds of load of each.
CLIENTS, SECONDS = (1, 16, 64), 12.0


class Bench(gpu_stages.Bench):
    """Has all stages."""

    def identity(self, pair: str) -> None:
        super().identity(pair)
        wrong = []
        for name, tiny in TINY.items():
            try:
                with tiny_engine(tiny, self.device) as core:
                    same = self._says_the_same(name, core)
            except Exception as error:  # one kind must not hide the next
                print(f"{name}: {error!r}", flush=True)
                same = False
            self.judge(f"{name}: captured rounds say what phases say", same, at_least=1)
            wrong += [] if same else [name]
        if wrong:
            raise AssertionError(f"captured rounds differ, or there are none: {', '.join(wrong)}")

    def _says_the_same(self, name: str, core: EngineCore) -> bool:
        captured = graphs.graphs_of(core)
        prompts = synthetic.prompts(core.target.vocab_size, 3, 20)
        same = True
        for rule, params in RULES.items():
            params = msgspec.structs.replace(params, max_tokens=6 if self.is_dry else 32)
            run = partial(run_engine, core, prompts, params, len(prompts))
            variants = {"": run} | graphs.without(core, {"": run})
            ours, theirs = (variant().token_ids for variant in variants.values())
            equal = sum(map(lists_equal, ours, theirs))
            print(f"{name}, {rule}: {equal} of {len(prompts)} texts are equal", flush=True)
            same &= equal == len(prompts)
        return same and (self.device == "cpu" or (captured is not None and captured.num_replays > 0))

    def recur(self, _: str) -> None:
        """Times one Gated DeltaNet layer of Qwen3.5-4B."""
        heads, size = ((2, 4), 16) if self.is_dry else ((16, 32), 128)
        device, seconds = torch.device(self.device), {}
        for rows, new in ((1, 1), (2, 3)) if self.is_dry else ((1, 1), (16, 1), (16, 3), (1, 1024)):
            work = delta_layer(heads, size, rows, new, device, self.dtype)
            seconds[rows, new] = self.seconds(self.replayed(_unread(work)))
            print(f"{rows} rows of {new} new tokens: {1e6 * seconds[rows, new]:.1f} us a layer", flush=True)
        first, *_, last = seconds.values()
        # A state of 2 MB is read at 3 TB/s in less than 1 us; a launch takes 2, and there are seven.
        self.judge("a recurrence of one row, us", 1e6 * first, at_most=30)
        self.judge("a recurrence of 1,024 tokens of a prompt, us", 1e6 * last, at_most=600)

    def experts(self, _: str) -> None:
        """Times one layer of Qwen3-30B-A3B."""
        number, sizes = ((8, 2), (64, 32)) if self.is_dry else ((128, 8), (2048, 768))
        copy, device = self.copy_bandwidth() / 2, torch.device(self.device)
        for name in (None, "Q4_K") if not self.is_dry else (None,):
            layer = ExpertLayer(number, sizes, name, device, self.dtype)
            for tokens in (1, 3) if self.is_dry else (1, 16, 64):
                took = self.seconds(self.replayed(_unread(layer.work(tokens))))
                touched = min(number[0], number[1] * tokens)
                share = touched * layer.num_bytes / took / copy
                what = f"experts, {name or self.dtype}, {tokens} tokens"
                print(f"{what}: {1e6 * took:.1f} us, {share:.2f} of a copy's reads", flush=True)
                if tokens == 1:
                    self.judge(f"{what}: share of a copy's reads", share, at_least=0.4 if name else 0.5)

    def head(self, _: str) -> None:
        """Runs a hybrid's file with its MTP head."""
        with tempfile.TemporaryDirectory() as folder:
            path, rows = hybrid_with_head(Path(folder), self.is_dry), (1, 2) if self.is_dry else (1, 16)
            more = {"max_num_sequences": max(rows), "cache_memory": "16MiB" if self.is_dry else "2GiB"}
            core = engine_of(path, "mtp", self.device, self.dtype, num_speculative_tokens=2, **more)
        for each in rows:
            prompts = synthetic.prompts(core.target.vocab_size, each, 64)
            speeds = []
            for drafts in (0, 2):
                params = decode_params(8 if self.is_dry else 96, num_speculative_tokens=drafts)
                run = partial(run_engine, core, prompts, params, each)
                run()
                speeds.append(run().tokens_per_second)
                print(f"{each} rows, {drafts} drafts of the head: {speeds[-1]:.0f} tokens/s", flush=True)
            self.judge(f"a head's two drafts, {each} rows: speed-up", speeds[1] / speeds[0], at_least=1.4)
        print(f"Graphs: {graphs.facts(core) or 'none'}")

    def http(self, pair: str) -> None:
        """Serves the pair, drawn on the device by the worker, to closed loops of clients."""
        with tempfile.TemporaryDirectory() as folder:
            on_device.save_folders(synthetic.PAIRS[pair], Path(folder))
            settings = {
                "target": f"{folder}/target",
                "draft": f"{folder}/draft",
                "device": self.device,
                "dtype": str(self.dtype).removeprefix("torch."),
                "cache_memory": "16MiB" if self.is_dry else "8GiB",
                "max_num_sequences": 64,
            }
            asyncio.run(self._serve(pair, settings))

    async def _serve(self, pair: str, settings: dict[str, Any]) -> None:
        # These need the packages of the server, which no other stage needs.
        from benchmarks.defaults import NUM_PROMPTS, Variant, process_ids, speculation
        from benchmarks.defaults import Bench as Load
        from benchmarks.online import running_server, until_ready
        from truedraft.loadtest.command import find_model
        from truedraft.loadtest.generator import new_session

        seconds, clients = (0.5, (1, 2)) if self.is_dry else (SECONDS, CLIENTS)
        worker = ("drawn_worker.py", "--pair", pair, "--acceptance", str(ACCEPTANCE))
        table = []
        async with new_session("none", timeout=60.0) as session:
            with running_server(settings, worker=worker) as server:
                await until_ready(session, server)
                model = await find_model(session, server.base_url)
                prompts = synthetic.prompts(synthetic.PAIRS[pair].vocab_size, NUM_PROMPTS, 64)
                load = Load(session, prompts, process_ids({server}))
                for number in clients:
                    row: dict[str, Any] = {"clients": number}
                    for name, fields in (("none", speculation(0)), ("default", {})):
                        variant = Variant(name, server, model, fields)
                        for cycle, length in (("warm", seconds / 4), ("0", seconds)):
                            block = await load.block(variant, number, cycle, ramp_up=0.2, seconds=length)
                        row[name] = round(block.window.tokens_per_second)
                    table.append(row)
                    print(row, flush=True)
                    self._judge_http(number, row["none"])
        print_table(table, "Tokens a second through HTTP")

    def _judge_http(self, clients: int, speed: float) -> None:
        """Compares with the engine's own speed, of which HTTP may take some."""
        name = torch.cuda.get_device_name() if self.device != "cpu" else "H200"
        for device, predicted in gpu_stages.PREDICTED.items():
            if device in name and (clients, 0) in predicted:
                self.judge(f"{clients} clients: tokens/s", speed, at_least=0.75 * predicted[clients, 0])


def _unread(work: Callable[[], object]) -> Callable[[], None]:
    def run() -> None:
        work()

    return run
