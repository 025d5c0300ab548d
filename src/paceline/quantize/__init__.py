"""A draft or target folder in, a smaller one out, with what it cost."""
