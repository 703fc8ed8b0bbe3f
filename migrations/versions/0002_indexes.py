"""Indexes as they are asked: names where there are any, ids by their beginning whatever the order of text is."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    named = sa.text("name is not null")
    op.drop_index("runs_name", "runs")
    op.create_index("runs_name", "runs", ["name"], sqlite_where=named, postgresql_where=named)
    if op.get_bind().dialect.name != "sqlite":  # whose order of text may be that of a language: no prefix is a range
        op.drop_index("runs_run_id", "runs")
        op.create_index("runs_run_id", "runs", ["run_id"], postgresql_ops={"run_id": "varchar_pattern_ops"})


def downgrade() -> None:
    raise NotImplementedError("a store goes forward only; this version reads what earlier ones wrote")
