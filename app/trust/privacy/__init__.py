"""What a node knows of private fields: the declarations of tenants, and the keys of their subjects.

The write path seals with it, the read path reveals with it. All nodes of a ledger share one state in Postgres; each
holds a copy in memory that is at most ``REFRESH_S`` old while Postgres answers.
"""
