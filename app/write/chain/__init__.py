"""Behind the WAL: the appender makes records chained rows; followers sign, watch and time-stamp what is chained."""
