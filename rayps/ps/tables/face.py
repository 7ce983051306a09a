"""The face of this folder: the functions that others find by `rayps.ps.client.table_face.find_tables`."""

from rayps.ps.client.table_face import TableFace
from rayps.ps.tables import embedding, parquet, row_optimizers, segment_state, table_segment
from rayps.ps.tables.follower import Follower

FACE = TableFace(
    check=table_segment.check_table,
    make_segment=table_segment.make_segment,
    first_state=table_segment.make_first_state,
    skip_steps=segment_state.skip_steps,
    write=parquet.write,
    read=parquet.read,
    follow=Follower,
    tables_of=embedding.tables_of,
    try_out=embedding.try_out,
    try_schedule=row_optimizers.try_schedule,
    bind=embedding.bind,
    step=embedding.step,
    save=embedding.save,
    load=embedding.load,
    load_states=embedding.load_states,
)
