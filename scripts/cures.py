# ruff: noqa: ISC004 - a row of a table that reads as a sentence
"""What moves outputs, what is usually advised, what is offered here, where it is tested and what it costs.

Read by ``scripts/docs``. Costs are figures of ``scripts/bench determinism``, or words where nothing was measured; those
that ``provenance doctor`` quotes too stand in the package.
"""

from provenance.determinism.doctor import COSTS

MODE, SEEDS, BATCHES = "tests/determinism/test_mode.py", "tests/determinism/test_seeds.py", "tests/determinism/test_batches.py"
SAMPLING, TRAPS = "tests/determinism/test_sampling.py", "tests/determinism/test_traps.py"
PINS, PROBES, DOCTOR = "tests/determinism/test_pins.py", "tests/replay/test_probes.py", "tests/determinism/test_doctor.py"
PROGRAM, TEXT, LOCK = "tests/cli/test_program.py", "tests/integrity/test_text.py", "tests/determinism/test_lock.py"

CACHE, DRIFT, BASELINE = "tests/capture/test_cache.py", "tests/cli/test_drift.py", "tests/replay/test_baseline.py"

# (source of divergence, usual advice, what is offered, tested in, cost)
CURES: tuple[tuple[str, str, str, str, str], ...] = (
    ("random draws that start anywhere", "seed everything", "`seed_all(seed)`; `provenance run --seed N`", SEEDS,
     "part of the block below"),
    ("draws that depend on what ran before", "seed before each call", "`with seeded(seed):`, every state back afterwards",
     SEEDS, COSTS["seeded"]),
    ("draws that depend on the order of requests", "a seed a request", "`seeded.call(seed, index)`; "
     "`seeded.derive` gives the number to a server", SEEDS, "the same"),
    ("rows of a batch share one random stream", "sample one at a time", "`seeded.call` around one prompt",
     SEEDS, "the speed of batches"),
    ("order of sets of strings", "`PYTHONHASHSEED`", "`provenance run --seed N` sets it before Python starts; `seed_all` says "
     "where it is too late", PROGRAM, "nothing"),
    ("operators that add in any order (CUDA)", "`use_deterministic_algorithms`", "`deterministic()`; `strict=True` names the "
     "operator", MODE, COSTS["mode"]),
    ("algorithms picked by timing", "`cudnn.benchmark = False`", "`deterministic()`: also TunableOp and the compiler's tuning",
     MODE, "in the figure above"),
    ("TF32", "`allow_tf32 = False`", "`deterministic()`: old and new settings, without the mixture at which torch raises",
     MODE, "in the figure above; not measured on CUDA"),
    ("half-precision sums inside products", "`allow_*_reduced_precision_reduction = False`", "`deterministic()`, the split "
     "along K too", MODE, "not measured on CUDA"),
    ("cuBLAS workspaces of several streams", "`CUBLAS_WORKSPACE_CONFIG`", "`provenance run --deterministic`; "
     "`deterministic()` while cuBLAS has not started", PROGRAM, "not measured on CUDA"),
    ("the choice of an attention kernel", "the math kernel", "`deterministic(attention='math')`", MODE,
     COSTS["math"]),
    ("the attention implementation that a checkpoint was loaded with", "`attn_implementation=` as it loads",
     "`pinned(model, attention=NAME)`; `probe` measures whether it matters", PINS, "that of the implementation"),
    ("the cache of keys and values, on or off", "(seldom named)", "`greedy(model)` sets it; `pinned(model, cache=True)`; `probe`", PINS,
     "nothing, if it was on"),
    ("the number of threads", "`OMP_NUM_THREADS`, `torch.set_num_threads`", "`pinned(model, threads=N)`; `probe`; `doctor` where it "
     "follows the cores", PINS, "speed, if it is below the cores"),
    ("company in the batch", "batch size 1", "`determinism.batches`: every call has one shape, alone and in company; "
     "`measure` counts what is left", BATCHES, COSTS["shapes"]),
    ("a row's place in its batch (CPU, several threads)", "(seldom named)", "one shape and `pinned(model, threads=1)`; `probe` says what "
     "holds: `fixed-shapes`, `fixed-shapes-pinned`", PINS, "speed of more threads"),
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
    ("padding beside a prompt", "pad always, or never", "`determinism.batches`; `probe` measures it", PROBES, COSTS["shapes"]),
    ("the first call after loading", "a warm-up call", "`provenance probe determinism`: cold and warm, here and in a fresh process", PROBES,
     "nothing"),
    ("another process", "restart and compare", "`provenance probe determinism` asks a fresh one", PROBES, "a second load of the model"),
    ("dropout left on", "`model.eval()`", "`provenance probe determinism`: repeats differ, and nothing else is claimed", PROBES, "nothing"),
    ("not knowing which of all this holds here", "believe the flags", "`provenance probe determinism MODEL`: tokens, and logits bit for bit",
     PROBES, "some 15 calls a prompt, once"),
    ("not knowing what matters here", "read all of this", "`provenance doctor`: what applies to this machine, worst first", DOCTOR, "nothing"),
    ("drivers, libraries, weights that change", "pin versions", "`provenance lock` and `provenance check`", LOCK, "nothing"),
    ("a changed answer to a question that was answered before", "cache responses", "`cached(model)`: the first result for equal input, "
     "settings and model is served, stored before the call returns", CACHE, "a look-up a call; docs/cache.md has the figures"),
    ("not knowing how often outputs move", "watch production", "`provenance drift`: share of equal inputs that got unequal answers, with "
     "intervals and change points; `drift probe` where traffic is thin; Prometheus counters", DRIFT, "counted by the writer"),
    ("not knowing whether an upgrade moves outputs", "a regression set", "`provenance baseline record` and `check`", BASELINE,
     "one call a frozen run"),
    ("texts that say the same in other characters", "compare by eye", "`normalize(text, profile)`", TEXT, "nothing at inference"),
)  # fmt: skip

# Counted by `tests/determinism/test_pins.py` at its size of 200 prompts (marker `long`), on two cores of an AMD EPYC, torch 2.13, with the
# nearly tied model, 4 rows, 16 new tokens. What is not in the list was not counted at that size.
COUNTED = "alone and as the last row of a batch of 4; the cache on and off; sdpa and eager; the fused kernel allowed and not; 1 thread and 2"
PROOF = (
    "With `deterministic(attention='math')`, `pinned(model, attention='sdpa', cache=True, threads=1)` and one shape for every call, on the model whose",
    f"every choice is nearly a tie, 0 of 200 prompts are answered otherwise, for each of: {COUNTED}.",
    "The same test counts all dials turned at once, and in CI every dial with 5 prompts.",
    "Two things were found by it. Over two threads torch's fused attention on a CPU sums a row otherwise at another place of its batch: of 24 prompts, equal",
    "copies in one batch differ for 23, and for none with one thread, with eager attention or with the math kernel. And a batch without a single pad token is",
    "computed without its mask, by another kernel (9 of 200 prompts): so every row of a shape keeps one.",
)
