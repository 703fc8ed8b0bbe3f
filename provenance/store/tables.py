"""The tables, once, for both databases. ``migrations/`` makes them; a test holds that the two agree.

Integer keys inside, UUIDs outside. Times are nanoseconds since 1970 in UTC. ``started_at`` is part of the keys
of `runs`, `sequences` and `payload_refs`, and ``month`` of `payloads`, so that they can be partitioned by time.
What is hashed or signed is binary; JSON and text beside it are for SQL. Keyed columns stand beside the
``key_id`` of their stream.
"""

from sqlalchemy import (
    BigInteger,
    Column,
    Double,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    SmallInteger,
    String,
    Table,
    Text,
    text,
)

metadata = MetaData()
# SQLite numbers rows by itself only in a column that is exactly INTEGER.
Key = BigInteger().with_variant(Integer, "sqlite")

store_info = Table(
    "store_info", metadata,
    Column("name", String(40), primary_key=True),
    Column("value", Text, nullable=False),
)  # fmt: skip

streams = Table(
    "streams", metadata,
    Column("id", Key, primary_key=True, autoincrement=False),
    Column("stream_id", LargeBinary(16), nullable=False, unique=True),
    Column("host", Text, nullable=False),
    Column("pid", Integer, nullable=False),
    Column("boot_id", LargeBinary(16), nullable=False),
    Column("started_at", BigInteger, nullable=False),
    Column("program", Text, nullable=False),
    Column("about", Text, nullable=False),
    Column("key_id", String(16), nullable=False),
    Column("segment", Integer, nullable=False),
    Column("position", BigInteger, nullable=False),
    Column("last_seq", BigInteger, nullable=False),
    Column("last_seen", BigInteger, nullable=False),
    Column("ended", SmallInteger, nullable=False),
)  # fmt: skip

fingerprints = Table(
    "fingerprints", metadata,
    Column("id", Key, primary_key=True, autoincrement=False),
    Column("digest", String(80), nullable=False, unique=True),
    Column("value_digest", String(80), nullable=False),
    Column("scope", String(16), nullable=False),
    Column("document", LargeBinary, nullable=False),
)  # fmt: skip

fingerprint_fields = Table(
    "fingerprint_fields", metadata,
    Column("fingerprint", Key, primary_key=True, autoincrement=False),
    Column("name", String(200), primary_key=True),
    Column("value", Text),
    Column("state", String(16), nullable=False),
    Column("reason", Text),
    Column("source", Text),
    Index("fingerprint_fields_name", "name", "fingerprint"),
    sqlite_with_rowid=False,
)  # fmt: skip

weights = Table(
    "weights", metadata,
    Column("id", Key, primary_key=True, autoincrement=False),
    Column("root", String(80), nullable=False, unique=True),
    Column("kind", String(16), nullable=False),
    Column("entries", Integer, nullable=False),
    Column("bytes", BigInteger, nullable=False),
    Column("document", LargeBinary, nullable=False),
)  # fmt: skip

weight_entries = Table(
    "weight_entries", metadata,
    Column("weights", Key, primary_key=True, autoincrement=False),
    Column("kind", String(8), primary_key=True),
    Column("name", String(300), primary_key=True),
    Column("dtype", String(24), nullable=False),
    Column("shape", Text, nullable=False),
    Column("bytes", BigInteger, nullable=False),
    Column("sha256", String(64), nullable=False),
    Index("weight_entries_sha256", "sha256"),
    sqlite_with_rowid=False,
)  # fmt: skip

runs = Table(
    "runs", metadata,
    Column("id", Key, primary_key=True, autoincrement=False),
    Column("started_at", BigInteger, primary_key=True, autoincrement=False),
    Column("run_id", String(36), nullable=False),
    Column("stream", Key, nullable=False),
    Column("start_seq", BigInteger, nullable=False),
    Column("end_seq", BigInteger),
    Column("kind", String(8), nullable=False),
    Column("runtime", String(32), nullable=False),
    Column("operation", Text, nullable=False),
    Column("status", String(10), nullable=False),
    Column("ended_at", BigInteger),
    Column("duration_ns", BigInteger),
    Column("environment", Key, nullable=False),
    Column("switches", Key, nullable=False),
    Column("model", Key),
    Column("settings", Key),
    Column("load", Integer, nullable=False),
    Column("weights", Key),
    Column("weight_files", Key),
    Column("weights_note", Text),
    Column("batch_size", Integer, nullable=False),
    Column("seed", BigInteger),
    Column("random_state", String(80)),
    Column("parent_run", String(36)),
    Column("trace_id", Text),
    Column("name", Text),
    Column("error", Text),
    Column("call_facts", Text, nullable=False),
    Column("leaf", LargeBinary(32)),
    Index("runs_run_id", "run_id", postgresql_ops={"run_id": "varchar_pattern_ops"}),
    Index("runs_stream", "stream", "start_seq"),
    Index("runs_started_at", "started_at"),
    Index("runs_name", "name", sqlite_where=text("name is not null"), postgresql_where=text("name is not null")),
)  # fmt: skip

run_tags = Table(
    "run_tags", metadata,
    Column("run", Key, primary_key=True, autoincrement=False),
    Column("key", String(200), primary_key=True),
    Column("value", Text, nullable=False),
    Index("run_tags_key", "key", "value"),
    sqlite_with_rowid=False,
)  # fmt: skip

sequences = Table(
    "sequences", metadata,
    Column("run", Key, primary_key=True, autoincrement=False),
    Column("started_at", BigInteger, primary_key=True, autoincrement=False),
    Column("prompt_index", Integer, primary_key=True, autoincrement=False),
    Column("return_index", Integer, primary_key=True, autoincrement=False),
    Column("input_key", LargeBinary(32)),
    Column("output_key", LargeBinary(32)),
    Column("input_tokens", Integer),
    Column("output_tokens", Integer),
    Column("padding_tokens", Integer),
    Column("finish", String(12)),
    Column("min_margin", Double),
    Column("min_margin_at", Integer),
    Column("input_preview", Text),
    Column("output_preview", Text),
    Index("sequences_input_key", "input_key"),
    sqlite_with_rowid=False,
)  # fmt: skip

codecs = Table(
    "codecs", metadata,
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("kind", String(24), nullable=False),
    Column("dictionary", LargeBinary),
    Column("sha256", String(64)),
)  # fmt: skip

payload_refs = Table(
    "payload_refs", metadata,
    Column("run", Key, primary_key=True, autoincrement=False),
    Column("started_at", BigInteger, primary_key=True, autoincrement=False),
    Column("role", SmallInteger, primary_key=True, autoincrement=False),
    Column("prompt_index", Integer, primary_key=True, autoincrement=False),
    Column("return_index", Integer, primary_key=True, autoincrement=False),
    Column("part", Integer, primary_key=True, autoincrement=False),
    Column("encoding", SmallInteger, nullable=False),
    Column("size", BigInteger, nullable=False),
    Column("commitment", LargeBinary(32), nullable=False),
    Column("salt", LargeBinary(32)),
    Column("body", Key),
    Index("payload_refs_body", "body"),
    sqlite_with_rowid=False,
)  # fmt: skip

payloads = Table(
    "payloads", metadata,
    Column("id", Key, primary_key=True, autoincrement=False),
    Column("month", Integer, primary_key=True, autoincrement=False),
    Column("key", LargeBinary(32), nullable=False),
    Column("codec", Integer, nullable=False),
    Column("size", BigInteger, nullable=False),
    Column("data", LargeBinary, nullable=False),
    Index("payloads_key", "key", "month"),
)  # fmt: skip

equal_inputs = Table(
    "equal_inputs", metadata,
    Column("grp", LargeBinary(32), primary_key=True),
    Column("input_key", LargeBinary(32), nullable=False),
    Column("settings", String(80), nullable=False),
    Column("random_state", String(80), nullable=False),
    Column("weights", Key, nullable=False),
    Column("runs", BigInteger, nullable=False),
    Column("outputs", BigInteger, nullable=False),
    Column("first_run", Key, nullable=False),
    Column("last_run", Key, nullable=False),
    Column("first_at", BigInteger, nullable=False),
    Column("last_at", BigInteger, nullable=False),
    # A run that waits for another one to be compared with; see store/pairs.py.
    Column("open_run", Key),
    Column("open_prompt", Integer),
    Column("open_return", Integer),
    Column("open_output", LargeBinary(32)),
    Column("open_environment", Key),
    Index("equal_inputs_diverged", "outputs", "last_at"),
)  # fmt: skip

equal_outputs = Table(
    "equal_outputs", metadata,
    Column("grp", LargeBinary(32), primary_key=True),
    Column("output_key", LargeBinary(32), primary_key=True),
    Column("runs", BigInteger, nullable=False),
    Column("first_run", Key, nullable=False),
    Column("last_run", Key, nullable=False),
    sqlite_with_rowid=False,
)  # fmt: skip

pair_hours = Table(
    "pair_hours", metadata,
    Column("hour", BigInteger, primary_key=True, autoincrement=False),  # since 1970
    Column("environment", Key, primary_key=True, autoincrement=False),
    Column("host", Text, primary_key=True),
    Column("model", Key, primary_key=True, autoincrement=False),
    Column("across", SmallInteger, primary_key=True, autoincrement=False),
    Column("pairs", BigInteger, nullable=False),
    Column("differed", BigInteger, nullable=False),
    Column("surface", BigInteger, nullable=False),
    Column("untold", BigInteger, nullable=False),
    sqlite_with_rowid=False,
)  # fmt: skip

cached_results = Table(
    "cached_results", metadata,
    Column("key", LargeBinary(32), primary_key=True),
    Column("at", BigInteger, nullable=False),
    Column("size", BigInteger, nullable=False),
    Column("run_id", String(36), nullable=False),
    Column("codec", Integer, nullable=False),
    Column("whole", BigInteger, nullable=False),  # bytes when unpacked
    Column("data", LargeBinary, nullable=False),
    Index("cached_results_at", "at", "size"),
    Index("cached_results_run_id", "run_id"),
)  # fmt: skip

ingested = Table(
    "ingested", metadata,
    Column("stream", Key, primary_key=True, autoincrement=False),
    Column("seq", BigInteger, primary_key=True, autoincrement=False),
    Column("frame_digest", LargeBinary(16), nullable=False),
    Column("log", Integer, nullable=False),
    Column("idx", BigInteger, nullable=False),
    sqlite_with_rowid=False,
)  # fmt: skip

log_entries = Table(
    "log_entries", metadata,
    Column("log", Integer, primary_key=True, autoincrement=False),
    Column("idx", BigInteger, primary_key=True, autoincrement=False),
    Column("stream", Key, nullable=False),
    Column("seq", BigInteger, nullable=False),
    Column("kind", SmallInteger, nullable=False),
    Column("leaf", LargeBinary, nullable=False),
)  # fmt: skip

checkpoints = Table(
    "checkpoints", metadata,
    Column("log", Integer, primary_key=True, autoincrement=False),
    Column("size", BigInteger, primary_key=True, autoincrement=False),
    Column("root", LargeBinary(32), nullable=False),
    Column("note", LargeBinary, nullable=False),
    Column("made_at", BigInteger, nullable=False),
)  # fmt: skip

events = Table(
    "events", metadata,
    Column("id", Key, primary_key=True, autoincrement=False),
    Column("stream", Key, nullable=False),
    Column("seq", BigInteger),
    Column("kind", String(16), nullable=False),
    Column("at", BigInteger, nullable=False),
    Column("detail", Text, nullable=False),
)  # fmt: skip

# Ends whose starts have not come (a segment was missing): held whole until they do. The seed of the frame is not kept.
early_ends = Table(
    "early_ends", metadata,
    Column("stream", Key, primary_key=True, autoincrement=False),
    Column("start_seq", BigInteger, primary_key=True, autoincrement=False),
    Column("seq", BigInteger, nullable=False),
    Column("salts", LargeBinary),
    Column("record", LargeBinary),
    sqlite_with_rowid=False,
)  # fmt: skip

# Large payloads on a server, in pieces; beside a SQLite file they are files.
blob_chunks = Table(
    "blob_chunks", metadata,
    Column("sha256", LargeBinary(32), primary_key=True),
    Column("part", Integer, primary_key=True, autoincrement=False),
    Column("data", LargeBinary, nullable=False),
)  # fmt: skip
