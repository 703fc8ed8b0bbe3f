"""Ends that came before their starts are held, large payloads lie in pieces, functions show where they diverged."""

import re

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

Key = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "early_ends",
        sa.Column("stream", Key, autoincrement=False, nullable=False),
        sa.Column("start_seq", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("seq", sa.BigInteger(), nullable=False),
        sa.Column("salts", sa.LargeBinary(), nullable=True),
        sa.Column("record", sa.LargeBinary(), nullable=True),
        sa.PrimaryKeyConstraint("stream", "start_seq"),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "blob_chunks",
        sa.Column("sha256", sa.LargeBinary(length=32), nullable=False),
        sa.Column("part", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("data", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("sha256", "part"),
    )

    codecs = sa.table("codecs", sa.column("id"), sa.column("kind"))
    if op.get_bind().execute(sa.select(codecs.c.id).limit(1)).first():  # a fresh store gets all of them from its writer
        op.bulk_insert(codecs, [{"id": 4, "kind": "blob by SHA-256"}])

    _show_functions()


def _show_functions() -> None:
    """Let the view of inputs that diverged show those of recorded functions too, which have no weights."""
    connection = op.get_bind()
    server = connection.dialect.name == "postgresql"
    where = (
        "pg_get_viewdef('diverged_inputs'::regclass)"
        if server
        else "sql from sqlite_master where name = 'diverged_inputs'"
    )
    text = str(connection.execute(sa.text("select " + where.replace(":", "\\:"))).scalar_one())
    joined, count = re.subn(r"\bjoin\s+weights\b", "left join weights", text, flags=re.IGNORECASE)
    if count != 1:
        raise RuntimeError("the view diverged_inputs is not as it was made")
    if server:
        op.execute(sa.text(f"create or replace view diverged_inputs as {joined}".replace(":", "\\:")))
    else:
        op.execute("drop view diverged_inputs")
        op.execute(sa.text(joined.replace(":", "\\:")))


def downgrade() -> None:
    raise NotImplementedError("a store goes forward only; this version reads what earlier ones wrote")
