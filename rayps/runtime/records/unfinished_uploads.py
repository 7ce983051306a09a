"""Find the multipart uploads that killed processes have left in a job's place of checkpoints; abort the old ones."""

from __future__ import annotations

from rayps.runtime.records.journal import Journal
from rayps.tensors.checkpoints.checkpoint_place import CheckpointPlace, abort_unfinished, unfinished

OLD_UPLOAD = 3600.0  # seconds after which an upload is aborted: that of a process that still runs may be as old


def report_unfinished(place: CheckpointPlace, journal: Journal) -> None:
    """Write an event on the uploads that no process finished, if there are any, after old ones were aborted.

    Raises:
        PlaceError: the place cannot be reached, or refuses to list or abort uploads.
    """
    found = unfinished(place)
    if not found:
        return
    aborted = abort_unfinished(place, OLD_UPLOAD)
    journal.event(
        "unfinished_uploads",
        f"{len(found)} multipart uploads below {place} were not finished by the processes that began them; "
        f"{len(aborted)} of them, older than {OLD_UPLOAD / 3600:g} h, were aborted",
        found=[upload.url for upload in found],
        aborted=len(aborted),
    )
