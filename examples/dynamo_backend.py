"""Serves the engine behind NVIDIA Dynamo, whose frontend tokenizes, routes and writes the answers.

    pip install ai-dynamo
    python dynamo_backend.py models/my-model --draft models/my-draft

Requests of several threads are decoded together by ``SharedEngine``. What changes an answer and is not
served here is refused by name.
"""

import argparse
import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from dynamo.common.backend import EngineConfig, LLMEngine, LlmRegistration, WorkerConfig
from dynamo.common.backend.run import run

from truedraft.engine import config, messages
from truedraft.engine.build import build_engine
from truedraft.engine.core.admission import RequestError
from truedraft.engine.library.params import SamplingParams
from truedraft.engine.library.shared_engine import Answers, SharedEngine

# Dynamo's names of what the engine knows by the same or another one.
NAMES = dict.fromkeys(("temperature", "top_p", "top_k", "min_p", "seed", "n", "max_tokens", "min_tokens"))
NAMES |= dict.fromkeys(("frequency_penalty", "presence_penalty", "repetition_penalty"))
NAMES |= dict.fromkeys(("ignore_eos", "logprobs", "stop_token_ids", "regex", "choice", "grammar"))
NAMES |= {"stop_token_ids_hidden": "stop_token_ids", "json": "json_schema"}
# The frontend looks for stop strings in the text and shows special tokens, or leaves them out.
OF_THE_FRONTEND = {"stop", "skip_special_tokens", "include_stop_str_in_output"}


class TruedraftEngine(LLMEngine):
    def __init__(self, settings: config.EngineConfig) -> None:
        self.settings = settings
        self.engine: SharedEngine | None = None
        self._threads = ThreadPoolExecutor(settings.num_sequences_on("cuda"))
        self._answers: dict[str, tuple[str, Answers]] = {}  # keys are Dynamo's ids

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple["TruedraftEngine", WorkerConfig]:
        parser = argparse.ArgumentParser(description=__doc__)
        parser.add_argument("target")
        parser.add_argument("--draft", default=config.AUTO)
        parser.add_argument("--namespace", default="dynamo")
        given = parser.parse_args(argv)
        settings = config.EngineConfig(target=given.target, draft=given.draft)
        return cls(settings), WorkerConfig(given.namespace, "truedraft", model_name=given.target)

    async def start(self, worker_id: int) -> EngineConfig:
        core = await asyncio.to_thread(build_engine, self.settings)
        self.engine, pool = SharedEngine(core), core.scheduler.target_pool
        sizes = {"kv_cache_block_size": pool.block_size, "total_kv_blocks": pool.num_blocks}
        registration = LlmRegistration(context_length=core.admission.max_model_len, **sizes)
        return EngineConfig(str(self.settings.target), llm=registration)

    async def generate(self, request: Any, context: Any) -> AsyncGenerator[Any, None]:
        outputs: asyncio.Queue[messages.TokenOutput | RequestError] = asyncio.Queue()
        put, answers = asyncio.get_running_loop().call_soon_threadsafe, deque[Any]()
        asked = self._asked(request)
        self._answers[context.id()] = asked.request_id, answers
        self._threads.submit(self._decode, asked, answers, lambda output: put(outputs.put_nowait, output))
        left, num_tokens = asked.n, 0
        try:
            while left:
                output = await outputs.get()
                if isinstance(output, RequestError):
                    if not context.is_stopped():
                        raise output
                    yield {"token_ids": [], "index": 0, "finish_reason": "cancelled"}
                    return
                num_tokens += len(output.token_ids)
                chunk = {"token_ids": output.token_ids, "index": output.index}
                if output.logprobs is not None:
                    chunk["log_probs"] = [token.logprob for token in output.logprobs]
                if output.finish_reason is not None:
                    left -= 1
                    prompt = len(asked.prompt_token_ids)
                    usage = {"prompt_tokens": prompt, "completion_tokens": num_tokens}
                    usage["total_tokens"] = prompt + num_tokens
                    chunk |= {"finish_reason": output.finish_reason, "completion_usage": usage}
                yield chunk
        finally:
            await self.abort(context)

    async def abort(self, context: Any) -> None:
        request_id, answers = self._answers.pop(context.id(), ("", deque()))
        answers.append(messages.Failed(request_id, "aborted", "the request was aborted"))

    async def cleanup(self) -> None:
        engine, self.engine = self.engine, None
        if engine is not None:
            engine.shut_down()
        self._threads.shutdown(wait=False)

    def _asked(self, request: Any) -> messages.Generate:
        assert self.engine is not None
        given: dict[str, Any] = {}
        for group in ("sampling_options", "stop_conditions", "output_options"):
            given |= _said(request.get(group))
        given |= _said(given.pop("guided_decoding", None))
        if unknown := given.keys() - NAMES.keys() - OF_THE_FRONTEND:
            raise ValueError(f"not served by this backend: {', '.join(sorted(unknown))}")
        fields = {NAMES[name] or name: value for name, value in given.items() if name in NAMES}
        fields.setdefault("max_tokens", self.engine.core.admission.room(len(request["token_ids"])))
        params = SamplingParams(**fields)
        return messages.Generate(self.engine.new_id(), request["token_ids"], params.for_engine(), params.n)

    def _decode(self, asked: messages.Generate, answers: Answers, tell: Callable[[Any], None]) -> None:
        engine, left = self.engine, asked.n
        if engine is None:
            return tell(RequestError("closed", "the engine is closed"))
        try:
            engine.submit(asked, answers)
            for output in engine.results(answers):
                tell(output)
                left -= output.finish_reason is not None
                if not left:
                    break
        except RequestError as error:
            tell(error)
        finally:
            engine.close([asked.request_id])


def _said(group: dict[str, Any] | None) -> dict[str, Any]:
    """Returns what asks for something: 0 does, what is empty or false does not."""
    items = (group or {}).items()
    return {name: value for name, value in items if value not in (None, [], {}, "") and value is not False}


if __name__ == "__main__":
    run(TruedraftEngine)
