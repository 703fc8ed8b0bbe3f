"""The database: one schema on SQLite and PostgreSQL, through SQLAlchemy Core."""
