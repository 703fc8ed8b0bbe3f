"""Runs migrations on the connection that `provenance.store.database` hands over."""

from alembic import context

from provenance.store.tables import metadata

connection = context.config.attributes["connection"]
context.configure(connection=connection, target_metadata=metadata, transaction_per_migration=True)
with context.begin_transaction():
    context.run_migrations()
