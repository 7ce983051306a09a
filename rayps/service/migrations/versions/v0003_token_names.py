"""A column for the names of users' tokens, which `rayps token ls` shows."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column for the names of users' tokens."""
    op.add_column("tokens", sa.Column("name", sa.String(64)))


def downgrade() -> None:
    """Drop the column for the names of users' tokens."""
    op.drop_column("tokens", "name")
