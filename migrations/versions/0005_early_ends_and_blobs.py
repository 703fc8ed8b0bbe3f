"""Ends that came before their starts are held until those come, and large payloads are kept in pieces."""

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


def downgrade() -> None:
    raise NotImplementedError("a store goes forward only; this version reads what earlier ones wrote")
