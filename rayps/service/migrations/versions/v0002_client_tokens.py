"""The table of the tokens of federated clients. A token is bound to a job, to a client's name, or to both."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create the table `client_tokens`."""
    op.create_table(
        "client_tokens",
        sa.Column("id", sa.String(16), primary_key=True),
        sa.Column("hash", sa.String(64), nullable=False, unique=True),
        sa.Column("job_id", sa.String(26), sa.ForeignKey("jobs.id", ondelete="CASCADE")),
        sa.Column("name", sa.String(64)),
        sa.Column("created_at", sa.Float, nullable=False),
        sa.Column("expires_at", sa.Float),
        sa.Column("revoked_at", sa.Float),
    )


def downgrade() -> None:
    """Drop the table `client_tokens`."""
    op.drop_table("client_tokens")
