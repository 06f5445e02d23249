"""An embedded PostgreSQL for ``make run``, tests and benchmarks."""
