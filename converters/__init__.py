"""One file a stage, named after the edge it makes; `accel.stage.STAGES` is the table."""
