"""Declared fields that no reader of ours fills in, each with the reason. A test holds that this list is complete.

A field may be declared so that others can set it (`run.set_field`, a collector), or so that a comparison can name it as
what would decide. Missing is never equal: such a field is not recorded, and says nothing until somebody records it.
"""

CONTENT = "content: kept as a payload and compared under the store's key; no digest of content is a field"
CALLER = "only whoever runs the engine or the service knows it: run.set_field, or a collector"
NOISE = "noise, and asking the driver at every call would slow it"
COLUMN = "a column of the run or its stream, not a field"
SEEN = "follows from what is recorded: "

UNREAD: dict[str, str] = {
    **dict.fromkeys(
        ("gpu.N.sm_clock", "gpu.N.temperature", "gpu.N.power_watts", "gpu.N.utilization", "gpu.N.throttle_reasons",
         "gpu.N.other_processes"), NOISE,
    ),
    **dict.fromkeys(
        ("input.token_ids_sha256", "input.messages_sha256", "input.inputs_embeds_sha256", "input.images_sha256",
         "input.pixel_values_sha256", "input.audio_sha256", "input.system_prompt_sha256", "input.unicode_normal_form",
         "input.retrieval_context_digest", "batch.attention_mask_sha256", "batch.position_ids_sha256",
         "batch.neighbours_digest"), CONTENT,
    ),
    **dict.fromkeys(
        ("engine.endpoint_digest", "engine.replica", "engine.restart_count", "engine.plan_sha256",
         "engine.timing_cache_sha256", "engine.built_at_start", "engine.builder_level", "engine.optimization_profile",
         "engine.moe_config_sha256", "engine.kv_splits", "engine.reduce_dtype", "engine.sampler",
         "engine.context_length", "engine.parallel_slots", "service.provider",
         "service.output_normalisation", "batch.running_requests",
         "service.response.moderation", "batch.chunked_prefill_boundaries", "adapters.mixed_batch",
         "weights.mutable_version",
         "chat_template.kwargs_digest", "input.truncated"), CALLER,
    ),
    **dict.fromkeys(
        ("context.hostname_digest", "context.process_start", "context.user_label", "context.load_average",
         "context.memory_rss"), COLUMN,
    ),
    **dict.fromkeys(
        ("continuous_batching.num_blocks", "continuous_batching.max_batch_tokens", "continuous_batching.use_cuda_graph",
         "continuous_batching.max_requests_per_batch", "continuous_batching.allow_block_sharing",
         "continuous_batching.q_padding_interval_size", "continuous_batching.kv_padding_interval_size",
         "continuous_batching.scheduler_type", "continuous_batching.auto_switch_to_flash",
         "continuous_batching.page_size", "continuous_batching.drop_unsupported_processors"),
        "generate_batch of transformers is not wrapped yet; a configuration given to generate is a setting",
    ),
    "context.cwd_digest": "a path of a person's machine; it acts on nothing",
    "context.argv_digest": "arguments hold secrets; what they set is recorded as it came out",
    "gpu.N.driver_model": "on Windows alone, where capture does not work",
    "gpu.N.conf_compute": "read for the machine as a whole: gpu.conf_compute",
    "gpu.N.topology_digest": "read for the machine as a whole: gpu.topology_digest",
    "gpu.gsp_firmware": "read for each device: gpu.N.gsp_firmware",
    "torch.autocast": "read for each device: torch.autocast.cpu, torch.autocast.cuda",
    "rng.row_at_sampling": SEEN + "the row and the return index of the sequence, where its run drew",
    "torch.compile.recompiled": SEEN + "torch.compile.graphs_before and torch.compile.graphs_after",
    "model.attn_implementation_requested": "loaders keep what was resolved and forget what was asked",
    "weights.tensor.NAME.sha256": "rows of the manifest: table weight_entries, `provenance weights diff`",
    "weights.sha256": "the files' digests stand in the manifest under weights.files_root",
    "weights.format": "the names of the files stand in the manifest under weights.files_root",
    "generation.defaults_digest": "its values are settings, each with the hand that set it",
    "input.token_ids": "the ids are kept as a payload; a comparison names the first that differs",
    "input.rendered_prompt_sha256": CONTENT,
    "weights.index_sha256": SEEN + "weights.files_root",
    "weights.shard_count": SEEN + "the manifest of files",
    "adapters.N.sha256": SEEN + "the tensors of the adapter stand in weights.loaded_root",
    "generation._from_model_config": "a mark of the loader, no setting",
    "generation.stop_reason": "the finish of each sequence",
    "batch.pad_to_multiple_of": SEEN + "batch.max_length and batch.sequence_lengths",
    "batch.unfinished_rows": SEEN + "the lengths of the sequences",
    "rng.generator_used": "transformers draws from the default generators",
    "seed.watermark": SEEN + "generation.watermarking_config, keys as keyed digests",
    "input.response_schema_digest": SEEN + "service.request.response_format",
    "input.extra_model_kwargs_digest": "arguments that are no settings stand in the arguments of the call",
    "llama_cpp.sampling.repeat_penalty": "read under its name in the call: llama_cpp.sampling.*",
    "llama_cpp.sampling.mirostat_mode": "read under its name in the call: llama_cpp.sampling.*",
    "service.response_cache_hit": "nothing serves answers from a cache yet",
    "service.safe_headers_digest": "headers hold credentials; x-request-id is the run's trace id",
}  # fmt: skip
