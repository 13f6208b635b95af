"""Task data sets from the hub, local files, or the built-in text."""
