"""Ledgers that write on their own and exchange: what each peer has chained is fetched, proved and imported."""
