"""The appender: turns committed WAL records into chained rows."""
