"""Alembic's entry point: run the schema changes on the connection that the store passes. Defines no schema."""

from alembic import context

connection = context.config.attributes["connection"]
context.configure(connection=connection, render_as_batch=True, transactional_ddl=True)
with context.begin_transaction():
    context.run_migrations()
