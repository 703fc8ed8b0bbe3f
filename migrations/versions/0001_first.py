"""The first schema: runs, their sequences and payloads, fingerprints, weights, the log, and the views for people."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy import Column

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

Key = sa.BigInteger().with_variant(sa.Integer(), "sqlite")

# What differs between the two databases: how a time prints.
TIME = {
    "sqlite": "strftime('%Y-%m-%dT%H:%M:%fZ', {0} / 1000000000.0, 'unixepoch')",
    "postgresql": "to_char(to_timestamp({0} / 1000000000.0) at time zone 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS.MS\"Z\"')",
}
HEX = {"sqlite": "lower(hex({0}))", "postgresql": "encode({0}, 'hex')"}


def field(scope: str, name: str) -> str:
    """Return the expression for one field of a run."""
    return f"(select f.value from fingerprint_fields f where f.fingerprint = r.{scope} and f.name = '{name}')"


def views(dialect: str) -> dict[str, str]:
    """Return the views for people, the documented surface for SQL."""
    time, text = TIME[dialect].format, HEX[dialect].format
    first = "s.run = r.id and s.started_at = r.started_at and s.prompt_index = 0 and s.return_index = 0"
    overview = f"""
        select r.run_id, {time("r.started_at")} as started, r.status, r.kind, r.runtime, r.operation, r.name,
            {field("model", "model.name_or_path")} as model,
            {field("model", "model.class")} as model_class,
            (select w.root from weights w where w.id = r.weights) as weights_root,
            r.weights_note,
            {field("model", "device.in_use")} as device,
            {field("model", "model.dtype")} as dtype,
            {field("model", "model.attn_implementation")} as attention,
            {field("environment", "gpu.0.name")} as gpu,
            {field("environment", "gpu.driver_version")} as driver,
            {field("environment", "cuda.runtime_version")} as cuda,
            {field("environment", "torch.version")} as torch,
            {field("environment", "lib.transformers.version")} as transformers,
            r.batch_size, r.seed,
            {field("settings", "generation.do_sample")} as do_sample,
            {field("settings", "generation.temperature")} as temperature,
            {field("settings", "generation.top_k")} as top_k,
            {field("settings", "generation.top_p")} as top_p,
            {field("settings", "generation.max_new_tokens")} as max_new_tokens,
            s.input_tokens, s.output_tokens, s.padding_tokens, s.finish, s.min_margin,
            s.input_preview as text_in, s.output_preview as text_out,
            r.duration_ns / 1000000.0 as duration_ms, r.error
        from runs r left join sequences s on {first}"""
    scopes = ("environment", "switches", "model", "settings")
    fields = " union all ".join(
        f"""select r.run_id, '{scope}' as scope, f.name, f.value, f.state, f.reason, f.source
        from runs r join fingerprint_fields f on f.fingerprint = r.{scope}"""
        for scope in scopes
    )
    diverged = f"""
        select {text("e.input_key")} as input_key, e.runs, e.outputs, e.settings, w.root as weights_root,
            {time("e.first_at")} as first_started, {time("e.last_at")} as last_started,
            (select run_id from runs r where r.id = e.first_run) as first_run,
            (select run_id from runs r where r.id = e.last_run) as last_run
        from equal_inputs e join weights w on w.id = e.weights where e.outputs > 1"""
    return {"run_overview": overview, "run_fields": fields, "diverged_inputs": diverged}


def upgrade() -> None:
    tables()
    for name, body in views(op.get_bind().dialect.name).items():
        op.execute(sa.text(f"create view {name} as {body}".replace(":", "\\:")))


def downgrade() -> None:
    raise NotImplementedError("the first schema has nothing below it")


def tables() -> None:
    op.create_table(
        "checkpoints",
        Column("log", sa.Integer(), autoincrement=False, nullable=False),
        Column("size", sa.BigInteger(), autoincrement=False, nullable=False),
        Column("root", sa.LargeBinary(length=32), nullable=False),
        Column("note", sa.LargeBinary(), nullable=False),
        Column("made_at", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("log", "size"),
    )
    op.create_table(
        "codecs",
        Column("id", sa.Integer(), autoincrement=False, nullable=False),
        Column("kind", sa.String(length=24), nullable=False),
        Column("dictionary", sa.LargeBinary(), nullable=True),
        Column("sha256", sa.String(length=64), nullable=True),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_table(
        "equal_inputs",
        Column("grp", sa.LargeBinary(length=32), nullable=False),
        Column("input_key", sa.LargeBinary(length=32), nullable=False),
        Column("settings", sa.String(length=80), nullable=False),
        Column("random_state", sa.String(length=80), nullable=False),
        Column("weights", Key, nullable=False),
        Column("runs", sa.BigInteger(), nullable=False),
        Column("outputs", sa.BigInteger(), nullable=False),
        Column("first_run", Key, nullable=False),
        Column("last_run", Key, nullable=False),
        Column("first_at", sa.BigInteger(), nullable=False),
        Column("last_at", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("grp"),
    )
    op.create_index("equal_inputs_diverged", "equal_inputs", ["outputs", "last_at"])
    op.create_table(
        "equal_outputs",
        Column("grp", sa.LargeBinary(length=32), nullable=False),
        Column("output_key", sa.LargeBinary(length=32), nullable=False),
        Column("runs", sa.BigInteger(), nullable=False),
        Column("first_run", Key, nullable=False),
        Column("last_run", Key, nullable=False),
        sa.PrimaryKeyConstraint("grp", "output_key"),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "events",
        Column("id", Key, autoincrement=False, nullable=False),
        Column("stream", Key, nullable=False),
        Column("seq", sa.BigInteger(), nullable=True),
        Column("kind", sa.String(length=16), nullable=False),
        Column("at", sa.BigInteger(), nullable=False),
        Column("detail", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_table(
        "fingerprint_fields",
        Column("fingerprint", Key, autoincrement=False, nullable=False),
        Column("name", sa.String(length=200), nullable=False),
        Column("value", sa.Text(), nullable=True),
        Column("state", sa.String(length=16), nullable=False),
        Column("reason", sa.Text(), nullable=True),
        Column("source", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("fingerprint", "name"),
        sqlite_with_rowid=False,
    )
    op.create_index("fingerprint_fields_name", "fingerprint_fields", ["name", "fingerprint"])
    op.create_table(
        "fingerprints",
        Column("id", Key, autoincrement=False, nullable=False),
        Column("digest", sa.String(length=80), nullable=False),
        Column("value_digest", sa.String(length=80), nullable=False),
        Column("scope", sa.String(length=16), nullable=False),
        Column("document", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("digest"),
    )
    op.create_table(
        "ingested",
        Column("stream", Key, autoincrement=False, nullable=False),
        Column("seq", sa.BigInteger(), autoincrement=False, nullable=False),
        Column("frame_digest", sa.LargeBinary(length=16), nullable=False),
        Column("log", sa.Integer(), nullable=False),
        Column("idx", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("stream", "seq"),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "log_entries",
        Column("log", sa.Integer(), autoincrement=False, nullable=False),
        Column("idx", sa.BigInteger(), autoincrement=False, nullable=False),
        Column("stream", Key, nullable=False),
        Column("seq", sa.BigInteger(), nullable=False),
        Column("kind", sa.SmallInteger(), nullable=False),
        Column("leaf", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("log", "idx"),
    )
    op.create_table(
        "payload_refs",
        Column("run", Key, autoincrement=False, nullable=False),
        Column("started_at", sa.BigInteger(), autoincrement=False, nullable=False),
        Column("role", sa.SmallInteger(), autoincrement=False, nullable=False),
        Column("prompt_index", sa.Integer(), autoincrement=False, nullable=False),
        Column("return_index", sa.Integer(), autoincrement=False, nullable=False),
        Column("part", sa.Integer(), autoincrement=False, nullable=False),
        Column("encoding", sa.SmallInteger(), nullable=False),
        Column("size", sa.BigInteger(), nullable=False),
        Column("commitment", sa.LargeBinary(length=32), nullable=False),
        Column("salt", sa.LargeBinary(length=32), nullable=True),
        Column("body", Key, nullable=True),
        sa.PrimaryKeyConstraint("run", "started_at", "role", "prompt_index", "return_index", "part"),
        sqlite_with_rowid=False,
    )
    op.create_index("payload_refs_body", "payload_refs", ["body"])
    op.create_table(
        "payloads",
        Column("id", Key, autoincrement=False, nullable=False),
        Column("month", sa.Integer(), autoincrement=False, nullable=False),
        Column("key", sa.LargeBinary(length=32), nullable=False),
        Column("codec", sa.Integer(), nullable=False),
        Column("size", sa.BigInteger(), nullable=False),
        Column("data", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("id", "month"),
    )
    op.create_index("payloads_key", "payloads", ["key", "month"])
    op.create_table(
        "run_tags",
        Column("run", Key, autoincrement=False, nullable=False),
        Column("key", sa.String(length=200), nullable=False),
        Column("value", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("run", "key"),
        sqlite_with_rowid=False,
    )
    op.create_index("run_tags_key", "run_tags", ["key", "value"])
    op.create_table(
        "runs",
        Column("id", Key, autoincrement=False, nullable=False),
        Column("started_at", sa.BigInteger(), autoincrement=False, nullable=False),
        Column("run_id", sa.String(length=36), nullable=False),
        Column("stream", Key, nullable=False),
        Column("start_seq", sa.BigInteger(), nullable=False),
        Column("end_seq", sa.BigInteger(), nullable=True),
        Column("kind", sa.String(length=8), nullable=False),
        Column("runtime", sa.String(length=32), nullable=False),
        Column("operation", sa.Text(), nullable=False),
        Column("status", sa.String(length=10), nullable=False),
        Column("ended_at", sa.BigInteger(), nullable=True),
        Column("duration_ns", sa.BigInteger(), nullable=True),
        Column("environment", Key, nullable=False),
        Column("switches", Key, nullable=False),
        Column("model", Key, nullable=True),
        Column("settings", Key, nullable=True),
        Column("load", sa.Integer(), nullable=False),
        Column("weights", Key, nullable=True),
        Column("weight_files", Key, nullable=True),
        Column("weights_note", sa.Text(), nullable=True),
        Column("batch_size", sa.Integer(), nullable=False),
        Column("seed", sa.BigInteger(), nullable=True),
        Column("random_state", sa.String(length=80), nullable=True),
        Column("parent_run", sa.String(length=36), nullable=True),
        Column("trace_id", sa.Text(), nullable=True),
        Column("name", sa.Text(), nullable=True),
        Column("error", sa.Text(), nullable=True),
        Column("call_facts", sa.Text(), nullable=False),
        Column("leaf", sa.LargeBinary(length=32), nullable=True),
        sa.PrimaryKeyConstraint("id", "started_at"),
    )
    op.create_index("runs_name", "runs", ["name"])
    op.create_index("runs_run_id", "runs", ["run_id"])
    op.create_index("runs_started_at", "runs", ["started_at"])
    op.create_index("runs_stream", "runs", ["stream", "start_seq"])
    op.create_table(
        "sequences",
        Column("run", Key, autoincrement=False, nullable=False),
        Column("started_at", sa.BigInteger(), autoincrement=False, nullable=False),
        Column("prompt_index", sa.Integer(), autoincrement=False, nullable=False),
        Column("return_index", sa.Integer(), autoincrement=False, nullable=False),
        Column("input_key", sa.LargeBinary(length=32), nullable=True),
        Column("output_key", sa.LargeBinary(length=32), nullable=True),
        Column("input_tokens", sa.Integer(), nullable=True),
        Column("output_tokens", sa.Integer(), nullable=True),
        Column("padding_tokens", sa.Integer(), nullable=True),
        Column("finish", sa.String(length=12), nullable=True),
        Column("min_margin", sa.Double(), nullable=True),
        Column("min_margin_at", sa.Integer(), nullable=True),
        Column("input_preview", sa.Text(), nullable=True),
        Column("output_preview", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("run", "started_at", "prompt_index", "return_index"),
        sqlite_with_rowid=False,
    )
    op.create_index("sequences_input_key", "sequences", ["input_key"])
    op.create_table(
        "store_info",
        Column("name", sa.String(length=40), nullable=False),
        Column("value", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("name"),
    )
    op.create_table(
        "streams",
        Column("id", Key, autoincrement=False, nullable=False),
        Column("stream_id", sa.LargeBinary(length=16), nullable=False),
        Column("host", sa.Text(), nullable=False),
        Column("pid", sa.Integer(), nullable=False),
        Column("boot_id", sa.LargeBinary(length=16), nullable=False),
        Column("started_at", sa.BigInteger(), nullable=False),
        Column("program", sa.Text(), nullable=False),
        Column("about", sa.Text(), nullable=False),
        Column("key_id", sa.String(length=16), nullable=False),
        Column("segment", sa.Integer(), nullable=False),
        Column("position", sa.BigInteger(), nullable=False),
        Column("last_seq", sa.BigInteger(), nullable=False),
        Column("last_seen", sa.BigInteger(), nullable=False),
        Column("ended", sa.SmallInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("stream_id"),
    )
    op.create_table(
        "weight_entries",
        Column("weights", Key, autoincrement=False, nullable=False),
        Column("kind", sa.String(length=8), nullable=False),
        Column("name", sa.String(length=300), nullable=False),
        Column("dtype", sa.String(length=24), nullable=False),
        Column("shape", sa.Text(), nullable=False),
        Column("bytes", sa.BigInteger(), nullable=False),
        Column("sha256", sa.String(length=64), nullable=False),
        sa.PrimaryKeyConstraint("weights", "kind", "name"),
        sqlite_with_rowid=False,
    )
    op.create_index("weight_entries_sha256", "weight_entries", ["sha256"])
    op.create_table(
        "weights",
        Column("id", Key, autoincrement=False, nullable=False),
        Column("root", sa.String(length=80), nullable=False),
        Column("kind", sa.String(length=16), nullable=False),
        Column("entries", sa.Integer(), nullable=False),
        Column("bytes", sa.BigInteger(), nullable=False),
        Column("document", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("root"),
    )
