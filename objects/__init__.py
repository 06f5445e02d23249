"""Storage for files that are written once: folders and buckets, by URL. Archives of ledgers and logs are kept there."""
