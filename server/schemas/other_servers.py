"""Names that requests have on other servers: what is refused here by name, and what to use instead.

``other_servers.json`` has every field of their request classes, which ``tools.other_servers`` reads from
packages. A field that is neither served nor ``HARMLESS`` is refused: a new one cannot be ignored unseen.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple


class Refused(NamedTuple):
    """``instead`` completes the error's sentence. ``neutral`` values ask for nothing, and neither do null and
    whatever is empty; but an empty schema, where the field ``takes_schema``, asks for any JSON."""

    instead: str
    neutral: tuple[object, ...] = ()
    takes_schema: bool = False

    def asks_for(self, value: object) -> bool:
        """Returns whether ``value`` would change anything. In Python 0 == False, but not in JSON."""
        if value is None or value in ("", []) or (value == {} and not self.takes_schema):
            return False
        return not any(
            value == item and isinstance(value, bool) == isinstance(item, bool) for item in self.neutral
        )


CUTS = "use 'temperature', 'top_p', 'top_k' or 'min_p'"
PENALTIES = "use 'repetition_penalty', 'presence_penalty' or 'frequency_penalty'"
REACH = "penalties look at the whole text here; leave it out"
LENGTH = "use 'max_tokens', or 'max_output_tokens' on /v1/responses"
LEAST = "use 'min_tokens'"
THINKING = "use 'reasoning_effort' or chat_template_kwargs"
BUDGET = "use 'thinking_budget', on chats and responses"
BIAS = "use 'logit_bias'"
TEXT_ONLY = "this server reads and writes text only"
ONE_BEAM = "tokens are sampled one after the other; use 'n' for several answers"
SPLIT_REASONING = "reasoning always comes apart from the text, as 'reasoning_content'"
STOP = "use 'stop', or 'stop_sequences' on /v1/messages"
LOGPROBS = "use 'logprobs'"
SCHEMA = "use 'response_format' or structured_outputs.json"
GRAMMAR = "use structured_outputs.grammar, in Lark's notation"
ONE_MODEL = "name a LoRA adapter of lora_modules in 'model'"
UNPACKED = "send what it holds as fields of the request itself"

# No endpoint serves these.
UNSUPPORTED: Mapping[str, Refused] = {
    "adapter_id": Refused(ONE_MODEL),
    "adapters": Refused(ONE_MODEL),
    "add_special_tokens": Refused("send token ids as the 'prompt' of /v1/completions", (True,)),
    "allowed_token_ids": Refused("use 'structured_outputs' or 'logit_bias'"),
    "audio": Refused(TEXT_ONLY),
    "bad_words": Refused(BIAS),
    "bad_words_ids": Refused(BIAS),
    "ban_eos_token": Refused("use 'ignore_eos' or 'min_tokens'", (False,)),
    "beam_width": Refused(ONE_BEAM, (1,)),
    "chat_template": Refused(
        "the server's setting of that name has it; send a finished text to /v1/completions"
    ),
    "custom_logit_processor": Refused("use 'logit_bias' or 'structured_outputs'"),
    "detokenize": Refused("use 'return_token_ids', which gives the ids too", (True,)),
    "do_sample": Refused("use 'temperature', where 0 is greedy", (True,)),
    "dry_multiplier": Refused(PENALTIES, (0,)),
    "dynatemp_range": Refused(CUTS, (0,)),
    "ebnf": Refused(GRAMMAR),
    "epsilon_cutoff": Refused(CUTS, (0,)),
    "eta_cutoff": Refused(CUTS, (0,)),
    "extra_body": Refused(UNPACKED),
    "format": Refused(SCHEMA, takes_schema=True),
    "frequency_context_size": Refused(REACH),
    "function_call": Refused("use 'tool_choice'", ("none", "auto")),
    "functions": Refused("use 'tools'"),
    "generation_config": Refused(UNPACKED),
    "grammar": Refused(GRAMMAR),
    "guidance_scale": Refused("guidance by a second prompt is not served; leave it out", (1,)),
    "guided_choice": Refused("use structured_outputs.choice"),
    "guided_decoding_backend": Refused("use 'structured_outputs', which has one backend", ("auto",)),
    "guided_grammar": Refused(GRAMMAR),
    "guided_json": Refused("use structured_outputs.json", takes_schema=True),
    "guided_regex": Refused("use structured_outputs.regex"),
    "images": Refused(TEXT_ONLY),
    "include_reasoning": Refused(SPLIT_REASONING, (True,)),
    "json_mode": Refused("use response_format: {'type': 'json_object'}", (False,)),
    "json_schema": Refused(SCHEMA, takes_schema=True),
    "length_penalty": Refused(ONE_BEAM, (1,)),
    "logits_bias": Refused(BIAS),
    "logits_processors": Refused("use 'logit_bias' or 'structured_outputs'"),
    "lora": Refused(ONE_MODEL),
    "lora_path": Refused(ONE_MODEL),
    "lora_request": Refused(ONE_MODEL),
    "max_length": Refused(LENGTH),
    "max_new_tokens": Refused(LENGTH),
    "min_length": Refused(LEAST, (0,)),
    "min_new_tokens": Refused(LEAST, (0,)),
    "mirostat": Refused(CUTS, (0,)),
    "mirostat_mode": Refused(CUTS, (0,)),
    "modalities": Refused(TEXT_ONLY, (["text"],)),
    "n_cmpl": Refused("use 'n'", (1,)),
    "n_predict": Refused(LENGTH, (-1,)),
    "n_probs": Refused(LOGPROBS, (0,)),
    "no_repeat_ngram_size": Refused(PENALTIES, (0,)),
    "num_beam_groups": Refused(ONE_BEAM, (1,)),
    "num_beams": Refused(ONE_BEAM, (1,)),
    "num_ctx": Refused("the context is as long as the server's setting max_model_len"),
    "num_predict": Refused(LENGTH, (-1,)),
    "num_return_sequences": Refused("use 'n'", (1,)),
    "nvext": Refused(UNPACKED),
    "options": Refused(UNPACKED),
    "parameters": Refused(UNPACKED),
    "penalty_alpha": Refused(CUTS, (0,)),
    "presence_context_size": Refused(REACH),
    "prompt_template": Refused("send a finished text to /v1/completions"),
    "raw": Refused("send a finished text to /v1/completions", (False,)),
    "reasoning": Refused("use 'reasoning_effort'"),
    "reasoning_budget": Refused(BUDGET, (-1,)),
    "reasoning_budget_tokens": Refused(BUDGET, (-1,)),
    "reasoning_format": Refused(SPLIT_REASONING, ("auto", "deepseek")),
    "regex": Refused("use structured_outputs.regex"),
    "rep_pen": Refused("use 'repetition_penalty'", (1,)),
    "rep_pen_range": Refused(REACH),
    "repeat_last_n": Refused(REACH, (-1,)),
    "repeat_penalty": Refused("use 'repetition_penalty'", (1,)),
    "repetition_context_size": Refused(REACH),
    "response_schema": Refused(SCHEMA, takes_schema=True),
    "return_full_text": Refused("use 'echo' on /v1/completions", (False,)),
    "return_tokens_as_token_ids": Refused("use 'return_token_ids'", (False,)),
    "samplers": Refused(CUTS),
    "sampling_params": Refused(UNPACKED),
    "sampling_seed": Refused("use 'seed'"),
    "separate_reasoning": Refused(SPLIT_REASONING, (True,)),
    "smoothing_factor": Refused(CUTS, (0,)),
    "spaces_between_special_tokens": Refused("use 'return_token_ids' and decode them", (True,)),
    "stop_regex": Refused("use 'stop' or structured_outputs.regex"),
    "stop_sequences": Refused(STOP),
    "stop_strings": Refused(STOP),
    "stop_words": Refused(STOP),
    "stopping_strings": Refused(STOP),
    "suffix": Refused("use /v1/completions, with a model that fills in the middle"),
    "suppress_tokens": Refused(BIAS),
    "system_prompt": Refused("send a message of the role 'system'"),
    "template": Refused("send a finished text to /v1/completions"),
    "tfs": Refused(CUTS, (1,)),
    "tfs_z": Refused(CUTS, (1,)),
    "think": Refused("use 'enable_thinking' or 'reasoning_effort'"),
    "thinking": Refused(THINKING),
    "thinking_budget": Refused(BUDGET),
    "thinking_budget_tokens": Refused(BUDGET, (-1,)),
    "thinking_token_budget": Refused(BUDGET),
    "top_a": Refused(CUTS, (0,)),
    "top_n_sigma": Refused(CUTS, (-1,)),
    "top_n_tokens": Refused(LOGPROBS, (0,)),
    "truncate": Refused("use 'truncate_prompt_tokens'"),
    "truncation_side": Refused("use 'truncate_prompt_tokens', which keeps the end", ("left",)),
    "typical": Refused(CUTS, (1,)),
    "typical_p": Refused(CUTS, (1,)),
    "until": Refused(STOP),
    "use_beam_search": Refused(ONE_BEAM, (False,)),
    "web_search_options": Refused("offer a function that searches among the 'tools'"),
    "xtc_probability": Refused(CUTS, (0,)),
}

# These change no token here: they are metadata, ask for more output, tune another server's machine, or belong
# to a sampler or a kind of input that is refused by its own name.
HARMLESS = frozenset(
    {
        "access_programs",
        "background_options",
        "cache_control",
        "client_metadata",
        "container",
        "custom_labels",
    }
    | {"diagnostics", "extra_key", "include", "inference_geo", "keep_alive", "max_tool_calls", "moderation"}
    | {"request_id", "rid", "session_id", "speed", "user_profile_id", "verbosity", "workspace_id"}
    | {"bootstrap_host", "bootstrap_port", "bootstrap_room", "data_parallel_rank", "disagg_prefill_dp_rank"}
    | {"ec_transfer_params", "kv_transfer_params", "routed_dp_rank", "vllm_xargs"}
    | {"decoder_input_details", "details", "enable_response_messages", "include_usage", "output_attentions"}
    | {"output_hidden_states", "output_logits", "output_scores", "post_sampling_probs", "response_fields"}
    | {"return_cached_tokens_details", "return_dict_in_generate", "return_flat_raw_output_top_logprobs"}
    | {"return_flat_raw_top_logprobs_b64", "return_hidden_states", "return_input_ids_in_sglext"}
    | {"return_meta_info", "return_mm_kwargs", "return_output_ids_in_sglext", "return_progress"}
    | {"return_prompt_text", "return_prompt_token_ids", "return_routed_experts", "return_sampling_mask"}
    | {"return_spec_tokens_details", "return_token_offsets", "return_tokens", "return_weight_versions"}
    | {"routed_experts_prompt_start", "routed_experts_start_len", "timings_per_token", "verbose"}
    | {"backend_sampling", "cache_config", "cache_implementation", "compile_config", "disable_compile"}
    | {"continuous_batching_config", "draft_model", "f16_kv", "id_slot", "low_memory", "low_vram", "main_gpu"}
    | {"max_cache_len", "n_cache_reuse", "n_discard", "n_keep", "num_batch", "num_draft_tokens", "num_gpu"}
    | {"num_keep", "num_thread", "numa", "prefill_chunk_size", "sse_ping_interval", "stream_interval"}
    | {"stream_reasoning", "transformers_version", "use_cache", "use_mlock", "use_mmap", "use_mtp"}
    | {"adaptive_decay", "dry_allowed_length", "dry_base", "dry_penalty_last_n", "dry_sequence_breakers"}
    | {"dynatemp_exponent", "early_stopping", "mirostat_eta", "mirostat_tau", "xtc_threshold"}
    | {"images_config", "max_dynamic_patch", "media_io_kwargs", "min_dynamic_patch", "mm_processor_kwargs"}
    | {"use_audio_in_video", "video_config"}
)


def fields_of_others() -> Mapping[str, Refused]:
    """Returns the fields of other servers that have no alternative here; neutral is their own default."""
    data = json.loads((Path(__file__).parent / "other_servers.json").read_text())
    owners: dict[str, list[str]] = {}
    defaults: dict[str, list[object]] = {}
    for server, names in data["fields"].items():
        for name, default in names.items():
            owners.setdefault(name, []).append(server)
            defaults.setdefault(name, []).append(False if default is None else default)
    return {
        name: Refused(
            f"it is a field of {' and '.join(servers[:2])} that has no equivalent here", (*defaults[name],)
        )
        for name, servers in owners.items()
        if name not in HARMLESS
    }


OTHERS = fields_of_others()
