"""Events between the WAL and the chain: what intake puts in and the appender takes out."""
