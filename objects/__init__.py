"""Where files are kept that are written once: folders and buckets, by URL. Archives of ledgers and logs stand there."""
