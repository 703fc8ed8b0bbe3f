"""On a server, the tables that grow are parted by month: a week is read in a month, and an old month goes at once.

A SQLite file stays as it is. What a server holds already becomes the first part of each table, where it lies: no row is
copied. Rows whose month has no part yet (a clock that was wrong, a journal that was found later) lie in the `rest`.
"""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

VIEWS = ("run_overview", "run_fields", "diverged_inputs")
# The column that each table is parted by, and how a month is written in it: `{0}` is the number of months since year 0.
SINCE_1970 = "(extract(epoch from make_date({0} / 12, {0} % 12 + 1, 1)) * 1000000000)::bigint"
PARTED = {
    "runs": ("started_at", SINCE_1970),
    "sequences": ("started_at", SINCE_1970),
    "payload_refs": ("started_at", SINCE_1970),
    "payloads": ("month", "({0})"),
}
THIS_MONTH = (
    "(extract(year from now() at time zone 'UTC') * 12 + extract(month from now() at time zone 'UTC') - 1)::int"
)
WRITERS = 0x70726F76  # the lock that a writer's transaction holds, see provenance/store/rows.py

# Run by the writer, whose role may make no table: a part of each table for this month and the next ones. A month that
# the rest holds rows of already stays there, and whoever reads a table for long is not waited for: tomorrow will do.
ROLL = """
create function provenance_roll(ahead integer default 2) returns integer
language plpgsql security definer set search_path = {schema}, pg_temp as $$
declare made integer := 0; month integer;
begin
    set local lock_timeout = '2s';
    for month in select generate_series({this_month}, {this_month} + ahead) loop
        {steps}
    end loop;
    return made;
end $$"""
STEP = """
        if to_regclass(format('{table}_%s', {stamp})) is null then
            begin
                execute format('create table {table}_%s partition of {table} for values from (%s) to (%s)',
                    {stamp}, {low}, {high});
                made := made + 1;
            exception
                when check_violation or invalid_object_definition or lock_not_available or duplicate_table then null;
            end;
        end if;"""
STAMP = "to_char(make_date(month / 12, month % 12 + 1, 1), 'YYYYMM')"

# Run by the owner: take away whole months that ended before a day. The month of the newest run stays, for numbers go on
# from it; what was expired is written down among the events, and the log keeps the leaves.
EXPIRE = """
create function provenance_expire(before date) returns setof text
language plpgsql set search_path = {schema}, pg_temp as $$
declare part record; newest bigint; gone text[] := '{{}}'; runs_gone bigint := 0; counted bigint;
begin
    perform pg_advisory_xact_lock({writers});
    select started_at into newest from runs order by id desc limit 1;
    for part in
        select c.relname as name, p.relname as parent, to_date(right(c.relname, 6), 'YYYYMM') as month
        from pg_inherits i join pg_class c on c.oid = i.inhrelid join pg_class p on p.oid = i.inhparent
        where p.oid in ({parents}) and c.relname ~ '_[0-9]{{6}}$'
        order by 1
    loop
        continue when part.month + interval '1 month' > before;
        continue when newest is not null
            and part.month = date_trunc('month', to_timestamp(newest / 1000000000.0) at time zone 'UTC')::date;
        if part.parent = 'runs' then
            execute format('select count(*) from %I', part.name) into counted;
            runs_gone := runs_gone + counted;
            execute format('delete from run_tags t using %I r where t.run = r.id', part.name);
        end if;
        execute format('drop table %I', part.name);
        gone := gone || part.name::text;
        return next part.name::text;
    end loop;
    if cardinality(gone) > 0 then
        insert into events(id, stream, seq, kind, at, detail)
        select coalesce(max(id), 0) + 1, 0, null, 'expired', (extract(epoch from now()) * 1000000000)::bigint,
            json_build_object('before', before, 'parts', gone, 'runs', runs_gone, 'by', session_user)::text
        from events;
    end if;
end $$"""


def upgrade() -> None:
    bind = op.get_bind()
    if bind.dialect.name == "sqlite":
        return
    views = {name: bind.scalar(sa.text(f"select pg_get_viewdef('{name}'::regclass)")) for name in VIEWS}
    for name in VIEWS:
        op.execute(f"drop view {name}")
    for table, (column, month) in PARTED.items():
        _part(table, column, month)
    for name, query in views.items():
        op.execute(f"create view {name} as {query}")
    schema = bind.scalar(sa.text("select quote_ident(current_schema())"))
    steps = "".join(
        STEP.format(table=table, stamp=STAMP, low=month.format("month"), high=month.format("(month + 1)"))
        for table, (_, month) in PARTED.items()
    )
    op.execute(ROLL.format(schema=schema, this_month=THIS_MONTH, steps=steps))
    parents = ", ".join(f"'{table}'::regclass" for table in PARTED)
    op.execute(EXPIRE.format(schema=schema, writers=WRITERS, parents=parents))
    for function in ("provenance_roll(integer)", "provenance_expire(date)"):
        op.execute(f"revoke execute on function {function} from public")
    op.execute("select provenance_roll()")


def _part(table: str, column: str, month: str) -> None:
    """Put a parted table in the place of one, and make that one its first part, up to the month after its last row."""
    bind = op.get_bind()
    old = f"{table}_first"
    op.execute(f"alter table {table} rename to {old}")
    indexes = bind.execute(
        sa.text("select indexname, indexdef from pg_indexes where schemaname = current_schema() and tablename = :t"),
        {"t": old},
    ).all()
    key = "select pg_get_constraintdef(oid) from pg_constraint where conrelid = cast(:t as regclass) and contype = 'p'"
    keys = bind.scalar(sa.text(key), {"t": old})
    for name, _ in indexes:
        op.execute(f"alter index {name} rename to {name.replace(table, old, 1)}")
    op.execute(f"create table {table} (like {old} including defaults) partition by range ({column})")
    op.execute(f"alter table {table} add constraint {table}_pkey {keys}")
    for name, definition in indexes:
        if name != f"{table}_pkey":
            op.execute(definition.replace(f".{old} ", f".{table} ").replace(f" {old} ", f" {table} "))
    op.execute(f"create table {table}_rest partition of {table} default")
    last = bind.scalar(sa.text(f"select max({column}) from {old}"))
    if last is None:
        op.execute(f"drop table {old}")
        return
    if column == "month":
        number = str(last)
    else:
        moment = f"(to_timestamp({last} / 1000000000.0) at time zone 'UTC')"
        number = f"(extract(year from {moment}) * 12 + extract(month from {moment}) - 1)::int"
    end = bind.scalar(sa.text(f"select {month.format(f'(greatest({number}, {THIS_MONTH}) + 1)')}"))
    op.execute(f"alter table {table} attach partition {old} for values from (minvalue) to ({end})")


def downgrade() -> None:
    raise NotImplementedError("a store goes forward only; this version reads what earlier ones wrote")
