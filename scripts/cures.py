# ruff: noqa: ISC004 - a row of a table that reads as a sentence
"""What moves outputs, what is usually advised, what is offered here, where it is tested and what it costs.

Read by ``scripts/docs``. Costs are figures of ``scripts/bench determinism``, or words where nothing was measured.
"""

MODE, SEEDS, BATCHES = "tests/determinism/test_mode.py", "tests/determinism/test_seeds.py", "tests/determinism/test_batches.py"
SAMPLING, TRAPS = "tests/determinism/test_sampling.py", "tests/determinism/test_traps.py"
PROGRAM, TEXT, LOCK = "tests/cli/test_program.py", "tests/integrity/test_text.py", "tests/determinism/test_lock.py"

# (source of divergence, usual advice, what is offered, tested in, cost)
CURES: tuple[tuple[str, str, str, str, str], ...] = (
    ("random draws that start anywhere", "seed everything", "`seed_all(seed)`; `provenance run --seed N`", SEEDS,
     "part of the block below"),
    ("draws that depend on what ran before", "seed before each call", "`with seeded(seed):`, every state back afterwards",
     SEEDS, "0.26 ms a block; 1.03 of a plain `generate`, which is noise here. Threads take turns"),
    ("draws that depend on the order of requests", "a seed a request", "`seeded.call(seed, index)`; "
     "`seeded.derive` gives the number to a server", SEEDS, "the same"),
    ("rows of a batch share one random stream", "sample one at a time", "`seeded.call` around one prompt",
     SEEDS, "the speed of batches"),
    ("order of sets of strings", "`PYTHONHASHSEED`", "`provenance run --seed N` sets it before Python starts; `seed_all` says "
     "where it is too late", PROGRAM, "nothing"),
    ("operators that add in any order (CUDA)", "`use_deterministic_algorithms`", "`deterministic()`; `strict=True` names the "
     "operator", MODE, "1.05 of a plain `generate` on a CPU; not measured on CUDA"),
    ("algorithms picked by timing", "`cudnn.benchmark = False`", "`deterministic()`: also TunableOp and the compiler's tuning",
     MODE, "in the figure above"),
    ("TF32", "`allow_tf32 = False`", "`deterministic()`: old and new settings, without the mixture at which torch raises",
     MODE, "in the figure above; not measured on CUDA"),
    ("half-precision sums inside products", "`allow_*_reduced_precision_reduction = False`", "`deterministic()`, the split "
     "along K too", MODE, "not measured on CUDA"),
    ("cuBLAS workspaces of several streams", "`CUBLAS_WORKSPACE_CONFIG`", "`provenance run --deterministic`; "
     "`deterministic()` while cuBLAS has not started", PROGRAM, "not measured on CUDA"),
    ("the choice of an attention kernel", "the math kernel", "`deterministic(attention='math')`", MODE,
     "1.23 of a plain `generate` on a CPU, float32, prompts of 64"),
    ("company in the batch", "batch size 1", "`determinism.batches`: every call has one shape, alone and in company; "
     "`measure` counts what is left", BATCHES, "1.3 of a prompt alone, 1.2 of full batches: 16 prompts of the tiny model, 8 rows"),
    ("company in the batch, on GPUs", "batch-invariant kernels", "`deterministic(batch_invariant=True)` where the package "
     "batch_invariant_ops is installed", MODE, "not measured: tested with a stand-in for the package"),
    ("company in the batch, in engines", "the engine's own mode", "the report names `VLLM_BATCH_INVARIANT` and "
     "`SGLANG_ENABLE_DETERMINISTIC_INFERENCE`", MODE, "the engine's"),
    ("defaults of a checkpoint or of the library", "set every field", "`greedy(model)`, `clean_sampling(config)`", SAMPLING,
     "nothing"),
    ("penalties that act in greedy decoding", "temperature 0", "`provenance lint` names them; `greedy` turns them off", TRAPS,
     "another output: they were doing something"),
    ("`max_time`", "(seldom named)", "`provenance lint`; `greedy` lifts it", TRAPS, "no bound on time"),
    ("right padding, a missing mask", "left padding", "`provenance lint`", TRAPS, "nothing"),
    ("the date in a chat template", "(seldom named)", "`provenance lint`", TRAPS, "the model is told a fixed date"),
    ("a static cache left by a longer call", "(seldom named)", "`provenance lint`", TRAPS, "the compiler makes its graphs again"),
    ("drivers, libraries, weights that change", "pin versions", "`provenance lock` and `provenance check`", LOCK, "nothing"),
    ("texts that say the same in other characters", "compare by eye", "`normalize(text, profile)`", TEXT, "nothing at inference"),
)  # fmt: skip
