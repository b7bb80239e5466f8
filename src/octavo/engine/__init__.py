"""The synchronous heart: requests in, text out."""
