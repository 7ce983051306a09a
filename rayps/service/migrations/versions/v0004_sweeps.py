"""A column for the name of the sweep to which a job belongs."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column for the sweep's name, with an index."""
    op.add_column("jobs", sa.Column("sweep", sa.String(64)))
    op.create_index("ix_jobs_sweep", "jobs", ["sweep"])


def downgrade() -> None:
    """Drop the column for the sweep's name, and its index."""
    op.drop_index("ix_jobs_sweep", "jobs")
    op.drop_column("jobs", "sweep")
