"""Pairs of equal inputs by the hour, counted from the runs that are there; and first results, to be served again."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

Key = sa.BigInteger().with_variant(sa.Integer, "sqlite")

# The runs of each group in order, the second with the first, the fourth with the third. Texts are not read here: of the
# pairs that differ none is told to differ on the surface alone. Who waits in a group without a partner is let go.
COUNT = """
insert into pair_hours(hour, environment, host, model, across, pairs, differed, surface, untold)
select hour, environment, host, model, across, count(*), sum(other), 0, sum(other) from (
    select started_at / 3600000000000 as hour, environment, host, model,
        case when environment <> environment_before then 1 else 0 end as across,
        case when output_key <> output_before then 1 else 0 end as other, place
    from (
        select s.started_at, r.environment, st.host, coalesce(r.model, 0) as model, s.output_key,
            lag(s.output_key) over equal as output_before, lag(r.environment) over equal as environment_before,
            row_number() over equal as place
        from sequences s join runs r on r.id = s.run and r.started_at = s.started_at
            join fingerprints f on f.id = r.settings join streams st on st.id = r.stream
        where r.status = 'ok' and r.kind = 'call' and r.weights is not null and s.input_key is not null
            and s.output_key is not null
        window equal as (
            partition by s.input_key, f.value_digest, coalesce(r.random_state, ''), r.weights, s.return_index,
                case when r.random_state is null then 0 else s.prompt_index end
            order by s.started_at, s.run, s.prompt_index)
    ) as ordered
) as paired where place % 2 = 0 group by hour, environment, host, model, across
"""


def upgrade() -> None:
    for column in (
        sa.Column("open_run", Key), sa.Column("open_prompt", sa.Integer), sa.Column("open_return", sa.Integer),
        sa.Column("open_output", sa.LargeBinary(32)), sa.Column("open_environment", Key),
    ):  # fmt: skip
        op.add_column("equal_inputs", column)
    op.create_table(
        "pair_hours",
        sa.Column("hour", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("environment", Key, primary_key=True, autoincrement=False),
        sa.Column("host", sa.Text, primary_key=True),
        sa.Column("model", Key, primary_key=True, autoincrement=False),
        sa.Column("across", sa.SmallInteger, primary_key=True, autoincrement=False),
        sa.Column("pairs", sa.BigInteger, nullable=False),
        sa.Column("differed", sa.BigInteger, nullable=False),
        sa.Column("surface", sa.BigInteger, nullable=False),
        sa.Column("untold", sa.BigInteger, nullable=False),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "cached_results",
        sa.Column("key", sa.LargeBinary(32), primary_key=True),
        sa.Column("at", sa.BigInteger, nullable=False),
        sa.Column("size", sa.BigInteger, nullable=False),
        sa.Column("run_id", sa.String(36), nullable=False),
        sa.Column("codec", sa.Integer, nullable=False),
        sa.Column("whole", sa.BigInteger, nullable=False),
        sa.Column("data", sa.LargeBinary, nullable=False),
    )
    op.create_index("cached_results_at", "cached_results", ["at", "size"])
    op.create_index("cached_results_run_id", "cached_results", ["run_id"])
    op.execute(COUNT)


def downgrade() -> None:
    raise NotImplementedError("a store goes forward only; this version reads what earlier ones wrote")
