"""The first schema: jobs, their events, tokens of users and of federated clients, login codes, and notices."""

import sqlalchemy as sa
from alembic import op

revision = "1"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create the tables."""
    op.create_table(
        "jobs",
        sa.Column("id", sa.String(26), primary_key=True),
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("status", sa.String(16), nullable=False, index=True),
        sa.Column("reason", sa.Text),
        sa.Column("spec", sa.Text, nullable=False),
        sa.Column("attempt", sa.Integer, nullable=False),
        sa.Column("failures", sa.Integer, nullable=False),
        sa.Column("interrupted", sa.Boolean, nullable=False),
        sa.Column("stop_requested_at", sa.Float),
        sa.Column("created_at", sa.Float, nullable=False),
        sa.Column("started_at", sa.Float),
        sa.Column("attempt_at", sa.Float),
        sa.Column("finished_at", sa.Float),
        sa.Column("metrics", sa.Text),
        sa.Column("checkpoint", sa.Text),
        sa.Column("idempotency_key", sa.String(255), unique=True),
        sa.Column("idempotency_hash", sa.String(64)),
        sa.Column("sweep", sa.String(64)),
        sa.Column("scale_to", sa.Integer),
        sa.Column("allowed", sa.Integer),
        sa.Column("allowed_at", sa.Float),
    )
    op.create_index("ix_jobs_sweep", "jobs", ["sweep"])
    op.create_table(
        "events",
        sa.Column("id", sa.Integer, primary_key=True, autoincrement=True),
        sa.Column("job_id", sa.String(26), sa.ForeignKey("jobs.id", ondelete="CASCADE"), nullable=False),
        sa.Column("time", sa.Float, nullable=False),
        sa.Column("kind", sa.String(32), nullable=False),
        sa.Column("message", sa.Text, nullable=False),
        sa.Column("attempt", sa.Integer, nullable=False),
    )
    op.create_index("ix_events_job", "events", ["job_id", "id"])
    op.create_table(
        "tokens",
        sa.Column("hash", sa.String(64), primary_key=True),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("created_at", sa.Float, nullable=False),
        sa.Column("expires_at", sa.Float),
        sa.Column("revoked_at", sa.Float),
        sa.Column("name", sa.String(64)),
    )
    op.create_table(
        "client_tokens",  # a token is bound to a job, to a client's name, or to both
        sa.Column("id", sa.String(16), primary_key=True),
        sa.Column("hash", sa.String(64), nullable=False, unique=True),
        sa.Column("job_id", sa.String(26), sa.ForeignKey("jobs.id", ondelete="CASCADE")),
        sa.Column("name", sa.String(64)),
        sa.Column("created_at", sa.Float, nullable=False),
        sa.Column("expires_at", sa.Float),
        sa.Column("revoked_at", sa.Float),
    )
    op.create_table(
        "login_codes",
        sa.Column("hash", sa.String(64), primary_key=True),
        sa.Column("expires_at", sa.Float, nullable=False),
    )
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
    """Drop the tables."""
    for table in ("notices", "login_codes", "client_tokens", "tokens", "events", "jobs"):
        op.drop_table(table)
