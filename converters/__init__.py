"""One file a stage, named after the edge it makes; `accel.stage_table.STAGES` is the table."""
