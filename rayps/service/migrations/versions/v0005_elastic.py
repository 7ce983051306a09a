"""Columns for the number of workers of elastic jobs, and a table of notices from outside of the cluster."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the columns and the table."""
    op.add_column("jobs", sa.Column("scale_to", sa.Integer))
    op.add_column("jobs", sa.Column("allowed", sa.Integer))
    op.add_column("jobs", sa.Column("allowed_at", sa.Float))
    op.create_table(
        "notices",
        sa.Column("key", sa.String(600), primary_key=True),
        sa.Column("node", sa.String(200), nullable=False),
        sa.Column("host", sa.String(300), nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("until", sa.Float),
        sa.Column("withdrawn", sa.Boolean, nullable=False),
    )


def downgrade() -> None:
    """Drop the columns and the table."""
    op.drop_table("notices")
    for name in ("allowed_at", "allowed", "scale_to"):
        op.drop_column("jobs", name)
